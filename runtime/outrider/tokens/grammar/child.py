"""The process that tries grammars: `python -m outrider.tokens.grammar.child`, started by `Trials`.

It reads a `Start` and then `GrammarTrial`s from standard input, a line of JSON each, and answers each with a
`GrammarVerdict`. A thread ends the process when a trial passes its limits, as nothing stops llguidance itself.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from outrider.errors import one_line
from outrider.system.memory import memory_in_use
from outrider.system.watch import LimitWatch
from outrider.tokens.grammar.kinds import GrammarSource
from outrider.tokens.grammar.matcher import new_matcher, new_tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llguidance import LLMatcher

_NUM_MASKS = 4  # beside the first
_RETIRE_BYTES = 64 << 20  # bytes that earlier trials may leave behind


class Start(msgspec.Struct, frozen=True):
    """The tokenizer of a process. path: of its tokenizer.json."""

    path: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class GrammarTrial(msgspec.Struct, frozen=True):
    """A grammar to try. seconds: of processor time. memory: bytes."""

    option: str
    text: str
    seconds: float
    memory: int


class GrammarVerdict(msgspec.Struct, frozen=True):
    """A trial's result. error: llguidance's reason, "" for none. beyond: the limit it passed, "seconds" or "memory",
    or "process" if the process has ended.

    memory: bytes that it took. mask_seconds: what its first masks took, the slowest of them. retires: whether the
    process ends now.
    """

    error: str = ""
    beyond: str = ""
    memory: int = 0
    mask_seconds: float = 0.0
    retires: bool = False


def main() -> None:
    """Try grammars until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to the parent's children, too
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=Start)
    text = Path(start.path).read_text(encoding="utf-8")
    tokenizer = new_tokenizer(text, start.vocab_size, start.eos_token_ids)
    warm = new_matcher(tokenizer, GrammarSource("regex", "a"))  # what the first grammar loads is not its own
    watch = LimitWatch(lambda beyond, most: _write(GrammarVerdict(beyond=beyond, memory=most, retires=True)))
    _write(GrammarVerdict())
    for line in sys.stdin.buffer:
        trial = msgspec.json.decode(line, type=GrammarTrial)
        watch.begin(trial.seconds, trial.memory)
        error, mask_seconds = "", 0.0
        try:
            matcher = new_matcher(tokenizer, GrammarSource(trial.option, trial.text))
            error, mask_seconds = matcher.get_error(), _slowest(matcher, start.eos_token_ids)
            del matcher
        except BaseException as raised:  # a panic in llguidance is no Exception
            error = one_line(raised) or type(raised).__name__
        with watch.writing:
            watch.end()
            most = max(watch.most, memory_in_use() - watch.base)
            retires = memory_in_use() - watch.base > _RETIRE_BYTES
            _write(GrammarVerdict(error, "", max(0, most), mask_seconds, retires))
        if retires:
            break
    del warm
    os._exit(0)


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


def _write(verdict: GrammarVerdict) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(verdict) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
