"""The price list of a model's calls: one table, which every call teaches and everybody else reads."""

from __future__ import annotations

import bisect
import itertools
import math
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from outrider.types import RowRule

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

LONGEST = 15  # most draft tokens per round; their target pass has 16 rows
MAIN_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 32)
DRAFT_ROWS = (1, 2, 8, 32, 128)
SHORT = MAIN_ROWS[-1]  # tokens; draft models read longer pieces like prompts
NEAR, FAR = 256, 2048  # tokens of context at which calls are measured
# Numbers of calls: that nobody can rely on, of a measurement at one load, and that are enough.
UNKNOWN, ONE_LOAD, ENOUGH = 1, 4, 8
UNSURE = 0.15  # times of which one is longer by that share disagree
_RECENT_OF_ROWS, _RECENT, _RECENT_OF_PROMPTS = 16, 8, 5  # calls that count
_CHANGED = 0.02  # the table is made again once a number has changed by that share
_CALM = 0.2  # above the least level, in its logarithm: more is other work on the machine
_FAR_FROM = 0.5  # of the way from the first context to the second: calls beyond say what the context adds
_RISE = 0.001  # of the least level, with each call
_LEAST_ADDED_SHARE = 0.1  # least seconds that a row adds to a call, as a share of the average row's
_LEAST_SHARE = 0.01  # least time of a call at any context, as a share of its time at the first context
# Limits of valid values. No measurement exceeds them; beyond them, calculations may overflow.
_LEAST_SECONDS, _MOST_SECONDS, _MOST_TOKENS = 1e-9, 1e6, 1 << 30
_MOST_SCALE = _MOST_SECONDS / _LEAST_SECONDS


@dataclass
class CallCost:
    """Seconds of a model's calls, by rows and by tokens of context.

        cost = CallTimes(backend, MAIN_ROWS).measure()
        cost(5, context=300)
        cost.observe([5], context=300, seconds=0.046)
        cost.learned()    # for later loads

    What a call takes is `scale`, the machine's slowness now, times the seconds of its rows and context. Both are
    medians of what the latest calls have shown, so that one which waited teaches nothing. The scale is that of the
    latest 8 calls. Each number of rows, at short and at long contexts, has its own latest 16, so that a change of the
    machine's speed has become one of the scale before it looks like one of some rows. Calls with a number of rows that
    is not known well teach that alone, and the others teach the scale too. Numbers of rows that nobody has seen follow
    those beside them.
    """

    rows: tuple[int, ...]  # ascending
    near: tuple[float, ...]  # seconds for each of `rows`, with the first of `contexts` in the cache
    far: tuple[float, ...]  # with the second one; all else is interpolated and extrapolated linearly
    contexts: tuple[int, int] = (NEAR, FAR)
    scale: float = 1.0
    one_call: bool = True  # several sequences share one call; otherwise they run one after another
    rule: RowRule = field(default_factory=RowRule)  # what calls are padded to
    # Extra seconds of a call with another number of rows than the one before, because a graph in dynamic shapes is
    # prepared again; None: it was not measured.
    change: float | None = None
    fork: float = 0.0  # extra seconds of each branch of a tree, besides its rows
    first: float = 0.0  # extra seconds of the first call after a load, which packs the weights and compiles kernels
    calls: tuple[int, ...] = ()  # from which each of `near` is known: 0 for a guess; empty: nobody knows

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
        if len(self.calls) not in (0, len(self.rows)) or not all(0 <= n <= _RECENT_OF_ROWS for n in self.calls):
            raise ValueError(f"a cost has a number of calls for each number of rows, from 0 to {_RECENT_OF_ROWS}")
        if not 0 <= self.contexts[0] <= self.contexts[1] < _MOST_TOKENS:
            raise ValueError(f"contexts of a cost ascend, from 0 to below {_MOST_TOKENS:,} tokens")
        if not 1 / _MOST_SCALE <= self.scale <= _MOST_SCALE:
            raise ValueError(f"the scale of a cost is from {1 / _MOST_SCALE:g} to {_MOST_SCALE:g}")
        self._version = 0
        self._begin()

    def _begin(self) -> None:
        """Forget what was learned, and begin with the numbers as they are now."""
        calls = self.calls or (UNKNOWN,) * len(self.rows)
        self.near, self.far = (tuple(itertools.accumulate(each, max)) for each in (self.near, self.far))
        self._base = self.near, self.far
        # By context and rows, how much longer calls took than the base says, as logarithms. Those at the long context
        # say what is added to the same rows' at the short one.
        self._deviations = [[deque([0.0] * n, _RECENT_OF_ROWS) for n in calls] for _ in self._base]
        self._taken = [[0.0] * len(self.rows) for _ in self._base]  # of these, what is reckoned with
        self._seen: set[tuple[int, int]] = set()
        self._levels = deque([math.log(self.scale)] * (calls[0] > 0), _RECENT)  # logarithms of the scale
        self._num_levels, self._least_level = 0, math.log(self.scale)
        self._before: int | None = None  # rows of the last call; None: it was none of answers
        self._kept: tuple[tuple[float, ...], tuple[float, ...], tuple[int, ...]] | None = None
        # Seconds of a prompt's row, in terms of `_added_row`. At first too many, as the longest measured call may have
        # logits for all its rows, which a piece of a prompt has not.
        self._prompts = deque([self.near[-1] / self.rows[-1] / self._added_row(self.contexts[0])], _RECENT_OF_PROMPTS)
        self._version += 1

    @property
    def version(self) -> int:
        """Of its numbers besides the scale, for what is derived from them."""
        return self._version

    @property
    def is_guess(self) -> bool:
        """Whether its calls were never timed."""
        return not (self.calls or (UNKNOWN,))[0]

    @property
    def is_blind(self) -> bool:
        """Whether it is a guess that no call was compared with."""
        return not self._levels

    @property
    def _counts(self) -> tuple[int, ...]:
        """From how many calls each of `near` is known now."""
        return tuple(map(len, self._deviations[0]))

    @property
    def unsure_rows(self) -> list[int]:
        """Numbers of rows of which calls have shown too little to rely on it."""
        return [n for n, count in zip(self.rows, self._counts, strict=True) if count < ONE_LOAD]

    @property
    def is_doubtful(self) -> bool:
        """Whether it is to be measured when there is time."""
        return any(count < ENOUGH and n <= SHORT for n, count in zip(self.rows, self._counts, strict=True))

    def __call__(self, rows: int, context: float = NEAR) -> float:
        """Seconds of one sequence's call, by its rows and its tokens of context."""
        return self.scale * self.unscaled(self.rule.num_rows([rows]), context)

    def together(self, rows: Sequence[int], context: float = NEAR, before: int | None = None) -> float:
        """Seconds for several sequences. rows: of each. before: rows of the last call; None: a change costs nothing."""
        if self.one_call:
            total = self.rule.num_rows(rows)
            changed = self.change if before not in (None, total) else None
            return self.scale * (self.unscaled(total, context) + (changed or 0.0))
        return sum(self(count, context) for count in rows)

    def prompt_row(self, context: float) -> float:
        """Seconds that a row of a prompt's piece adds to a call."""
        return self.scale * _middle(self._prompts) * self._added_row(context)

    def unscaled(self, rows: float, context: float = NEAR) -> float:
        """Seconds of a call with so many rows in all, where the scale is 1."""
        near = line(rows, self.rows, self.near)
        if self.contexts[1] == self.contexts[0]:
            return near
        # Below the first context, the line may fall to 0 if a measurement was disturbed.
        behind = self._behind(context)
        return max(near + behind * (line(rows, self.rows, self.far) - near), _LEAST_SHARE * near)

    def _behind(self, context: float) -> float:
        """How far a context is on the way from the first one to the second."""
        between = self.contexts[1] - self.contexts[0]
        return (context - self.contexts[0]) / between if between else 0.0

    def _added_row(self, context: float) -> float:
        """Seconds that a row adds to a call, where the scale is 1."""
        first, last = self.rows[0], self.rows[-1]
        longest = self.unscaled(last, context)
        added = (longest - self.unscaled(first, context)) / max(last - first, 1)
        return max(added, _LEAST_ADDED_SHARE * longest / last)

    def take(self, measured: CallCost) -> None:
        """Take the numbers of a cost that was measured just now. Those of rows that agree are enough to be sure."""
        known, ours, theirs = self.learned(), self.near, measured.near
        agree = [abs(math.log(a * theirs[0] / b / ours[0])) < UNSURE for a, b in zip(ours, theirs, strict=True)]
        both = zip(known.calls or (0,) * len(ours), measured.calls, agree, strict=True)
        self.calls = tuple(ENOUGH if min(old, new) >= ONE_LOAD and same else new for old, new, same in both)
        self.near, self.far, self.change, self.fork = measured.near, measured.far, measured.change, measured.fork
        self.scale = 1.0
        self._begin()

    def observe(
        self,
        rows: Sequence[int],
        context: float,
        seconds: float,
        padded: int = 0,
        *,
        prompt_rows: int = 0,
        prompt_context: float = 0.0,
    ) -> None:
        """Learn from a call.

        rows: of each answer in it; none if they say nothing, as something else ran meanwhile. context: of these, in the
        mean. padded: rows of the call, if more than the rule says. prompt_rows: of prompts. prompt_context: of the
        longest of these.
        """
        total, before = padded or self.rule.num_rows(rows), self._before
        self._before = total if rows and not prompt_rows else None
        if seconds <= 0 or not (rows or prompt_rows):
            return
        if prompt_rows:
            self._observe_prompts(seconds, self.together(rows, context) if rows else 0.0, prompt_rows, prompt_context)
            return
        if total > self.rows[-1] or not (self.one_call or len(rows) == 1) or (self.change and before is None):
            return
        if self.change and before != total:
            seconds = max(seconds - self.scale * self.change, seconds / 2)
        behind = self._behind(context)
        column, at = int(behind > _FAR_FROM), self._nearest(total)
        deviations = self._deviations[column][at]
        off = math.log(seconds / self.scale / self.unscaled(total, context))
        is_new = (column, at) not in self._seen
        self._seen.add((column, at))
        if is_new and off > 0 and deviations:  # it may have compiled kernels
            return
        if not (column or at) or len(deviations) >= ONE_LOAD or seconds < self.scale * self.near[0]:
            self._see_level(math.log(self.scale) + off)
        seconds /= self.scale
        if column:  # what the context adds, as far as it is known from this one
            near, far = (line(total, self.rows, each) for each in (self.near, self.far))
            seen = max(near + (seconds - near) / behind, _LEAST_SHARE * near) / far * self.far[at]
            deviations.append(math.log(seen / self._base[1][at]) - self._taken[0][at])
        else:
            deviations.append(math.log(seconds / self.unscaled(total, context) * self.near[at] / self._base[0][at]))
        if abs(_middle(deviations) - self._taken[column][at]) > _CHANGED:
            self._make_again()
        if self._num_levels >= ENOUGH and math.log(self.scale) <= self._least_level + _CALM:
            self._kept = self.near, self.far, self._counts

    def _observe_prompts(self, seconds: float, of_answers: float, rows: int, context: float) -> None:
        """Learn what prompts' rows add."""
        if seconds > of_answers:
            self._prompts.append((seconds - of_answers) / (rows * self.scale * self._added_row(context)))
        else:  # the answers alone took no longer
            self._see_level(math.log(self.scale * seconds / of_answers))

    def _see_level(self, level: float) -> None:
        self._levels.append(level)
        self._num_levels += 1
        level = _middle(self._levels)
        self.scale = math.exp(level)
        above = level - self._least_level
        self._least_level += above * (1.0 if above < 0 or self._num_levels <= ENOUGH else _RISE)

    def _make_again(self) -> None:
        """Make the numbers again from what calls have shown. More rows never take less."""
        for column, deviations in enumerate(self._deviations):
            known = [i for i, shown in enumerate(deviations) if (column, i) in self._seen or len(shown) >= ONE_LOAD]
            at, seen = [self.rows[i] for i in known], [_middle(deviations[i]) for i in known]
            self._taken[column] = [line(n, at, seen, level=True) if known else 0.0 for n in self.rows]
        by = self._taken[0][0]  # the scale is to be that of the fewest rows
        self._taken[0] = [each - by for each in self._taken[0]]
        self._deviations[0] = [deque((each - by for each in shown), _RECENT_OF_ROWS) for shown in self._deviations[0]]
        self._levels = deque((each + by for each in self._levels), _RECENT)
        self.scale, self._least_level = self.scale * math.exp(by), self._least_level + by
        of_rows, of_context = self._taken
        near, counts = [math.exp(a) * n for a, n in zip(of_rows, self._base[0], strict=True)], self._counts
        for i, count in enumerate(counts):  # what is better known of more rows is a limit
            near[i] = min([near[i], *(n for n, more in zip(near[i:], counts[i:], strict=True) if more > count)])
        far = [math.exp(a + b) * n for a, b, n in zip(of_rows, of_context, self._base[1], strict=True)]
        self.near = tuple(itertools.accumulate(near, max))
        self.far = tuple(itertools.accumulate(map(max, far, self.near), max))
        self._version += 1

    def _nearest(self, total: int) -> int:
        """The place in `rows` that is nearest to a number of rows."""
        at = bisect.bisect_left(self.rows, total)
        return at - 1 if at and 2 * total < self.rows[at - 1] + self.rows[at] else at

    def learned(self) -> CallCost:
        """The numbers for later loads: what a calm machine has shown."""
        if self._kept is None:
            return replace(self, near=self._base[0], far=self._base[1], scale=1.0)
        level = math.exp(self._least_level)
        near, far = (tuple(level * seconds for seconds in each) for each in self._kept[:2])
        change = None if self.change is None else level * self.change
        return replace(self, near=near, far=far, scale=1.0, change=change, calls=self._kept[2])


def line(x: float, xs: Sequence[float], ys: Sequence[float], *, level: bool = False) -> float:
    """Linear interpolation. Constant before the first point; beyond the last, a line that never falls, or constant."""
    if x <= xs[0] or len(xs) == 1:
        return ys[0]
    at = min(bisect.bisect_left(xs, x), len(xs) - 1)  # NumPy's interp is ten times slower for a few numbers
    rise = ys[at] - ys[at - 1]
    if x > xs[-1]:
        rise = 0.0 if level else max(rise, 0.0)
    return ys[at] + (x - xs[at]) * rise / (xs[at] - xs[at - 1])


def ascending(seconds: Iterable[float]) -> list[float]:
    """Seconds by rows, each at most as long as those of more rows.

    A call with more rows does not take less time. If it seems to, other work on the machine has added to another one.
    """
    return [*itertools.accumulate(reversed([*seconds]), min)][::-1]


def _middle(values: Collection[float]) -> float:
    """The median, of an even number the lower one; 0 of none."""
    return sorted(values)[(len(values) - 1) // 2] if values else 0.0
