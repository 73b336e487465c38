"""The argument that names a bundle or a model, in every command that has one.

@model_argument
def inspect(bundle: str, draft: str | None) -> None:
    opened = open_model(bundle, draft, quiet=False)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from outrider.cli.export import Bars, terminable
from outrider.cli.progress import progress_line
from outrider.engine.opening import open_bundle

if TYPE_CHECKING:
    from collections.abc import Callable

    from outrider.bundle.folder import Bundle
    from outrider.config import Config
    from outrider.engine.engine import Engine


def model_argument(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the argument `bundle` and the option `--draft`."""
    return click.argument("bundle", metavar="MODEL")(draft_option(function))


def draft_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--draft`."""
    described = "Draft model for a MODEL that is not a bundle: a file, folder or hub id; auto finds one."
    return click.option("--draft", metavar="DRAFT", help=described)(function)


def open_model(
    bundle: str, draft: str | None, *, quiet: bool, config: Config | None = None, main_first: bool = False
) -> Bundle:
    """As `outrider.engine.opening.open_bundle`, with an export's progress on standard error.

    config: that it will be loaded with, which may ask for what only one format has.
    """
    free = config is None or config.device.takes_any_form
    main_first = main_first and config is not None and config.drafts_may_join
    with terminable(), Bars(quiet=quiet) as bars:
        return open_bundle(bundle, draft, for_this_machine=free, main_first=main_first, progress=bars)


def load_model(bundle: Bundle, config: Config, **options: Any) -> Engine:
    """As `outrider.load`, with a line that says what it is doing."""
    from outrider.engine.engine import load

    with progress_line(f"Loading {bundle.folder.name}.", quiet=True):
        return load(bundle, config, **options)
