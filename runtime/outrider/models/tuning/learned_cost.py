"""The cost of a model's calls, corrected by the calls that answers make."""

from __future__ import annotations

import bisect
import contextlib
import math
from dataclasses import fields
from typing import TYPE_CHECKING

from outrider.models.tuning.measure.cost import GUESSED, ONE_ROUND, SHORT, UNKNOWN, PassCost

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from outrider.system.saved import SavedValue

UNSURE = 0.15  # a number of rows with a larger doubt is measured again
_LEAST_DOUBT = 0.03
# Variances of the logarithm of a call's seconds. Nothing makes a call shorter, and other work makes it longer.
_SHORTER, _LONGER = 0.08**2, 0.16**2
_MOST_LONGER = 0.4  # of one call, in the logarithm of its seconds: it may have waited, or have compiled kernels
_DRIFT_OF_LEVEL, _DRIFT = 0.02**2, 0.003**2  # what variances grow by with each call
_LEVEL = 0.15  # the doubt of the level after a load that has timed a few calls, at least
# The doubt of what the context and a change of rows add, as a share of the shortest call; and where others are large.
_ADDED, _ADDED_UNSURE = 0.1, 0.25
_LEAST_BEHIND = 0.15  # of the way from the first context to the second one: nearer calls say nothing of it
_NEARBY = 0.7  # of a correction, for the next number of rows if nothing was seen of that
_CHANGED = 0.02  # the numbers are told once they have changed by that
_CALM, _MOST_NOISE = 0.2, 0.15  # above the least level, and of the mean deviation: more is other work on the machine
_SINK, _RISE = 0.2, 0.001  # weight of the latest level in the least one
_ENOUGH_OF_ROWS, _ENOUGH = 8, 64  # calls, before their numbers are saved


def is_guess(cost: PassCost) -> bool:
    """Whether its calls were never timed."""
    return bool(cost.doubt) and cost.doubt[0] >= GUESSED


class LearnedCost(PassCost):
    """A cost that learns from calls.

        cost = LearnedCost.of(measured)
        cost.observe([5], context=300, seconds=0.046)
        cost.save()    # for later loads

    What a call takes is a product of `scale`, the level of the machine now, and of the seconds of its rows and context,
    the shape. Each number has a variance, and a call that took another time than expected moves those most that are
    least sure (an extended Kalman filter with a diagonal covariance). The seconds of the fewest rows stay: the level is
    measured against them. A call that is shorter than expected counts for more than a longer one.

    Only what was seen while the machine was calm is saved: near its least level, with calls that take equal times.

    file, stored: where it is saved, and what is there. told: is called with it when its numbers have changed. It
    must not hold the cost, or both wait for the garbage collector.
    """

    file: SavedValue[PassCost] | None = None
    stored: PassCost | None = None
    told: Callable[[PassCost], None] | None = None

    @classmethod
    def of(cls, cost: PassCost) -> LearnedCost:
        """A cost with the same numbers."""
        return cls(**{each.name: getattr(cost, each.name) for each in fields(PassCost)})

    def __post_init__(self) -> None:
        super().__post_init__()
        self._version = 0
        self.begin()

    def take(self, measured: PassCost) -> None:
        """Take the numbers of a cost that was measured just now, and forget what was learned."""
        super().take(measured)
        self.begin()
        self._tell()

    def begin(self) -> None:
        """Forget what was learned, and begin with the numbers as they are now."""
        count, unsure = len(self.rows), max(self.doubt, default=UNKNOWN) > UNSURE
        self._near, self._doubt = [*self.near], [*(self.doubt or (UNKNOWN,) * count)]
        self._variance = [0.0, *(max(each, _LEAST_DOUBT) ** 2 for each in self._doubt[1:])]
        self._added = [far - near for near, far in zip(self.near, self.far, strict=True)]
        self._change = self.change
        # What is added to them, as a share of the shortest call.
        self._more_added = self._more_change = 0.0
        self._variance_added = self._variance_change = (_ADDED_UNSURE if unsure else _ADDED) ** 2
        self._level = math.log(self.scale)
        self._variance_level = max(_LEVEL, self._doubt[0]) ** 2
        self._before: int | None = None  # rows of the last call; None: nobody knows
        self._num_calls, self._calls = 0, [0] * count
        self._moved = 0.0  # since the numbers were told
        self._least_level, self._noise = self._level, 0.0
        self._saved_near, self._saved_doubt, self._saved_extra = [*self._near], [*self._doubt], (0.0, 0.0)
        self._version += 1

    @property
    def version(self) -> int:
        """Of its numbers."""
        return self._version

    @property
    def is_unsure(self) -> bool:
        """Whether it is worth a part of the answers' time to time calls again."""
        return self.is_level_unsure or bool(self.unsure_rows)

    @property
    def is_level_unsure(self) -> bool:
        """Whether calls of the fewest rows are to be timed."""
        return self._variance_level > UNSURE**2

    @property
    def unsure_rows(self) -> list[int]:
        """Numbers of rows whose seconds are unsure, the most unsure first; without the fewest rows."""
        both = sorted(zip(self._variance[1:], self.rows[1:], strict=True), reverse=True)
        return [rows for variance, rows in both if variance > UNSURE**2]

    @property
    def doubtful_rows(self) -> list[int]:
        """Numbers of rows that are to be timed when there is time: unsure, or seen at one load only."""
        return [
            n
            for n, doubt in zip(self.rows[1:], self._saved_doubt[1:], strict=True)
            if doubt >= ONE_ROUND and n <= SHORT
        ]

    def follow(self, expected: float, seconds: float) -> None:
        """Adapt the scale, unless `observe` does so."""
        if not self._num_calls:
            super().follow(expected, seconds)
            self._level = math.log(self.scale)

    def observe(self, rows: Sequence[int], context: float, seconds: float, padded: int = 0) -> None:
        """Learn from a call; see `PassCost`."""
        total, before = padded or self.rule.num_rows(rows) if rows else None, self._before
        self._before = total
        if total is None or before is None or seconds <= 0 or total > self.rows[-1]:
            return
        if not self.one_call and len(rows) > 1:
            return
        at, share = self._place(total)
        near, least = self._near, self._near[0]
        parts, added = [(at, (1 - share) * near[at])], (1 - share) * self._added[at] + self._more_added * least
        if share:
            parts.append((at + 1, share * near[at + 1]))
            added += share * self._added[at + 1]
        behind = (context - self.contexts[0]) / max(self.contexts[1] - self.contexts[0], 1)
        alone = sum(part for _, part in parts)
        expected = alone + max(behind * added, -alone / 2)
        has_changed = before != total and self._change is not None
        if has_changed:
            expected += max((self._change or 0.0) + self._more_change * least, 0.0)
        off = math.log(seconds / expected) - self._level
        self._noise += _SINK / 2 * (min(abs(off), 1.0) - self._noise)
        is_new, self._calls[at] = not self._calls[at], self._calls[at] + 1
        if is_new and off > 0:  # it may have compiled kernels
            return
        of_least = least / expected
        of_added = behind * of_least if abs(behind) >= _LEAST_BEHIND else 0.0
        of_parts = [(i, part / expected) for i, part in parts]
        knows_rows = all(self._variance[i] <= UNSURE**2 for i, _ in parts)
        self._learn(min(off, _MOST_LONGER), of_parts, of_added, of_least if has_changed and knows_rows else 0.0)

    def observed_alone(self, rows: int, seconds: float) -> None:
        """Learn from a call that was made to be timed, after another one with as many rows, at the first context."""
        self._before = rows
        self.observe([rows], self.contexts[0], seconds, rows)
        self._before = None

    def _learn(self, off: float, parts: Sequence[tuple[int, float]], of_added: float, of_change: float) -> None:
        """Move what a call depends on. off: its deviation. Others: how much the call depends on each."""
        self._num_calls += 1
        self._variance_level += _DRIFT_OF_LEVEL
        variance, noise = self._variance, _SHORTER if off < 0 else _LONGER
        total = self._variance_level + noise
        total += of_added**2 * self._variance_added + of_change**2 * self._variance_change
        for i, of in parts:
            variance[i] += _DRIFT if i else 0.0
            total += of**2 * variance[i]
        gain = off / total
        self._level += gain * self._variance_level
        self._variance_level -= self._variance_level**2 / total
        self.scale = math.exp(self._level)
        for i, of in parts:
            self._move(i, gain * of * variance[i])
            variance[i] -= (of * variance[i]) ** 2 / total
            self._limit_level(i)
        moved = gain * of_added * self._variance_added, gain * of_change * self._variance_change
        self._more_added += moved[0]
        self._more_change += moved[1]
        self._variance_added -= (of_added * self._variance_added) ** 2 / total
        self._variance_change -= (of_change * self._variance_change) ** 2 / total
        self._moved += sum(map(abs, moved))
        if self._moved > _CHANGED:
            self._tell()
        self._keep([i for i, _ in parts])

    def _move(self, at: int, by: float) -> None:
        """Correct the seconds of one number of rows, and of those beside it that are no surer."""
        if not by:
            return
        self._near[at] *= math.exp(by)
        self._moved += abs(by)
        for i in range(1, len(self._near)):
            if i != at:
                share = self._variance[i] / (self._variance[i] + self._variance[at])
                self._near[i] *= math.exp(by * share * _NEARBY ** abs(i - at))

    def _limit_level(self, at: int) -> None:
        """Lower the level where more rows would take less: then their seconds were too low in relation to others'."""
        if (above := math.log(self._near[0] / self._near[at])) > 0:
            self._level -= above
            self.scale = math.exp(self._level)
            for i, count in enumerate(self._calls):
                if i and (count or i == at):
                    self._near[i] *= math.exp(above)
            self._moved += above

    def _tell(self) -> None:
        """Let everybody reckon with the numbers as they are now."""
        near, least = _ascending(self._near, self._variance), self._near[0]
        self.near = tuple(near)
        self.far = tuple(n + max(a + self._more_added * least, 0.0) for n, a in zip(near, self._added, strict=True))
        if self._change is not None:
            self.change = max(self._change + self._more_change * least, 0.0)
        self._version, self._moved = self._version + 1, 0.0
        if self.told is not None:
            self.told(self)

    def _keep(self, parts: Sequence[int]) -> None:
        """Keep what a calm machine has shown, for later loads."""
        above = self._level - self._least_level
        self._least_level += above * (1.0 if self._num_calls < _ENOUGH_OF_ROWS else _SINK if above < 0 else _RISE)
        if above > _CALM or self._noise > _MOST_NOISE:
            return
        for i in parts:
            if self._calls[i] >= _ENOUGH_OF_ROWS:
                self._saved_near[i] = self._near[i]
                self._saved_doubt[i] = max(math.sqrt(self._variance[i]), _LEAST_DOUBT)
                self._saved_extra = self._more_added, self._more_change

    def _place(self, total: int) -> tuple[int, float]:
        """The place in `rows` at or before a number of rows, and how far it is on the way to the next one."""
        at = max(bisect.bisect_right(self.rows, total) - 1, 0)
        if total <= self.rows[at]:
            return at, 0.0
        return at, (total - self.rows[at]) / (self.rows[at + 1] - self.rows[at])

    def measured_again(self, taken: Mapping[int, Sequence[float]]) -> bool:
        """Take in calls that were timed in turns, by their rows, at the first context. False if they disagree.

        They include the fewest rows. The shorter times count.
        """
        if not all(map(min, taken.values())):  # a clock that is too coarse
            return False
        two = {rows: sorted(seconds)[:2] for rows, seconds in taken.items()}
        spreads = {rows: math.log(second / least) for rows, (least, second) in two.items()}
        if spreads[self.rows[0]] > UNSURE:
            return False
        least = two[self.rows[0]][0]
        self._level, self._variance_level = math.log(least / self._near[0]), _LEVEL**2
        self.scale = math.exp(self._level)
        for rows, (seconds, _) in two.items():
            if rows != self.rows[0] and spreads[rows] <= UNSURE:
                at = self.rows.index(rows)
                self._near[at] = self._saved_near[at] = self._near[0] * seconds / least
                doubt = self._saved_doubt[at] = max(spreads[rows], _LEAST_DOUBT)
                self._variance[at], self._calls[at] = doubt**2, self._calls[at] + 1
        self._saved_doubt[0] = max(spreads[self.rows[0]], _LEAST_DOUBT)
        self._least_level, self._num_calls = self._level, max(self._num_calls, _ENOUGH)
        self._before = None
        self._tell()
        return all(spread <= UNSURE for spread in spreads.values())

    def learned(self) -> PassCost:
        """The numbers for later loads."""
        level = math.exp(self._least_level) if self._num_calls >= _ENOUGH else 1.0
        near = _ascending([level * each for each in self._saved_near], [each**2 for each in self._saved_doubt])
        added, change = (each * self._saved_near[0] for each in self._saved_extra)
        far = [n + level * max(a + added, 0.0) for n, a in zip(near, self._added, strict=True)]
        return PassCost(
            self.rows,
            tuple(near),
            tuple(far),
            self.contexts,
            change=None if self._change is None else level * max(self._change + change, 0.0),
            fork=self.fork,
            first=self.first,
            doubt=tuple(self._saved_doubt),
        )

    def save(self) -> None:
        """Write what was learned to the file, if that differs from what is there."""
        if self.file is None or self.stored is None:
            return
        with contextlib.suppress(ValueError):  # numbers that nothing measures
            made = self.learned()
            if _differs(self.stored, made):
                self.file.write(made)
                self.stored = made


def _ascending(seconds: Sequence[float], variances: Sequence[float]) -> list[float]:
    """Seconds by rows, none longer than that of more rows: of two that contradict each other, the surer one stays."""
    made = [*seconds]
    for i in range(1, len(made)):  # what is longer before a surer one becomes as short as that
        for j in range(i - 1, -1, -1):
            if made[j] <= made[i] or variances[j] < variances[i]:
                break
            made[j] = made[i]
        made[i] = max(made[i], made[i - 1])
    return made


def _differs(known: PassCost, made: PassCost) -> bool:
    """Whether a cost says something new: of the times, or of how sure they are."""
    if not known.doubt:
        return True
    pairs = [*zip(known.near, made.near, strict=True), *zip(known.far, made.far, strict=True)]
    pairs.append((known.near[0] + (known.change or 0.0), made.near[0] + (made.change or 0.0)))
    is_off = any(abs(math.log(a / b)) > _LEAST_DOUBT for a, b in pairs)
    return is_off or any((a > UNSURE) != (b > UNSURE) for a, b in zip(known.doubt, made.doubt, strict=True))
