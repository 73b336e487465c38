"""The part of `outrider verify` that compares models with the checkpoints that they came from."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from outrider.cli.console import err, progress_bar
from outrider.config import GenerationConfig
from outrider.errors import ExportError, install

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from outrider.bundle.folder import Bundle
    from outrider.config import Config
    from outrider.engine.engine import Engine
    from outrider_bench.prompts import Prompt
    from outrider_bench.verify.certify import Check
    from outrider_export.fidelity import Fidelity
    from outrider_export.sources import Located


def fetch_checkpoints(
    bundle: Bundle, config: Config, checkpoints: Mapping[str, str], *, quiet: bool
) -> dict[str, Located]:
    """Find the checkpoints by their names, by role. Called before models are loaded, which takes longer.

    Raises:
        OptionError: for a model that is not there.
        ExportError: when a checkpoint is not there, or the export half is not installed.
    """
    try:
        from outrider_export.fidelity import fetch_checkpoint, find_holder
    except ImportError as error:
        raise ExportError(
            f"The export half of outrider is not installed ({error}). Run: {install('export')}"
        ) from error
    progress = _Steps(lambda: None, quiet)
    for role in checkpoints:
        find_holder(bundle, role, config)
    return {role: fetch_checkpoint(bundle, role, name, progress) for role, name in checkpoints.items()}


def check_fidelity(
    engine: Engine,
    checkpoints: Mapping[str, Located],
    prompts: list[Prompt],
    max_new_tokens: int,
    min_cosine: float | None,
    *,
    quiet: bool,
) -> list[Check]:
    """One check per role of `checkpoints`: compares its model's logits for prompts and the main model's answers.

    Raises:
        ExportError: when a checkpoint cannot be read.
    """
    from outrider_export.fidelity import compare_with_checkpoint

    with progress_bar("answering", len(prompts), quiet=quiet) as advance:
        texts = []
        for prompt in prompts:
            token_ids = engine.tokenizer.encode_prompt(prompt.text)
            answer = engine.generate(token_ids, GenerationConfig(max_new_tokens=max_new_tokens))
            texts.append([*token_ids, *answer.token_ids])
            advance()
    checks = []
    for role, checkpoint in checkpoints.items():
        with progress_bar(f"comparing {role}", len(texts), quiet=quiet) as advance:
            found = compare_with_checkpoint(
                engine.bundle, role, checkpoint, texts, engine.config, progress=_Steps(advance, quiet)
            )
        checks.append(_check_cosine(role, found, min_cosine))
    return checks


def _check_cosine(role: str, found: Fidelity, min_cosine: float | None) -> Check:
    """How close a model is to the checkpoint that it came from.

    role: "main" or a drafter's name. min_cosine: the least median that passes; None: report only.
    """
    from outrider_bench.verify.certify import Check

    detail = (
        f"{found.setting}, against {found.checkpoint} in float32, {found.num_rows:,} rows: cosine median "
        f"{found.median:.5f}, first percentile {found.first_percentile:.5f}, minimum {found.minimum:.5f}; the same "
        f"token on top in {found.top1_agreement:.1%}"
    )
    passed = None if min_cosine is None else found.median >= min_cosine
    if min_cosine is not None:
        detail += f"; fails where the median is below {min_cosine:g}"
    return Check(f"fidelity, {role} model", passed, detail, asdict(found))


class _Steps:
    """A `Progress` of outrider_export for a bar that counts texts."""

    def __init__(self, advance: Callable[[], None], quiet: bool) -> None:
        self._advance = advance
        self._quiet = quiet

    def phase(self, name: str, total: int | None = None) -> None:
        """The bar has one phase."""

    def advance(self, count: int) -> None:
        """Advance the bar by `count` texts."""
        for _ in range(count):
            self._advance()

    def note(self, text: str) -> None:
        """Print a line of its own."""
        if not self._quiet:
            err.print(text)
