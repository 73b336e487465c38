"""What the models' calls cost on this machine."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outrider.types import Chunk, RowRule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from collections.abc import Sequence as Seq

    from outrider.types import Backend, FixedShape, Slot

LONGEST = 15  # draft tokens a round: with the one before them, the 16 rows up to which calls are measured
MAIN_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 32)
DRAFT_ROWS = (1, 2, 8, 32, 128)
NEAR, FAR = 256, 2048  # tokens of context at which calls are measured
_REPEATS, _PATIENCE = 2, 1.0  # rounds of measurements at a first load, and seconds after which one is enough
_OUTLIER = 3.0
_LEAST_SHARE = 0.01  # of a call's time at the first context, that it takes with any other
# What no measurement gives: of numbers beyond these, calculations may make infinities.
_LEAST_SECONDS, _MOST_SECONDS, _MOST_TIMES, _MOST_TOKENS = 1e-9, 1e6, 1e9, 1 << 30
_MOST_SCALE = _MOST_SECONDS / _LEAST_SECONDS
_SWAY = 0.1  # weight of the latest call in the scale that follows the machine


@dataclass(slots=True)
class PassCost:
    """Seconds that one call takes, by rows and by tokens of context.

        cost = measure_pass(backend, MAIN_ROWS)
        cost(5, context=300)
        cost.follow(expected=0.045, seconds=0.046)

    rows: ascending. near, far: seconds for each of `rows`, with `contexts` tokens in the cache. Between these and
    beyond, straight lines. `follow` keeps up with a machine that gets slower or faster. one_call: whether several
    sequences share the device's call, or run one after another. rule: what calls are padded to. change: seconds that a
    call takes more where the one before it had another number of rows, as a graph in dynamic shapes is prepared anew.
    """

    rows: tuple[int, ...]
    near: tuple[float, ...]
    far: tuple[float, ...]
    contexts: tuple[int, int] = (NEAR, FAR)
    scale: float = 1.0
    one_call: bool = True
    rule: RowRule = field(default_factory=RowRule)
    change: float = 0.0

    def __post_init__(self) -> None:
        # One that was kept comes from a file, which may be damaged; rows and contexts are what the caches are told.
        if not self.rows or not all(a < b for a, b in itertools.pairwise((0, *self.rows, _MOST_TOKENS))):
            raise ValueError(f"a cost is for numbers of rows that ascend, from 1 to below {_MOST_TOKENS:,}")
        if not len(self.rows) == len(self.near) == len(self.far):
            raise ValueError("a cost has seconds for each number of rows")
        if not all(_LEAST_SECONDS <= seconds <= _MOST_SECONDS for seconds in (*self.near, *self.far)):
            raise ValueError(f"a call takes from {_LEAST_SECONDS:g} to {_MOST_SECONDS:g} seconds")
        if not 0 <= self.change <= _MOST_SECONDS:
            raise ValueError(f"another number of rows takes from 0 to {_MOST_SECONDS:g} seconds")
        if not 0 <= self.contexts[0] <= self.contexts[1] < _MOST_TOKENS:
            raise ValueError(f"contexts of a cost ascend, from 0 to below {_MOST_TOKENS:,} tokens")
        if not 1 / _MOST_SCALE <= self.scale <= _MOST_SCALE:
            raise ValueError(f"the scale of a cost is from {1 / _MOST_SCALE:g} to {_MOST_SCALE:g}")

    def __call__(self, rows: int, context: float = NEAR) -> float:
        """Seconds of a call of one sequence with so many rows at so much context."""
        return self.scale * self._measured(self.rule.num_rows([rows]), context)

    def together(self, rows: Seq[int], context: float = NEAR, before: int | None = None) -> float:
        """Seconds for several sequences with so many rows each; before: the rows of the call before, if they matter."""
        if self.one_call:
            total = self.rule.num_rows(rows)
            changed = self.change if before not in (None, total) else 0.0
            return self.scale * (self._measured(total, context) + changed)
        return sum(self(count, context) for count in rows)

    def follow(self, expected: float, seconds: float) -> None:
        """Adapt to calls that should have taken `expected` seconds, and took `seconds`."""
        # A call that waited, compiled its kernels first, or read a prompt besides, says nothing about the next one.
        if _OUTLIER * expected > seconds > expected / _OUTLIER:
            self.scale *= (seconds / expected) ** _SWAY

    def _measured(self, rows: float, context: float) -> float:
        near = _line(rows, self.rows, self.near)
        if self.contexts[1] == self.contexts[0]:
            return near
        share = (context - self.contexts[0]) / (self.contexts[1] - self.contexts[0])
        # Below the first context the line may come to nothing, where that one's time was disturbed.
        return max(near + share * (_line(rows, self.rows, self.far) - near), _LEAST_SHARE * near)


@dataclass(frozen=True, slots=True)
class Contention:
    """How many times as long a call takes while calls of the other model run: of the main model, of the draft model.

    1 where the two share nothing. On one processor both may be above 2.
    """

    check: float
    draft: float

    def __post_init__(self) -> None:
        if not all(1 <= times <= _MOST_TIMES for times in (self.check, self.draft)):
            raise ValueError(f"beside another, a call takes from 1 to {_MOST_TIMES:g} times as long")


ALONE = Contention(1.0, 1.0)


def _line(x: float, xs: Seq[float], ys: Seq[float]) -> float:
    """Linear interpolation, and the last two points' line beyond the end, where it does not fall."""
    if x <= xs[0] or len(xs) == 1:
        return ys[0]
    at = min(bisect.bisect_left(xs, x), len(xs) - 1)  # NumPy's interp takes ten times as long for a few numbers
    rise = ys[at] - ys[at - 1]
    if x > xs[-1]:
        rise = max(rise, 0.0)
    return ys[at] + (x - xs[at]) * rise / (xs[at] - xs[at - 1])


def check_pass(backend: Backend, cost: PassCost, repeats: int = 3) -> None:
    """See how fast the machine is today, by the shortest of a few calls, and scale what was measured before.

    Raises:
        DeviceError: when the device fails.
    """
    with _timer(backend, cost.contexts[0] + cost.rows[0]) as seconds:
        seconds(cost.rows[0], cost.contexts[0])
        cost.scale = min(seconds(cost.rows[0], cost.contexts[0]) for _ in range(repeats)) / cost.near[0]


def measure_pass(
    backend: Backend, rows: Seq[int], repeats: int | None = None, *, max_tokens: int | None = None
) -> PassCost:
    """Time calls of one sequence with these numbers of rows, with no more than `max_tokens` tokens of context.

    The shortest of `repeats` times, or of two unless the first takes a second, as what else the machine does can only
    add to them; all sizes take turns, twice each, and a round in advance compiles the kernels. The cache is not filled:
    what is in there does not change the time. For a model in fixed shapes, `rows` and `max_tokens` are its own.

    Raises:
        DeviceError: when the device fails.
    """
    contexts = contexts_of(backend, rows, max_tokens)
    if fixed := backend.capabilities.fixed:
        return _measure_windows(backend, fixed, contexts[0], repeats)
    with _timer(backend, contexts[1] + max(rows)) as seconds:
        for n in rows:
            seconds(n, contexts[0])
        rounds: list[list[tuple[float, float]]] = []
        began = time.perf_counter()
        enough = repeats or _REPEATS
        while not rounds or (len(rounds) < enough and (repeats or time.perf_counter() - began < _PATIENCE)):
            rounds.append([(seconds(n, contexts[0]), seconds(n, contexts[0])) for n in rows])
        changed, near = ([min(taken[i] for taken in each) for each in zip(*rounds, strict=True)] for i in (0, 1))
        ends = (rows[0], rows[-1])
        far_rounds = [[min(seconds(n, contexts[1]) for _ in range(2)) for n in ends] for _ in rounds]
        extra = [min(taken) for taken in zip(*far_rounds, strict=True)]
    # A call with more rows does not take less time; where it seems to, both were measured alike.
    change = max(statistics.median(c - n for c, n in zip(changed, near, strict=True)), 0.0) if len(rows) > 1 else 0.0
    near = list(itertools.accumulate(near, max))
    more = [max(e - n, 0.0) for e, n in zip(extra, (near[0], near[-1]), strict=True)]
    far = [n + _line(r, ends, more) for r, n in zip(rows, near, strict=True)]
    return PassCost(tuple(rows), tuple(near), tuple(far), contexts, change=change)


def time_calls(backend: Backend, calls: Seq[tuple[int, int]], repeats: int = 2) -> dict[tuple[int, int], float]:
    """Seconds of calls (tokens, tokens of context): each the shortest of `repeats`.

    Calls of more than 16 tokens read a prompt: one row of logits, and one time, are enough.

    Raises:
        DeviceError: when the device fails.
    """
    most = max(count for count, _ in calls)
    room = backend.max_tokens - most
    taken = {}
    with _timer(backend, room + most) as seconds:
        for count, context in calls:
            is_prompt = count > 16
            times, num_rows = (1, 1) if is_prompt else (repeats + 1, None)
            each = [seconds(count, max(min(context, room), 0), num_rows) for _ in range(times)]
            taken[count, context] = min(each[1:] or each)  # the first compiles kernels
    return taken


def contexts_of(backend: Backend, rows: Seq[int], max_tokens: int | None = None) -> tuple[int, int]:
    """The tokens of context at which `measure_pass` times calls of up to so many rows, few and many."""
    if backend.capabilities.fixed:
        context = min(NEAR, backend.max_tokens - 1)
        return context, context
    room = min(backend.max_tokens, max_tokens or backend.max_tokens)
    longest = next((n for n in (FAR, FAR // 2, NEAR, 64, 16) if n + max(rows) <= room), 0)
    return min(NEAR, longest), longest


def _measure_windows(backend: Backend, fixed: FixedShape, context: int, repeats: int | None) -> PassCost:
    """The same for a model in fixed shapes: time a call, and the reading of a prompt.

    A call takes as long for one row as for all of a window's, wherever it is in the context. What a row more costs is
    the chance that it is behind a window's end, in another call.
    """
    prompt = min(DRAFT_ROWS[-1], fixed.max_prompt_tokens, backend.max_tokens)
    with _timer(backend, max(context + 1, prompt)) as seconds:
        seconds(1, context)
        rounds = [(seconds(1, context), seconds(prompt, 0, 1)) for _ in range(repeats or _REPEATS)]
    call, read = (min(taken) for taken in zip(*rounds, strict=True))
    near = [call, call * (2 - 1 / fixed.window)]
    rows = [1, fixed.window]
    if prompt > fixed.window:
        rows, near = [*rows, prompt], [*near, max(read, near[-1])]
    return PassCost(tuple(rows), tuple(near), tuple(near), (context, context))


@contextlib.contextmanager
def _timer(backend: Backend, max_tokens: int) -> Iterator[Callable[..., float]]:
    """Gives a function from tokens, tokens of context, and rows (by default of all tokens) to a call's seconds."""
    with idle_slot(backend, max_tokens) as slot:

        def seconds(num_tokens: int, context: int, num_rows: int | None = None) -> float:
            slot.trim(0)
            slot.skip_to(context)
            began = time.perf_counter()
            backend.submit([Chunk(slot, [0] * num_tokens, num_rows=num_rows or num_tokens)]).wait()
            return time.perf_counter() - began

        yield seconds


@contextlib.contextmanager
def idle_slot(backend: Backend, max_tokens: int) -> Iterator[Slot]:
    """A slot to measure calls with, while nothing else runs."""
    slot = backend.open(max_tokens)
    if slot is None:
        raise RuntimeError("the cache is in use: costs are measured while nothing runs")
    try:
        yield slot
    finally:
        slot.close()
