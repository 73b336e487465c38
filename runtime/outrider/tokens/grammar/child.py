"""The process that tries grammars: `python -m outrider.tokens.grammar.child`, started by `Trials`.

It reads a `Start` and then `GrammarTrial`s from standard input, a line of JSON each, and answers each with a
`GrammarVerdict`. A thread ends the process when a trial passes its limits, as nothing stops llguidance itself.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from threading import Lock, Thread
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from outrider.errors import one_line
from outrider.system.memory import memory_in_use
from outrider.tokens.grammar.matcher import new_matcher, new_tokenizer
from outrider.tokens.grammar.source import GrammarSource

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llguidance import LLMatcher

_POLL_SECONDS = 0.01  # seconds between two looks at a trial's time and memory
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


class _Watch:
    """Ends the process when a trial passes its limits."""

    def __init__(self) -> None:
        self.base = memory_in_use()
        self.most = 0  # bytes that the trial took
        self.writing = Lock()
        self._trial: tuple[GrammarTrial, float] | None = None
        Thread(target=self._look, daemon=True).start()

    def begin(self, trial: GrammarTrial) -> None:
        self.most = 0
        self._trial = trial, time.process_time()

    def end(self) -> None:
        self._trial = None

    def _look(self) -> None:
        while True:
            time.sleep(_POLL_SECONDS)
            if (running := self._trial) is None:
                continue
            trial, began = running
            self.most = max(self.most, memory_in_use() - self.base)
            beyond = "memory" if self.most > trial.memory else ""
            beyond = beyond or ("seconds" if time.process_time() - began > trial.seconds else "")
            with self.writing:
                if beyond and self._trial is running:
                    try:
                        _write(GrammarVerdict(beyond=beyond, memory=self.most, retires=True))
                    finally:  # the parent may be gone
                        os._exit(0)


def main() -> None:
    """Try grammars until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to the parent's children, too
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=Start)
    text = Path(start.path).read_text(encoding="utf-8")
    tokenizer = new_tokenizer(text, start.vocab_size, start.eos_token_ids)
    warm = new_matcher(tokenizer, GrammarSource("regex", "a"))  # what the first grammar loads is not its own
    watch = _Watch()
    _write(GrammarVerdict())
    for line in sys.stdin.buffer:
        trial = msgspec.json.decode(line, type=GrammarTrial)
        _limit(trial.memory)
        watch.begin(trial)
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


def _limit(memory: int) -> None:
    """Let the system refuse memory far beyond a trial's limit, where it can: between two looks much may be taken."""
    if sys.platform == "linux":
        import resource

        with suppress(OSError, ValueError):
            size = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
            most = resource.getrlimit(resource.RLIMIT_AS)[1]
            wanted = size + 2 * memory + (256 << 20)
            resource.setrlimit(resource.RLIMIT_AS, (wanted if most < 0 else min(wanted, most), most))


def _write(verdict: GrammarVerdict) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(verdict) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
