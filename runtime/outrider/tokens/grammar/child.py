"""The process that tries grammars: `python -m outrider.tokens.grammar.child`, started by `Grammars`.

It reads a `Start` first. A grammar that is compiled may take any time and memory, and nothing stops llguidance itself.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from outrider.errors import one_line
from outrider.system.children import ChildOutcome, Question, answer, read_start
from outrider.tokens.grammar.kinds import GrammarSource
from outrider.tokens.grammar.matcher import STACK_BYTES, new_matcher, new_tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llguidance import LLMatcher

_NUM_MASKS = 4  # beside the first
_TRIAL_STACK_BYTES = STACK_BYTES // 2  # so that what has room here has it in the engine's process, too


class Start(msgspec.Struct, frozen=True):
    """The tokenizer of a process. path: of its tokenizer.json."""

    path: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class GrammarTrial(Question, frozen=True, kw_only=True):
    """A grammar to try."""

    option: str
    text: str


class GrammarVerdict(ChildOutcome, kw_only=True):
    """A trial's result. error: llguidance's reason, "" for none. mask_seconds: of the slowest of its first masks.

    made: the grammar in llguidance's form.
    """

    made: str = ""
    error: str = ""
    mask_seconds: float = 0.0


def main() -> None:
    """Try grammars until standard input ends."""
    start = read_start(Start)
    text = Path(start.path).read_text(encoding="utf-8")
    tokenizer = new_tokenizer(text, start.vocab_size, start.eos_token_ids)
    warm = new_matcher(tokenizer, GrammarSource("regex", "a"))  # what the first grammar loads is not its own

    def tried(trial: GrammarTrial) -> GrammarVerdict:
        try:
            source = GrammarSource(trial.option, trial.text)
            made = source.kind.compile(trial.text, tokenizer)
            matcher = new_matcher(tokenizer, source, made, _TRIAL_STACK_BYTES)
            seconds = _slowest(matcher, start.eos_token_ids)
            return GrammarVerdict(made=made, error=matcher.get_error(), mask_seconds=seconds)
        except BaseException as raised:  # a panic in llguidance is no Exception
            return GrammarVerdict(error=one_line(raised) or type(raised).__name__)

    answer(GrammarTrial, GrammarVerdict, tried)
    del warm


def _slowest(matcher: LLMatcher, eos_token_ids: Sequence[int]) -> float:
    """Seconds of processor time for the slowest of a few masks, after the first tokens that the grammar allows."""
    slowest = 0.0
    for _ in range(_NUM_MASKS):
        began = time.process_time()
        allowed = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed[[*eos_token_ids]] = 0
        slowest = max(slowest, time.process_time() - began)
        if not allowed.any() or not matcher.try_consume_tokens([int(allowed.argmax())]):
            break
    return slowest


if __name__ == "__main__":
    main()
