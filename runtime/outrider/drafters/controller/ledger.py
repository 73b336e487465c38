"""The ledger: what drafting has cost and saved, in seconds by the clock, for each answer and each drafter."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

COPIES = "copies"  # the account of copies; a model's has the model's name
ALLOWANCE = 0.0045  # share of all answers' time that a drafter may lose
TRIAL_SHARE = 0.025  # share of an answer's time that may be lost
TRIAL_ROUNDS = 0.45  # plain rounds that a new answer may lose to a model that is not known: a draft, and a short prompt
TRIAL_TOKENS = 100  # that an answer gets, at most, until a drafter that does not seem to pay is tried again
LEAST_ROUNDS = 0.4  # plain rounds that an answer may lose at least
BOUND_ROUNDS = 8.0  # plain rounds that an account is at most above or below 0
FIRST_ROUNDS = 4.0  # plain rounds that a model may lose at first
CREDIT_ROUNDS = 1.0  # plain rounds that a new answer may lose to a drafter that is known to pay
_OUTLIER_FACTOR = 3.0  # times as long as expected: such a round has waited for other work, or has compiled kernels
_LATEST_WEIGHT = 0.1  # weight of the latest plain round
_EARLIER_WEIGHT = 0.9  # weight of earlier rounds after another one: the rate is that of about ten rounds


@dataclass(slots=True)
class Account:
    """What drafting has saved and cost in one answer.

    account.limit(ledger.credit("draft"), plain=0.04)    # seconds that the next draft may lose
    """

    rate_tokens: float  # of recent rounds
    rate_seconds: float
    spent: float = 0.0  # seconds
    balance: float = 0.0  # seconds saved against plain rounds
    granted: float = 0.0  # seconds that it may lose besides: for a prompt that a model which is known to pay has read
    failed_at: float | None = None  # `spent` when no token of a model's draft was accepted
    drafter: str = COPIES  # that drafted last

    def idle(self) -> float:
        """Seconds since a draft of a model failed."""
        return self.spent - (self.failed_at or 0.0)

    def limit(self, credit: float, plain: float, others: Sequence[Account] = ()) -> float:
        """Seconds that the next draft may lose.

        credit: of the drafter's account, as far as the answer may use it. plain: seconds of a plain round, for one
        answer. others: of the same batch. They wait for the draft too, so what they may lose is there for it.
        """
        least = max(LEAST_ROUNDS * plain, min(credit, CREDIT_ROUNDS * plain))
        own = self.balance + self.granted + max(TRIAL_SHARE * self.spent, least)
        return own + max(sum(other.limit(0.0, plain) for other in others if other is not self), 0.0)

    def trial(self, credit: float, plain: float, others: Sequence[Account] = ()) -> float:
        """The same for a drafter that is not known to pay."""
        return self.limit(min(credit, TRIAL_ROUNDS * plain), plain, others)


@dataclass(slots=True)
class LedgerEntry:
    """One answer's part of a round."""

    account: Account
    drafter: str | None  # that made its draft
    seconds: float  # expected, for drafting and its rows in the target pass
    num_drafted: int = 0  # tokens of its draft
    granted: float = 0.0  # see `Account`
    num_tokens: int = 0  # committed


@dataclass(slots=True)
class _Round:
    began: float  # by the clock
    called: float  # seconds of calls until then
    plain: float  # expected seconds of a round without drafts
    together: int  # answers
    decided: float = 0.0  # seconds of the clock until turns were chosen
    considered: Sequence[str] = ()  # drafters, when turns were chosen
    entries: list[LedgerEntry] = field(default_factory=list)
    is_plain: bool = False  # whether the target pass was one of plain decoding
    counts: bool = True  # whether the clock shows the seconds of these answers alone


class Ledger:
    """Seconds that drafting has saved and cost, by the clock, against plain rounds.

        ledger.begin(plain=0.04, together=1)    # ends the round before
        if ledger.is_open("draft"):
            ledger.decided(["draft"])
            ledger.chose([LedgerEntry(account, "draft", 0.055)], is_plain=False)
        ledger.committed(account, 2, counts=True)

    A round's seconds are those from its begin to the next one's, the host's part included. Plain rounds show what that
    is besides the models' calls; the seconds in which turns were chosen are a cost of drafting. Until there was a plain
    round, all rounds show that. A round that took much longer than expected, or that also read prompts, counts with its
    expected seconds.

    An answer has an account, and each drafter has one for all answers. A drafter's gets a share of the time, and what
    its drafts save or lose. A drafter that is not known to pay drafts while its account is not below 0. One that is
    known to pay has what is in its account as credit in new answers.

    clock: seconds of the host. calls: seconds of the models' calls.
    """

    def __init__(self, clock: Callable[[], float], calls: Callable[[], float]) -> None:
        self._clock, self._calls = clock, calls
        self._host, self._num_rounds, self._num_plain = 0.0, 0, 0  # seconds of a plain round besides its call
        self._saved: dict[str, float] = {}
        self._first: dict[str, float] = {}
        self._round: _Round | None = None
        self.num_tokens = 0  # of all answers

    def open(self, drafter: str, seconds: float) -> None:
        """Open a drafter's account, unless it has one. seconds: in it at first."""
        self._first.setdefault(drafter, seconds)
        self._saved.setdefault(drafter, seconds)

    def restore(self, drafter: str) -> None:
        """Give a drafter that has new records the account of a new one, if it has less."""
        self._saved[drafter] = max(self._saved[drafter], self._first.get(drafter, 0.0))

    def begin(self, plain: float, together: int, *, counts: bool = True) -> None:
        """Begin a round, and end the one before.

        plain: seconds that the target pass of a plain round should take. counts: whether the one before has ended now.
        """
        if self._round is not None and self._round.together == together:
            self._round.plain = plain  # as its call has shown
        self.end(counts=counts)
        self._round = _Round(self._clock(), self._calls(), plain, together)

    def end(self, *, counts: bool) -> None:
        """End the round. counts: whether it has ended now; otherwise there were others after it, of no policy."""
        last, self._round = self._round, None
        if last is not None and any(entry.num_tokens for entry in last.entries):
            last.counts &= counts
            self._take(last, self._clock() - last.began, self._calls() - last.called)

    def is_open(self, drafter: str) -> bool:
        """Whether a drafter may be considered: it has not lost more than is allowed."""
        return self._saved[drafter] >= 0

    def credit(self, drafter: str) -> float:
        """Seconds that a drafter which is known to pay may lose in a new answer."""
        return max(self._saved[drafter], 0.0)

    def decided(self, considered: Sequence[str]) -> None:
        """Note that turns are chosen. considered: the drafters that could have been."""
        if self._round is not None and considered:
            self._round.considered, self._round.decided = considered, self._clock() - self._round.began

    def chose(self, entries: list[LedgerEntry], *, is_plain: bool) -> None:
        """Note each answer's turn. is_plain: see `_Round`."""
        if self._round is not None:
            self._round.entries, self._round.is_plain = entries, is_plain

    def committed(self, account: Account, num_tokens: int, *, counts: bool) -> None:
        """Note the tokens of an answer. counts: see `_Round`."""
        self.num_tokens += num_tokens
        if self._round is None:
            return
        self._round.counts &= counts
        for entry in self._round.entries:
            if entry.account is account:
                entry.num_tokens += num_tokens

    def _take(self, last: _Round, seconds: float, called: float) -> None:
        """Take in a round that has ended. called: seconds of its calls."""
        expected = sum(entry.seconds for entry in last.entries)
        host = seconds - last.decided - called
        if not last.counts or seconds > _OUTLIER_FACTOR * (max(expected, last.plain) + self._host):
            seconds = expected + self._host + last.decided
        elif last.is_plain:
            self._num_plain += 1
            self._host += max(_LATEST_WEIGHT, 1 / self._num_plain) * (host - self._host)
        elif not self._num_plain:
            self._num_rounds += 1
            self._host += max(_LATEST_WEIGHT, 1 / self._num_rounds) * (host - self._host)
        plain = (last.plain + self._host) / last.together
        for drafter in self._saved:
            self._add(drafter, ALLOWANCE * plain * last.together, plain)
        if last.is_plain:  # all that it costs is the choice of turns: its seconds vary
            for drafter in last.considered:
                self._add(drafter, -last.decided / len(last.considered), plain)
            for entry in last.entries:
                _post(entry, plain, -last.decided / last.together, plain)
            return
        # What the round takes longer is lost by those that draft; after a change of rows, by those that drafted last.
        losers = [entry for entry in last.entries if entry.drafter is not None] or last.entries
        extra, weight = seconds - plain * last.together, sum(entry.seconds for entry in losers)
        for entry in last.entries:
            part = extra * entry.seconds / weight if entry in losers else 0.0
            gain = (entry.num_tokens - 1) * plain - part
            _post(entry, plain + part, gain, plain)
            self._add(entry.account.drafter, gain, plain)

    def _add(self, drafter: str, seconds: float, plain: float) -> None:
        most = BOUND_ROUNDS * plain
        self._saved[drafter] = min(max(self._saved[drafter] + seconds, -most), most)


def _post(entry: LedgerEntry, spent: float, gain: float, plain: float) -> None:
    """Enter the seconds of one answer's round, and what it has gained against a plain one."""
    account = entry.account
    account.spent += spent
    account.balance = min(account.balance + gain, BOUND_ROUNDS * plain)
    account.granted += entry.granted
    account.rate_tokens = _EARLIER_WEIGHT * account.rate_tokens + entry.num_tokens
    account.rate_seconds = _EARLIER_WEIGHT * account.rate_seconds + spent
    if entry.drafter is not None:
        account.drafter = entry.drafter
        if entry.drafter != COPIES and entry.num_drafted and entry.num_tokens == 1:
            account.failed_at = account.spent
