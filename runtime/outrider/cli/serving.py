"""Options of `outrider export --for ovms`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from outrider.errors import OptionError, nearest

if TYPE_CHECKING:
    from collections.abc import Callable

SERVERS = ("ovms",)

_SERVED = {
    "server": click.option("--for", "server", metavar="SERVER", help="Make a model repository for a server: ovms."),
    "drafter": click.option(
        "--drafter", metavar="NAME", help="For ovms: a drafter of the bundle, ngram or none.  [default: auto]"
    ),
    "main_device": click.option("--main-device", metavar="DEVICE", help="For ovms: of the main model.  [default: CPU]"),
    "draft_device": click.option(
        "--draft-device", metavar="DEVICE", help="For ovms: of the draft model.  [default: the same]"
    ),
    "cache_size": click.option(
        "--cache-size", type=int, help="For ovms: GB for keys and values; 0 grows.  [default: 0]"
    ),
    "draft_cache_size": click.option(
        "--draft-cache-size", type=int, help="For ovms: the same of the draft model.  [default: the same]"
    ),
}


def served_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a model repository."""
    for option in reversed(_SERVED.values()):
        function = option(function)
    return function


def pop_serving(options: dict[str, Any]) -> tuple[str | None, dict[str, Any]]:
    """Take these options out of all: the server, and what was given of the others, for `outrider_export.Serving`.

    Raises:
        OptionError: for an unknown server, or other options without one.
    """
    given = {name: value for name in _SERVED if (value := options.pop(name)) is not None}
    server = given.pop("server", None)
    if server is not None and server not in SERVERS:
        raise OptionError(f"--for {server} is not a server that we export for. {nearest(server, SERVERS)}")
    if server is None and given:
        name = next(iter(given)).replace("_", "-")
        raise OptionError(f"--{name} is an option of a model repository. Give it with --for ovms, or leave it out.")
    if given.get("drafter") == "none":
        given["drafter"] = None
    return server, given
