"""What of a certificate has room in a model's context."""

from __future__ import annotations

import dataclasses

from outrider.engine.engine import Engine
from outrider.errors import OptionError
from outrider.models.tuning.measure.readings import TAIL, longest_certified
from outrider_bench.prompts import BenchPrompt

CONTEXT = 256  # tokens that the check batching reads
NUM_NEW_TOKENS = 48


def fit_answers(engine: Engine) -> int:
    """The default length of answers: at most half of the context."""
    return min(NUM_NEW_TOKENS, engine.max_tokens // 2)


def fit_prompts(engine: Engine, prompts: list[BenchPrompt], max_new_tokens: int) -> tuple[list[BenchPrompt], int]:
    """Prompts whose texts are cut where they and their answers do not fit in the context; and how many are cut.

    Raises:
        OptionError: if even the chat template's own tokens leave no room.
    """
    if engine.bundle.manifest.main.encoder is not None:  # its context is that of texts and sounds
        return prompts, 0
    room = engine.max_tokens - max_new_tokens

    def fits(text: str) -> bool:
        return len(engine.tokenizer.encode_prompt(text)) <= room

    made = []
    for prompt in prompts:
        text = prompt.text
        if not fits(text):
            shortest, longest = 1, len(text)
            while longest - shortest > 1:
                middle = (shortest + longest) // 2
                shortest, longest = (middle, longest) if fits(text[:middle]) else (shortest, middle)
            text = text[:shortest]
            if not fits(text):
                raise OptionError(
                    f"The context of {engine.max_tokens:,} tokens has no room for a prompt and an answer of "
                    f"{max_new_tokens:,}. Lower --max-new-tokens."
                )
        made.append(dataclasses.replace(prompt, text=text))
    return made, sum(one.text != other.text for one, other in zip(made, prompts, strict=True))


def fit_context(engine: Engine, context: int | None) -> int | None:
    """How many tokens the check batching reads; None if there is no room for as many as it compares.

    Raises:
        OptionError: if `context`, where it is given, does not fit.
    """
    longest = longest_certified(engine.main, engine.main.max_tokens, engine.max_tokens)
    if context is None:
        return min(CONTEXT, longest) if longest > TAIL else None
    if context > longest:
        raise OptionError(
            f"--context {context:,} needs room for three sequences and their drafts, and there is room for three of "
            f"{max(longest, 0):,} tokens. Lower it, or raise --cache-size."
        )
    return context
