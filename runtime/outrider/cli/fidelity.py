"""The part of `outrider verify` that compares models with the checkpoints that they came from."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from outrider.bench.certify import Check
from outrider.cli.console import err, progress_bar
from outrider.config import GenerationConfig
from outrider.errors import ExportError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from outrider.bench.prompts import Prompt
    from outrider.engine import Engine


def check_fidelity(
    engine: Engine,
    checkpoints: Mapping[str, str],
    prompts: list[Prompt],
    max_new_tokens: int,
    min_cosine: float | None,
    *,
    quiet: bool,
) -> list[Check]:
    """One check for each role of `checkpoints`: the logits of its model for the prompts and the main model's answers.

    Raises:
        OptionError: for a model that is not there.
        ExportError: when a checkpoint cannot be read, or the export half is not installed.
    """
    try:
        from outrider_export.fidelity import compare_with_checkpoint, find_holder
    except ImportError as error:
        raise ExportError(
            f'The export half of outrider is not installed ({error}). Run: pip install "outrider[export]"'
        ) from error
    for role in checkpoints:
        find_holder(engine.bundle, role, engine.config)
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
