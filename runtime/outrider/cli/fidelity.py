"""The part of `outrider verify` that compares models with the checkpoints that they came from."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from outrider.bench.certify import Check
from outrider.bundle import read_bundle
from outrider.cli.console import err, progress_bar
from outrider.config import GenerationConfig
from outrider.errors import ExportError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from outrider.bench.prompts import Prompt
    from outrider.config import Config
    from outrider.engine import Engine
    from outrider_export.sources import Located


def fetch_checkpoints(
    bundle: str, config: Config, checkpoints: Mapping[str, str], *, quiet: bool
) -> dict[str, Located]:
    """What the names of `checkpoints` stand for, by role. To be called before models are loaded, which takes longer.

    Raises:
        OptionError: for a model that is not there.
        BundleError: when the bundle cannot be read.
        ExportError: when a checkpoint is not there, or the export half is not installed.
    """
    try:
        from outrider_export.fidelity import fetch_checkpoint, find_holder
    except ImportError as error:
        raise ExportError(
            f'The export half of outrider is not installed ({error}). Run: pip install "outrider[export]"'
        ) from error
    opened, progress = read_bundle(bundle), _Steps(lambda: None, quiet)
    for role in checkpoints:
        find_holder(opened, role, config)
    return {role: fetch_checkpoint(opened, role, name, progress) for role, name in checkpoints.items()}


def check_fidelity(
    engine: Engine,
    checkpoints: Mapping[str, Located],
    prompts: list[Prompt],
    max_new_tokens: int,
    min_cosine: float | None,
    *,
    quiet: bool,
) -> list[Check]:
    """One check for each role of `checkpoints`: the logits of its model for the prompts and the main model's answers.

    Raises:
        ExportError: when a checkpoint cannot be read.
    """
    from outrider_export.fidelity import compare_with_checkpoint

    with progress_bar("answering", len(prompts), quiet=quiet) as advance:
        texts = [_answered(engine, prompt, max_new_tokens, advance) for prompt in prompts]
    checks = []
    for role, checkpoint in checkpoints.items():
        with progress_bar(f"comparing {role}", len(texts), quiet=quiet) as advance:
            found = compare_with_checkpoint(
                engine.bundle, role, checkpoint, texts, engine.config, progress=_Steps(advance, quiet)
            )
        detail = (
            f"{found.setting}, against {found.checkpoint} in float32, {found.num_rows:,} rows: cosine median "
            f"{found.median:.5f}, first percentile {found.first_percentile:.5f}, minimum {found.minimum:.5f}; the same "
            f"token on top in {found.top1_agreement:.1%}"
        )
        passed = None if min_cosine is None else found.median >= min_cosine
        if min_cosine is not None:
            detail += f"; fails where the median is below {min_cosine:g}"
        checks.append(Check(f"fidelity, {role} model", passed, detail, asdict(found)))
    return checks


def _answered(engine: Engine, prompt: Prompt, max_new_tokens: int, advance: Callable[[], None]) -> list[int]:
    """The token ids of a prompt and of its greedy answer."""
    token_ids = engine.tokenizer.encode_prompt(prompt.text)
    config = GenerationConfig(max_new_tokens=max_new_tokens)
    answer = engine.generate(token_ids, config).token_ids
    advance()
    return [*token_ids, *answer]


class _Steps:
    """A `Progress` of outrider_export for a bar that counts texts."""

    def __init__(self, advance: Callable[[], None], quiet: bool) -> None:
        self._advance = advance
        self._quiet = quiet

    def phase(self, name: str, total: int | None = None) -> None:
        """The bar has one phase."""

    def advance(self, count: int) -> None:
        """Move the bar on by `count` texts."""
        for _ in range(count):
            self._advance()

    def note(self, text: str) -> None:
        """Print a line of its own."""
        if not self._quiet:
            err.print(text)
