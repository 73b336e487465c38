"""The controller: chooses drafters and draft lengths that give the most tokens per second.

Every round costs seconds and yields tokens. The policy with the best long-run rate, in tokens per second, maximises
tokens − rate · seconds in each round, with its own rate (renewal-reward theorem; Dinkelbach 1967, "On nonlinear
fractional programming"). So a draft token is worth its probability of acceptance. It costs the seconds of drafting and
verifying it, at the recent rate of the answer.
"""

from __future__ import annotations

import dataclasses
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING

from outrider.controller.acceptance import Share
from outrider.controller.answer import Answer, PricedTurn
from outrider.controller.batch import Batch, ModelPrice, best_length
from outrider.controller.records import Records, confidences_of
from outrider.controller.rules import WorthIt
from outrider.measure import ALONE, LONGEST, NEAR
from outrider.types import NO_DRAFT

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from outrider.measure import Contention, PassCost
    from outrider.types import Backend, Committed, Draft, DraftRequest, Pending, PricedDrafter, Sequence, Turn

_QUICKLY_READ = 1.0  # rounds of plain decoding: a prompt that is read in less is read at once


class Controller:
    """Chooses in each round copies, a draft model, or neither, by which gives the most tokens per second.

        Controller(main, main_cost, copier=Suffix())                 # copies only
        Controller(main, main_cost, copier=Suffix(), model=model)    # both

    main_cost: of the main model's calls. copier: a drafter that is free. model: a drafter whose calls have a cost.
    contention: how much drafting ahead slows the target pass. records: of the drafters' acceptance.
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
        self._num_drafting = self._num_sharing = 1  # answers that the model drafted for in the last round; see `_price`

    def choose(self, requests: Seq[DraftRequest]) -> list[PricedTurn]:
        """For each request the turn that is worth most: a copy, a draft of the model, or nothing."""
        batch = self._batch(requests)
        copies = self._copier.propose(requests) if self._copier else [NO_DRAFT] * len(requests)
        lengths = self._copy_lengths(requests, copies, batch)
        price = self._price(requests, batch)
        turns = [
            self._plan(request, copy, length, batch, price)
            for request, copy, length in zip(requests, copies, lengths, strict=True)
        ]
        self._round = batch, turns
        self._drafting_began = self._model.seconds if self._model else 0.0
        return turns

    def drafted(self) -> None:
        """Estimate the seconds of the round, from its drafts."""
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
        """Add the expected seconds of the model's drafts, and adapt its cost to the measured ones."""
        asked = [(turn, turn.rule) for turn in turns if turn.rule is not None]
        self._num_drafting = len(asked)
        if not (self._model and asked):
            return
        for turn, rule in asked:
            turn.seconds += rule.step * max(len(turn.draft) - max(rule.num_ahead, 1), 0)
        if len(asked) == self._num_sharing == 1 and len(asked[0][0].draft):  # the prompt is read
            self._model.follow(asked[0][0].seconds, self._model.seconds - self._drafting_began)

    def go_ahead(self, turns: Seq[Turn], check: Pending) -> None:
        """Let the model draft ahead for its own drafts, if the guess is likely enough."""
        if self._model is None:
            return
        step = self._model.seconds_for([1] * len(turns), NEAR)
        # Calls that would end after the target pass are not begun: the round would wait for them.
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
            self._expected_check += held_up  # the machine is not slower

    def observe(self, sequence: Sequence, committed: Committed) -> None:
        """Learn from the outcome of the last draft."""
        answer = self._answers.get(sequence)
        if answer is None or answer.turn is None:
            return
        turn, answer.turn = answer.turn, None
        if self._expected_check:  # once per round, at its first answer
            self._main_cost.follow(self._expected_check, self._main.seconds - self._check_began)
            self._expected_check = 0.0
        answer.add(turn, len(committed.path))

    def release(self, sequence: Sequence) -> None:
        """Drop a sequence's state. Its records stay."""
        if answer := self._answers.pop(sequence, None):
            answer.record.length.add(len(sequence) - sequence.num_prompt_tokens)
            self.records.save()

    def _batch(self, requests: Seq[DraftRequest]) -> Batch:
        together = len(requests)
        context = sum(len(request.sequence) for request in requests) / together
        plain = self._main_cost.together([1] * together, context)
        answers = [self._answer(request, plain / together) for request in requests]
        # Plain decoding is always possible.
        rate = max(sum(a.tokens for a in answers) / sum(a.seconds for a in answers), together / plain)
        cost = self._main_cost
        least = cost.rule.num_rows([1] * together)
        return Batch(cost, together, context, plain, rate, least, self._rows_before, cost.scale * cost.change)

    def _copy_lengths(self, requests: Seq[DraftRequest], copies: Seq[Draft], batch: Batch) -> list[int]:
        """How many tokens of each copy to draft.

        Tokens that pay by a careful estimate are always drafted. Others have a budget, so that an answer whose copies
        are all wrong is hardly slower.
        """
        sure: list[list[float]] = []
        hoped: list[list[float]] = []
        budget = 0.0
        for request, copy in zip(requests, copies, strict=True):
            answer = self._answers[request.sequence]
            answer.observe_copy(request.sequence)
            answer.copy, answer.copied_at = copy, len(request.sequence)
            confidences = confidences_of(copy)[: min(request.limit, LONGEST)]
            sure.append(answer.copy_chances(confidences, careful=True))
            hoped.append(answer.copy_chances(confidences))
            budget += answer.budget
        if not any(hoped):
            return [0] * len(copies)
        best, safe = batch.allot(hoped), batch.allot(sure)
        return best if batch.added(best) - batch.added(safe) <= budget else safe

    def _price(self, requests: Seq[DraftRequest], batch: Batch) -> ModelPrice | None:
        """The model's price in this round. Answers share its calls, so it depends on how many it drafts for.

        That is all of them, if it is worth the shared price to all that have been read by it; else as many as in the
        last round, by the same condition; else one, which pays for a call alone.
        """
        if self._model is None:
            return None
        read = [(self._answers[each.sequence].model_share, each.limit) for each in requests if self._is_read(each)]
        for share in sorted({len(read), min(self._num_drafting, len(read))} - {0, 1}, reverse=True):
            price = ModelPrice.of(self._model, batch, share)
            if sum(price.pays(chance, limit, batch.rate) for chance, limit in read) >= share:
                break
        else:
            price = ModelPrice.of(self._model, batch, 1)
        self._num_sharing = price.share
        return price

    def _is_read(self, request: DraftRequest) -> bool:
        """Whether the model can draft for an answer without reading its prompt first."""
        if self._model is None or not self._model.can_draft(request):
            return False
        return self._answers[request.sequence].reading or self._model.num_unread(request.sequence) <= 1

    def _plan(
        self, request: DraftRequest, copy: Draft, length: int, batch: Batch, price: ModelPrice | None
    ) -> PricedTurn:
        """One answer's turn: `length` tokens of the copy, or a draft of the model with a rule."""
        answer = self._answers[request.sequence]
        turn = PricedTurn(request, draft=copy.cut(length))
        if self._model is None or price is None or not self._model.can_draft(request):
            return turn
        rate, plain = batch.rate, batch.plain / batch.together
        longest = min(request.limit, LONGEST)
        check, step = price.check[: longest + 1], price.step
        chances = answer.copy_chances(confidences_of(copy)[:length])
        value = sum(accumulate(chances, mul)) - rate * check[length]
        context = len(request.sequence)
        generated = context - request.sequence.num_prompt_tokens
        unread = max(self._model.num_unread(request.sequence), 1)
        first = self._model.seconds_for([unread] + [1] * (price.share - 1), context, price.share)
        first -= (price.share - 1) * step  # the others' share of that call
        num_ahead = self._model.num_ahead(request.sequence)
        if num_ahead:
            first = 0.0  # using them must not depend on how many there are: that may depend on the tokens
        costs = [rate * (seconds + max(k - bool(num_ahead), 0) * step) for k, seconds in enumerate(check)]
        by_model, _ = best_length([answer.model_share] * longest, costs)
        if not answer.reading and unread > 1:
            # Reading the prompt pays later, if the answer goes on (estimated: as long again as so far) and copies do
            # worse. For a long prompt, the estimated loss without the model first has to reach the cost of reading.
            answer.regret += max(by_model - value, 0.0) / rate
            left = min(request.num_left, max(generated, answer.record.length.mean))
            is_missed = answer.regret >= first - _QUICKLY_READ * plain
            answer.reading = is_missed and by_model * left / (1 + answer.model.mean) > rate * first
            by_model = by_model if answer.reading else 0.0
        known, _ = best_length([answer.record.model_share.careful] * longest, costs)
        least = 0.0 if known > 0 else first + step + check[min(1, longest)]
        if (answer.reading and by_model > value) or answer.probes(by_model, least):
            # Cap early drafts at generated + 2 tokens: acceptance is not yet known.
            rule = WorthIt(answer.model_chance, answer.model.mean, rate, step, check[: generated + 3], num_ahead)
            asked = dataclasses.replace(request, rule=rule)
            return PricedTurn(asked, self._model, rule=rule, seconds=first)
        return turn

    def _answer(self, request: DraftRequest, plain: float) -> Answer:
        """The state of an answer. plain: seconds of a round without drafts."""
        answer = self._answers.get(request.sequence)
        if answer is None:
            record = self.records.of(request.verifier)
            share = Share(record.model_share.mean, weight=min(record.model_share.weight, 6.0), memory=0.9)
            answer = self._answers[request.sequence] = Answer(record, tokens=1.0, seconds=plain, model=share)
        return answer
