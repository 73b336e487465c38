"""The controller: what drafts, and how far, decided by what it earns.

Every round is paid in seconds and yields tokens. The best long-run rate, tokens per second, is that of the policy which
in each round maximises tokens − rate · seconds, with the rate that it earns itself (renewal-reward theorem; Dinkelbach
1967, "On nonlinear fractional programming"). So a draft token is worth its chance of being kept, and costs the seconds
that it takes to draft and to check it, at the rate that the answer has been earning lately.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from operator import mul
from typing import TYPE_CHECKING

from outrider.controller.acceptance import Luck, Share
from outrider.controller.records import Records, confidences_of
from outrider.measure import ALONE, LONGEST
from outrider.types import NO_DRAFT, Requirements

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as Seq

    from outrider.controller.acceptance import Acceptance
    from outrider.controller.records import Record
    from outrider.drafters import DraftModel
    from outrider.measure import Contention, PassCost
    from outrider.types import Backend, Committed, Draft, Drafter, DraftRequest, Pending, Sequence

BUDGET = 0.01  # of an answer's time so far, for drafts that may not pay
_MEMORY = 0.9  # of earlier rounds, how much the next one leaves: the rate is that of about ten rounds
_FIRST_PROBE, _LAST_PROBE = 8, 32  # rounds between tries of a draft model that does not pay
_QUICKLY_READ = 1.0  # rounds of plain decoding that reading a prompt may take without a second thought


class Auto:
    """Copies or drafts by model, round by round, whichever earns more; neither, when neither does.

        Auto(main, main_cost, copier=Suffix())                                  # copies alone
        Auto(main, main_cost, copier=Suffix(), model=model, draft_cost=cost)    # both

    copier: a drafter without a model of its own, whose drafts are free, and chosen without looking at the noise.
    contention: what drafting ahead costs the check that is under way. records: what is known of the drafters.
    """

    num_assistant_tokens = LONGEST

    def __init__(
        self,
        main: Backend,
        main_cost: PassCost,
        *,
        copier: Drafter | None = None,
        model: DraftModel | None = None,
        draft_cost: PassCost | None = None,
        contention: Contention = ALONE,
        records: Records | None = None,
    ) -> None:
        self._main, self._main_cost = main, main_cost
        self._copier, self._model, self._draft_cost = copier, model, draft_cost
        self.contention = contention
        self._answers: dict[Sequence, _Answer] = {}
        self.records = Records() if records is None else records
        self._expected_check = self._check_began = 0.0
        self._rows_before = main_cost.rule.num_rows([1])

    @property
    def seconds(self) -> float:
        """Time spent in the draft model's calls so far."""
        return sum(drafter.seconds for drafter in self._drafters)

    @property
    def ahead_seconds(self) -> float:
        """Time spent in the draft model's calls while drafts were checked."""
        return self._model.ahead_seconds if self._model else 0.0

    @property
    def requirements(self) -> Requirements:
        """The draft model's: copying needs nothing."""
        return Requirements.of(self._model)

    @property
    def _drafters(self) -> list[Drafter]:
        return [drafter for drafter in (self._copier, self._model) if drafter is not None]

    def reserve(self, sequence: Sequence, max_tokens: int, num_cached: int) -> bool:
        """Take room with every drafter for a sequence that may grow to `max_tokens`; False while there is none."""
        reserved = False
        try:
            reserved = all(drafter.reserve(sequence, max_tokens, num_cached) for drafter in self._drafters)
        finally:
            if not reserved:
                self.release(sequence)
        return reserved

    def release(self, sequence: Sequence) -> None:
        """Forget a sequence and give its room back."""
        for drafter in self._drafters:
            drafter.release(sequence)
        if answer := self._answers.pop(sequence, None):
            answer.record.length.add(len(sequence) - sequence.num_prompt_tokens)
            self.records.save()

    def propose(self, requests: Seq[DraftRequest]) -> list[Draft]:
        """For each request the draft that is worth most, empty where none is worth anything."""
        if not requests:
            return []
        batch = self._batch(requests)
        copies = self._copier.propose(requests) if self._copier else [NO_DRAFT] * len(requests)
        lengths = self._copy_lengths(requests, copies, batch)
        rounds = [
            self._plan(request, copy, length, batch)
            for request, copy, length in zip(requests, copies, lengths, strict=True)
        ]
        self._draft(requests, rounds)
        rows = [len(turn.draft) + 1 for turn in rounds]
        self._expected_check = self._main_cost.together(rows, batch.context, batch.before)
        self._rows_before = self._main_cost.rule.num_rows(rows)
        for request, turn, count in zip(requests, rounds, rows, strict=True):
            turn.seconds += self._expected_check * count / sum(rows)
            turn.plain = batch.plain / len(rounds)
            self._answers[request.sequence].turn = turn
        self._check_began = self._main.seconds
        return [turn.draft for turn in rounds]

    def _batch(self, requests: Seq[DraftRequest]) -> _Batch:
        together = len(requests)
        context = sum(len(request.sequence) for request in requests) / together
        plain = self._main_cost.together([1] * together, context)
        answers = [self._answer(request, plain / together) for request in requests]
        # Plain decoding is there to be had.
        rate = max(sum(a.tokens for a in answers) / sum(a.seconds for a in answers), together / plain)
        cost = self._main_cost
        least = cost.rule.num_rows([1] * together)
        return _Batch(together, context, plain, rate, least, self._rows_before, cost.scale * cost.change)

    def _copy_lengths(self, requests: Seq[DraftRequest], copies: Seq[Draft], batch: _Batch) -> list[int]:
        """How much of each copy to draft.

        What pays even if chances are lower than they seem is drafted anyway. What may pay has a budget, so that an
        answer whose copies are all wrong is hardly slower for it.
        """
        sure: list[list[float]] = []
        hoped: list[list[float]] = []
        budget = 0.0
        for request, copy in zip(requests, copies, strict=True):
            answer = self._answers[request.sequence]
            answer.judge_copy(request.sequence)
            answer.copy, answer.copied_at = copy, len(request.sequence)
            confidences = confidences_of(copy)[: min(request.limit, LONGEST)]
            sure.append(answer.copy_chances(confidences, careful=True))
            hoped.append(answer.copy_chances(confidences))
            budget += answer.budget
        if not any(hoped):
            return [0] * len(copies)
        best, safe = self._allot(hoped, batch), self._allot(sure, batch)
        return best if self._extra(best, batch) - self._extra(safe, batch) <= budget else safe

    def _allot(self, chances: Seq[Seq[float]], batch: _Batch) -> list[int]:
        """How many draft tokens of each answer are worth their rows in this batch, the likeliest taken first.

        chances: of each token to be kept if those before it are. Rows cost what they cost together: where a call is
        full, or every row has its price, few are worth it; where a batch has to be padded anyway, some are free.
        """
        reached = [(kept, i) for i, each in enumerate(chances) for kept in accumulate(each, mul)]
        lengths = [0] * len(chances)
        most = sum(kept for kept, _ in reached)
        if most <= batch.rate * self._cheapest(batch):
            return lengths
        reached.sort(key=lambda token: -token[0])  # stable: a token comes behind those before it
        best, best_value, value = list(lengths), 0.0, 0.0
        for kept, i in reached:
            value += kept
            lengths[i] += 1
            extra = self._extra(lengths, batch)
            if value - batch.rate * extra > best_value:
                best, best_value = list(lengths), value - batch.rate * extra
            if most - batch.rate * (extra - 2 * batch.change) <= best_value:
                break  # more rows cost no less, whatever is kept of them
        return best

    def _extra(self, lengths: Seq[int], batch: _Batch) -> float:
        """Seconds that drafts of these lengths add to a plain round."""
        rows, cost = [k + 1 for k in lengths], self._main_cost
        if not cost.one_call:
            return max(cost.together(rows, batch.context) - batch.plain, 0.0)
        return self._extra_of(cost.rule.num_rows(rows), batch)

    def _extra_of(self, total: int, batch: _Batch) -> float:
        """The same, for so many rows in one call.

        With another number of rows than before, a call is dearer; and so is the next plain one, which has others again.
        """
        if total not in batch.extra:  # many lengths come to the same call
            cost, least = self._main_cost, batch.least
            changes = (total != batch.before) + (total != least) - (least != batch.before)
            seconds = cost.together([total], batch.context) - batch.plain + batch.change * changes
            batch.extra[total] = max(seconds, 0.0)
        return batch.extra[total]

    def _cheapest(self, batch: _Batch) -> float:
        """The least seconds that any draft adds to a plain round."""
        if not self._main_cost.one_call:
            return 0.0
        one = self._main_cost.rule.num_rows([2] + [1] * (batch.together - 1))
        return min(self._extra_of(one, batch), self._extra_of(max(batch.before, one), batch))

    def _draft(self, requests: Seq[DraftRequest], rounds: Seq[_Turn]) -> None:
        """Have the draft model draft where it was decided on."""
        asked = [
            dataclasses.replace(request, rule=turn.rule)
            for request, turn in zip(requests, rounds, strict=True)
            if turn.rule is not None
        ]
        if not (self._model and self._draft_cost and asked):
            return
        began = self._model.seconds
        drafts = iter(self._model.propose(asked))
        for turn in rounds:
            if turn.rule is not None:
                turn.draft = next(drafts)
                turn.seconds += turn.rule.step * max(len(turn.draft) - max(turn.rule.num_ahead, 1), 0)
        if len(asked) == 1 and any(turn.rule and len(turn.draft) for turn in rounds):  # the prompt is read
            expected = sum(turn.seconds for turn in rounds) * len(rounds)
            self._draft_cost.follow(expected, self._model.seconds - began)

    def draft_ahead(self, requests: Seq[DraftRequest], drafts: Seq[Draft], check: Pending) -> None:
        """Let the draft model go on where it has drafted, if that is likely enough to come true."""
        if self._model is None or self._draft_cost is None:
            return
        step = self._draft_cost.together([1] * len(requests))
        # What would not be there in time is not begun: the check's end would wait for it.
        most = int(self._expected_check * self.contention.check / (step * self.contention.draft))
        slower = min(most * step * self.contention.draft, self._expected_check) * (1 - 1 / self.contention.check)
        mine = []
        for request, draft in zip(requests, drafts, strict=True):
            answer = self._answers[request.sequence]
            if answer.turn is None or not answer.turn.by_model:
                continue
            guess = self._model.guess(request, draft, answer.model_chance, answer.model.mean)
            if guess is None:
                continue
            num_calls = most if guess.token_id is not None else most - 1  # the first gives the token that is expected
            if guess.chance * min(num_calls, len(draft)) * step > slower / len(requests):
                mine.append((request, draft, guess))
        if mine:
            asked, guessed, guesses = zip(*mine, strict=True)
            began = self._model.ahead_seconds
            self._model.draft_ahead(asked, guessed, check, guesses, most)
            held_up = (self._model.ahead_seconds - began) * (1 - 1 / self.contention.check)
            self._expected_check += held_up  # which says nothing about the machine

    def observe(self, sequence: Sequence, committed: Committed) -> None:
        """Learn from what became of the last draft."""
        for drafter in self._drafters:
            drafter.observe(sequence, committed)
        answer = self._answers.get(sequence)
        if answer is None or answer.turn is None:
            return
        turn, answer.turn = answer.turn, None
        if self._expected_check:  # the first answer of a round that all its answers share
            self._main_cost.follow(self._expected_check, self._main.seconds - self._check_began)
            self._expected_check = 0.0
        answer.add(turn, len(committed.path))

    def _plan(self, request: DraftRequest, copy: Draft, length: int, batch: _Batch) -> _Turn:
        """What this round may bring to one answer; the draft model is only asked where `rule` is set."""
        answer = self._answers[request.sequence]
        turn = _Turn(copy.cut(length), by_model=False)
        if self._model is None or self._draft_cost is None or not self._model.can_draft(request):
            return turn
        together, rate, plain = batch.together, batch.rate, batch.plain / batch.together
        longest = min(request.limit, LONGEST)
        check = [self._extra([k] * together, batch) / together for k in range(longest + 1)]
        chances = answer.copy_chances(confidences_of(copy)[:length])
        value = sum(accumulate(chances, mul)) - rate * check[length]
        context = len(request.sequence)
        generated = context - request.sequence.num_prompt_tokens
        unread = max(self._model.num_unread(request.sequence), 1)
        step = self._draft_cost.together([1] * together, context) / together
        first = self._draft_cost.together([unread] + [1] * (together - 1), context, before=together) / together
        num_ahead = self._model.num_ahead(request.sequence)
        if num_ahead:
            first = 0.0  # how many there are may depend on what they are: it has no say in whether they are used
        costs = [rate * (seconds + max(k - bool(num_ahead), 0) * step) for k, seconds in enumerate(check)]
        by_model, _ = best_length([answer.model_share] * longest, costs)
        if not answer.reading and unread > 1:
            # Reading the prompt pays later, if the answer goes on, as far as is known for as long again as it has, and
            # if copies do not do as well: a long one has to be missed first for as much as it takes to read.
            answer.regret += max(by_model - value, 0.0) / rate
            left = min(request.num_left, max(generated, answer.record.length.mean))
            is_missed = answer.regret >= first - _QUICKLY_READ * plain
            answer.reading = is_missed and by_model * left / (1 + answer.model.mean) > rate * first
            by_model = by_model if answer.reading else 0.0
        known, _ = best_length([answer.record.model_share.careful] * longest, costs)
        least = 0.0 if known > 0 else first + step + check[min(1, longest)]
        if (answer.reading and by_model > value) or answer.probes(by_model, least):
            # How an answer begins says little: it is not drafted farther than it has come, and two tokens.
            rule = WorthIt(answer.model_chance, answer.model.mean, rate, step, check[: generated + 3], num_ahead)
            return _Turn(NO_DRAFT, by_model=True, rule=rule, seconds=first)
        return turn

    def _answer(self, request: DraftRequest, plain: float) -> _Answer:
        """What is known of an answer; plain: seconds of a round without drafts."""
        answer = self._answers.get(request.sequence)
        if answer is None:
            record = self.records.of(request.verifier)
            share = Share(record.model_share.mean, weight=min(record.model_share.weight, 6.0), memory=0.9)
            answer = self._answers[request.sequence] = _Answer(record, tokens=1.0, seconds=plain, model=share)
        return answer


@dataclass(frozen=True, slots=True)
class _Batch:
    """The answers of one round.

    context: tokens, on average. plain: seconds of a round without drafts, for all of them. rate: tokens a second that
    all of them have been earning. least: rows of a plain call; before: of the main model's last one. change: seconds
    that another number of rows takes. extra: seconds that calls of so many rows take more than a plain one.
    """

    together: int
    context: float
    plain: float
    rate: float
    least: int
    before: int
    change: float
    extra: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WorthIt:
    """Goes on while the next token is worth what it costs: its chance of being reached and kept against its seconds.

    chance: of a token to be kept, by its confidence. next_chance: of one that is not drawn yet. rate: tokens a second.
    step: seconds to draft a token. check: seconds that checking k tokens adds. num_ahead: tokens that are drafted.
    """

    chance: Callable[[float], float]
    next_chance: float
    rate: float
    step: float
    check: Seq[float]
    num_ahead: int = 0

    def wants_more(self, confidences: Seq[float]) -> bool:
        """Whether another token is worth it; what a token after that may be worth falls with every further one."""
        k = len(confidences)
        if k + 1 >= len(self.check):
            return False
        kept = prod(self.chance(confidence) for confidence in confidences) * self.next_chance
        step = self.step if k >= self.num_ahead else 0.0
        return kept > self.rate * (step + self.check[k + 1] - self.check[k])


@dataclass(slots=True)
class _Turn:
    """One answer's round under way. seconds: that drafting and checking should take; plain: of a plain one."""

    draft: Draft
    by_model: bool
    rule: WorthIt | None = None
    seconds: float = 0.0
    plain: float = 0.0


@dataclass(slots=True)
class _Answer:
    """What one answer has been earning.

    tokens, seconds: of lately. model: the share of the draft model's tokens kept. spent: seconds so far. lead: seconds
    that plain decoding would have taken more.
    """

    record: Record
    tokens: float
    seconds: float
    model: Share
    turn: _Turn | None = None
    reading: bool = False  # whether the draft model has been given the prompt
    luck: Luck = field(default_factory=lambda: Luck(weight=1.0, memory=0.9))  # with copies
    model_luck: Luck = field(default_factory=lambda: Luck(weight=8.0, memory=0.95))
    regret: float = 0.0
    copy: Draft = NO_DRAFT
    copied_at: int = 0
    goes_on: bool = False  # whether the last copy was right, as far as the text has come
    patience: int = _FIRST_PROBE
    waited: int = 0
    worked: bool = False  # whether the draft model was right the last time
    spent: float = 0.0
    lead: float = 0.0

    @property
    def budget(self) -> float:
        """Seconds that may be lost on drafts that may not pay: of what was won, half."""
        return BUDGET * self.spent + (self.lead if self.lead < 0 else self.lead / 2)

    def probes(self, value: float, cost: float) -> bool:
        """Whether it is time to try a draft model that does not seem to pay here.

        cost: in seconds, of a try; 0 for a model that has paid in other answers.
        """
        if not self.reading or value > 0:
            self.waited, self.patience = 0, _FIRST_PROBE
            return False
        self.waited += 1
        if self.waited < self.patience or (cost and cost > self.budget and not self.worked):
            return False
        self.waited, self.patience = 0, min(2 * self.patience, _LAST_PROBE)
        return True

    def add(self, turn: _Turn, num_accepted: int) -> None:
        """Take in what became of a round."""
        self.tokens = _MEMORY * self.tokens + num_accepted + 1
        self.seconds = _MEMORY * self.seconds + turn.seconds
        self.spent += turn.seconds
        self.lead += (num_accepted + 1) * turn.plain - turn.seconds
        if not turn.by_model:
            return
        for i, confidence in enumerate(confidences_of(turn.draft)[: num_accepted + 1]):  # none behind was judged
            self.model_luck.add(self.record.model.chance(confidence), happened=i < num_accepted)
            self.model.add(i < num_accepted)
        self.record.judge(turn.draft, num_accepted)
        self.worked = num_accepted > 0
        if self.worked:
            self.waited = self.patience = _FIRST_PROBE  # what has worked is tried again at once

    @property
    def model_share(self) -> float:
        """The share of the draft model's tokens that is kept here, as far as can be said for sure."""
        known = self.record.model_share
        return max(self.model.mean - (known.mean - known.careful), 0.0)

    def model_chance(self, confidence: float) -> float:
        """How likely a token of the draft model is to be kept."""
        return min(self.record.model.chance(confidence) * self.model_luck.factor, 1.0)

    def copy_chances(self, confidences: Seq[float], *, careful: bool = False) -> list[float]:
        """How likely each copied token is to be kept if those before it are: some answers repeat what was said.

        careful: as far as can be said for sure.
        """
        known = zip(self._copy_records(len(confidences)), confidences, strict=True)
        chances = [record.careful(each) if careful else record.chance(each) for record, each in known]
        factor = min(self.luck.factor, 1.0) if careful else self.luck.factor  # a few tokens prove nothing
        return [min(chance * factor, 1.0) for chance in chances]

    def judge_copy(self, sequence: Sequence) -> None:
        """Learn from the last copy, proposed or not: what was committed says what would have become of it."""
        committed = sequence.token_ids[self.copied_at :]
        records = self._copy_records(len(self.copy))
        for i, (token_id, said) in enumerate(zip(self.copy.token_ids, committed, strict=False)):
            confidence = confidences_of(self.copy)[i]
            self.luck.add(records[i].chance(confidence), happened=token_id == said)
            records[i].observe(confidence, kept=token_id == said)
            if token_id != said:
                break
        copied = self.copy.token_ids[: len(committed)]
        self.goes_on = bool(copied) and copied == committed[: len(copied)]

    def _copy_records(self, count: int) -> list[Acceptance]:
        """What is known of each token of a copy: that the first is right, where none was before, is less likely."""
        return [self.record.copies if i or self.goes_on else self.record.first_copies for i in range(count)]


def best_length(chances: Seq[float], costs: Seq[float]) -> tuple[float, int]:
    """The most that a draft can be worth, in tokens, and how long it is then.

    chances: of each token to be kept if those before it are. costs: for 0, 1, … tokens, in tokens.
    """
    best, length, kept, value = 0.0, 0, 1.0, 0.0
    for k, chance in enumerate(chances[: len(costs) - 1], 1):
        kept *= chance
        value += kept
        if value - costs[k] > best:
            best, length = value - costs[k], k
    return best, length
