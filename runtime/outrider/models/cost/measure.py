"""Times the calls of a model."""

from __future__ import annotations

import contextlib
import statistics
import time
from typing import TYPE_CHECKING

from outrider.models.cost.slots import open_slot, random_tokens
from outrider.models.cost.table import (
    DRAFT_ROWS,
    FAR,
    MAIN_ROWS,
    NEAR,
    ONE_LOAD,
    SHORT,
    UNKNOWN,
    UNSURE,
    CallCost,
    ascending,
    line,
)
from outrider.types import Chunk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from outrider.types import Backend, FixedShape

_REPEATS, _PATIENCE = 2, 1.0  # rounds of measurements at a first load; one if it takes this many seconds
_LEAST_CHANGES, _MOST_CHANGES, _SPENT = 6, 20, 0.4  # measurements of a change of rows; seconds for them
_LEAST_PROCESSOR_SHARE = 0.6  # of its threads' time; with less while it was measured, others used the processor


class CallTimes:
    """Times calls of one sequence of a model, with these numbers of rows, at contexts of up to `max_tokens` tokens.

    times = CallTimes(backend, MAIN_ROWS)
    cost = times.measure()
    """

    def __init__(self, backend: Backend, rows: Sequence[int], max_tokens: int | None = None) -> None:
        self.backend, self.rows = backend, tuple(rows)
        self._fixed, self._longest = backend.capabilities.fixed, max(max_tokens or 0, backend.max_tokens)
        if self._fixed:
            context = min(NEAR, backend.max_tokens - 1)
            self.contexts = context, context
            return
        room = min(backend.max_tokens, max_tokens or backend.max_tokens)
        longest = next((n for n in (FAR, FAR // 2, NEAR, 64, 16) if n + max(rows) <= room), 0)
        self.contexts = min(NEAR, longest), longest  # the short and the long one

    def can_be(self, known: CallCost) -> bool:
        """Whether a saved cost is one of these calls, at contexts that the model can have."""
        alike = known.rows[:2] == (1, self._fixed.window) if self._fixed else known.rows == self.rows
        return alike and known.contexts[1] < self._longest

    def measure(self, repeats: int | None = None, made: list[float] | None = None) -> CallCost:
        """The cost of these calls.

        Takes the shortest time of each size, because other work on the machine can only add to it. A first round
        compiles the kernels. Then each of `repeats` rounds times all sizes, twice each, and pieces of a prompt once.
        The default is two rounds, or one if that takes a second. The cache is not filled, because its content does not
        change the times. A model in fixed shapes is timed with its own rows and context. made: as for `timer`, for a
        number of `repeats`.
        """
        if self._fixed:
            return self._measure_windows(self._fixed, repeats)
        rows, contexts = self.rows, self.contexts
        with timer(self.backend, contexts[1] + max(rows), made) as seconds:

            def times(n: int, context: int) -> list[float]:
                return [seconds(n, context) for _ in range(1 if n > SHORT else 2)]

            first, *_ = [seconds(n, contexts[0]) for n in rows]
            rounds: list[list[list[float]]] = []
            began, ran = time.perf_counter(), time.process_time()
            enough = repeats or _REPEATS
            while not rounds or (len(rounds) < enough and (repeats or time.perf_counter() - began < _PATIENCE)):
                rounds.append([times(n, contexts[0]) for n in rows])
            share = self._processor_share(time.process_time() - ran, time.perf_counter() - began)
            same = [[taken[-1] for taken in each] for each in rounds]  # rows as in the call before
            near = ascending(min(taken) for taken in zip(*same, strict=True))
            ends = (rows[0], rows[-1])
            far_rounds = [[min(times(n, contexts[1])) for n in ends] for _ in rounds]
            extra = [min(taken) for taken in zip(*far_rounds, strict=True)]
            change = measure_change(seconds, rows)
        more = [max(e - n, 0.0) for e, n in zip(extra, (near[0], near[-1]), strict=True)]
        far = [n + line(r, ends, more) for r, n in zip(rows, near, strict=True)]
        return CallCost(
            rows,
            tuple(near),
            tuple(far),
            contexts,
            change=change,
            fork=self._measure_fork(),
            first=max(first - near[0], 0.0),
            calls=_agreeing(same, near, share),
        )

    def _processor_share(self, ran: float, seconds: float) -> float | None:
        """The share of its threads' time in which the process ran; None where nobody knows how many there are.

        ran: seconds of processor time.
        """
        num_threads = int(getattr(self.backend, "fingerprint", {}).get("INFERENCE_NUM_THREADS", 0))
        return ran / (seconds * num_threads) if num_threads and seconds else None

    def _measure_windows(self, fixed: FixedShape, repeats: int | None) -> CallCost:
        """`measure` for a model in fixed shapes: times a call, and the reading of a prompt.

        A call takes the same time for one row as for a whole window, at any context. The cost of an added row is a
        call's, times the probability that the row falls behind the window's end, into another call.
        """
        context, prompt = self.contexts[0], min(DRAFT_ROWS[-1], fixed.max_prompt_tokens, self.backend.max_tokens)
        with timer(self.backend, max(context + 1, prompt)) as seconds:
            seconds(1, context)
            rounds = [(seconds(1, context), seconds(prompt, 0, 1)) for _ in range(repeats or _REPEATS)]
        call, read = (min(taken) for taken in zip(*rounds, strict=True))
        near = [call, call * (2 - 1 / fixed.window)]
        rows = [1, fixed.window]
        if prompt > fixed.window:
            rows, near = [*rows, prompt], [*near, max(read, near[-1])]
        calls = (ONE_LOAD,) * len(rows)
        return CallCost(tuple(rows), tuple(near), tuple(near), self.contexts, change=0.0, calls=calls)

    def _measure_fork(self) -> float:
        """Seconds to make room for a branch, which copies a block; the shortest of a few, each after a call.

        A call's weights push the block out of the processor's caches: without it, the copy takes a fraction of that.
        """
        backend = self.backend
        if not backend.capabilities.trees:
            return 0.0
        with contextlib.closing(open_slot(backend, 64)) as slot:
            seconds = []
            for _ in range(_REPEATS + 1):
                slot.trim(0)
                slot.skip_to(1)
                backend.submit([Chunk(slot, random_tokens(backend, 1), 1, generated=True)]).wait()
                began = time.perf_counter()
                slot.fork(1, 2)
                seconds.append(time.perf_counter() - began)
        return min(seconds)


def timed_rows(role: str, backend: Backend) -> tuple[int, ...]:
    """The numbers of rows for timing a model's calls. role: "main", or a drafter's name."""
    rule = backend.capabilities.rows
    return tuple(sorted({rule.num_rows([n]) for n in (MAIN_ROWS if role == "main" else DRAFT_ROWS)}))


def measure_change(seconds: Callable[[int, int], float], rows: Sequence[int]) -> float:
    """Extra seconds of a call whose number of rows is not that of the call before: the median of a few.

    Takes two numbers in turns, two calls with each. seconds: times a call of rows and tokens of context.
    """
    if len(rows) == 1:
        return 0.0
    extra = list[float]()
    for n in rows[:2]:
        seconds(n, 0)  # compiles kernels
    began = time.perf_counter()
    while len(extra) < _LEAST_CHANGES or (len(extra) < _MOST_CHANGES and time.perf_counter() - began < _SPENT):
        changed, same = (seconds(rows[len(extra) % 2], 0) for _ in range(2))
        extra.append(changed - same)
    return max(statistics.median(extra), 0.0)


def _agreeing(rounds: Sequence[Sequence[float]], near: Sequence[float], share: float | None) -> tuple[int, ...]:
    """How many calls each of `near` is known from. rounds: of measurements, from which it was made.

    share: of its threads' time in which the process ran meanwhile; None: nobody knows.
    """
    if share is not None and share < _LEAST_PROCESSOR_SHARE:
        return (UNKNOWN,) * len(near)
    second = (sorted(taken)[:2][-1] for taken in zip(*rounds, strict=True))
    return tuple(ONE_LOAD if a < (1 + UNSURE) * b else UNKNOWN for a, b in zip(second, near, strict=True))


@contextlib.contextmanager
def timer(backend: Backend, max_tokens: int, made: list[float] | None = None) -> Iterator[Callable[..., float]]:
    """Yield a function that times a call of tokens, tokens of context, and rows (by default of all tokens).

    Calls of more tokens begin with those of calls of fewer, so that a mixture of experts never activates fewer. made:
    seconds of the first calls, which were timed before and are not made again; it gets those of the others.
    """
    known = iter([*(made or ())])
    token_ids = random_tokens(backend, max_tokens)
    with contextlib.closing(open_slot(backend, max_tokens)) as slot:

        def seconds(num_tokens: int, context: int, num_rows: int | None = None) -> float:
            before: float | None = next(known, None)
            if before is not None:
                return before
            slot.trim(0)
            slot.skip_to(context)
            generated = num_rows is None and num_tokens <= SHORT
            chunk = Chunk(slot, token_ids[:num_tokens], num_rows or num_tokens, generated=generated)
            began = time.perf_counter()
            backend.submit([chunk]).wait()
            took = time.perf_counter() - began
            if made is not None:
                made.append(took)
            return took

        yield seconds
