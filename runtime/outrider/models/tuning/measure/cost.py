"""What the models' calls cost on this machine, in seconds."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import math
import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outrider.models.tuning.measure.slots import open_slot, random_tokens
from outrider.types import Chunk, RowRule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from outrider.types import Backend, FixedShape

LONGEST = 15  # most draft tokens per round; their target pass has 16 rows
MAIN_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 32)
DRAFT_ROWS = (1, 2, 8, 32, 128)
SHORT = MAIN_ROWS[-1]  # tokens; draft models read longer pieces like prompts
NEAR, FAR = 256, 2048  # tokens of context at which calls are measured
_REPEATS, _PATIENCE = 2, 1.0  # rounds of measurements at a first load; one if it takes this many seconds
_LEAST_CHANGES, _MOST_CHANGES, _SPENT = 6, 20, 0.4  # measurements of a change of rows; seconds for them
_LEAST_SHARE = 0.01  # least time of a call at any context, as a share of its time at the first context
# Limits of valid values. No measurement exceeds them; beyond them, calculations may overflow.
_LEAST_SECONDS, _MOST_SECONDS, _MOST_TIMES, _MOST_TOKENS = 1e-9, 1e6, 1e9, 1 << 30
_MOST_SCALE = _MOST_SECONDS / _LEAST_SECONDS
_LATEST_WEIGHT = 0.1  # weight of the latest call in the scale
_MOST_LONGER = 1.5  # times as long as expected: what a call that took longer counts for, as it may have waited
UNKNOWN = 0.7  # the doubt of a cost that does not say how sure it is: a factor of two
ONE_ROUND = 0.1  # the doubt of what was measured at one load only, at least
_MOST_DOUBT = GUESSED = 10.0  # of a call of the fewest rows that nobody has timed
_LEAST_PROCESSOR_SHARE = 0.6  # of its threads' time; with less while it was measured, others used the processor


@dataclass(slots=True)
class PassCost:
    """Seconds of a call, by rows and by tokens of context.

        cost = measure_pass(backend, MAIN_ROWS)
        cost(5, context=300)
        cost.follow(expected=0.045, seconds=0.046)

    rows: ascending. near, far: seconds for each of `rows`, with `contexts` tokens in the cache. Other values are
    interpolated and extrapolated linearly. scale: the machine's current slowness, which `follow` adapts. one_call:
    whether several sequences share one call; otherwise they run one after another. rule: what calls are padded to.
    change: extra seconds of a call with another number of rows than the one before, because a graph in dynamic shapes
    is prepared again; None: it was not measured. fork: extra seconds of each branch of a tree, besides its rows. first:
    extra seconds of the first call after a load, which packs the weights and compiles kernels. doubt: how far each of
    `near` may be off, as the logarithm of a factor; empty: nobody knows.
    """

    rows: tuple[int, ...]
    near: tuple[float, ...]
    far: tuple[float, ...]
    contexts: tuple[int, int] = (NEAR, FAR)
    scale: float = 1.0
    one_call: bool = True
    rule: RowRule = field(default_factory=RowRule)
    change: float | None = None
    fork: float = 0.0
    first: float = 0.0
    doubt: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        # A saved cost comes from a file, which may be damaged. Its rows and contexts address the caches.
        if not self.rows or not all(a < b for a, b in itertools.pairwise((0, *self.rows, _MOST_TOKENS))):
            raise ValueError(f"a cost is for numbers of rows that ascend, from 1 to below {_MOST_TOKENS:,}")
        if not len(self.rows) == len(self.near) == len(self.far):
            raise ValueError("a cost has seconds for each number of rows")
        if not all(_LEAST_SECONDS <= seconds <= _MOST_SECONDS for seconds in (*self.near, *self.far)):
            raise ValueError(f"a call takes from {_LEAST_SECONDS:g} to {_MOST_SECONDS:g} seconds")
        if not all(0 <= seconds <= _MOST_SECONDS for seconds in (self.change or 0.0, self.fork, self.first)):
            raise ValueError(f"what a call takes longer is from 0 to {_MOST_SECONDS:g} seconds")
        if len(self.doubt) not in (0, len(self.rows)) or not all(0 <= each <= _MOST_DOUBT for each in self.doubt):
            raise ValueError(f"a cost has a doubt for each number of rows, from 0 to {_MOST_DOUBT:g}, or none")
        if not 0 <= self.contexts[0] <= self.contexts[1] < _MOST_TOKENS:
            raise ValueError(f"contexts of a cost ascend, from 0 to below {_MOST_TOKENS:,} tokens")
        if not 1 / _MOST_SCALE <= self.scale <= _MOST_SCALE:
            raise ValueError(f"the scale of a cost is from {1 / _MOST_SCALE:g} to {_MOST_SCALE:g}")

    @property
    def version(self) -> int:
        """Of its numbers, for what is derived from them: a cost that learns changes it."""
        return 0

    def __call__(self, rows: int, context: float = NEAR) -> float:
        """Seconds of one sequence's call, by its rows and its tokens of context."""
        return self.scale * self._measured(self.rule.num_rows([rows]), context)

    def together(self, rows: Sequence[int], context: float = NEAR, before: int | None = None) -> float:
        """Seconds for several sequences. rows: of each. before: rows of the last call; None: a change costs nothing."""
        if self.one_call:
            total = self.rule.num_rows(rows)
            changed = self.change if before not in (None, total) else None
            return self.scale * (self._measured(total, context) + (changed or 0.0))
        return sum(self(count, context) for count in rows)

    def take(self, measured: PassCost) -> None:
        """Take the numbers of a cost that was measured just now."""
        self.near, self.far, self.change, self.doubt = measured.near, measured.far, measured.change, measured.doubt
        self.fork, self.scale = measured.fork, 1.0

    def combined(self, larger: PassCost, whole: Callable[[float, float], float], layers: float) -> PassCost:
        """What a model's calls cost, from this cost of a small slice of it, and that of a larger one.

        whole: seconds of the model's call, from the slices'. layers: the model's, as a multiple of the larger slice's,
        which alone read the context.
        """
        near = _ascending(map(whole, self.near, larger.near))
        far = [n + layers * (b - a) for n, a, b in zip(near, larger.near, larger.far, strict=True)]
        fork, first = layers * larger.fork, max(whole(self.first, larger.first), 0.0)
        doubt = tuple(
            min(
                math.hypot(*(math.log(whole(a * x, b * y) / whole(a, b)) for x, y in ((off_a, 1.0), (1.0, off_b)))),
                _MOST_DOUBT,
            )
            for a, b, off_a, off_b in zip(self.near, larger.near, *map(_factors, (self, larger)), strict=True)
        )
        return PassCost(self.rows, tuple(near), tuple(far), self.contexts, fork=fork, first=first, doubt=doubt)

    def follow(self, expected: float, seconds: float) -> None:
        """Adapt the scale to calls that were expected to take `expected` seconds, and took `seconds`."""
        # Outliers count for little: calls that waited, or compiled kernels. Nothing makes a call shorter.
        if seconds > 0:
            self.scale *= min(seconds / expected, _MOST_LONGER) ** _LATEST_WEIGHT

    def observe(self, rows: Sequence[int], context: float, seconds: float, padded: int = 0) -> None:
        """Learn from a call that took `seconds`; a cost that does not learn takes no notice.

        rows: of each sequence; none after a call whose rows are not all answers'. padded: rows of the call, if more.
        """

    def _measured(self, rows: float, context: float) -> float:
        near = _line(rows, self.rows, self.near)
        if self.contexts[1] == self.contexts[0]:
            return near
        share = (context - self.contexts[0]) / (self.contexts[1] - self.contexts[0])
        # Below the first context, the line may fall to 0 if a measurement was disturbed.
        return max(near + share * (_line(rows, self.rows, self.far) - near), _LEAST_SHARE * near)


@dataclass(frozen=True, slots=True)
class Contention:
    """How many times as long a call takes while calls of the other model run.

    check: calls of the main model. draft: calls of the draft model. 1 if the two models share no resources. On one
    processor both may be above 2.
    """

    check: float
    draft: float

    def __post_init__(self) -> None:
        if not all(1 <= times <= _MOST_TIMES for times in (self.check, self.draft)):
            raise ValueError(f"beside another, a call takes from 1 to {_MOST_TIMES:g} times as long")


ALONE = Contention(1.0, 1.0)


def _line(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """Linear interpolation. Constant before the first point; beyond the last, a line that never falls."""
    if x <= xs[0] or len(xs) == 1:
        return ys[0]
    at = min(bisect.bisect_left(xs, x), len(xs) - 1)  # NumPy's interp is ten times slower for a few numbers
    rise = ys[at] - ys[at - 1]
    if x > xs[-1]:
        rise = max(rise, 0.0)
    return ys[at] + (x - xs[at]) * rise / (xs[at] - xs[at - 1])


def _ascending(seconds: Iterable[float]) -> list[float]:
    """Seconds by rows, each at most as long as those of more rows.

    A call with more rows does not take less time. If it seems to, other work on the machine has added to another one.
    """
    return [*itertools.accumulate(reversed([*seconds]), min)][::-1]


def _factors(cost: PassCost) -> list[float]:
    """How many times as long each number of rows may take."""
    return [math.exp(each) for each in cost.doubt or (UNKNOWN,) * len(cost.rows)]


def _doubt(rounds: Sequence[Sequence[float]], near: Sequence[float], share: float | None) -> tuple[float, ...]:
    """How far each of `near` may be off. rounds: of measurements, from which it was made.

    share: of its threads' time in which the process ran meanwhile; None: nobody knows.
    """
    made = []
    for taken, seconds in zip(zip(*rounds, strict=True), near, strict=True):
        spread = max(math.log(sorted(taken)[1] / min(taken)) if len(taken) > 1 else 0.0, ONE_ROUND)
        made.append(max(spread, math.log(min(taken) / seconds)))
    least = UNKNOWN if share is not None and share < _LEAST_PROCESSOR_SHARE else 0.0
    return tuple(min(max(each, least), _MOST_DOUBT) for each in made)


def check_pass(backend: Backend, cost: PassCost) -> None:
    """Scale a saved cost to the machine's current speed, by the shortest of a few calls."""
    with timer(backend, cost.contexts[0] + cost.rows[0]) as seconds:
        seconds(cost.rows[0], cost.contexts[0])
        cost.scale = min(seconds(cost.rows[0], cost.contexts[0]) for _ in range(2)) / cost.near[0]


def measure_pass(
    backend: Backend,
    rows: Sequence[int],
    repeats: int | None = None,
    *,
    max_tokens: int | None = None,
    made: list[float] | None = None,
) -> PassCost:
    """Time calls of one sequence with these numbers of rows, at contexts of up to `max_tokens` tokens.

    Takes the shortest time of each size, because other work on the machine can only add to it. A first round compiles
    the kernels. Then each of `repeats` rounds times all sizes, twice each, and pieces of a prompt once. The default is
    two rounds, or one if that takes a second. The cache is not filled, because its content does not change the times. A
    model in fixed shapes is timed with its own rows and context. made: as for `timer`, for a number of `repeats`.
    """
    contexts = contexts_of(backend, rows, max_tokens)
    if fixed := backend.capabilities.fixed:
        return _measure_windows(backend, fixed, contexts[0], repeats)
    with timer(backend, contexts[1] + max(rows), made) as seconds:

        def times(n: int, context: int) -> list[float]:
            return [seconds(n, context) for _ in range(1 if n > SHORT else 2)]

        first, *_ = [seconds(n, contexts[0]) for n in rows]
        rounds: list[list[list[float]]] = []
        began, ran = time.perf_counter(), time.process_time()
        enough = repeats or _REPEATS
        while not rounds or (len(rounds) < enough and (repeats or time.perf_counter() - began < _PATIENCE)):
            rounds.append([times(n, contexts[0]) for n in rows])
        share = _processor_share(backend, time.process_time() - ran, time.perf_counter() - began)
        same = [[taken[-1] for taken in each] for each in rounds]  # rows as in the call before
        near = [min(taken) for taken in zip(*same, strict=True)]
        ends = (rows[0], rows[-1])
        far_rounds = [[min(times(n, contexts[1])) for n in ends] for _ in rounds]
        extra = [min(taken) for taken in zip(*far_rounds, strict=True)]
    near = _ascending(near)
    more = [max(e - n, 0.0) for e, n in zip(extra, (near[0], near[-1]), strict=True)]
    far = [n + _line(r, ends, more) for r, n in zip(rows, near, strict=True)]
    return PassCost(
        tuple(rows),
        tuple(near),
        tuple(far),
        contexts,
        fork=_measure_fork(backend),
        first=max(first - near[0], 0.0),
        doubt=_doubt(same, near, share),
    )


def _processor_share(backend: Backend, ran: float, seconds: float) -> float | None:
    """The share of its threads' time in which the process ran; None where nobody knows how many there are.

    ran: seconds of processor time.
    """
    num_threads = int(getattr(backend, "fingerprint", {}).get("INFERENCE_NUM_THREADS", 0))
    return ran / (seconds * num_threads) if num_threads and seconds else None


def measure_change(backend: Backend, rows: Sequence[int], *, made: list[float] | None = None) -> float:
    """Extra seconds of a call whose number of rows is not that of the call before: the median of a few.

    Takes two numbers in turns, two calls with each. rows: as in `measure_pass`. made: as for `timer`.
    """
    if backend.capabilities.fixed or len(rows) == 1:
        return 0.0
    extra = list[float]()
    with timer(backend, rows[1], made) as seconds:
        for n in rows[:2]:
            seconds(n, 0)  # compiles kernels
        began = time.perf_counter()
        while len(extra) < _LEAST_CHANGES or (len(extra) < _MOST_CHANGES and time.perf_counter() - began < _SPENT):
            changed, same = (seconds(rows[len(extra) % 2], 0) for _ in range(2))
            extra.append(changed - same)
    return max(statistics.median(extra), 0.0)


def time_calls(
    backend: Backend,
    calls: Sequence[tuple[int, int]],
    patience: float = 0.0,
) -> dict[tuple[int, int], float]:
    """Seconds of calls, each the shortest of at least two. calls: (tokens, tokens of context).

    Calls of more than 16 tokens read a prompt. They are timed once, with one row of logits. patience: seconds that each
    other call is repeated for, at least.
    """
    most = max(count for count, _ in calls)
    room = backend.max_tokens - most
    taken = {}
    with timer(backend, room + most) as seconds:
        for count, context in calls:
            is_prompt = count > 16
            times, num_rows = (1, 1) if is_prompt else (3, None)
            each: list[float] = []
            while len(each) < times or (not is_prompt and sum(each[1:]) < patience):
                each.append(seconds(count, max(min(context, room), 0), num_rows))
            taken[count, context] = min(each[1:] or each)  # the first compiles kernels
    return taken


def timed_rows(role: str, backend: Backend) -> tuple[int, ...]:
    """The numbers of rows for timing a model's calls. role: "main", or a drafter's name."""
    rule = backend.capabilities.rows
    return tuple(sorted({rule.num_rows([n]) for n in (MAIN_ROWS if role == "main" else DRAFT_ROWS)}))


def contexts_of(backend: Backend, rows: Sequence[int], max_tokens: int | None = None) -> tuple[int, int]:
    """The short and the long context, in tokens, at which `measure_pass` times calls of these rows."""
    if backend.capabilities.fixed:
        context = min(NEAR, backend.max_tokens - 1)
        return context, context
    room = min(backend.max_tokens, max_tokens or backend.max_tokens)
    longest = next((n for n in (FAR, FAR // 2, NEAR, 64, 16) if n + max(rows) <= room), 0)
    return min(NEAR, longest), longest


def _measure_windows(backend: Backend, fixed: FixedShape, context: int, repeats: int | None) -> PassCost:
    """`measure_pass` for a model in fixed shapes: times a call, and the reading of a prompt.

    A call takes the same time for one row as for a whole window, at any context. The cost of an
    added row is a call's, times the probability that the row falls behind the window's end, into another call.
    """
    prompt = min(DRAFT_ROWS[-1], fixed.max_prompt_tokens, backend.max_tokens)
    with timer(backend, max(context + 1, prompt)) as seconds:
        seconds(1, context)
        rounds = [(seconds(1, context), seconds(prompt, 0, 1)) for _ in range(repeats or _REPEATS)]
    call, read = (min(taken) for taken in zip(*rounds, strict=True))
    near = [call, call * (2 - 1 / fixed.window)]
    rows = [1, fixed.window]
    if prompt > fixed.window:
        rows, near = [*rows, prompt], [*near, max(read, near[-1])]
    doubt = (ONE_ROUND,) * len(rows)
    return PassCost(tuple(rows), tuple(near), tuple(near), (context, context), doubt=doubt)


def _measure_fork(backend: Backend) -> float:
    """Seconds to make room for a branch, which copies a block; the shortest of a few, each after a call.

    A call's weights push the block out of the processor's caches: without it, the copy takes a fraction of that.
    """
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
