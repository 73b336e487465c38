"""What copies may cost in a batch: a share of the time, and what they have gained, as measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from outrider.drafters.controller.answer import BUDGET

_MOST_GAINED, _MOST_LOST = 2.0, 1.0  # plain rounds' seconds
_OUTLIER = 3.0  # times as long as expected: such a round has waited for other work, or has compiled kernels
_SWAY = 0.1  # weight of the latest plain round
_FIRST_PLAIN, _PLAIN_EVERY = 3, 32  # rounds without a look at copies: at first, and later, to compare with


@dataclass(slots=True)
class _Round:
    """A round of a batch.

    began: by the clock. plain: expected seconds of a call without drafts; call: of its own. is_plain: whether it is a
    round as without copies. counts: whether copies alone make it longer or shorter. num_tokens: committed so far.
    """

    began: float
    together: int
    plain: float
    call: float = 0.0
    is_plain: bool = False
    counts: bool = True
    num_tokens: int = 0


class CopyBudget:
    """Seconds that copies may cost in a batch.

        budget.begin(together=4, plain=0.008)
        if budget.allows:    # look for copies
        budget.chose(0.009, looks=True, is_plain=False, counts=True)
        budget.committed(2, counts=True)    # for each answer

    Expected gains leave out much of what copies cost in a batch: the host's work for each answer, a call that has to
    be prepared again, and the rows that later calls are then padded to. So whole rounds are compared by the clock, with
    rounds that had no copies. Copies that lose time rest, until their share of the time has made up for it.

    clock: seconds of the host.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._left = 0.0
        self._ratio, self._num_plain = 1.0, 0  # of plain rounds' seconds to those that are expected for their calls
        self._num_looks = 0  # rounds in which copies were considered, one after the other
        self._is_measured = True  # whether the last round was compared, or showed what to compare with
        self._round: _Round | None = None

    def begin(self, together: int, plain: float) -> None:
        """Begin a round, and end the one before. plain: seconds that a call without drafts is expected to take."""
        now, last = self._clock(), self._round
        self._is_measured = last is None or last.counts
        if last is not None and last.counts and last.num_tokens:
            self._add(last, now - last.began)
        self._round = _Round(now, together, plain) if together > 1 else None
        self._left = min(self._left + BUDGET * plain, _MOST_GAINED * plain)

    @property
    def allows(self) -> bool:
        """Whether copies may be considered in this round. Behind a round that a model has drafted for, they may."""
        if self._round is None or not self._is_measured:
            return True
        knows = self._num_plain >= _FIRST_PLAIN and self._num_looks < _PLAIN_EVERY
        return knows and self._left >= 0

    def chose(self, call: float, *, looks: bool, is_plain: bool, counts: bool) -> None:
        """Note what the round is: see `_Round`. looks: whether copies were considered."""
        self._num_looks = self._num_looks + 1 if looks else 0
        if self._round is not None:
            self._round.call, self._round.is_plain, self._round.counts = call, is_plain, counts

    def committed(self, num_tokens: int, *, counts: bool) -> None:
        """Note the tokens of one of the round's answers. counts: see `_Round`."""
        if self._round is not None:
            self._round.num_tokens += num_tokens
            self._round.counts &= counts

    def _add(self, last: _Round, seconds: float) -> None:
        """Take in a round that has ended."""
        if seconds > _OUTLIER * self._ratio * max(last.call, last.plain):
            return
        usual = self._ratio * last.plain
        if last.is_plain:
            self._num_plain += 1
            self._ratio += max(_SWAY, 1 / self._num_plain) * (seconds / last.plain - self._ratio)
        elif self._num_plain:
            gain = last.num_tokens / last.together * usual - seconds
            self._left = max(self._left + gain, -_MOST_LOST * usual)
