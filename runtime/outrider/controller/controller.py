"""The controller: what drafts, and how far, decided by what it earns.

Every round is paid in seconds and yields tokens. The best long-run rate, tokens per second, is that of the policy which
in each round maximises tokens − rate · seconds, with the rate that it earns itself (renewal-reward theorem; Dinkelbach
1967, "On nonlinear fractional programming"). So a draft token is worth its chance of being kept, and costs the seconds
that it takes to draft and to check it, at the rate that the answer has been earning lately.
"""

from __future__ import annotations

import dataclasses
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING

from outrider.controller.acceptance import Share
from outrider.controller.answer import Answer, PricedTurn
from outrider.controller.batch import Batch, best_length
from outrider.controller.records import Records, confidences_of
from outrider.controller.rules import WorthIt
from outrider.measure import ALONE, LONGEST, NEAR
from outrider.types import NO_DRAFT

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from outrider.measure import Contention, PassCost
    from outrider.types import Backend, Committed, Draft, DraftRequest, Pending, PricedDrafter, Sequence, Turn

_QUICKLY_READ = 1.0  # rounds of plain decoding that reading a prompt may take without a second thought


class Controller:
    """Has copies or a model's drafts checked, round by round, whichever earn more; neither, when neither does.

        Controller(main, main_cost, copier=Suffix())                 # copies alone
        Controller(main, main_cost, copier=Suffix(), model=model)    # both

    main_cost: of the main model's calls. copier: a drafter that is free. model: one whose calls cost what it says.
    contention: what drafting ahead costs the check that is under way. records: what is known of the drafters.
    """

    def __init__(
        self,
        main: Backend,
        main_cost: PassCost,
        *,
        copier: PricedDrafter | None = None,
        model: PricedDrafter | None = None,
        contention: Contention = ALONE,
        records: Records | None = None,
    ) -> None:
        self._main, self._main_cost = main, main_cost
        self._copier, self._model = copier, model
        self.drafters = tuple(drafter for drafter in (copier, model) if drafter is not None)
        self.goes_ahead = model is not None and model.goes_ahead
        self.contention = contention
        self.records = Records() if records is None else records
        self._answers: dict[Sequence, Answer] = {}
        self._round: tuple[Batch, list[PricedTurn]] | None = None  # from `choose` to `drafted`
        self._drafting_began = self._check_began = self._expected_check = 0.0
        self._rows_before = main_cost.rule.num_rows([1])

    def choose(self, requests: Seq[DraftRequest]) -> list[PricedTurn]:
        """For each request what is worth most: a copy, a draft of the model's as long as that pays, or nothing."""
        batch = self._batch(requests)
        copies = self._copier.propose(requests) if self._copier else [NO_DRAFT] * len(requests)
        lengths = self._copy_lengths(requests, copies, batch)
        turns = [
            self._plan(request, copy, length, batch)
            for request, copy, length in zip(requests, copies, lengths, strict=True)
        ]
        self._round = batch, turns
        self._drafting_began = self._model.seconds if self._model else 0.0
        return turns

    def drafted(self) -> None:
        """Foresee what the round takes, now that it has its drafts."""
        if self._round is None:
            return
        (batch, turns), self._round = self._round, None
        self._price_drafts(turns)
        rows = [len(turn.draft) + 1 for turn in turns]
        self._expected_check = self._main_cost.together(rows, batch.context, batch.before)
        self._rows_before = self._main_cost.rule.num_rows(rows)
        for turn, count in zip(turns, rows, strict=True):
            turn.seconds += self._expected_check * count / sum(rows)
            turn.plain = batch.plain / len(turns)
            self._answers[turn.request.sequence].turn = turn
        self._check_began = self._main.seconds

    def _price_drafts(self, turns: Seq[PricedTurn]) -> None:
        """Put down what the model's drafts should have taken, and have its price follow what one did take."""
        asked = [(turn, turn.rule) for turn in turns if turn.rule is not None]
        if not (self._model and asked):
            return
        for turn, rule in asked:
            turn.seconds += rule.step * max(len(turn.draft) - max(rule.num_ahead, 1), 0)
        if len(asked) == 1 and len(asked[0][0].draft):  # the prompt is read
            self._model.follow(asked[0][0].seconds * len(turns), self._model.seconds - self._drafting_began)

    def go_ahead(self, turns: Seq[Turn], check: Pending) -> None:
        """Let the model go on where it has drafted, if that is likely enough to come true."""
        if self._model is None:
            return
        step = self._model.seconds_for([1] * len(turns), NEAR)
        # What would not be there in time is not begun: the check's end would wait for it.
        most = int(self._expected_check * self.contention.check / (step * self.contention.draft))
        slower = min(most * step * self.contention.draft, self._expected_check) * (1 - 1 / self.contention.check)
        mine = []
        for request, draft in ((turn.request, turn.draft) for turn in turns):
            answer = self._answers[request.sequence]
            if answer.turn is None or answer.turn.rule is None:
                continue
            guess = self._model.guess(request, draft, answer.model_chance, answer.model.mean)
            if guess is None:
                continue
            num_calls = most if guess.token_id is not None else most - 1  # the first gives the token that is expected
            if guess.chance * min(num_calls, len(draft)) * step > slower / len(turns):
                mine.append((request, draft, guess))
        if mine:
            asked, guessed, guesses = zip(*mine, strict=True)
            began = self._model.ahead_seconds
            self._model.draft_ahead(asked, guessed, check, guesses, most)
            held_up = (self._model.ahead_seconds - began) * (1 - 1 / self.contention.check)
            self._expected_check += held_up  # which says nothing about the machine

    def observe(self, sequence: Sequence, committed: Committed) -> None:
        """Learn from what became of the last draft."""
        answer = self._answers.get(sequence)
        if answer is None or answer.turn is None:
            return
        turn, answer.turn = answer.turn, None
        if self._expected_check:  # the first answer of a round that all its answers share
            self._main_cost.follow(self._expected_check, self._main.seconds - self._check_began)
            self._expected_check = 0.0
        answer.add(turn, len(committed.path))

    def release(self, sequence: Sequence) -> None:
        """Forget a sequence, but for what was learned from it."""
        if answer := self._answers.pop(sequence, None):
            answer.record.length.add(len(sequence) - sequence.num_prompt_tokens)
            self.records.save()

    def _batch(self, requests: Seq[DraftRequest]) -> Batch:
        together = len(requests)
        context = sum(len(request.sequence) for request in requests) / together
        plain = self._main_cost.together([1] * together, context)
        answers = [self._answer(request, plain / together) for request in requests]
        # Plain decoding is there to be had.
        rate = max(sum(a.tokens for a in answers) / sum(a.seconds for a in answers), together / plain)
        cost = self._main_cost
        least = cost.rule.num_rows([1] * together)
        return Batch(cost, together, context, plain, rate, least, self._rows_before, cost.scale * cost.change)

    def _copy_lengths(self, requests: Seq[DraftRequest], copies: Seq[Draft], batch: Batch) -> list[int]:
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
        best, safe = batch.allot(hoped), batch.allot(sure)
        return best if batch.added(best) - batch.added(safe) <= budget else safe

    def _plan(self, request: DraftRequest, copy: Draft, length: int, batch: Batch) -> PricedTurn:
        """What this round may bring to one answer: so much of the copy, or what the model drafts by a rule."""
        answer = self._answers[request.sequence]
        turn = PricedTurn(request, draft=copy.cut(length))
        if self._model is None or not self._model.can_draft(request):
            return turn
        together, rate, plain = batch.together, batch.rate, batch.plain / batch.together
        longest = min(request.limit, LONGEST)
        check = [batch.added([k] * together) / together for k in range(longest + 1)]
        chances = answer.copy_chances(confidences_of(copy)[:length])
        value = sum(accumulate(chances, mul)) - rate * check[length]
        context = len(request.sequence)
        generated = context - request.sequence.num_prompt_tokens
        unread = max(self._model.num_unread(request.sequence), 1)
        step = self._model.seconds_for([1] * together, context) / together
        first = self._model.seconds_for([unread] + [1] * (together - 1), context, together) / together
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
            asked = dataclasses.replace(request, rule=rule)
            return PricedTurn(asked, self._model, rule=rule, seconds=first)
        return turn

    def _answer(self, request: DraftRequest, plain: float) -> Answer:
        """What is known of an answer; plain: seconds of a round without drafts."""
        answer = self._answers.get(request.sequence)
        if answer is None:
            record = self.records.of(request.verifier)
            share = Share(record.model_share.mean, weight=min(record.model_share.weight, 6.0), memory=0.9)
            answer = self._answers[request.sequence] = Answer(record, tokens=1.0, seconds=plain, model=share)
        return answer
