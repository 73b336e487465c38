"""The controller: chooses drafters and draft lengths that give the most tokens per second.

Every round costs seconds and yields tokens. The policy with the best long-run rate, in tokens per second, maximises
tokens − rate · seconds in each round, with its own rate (renewal-reward theorem; Dinkelbach 1967, "On nonlinear
fractional programming"). So a draft token is worth its probability of acceptance. It costs the seconds of drafting and
verifying it, at the recent rate of the answer.
"""

from __future__ import annotations

import dataclasses
import math
import time
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING

from outrider.drafters.controller.answer import Answer, ModelAnswer, PricedTurn
from outrider.drafters.controller.batch import Batch, ModelPrice, best_length, row_prices
from outrider.drafters.controller.copy_budget import CopyBudget
from outrider.drafters.controller.records import Records, confidences_of
from outrider.drafters.controller.rules import WorthCopying, WorthIt
from outrider.models.tuning.measure import ALONE, LONGEST, NEAR
from outrider.types import NO_DRAFT, DraftPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from collections.abc import Sequence as Seq

    from outrider.models.tuning.measure import Contention, PassCost
    from outrider.types import Backend, Committed, Draft, Drafter, DraftRequest, Pending, Sequence, Turn

_SIMILAR = 32  # tokens by which contexts may differ that are priced alike
_QUICKLY_READ = 1.0  # rounds of plain decoding: a prompt that is read in less is read at once
_KNOWN = 60.0  # tokens that a model has drafted, from which on its acceptance is known
_CLEARLY = 4.0  # times the price of reading a prompt: where drafts are expected to gain as much, it is read at once
# Considering copies takes time, too. Where a draft has to bring n tokens to be worth its cost, each needs a chance of
# n / (1 + n), and a match of m tokens has one of 1 − (2 / 3)^m (see `Suffix`). So where nothing was worth it, nothing
# is until a match is that long. Other answers may have longer ones, so that copies do not rest for long.
_PER_MATCHED, _LONGEST_REST = 1.5, 4


class Controller(DraftPolicy):
    """Chooses in each round copies, one of several models, or neither, by which gives the most tokens per second.

        Controller(main, main_cost, copier=Suffix())                              # copies only
        Controller(main, main_cost, copier=Suffix(), models={"draft": model})     # both

    main_cost: of the main model's calls. copier: a drafter that is free. models: drafters whose calls have a cost, by
    their names in the records. contention: how much drafting ahead slows the target pass. records: of the drafters'
    acceptance. clock: seconds of the host.
    """

    def __init__(
        self,
        main: Backend,
        main_cost: PassCost,
        *,
        copier: Drafter | None = None,
        models: Mapping[str, Drafter] | None = None,
        contention: Contention = ALONE,
        records: Records | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._main, self._main_cost = main, main_cost
        self._copier, self._models = copier, dict(models or {})
        self.drafters = (*([copier] if copier else []), *self._models.values())
        self.goes_ahead = any(model.goes_ahead for model in self._models.values())
        self.contention = contention
        self.records = Records() if records is None else records
        self._answers: dict[Sequence, Answer] = {}
        self._round: tuple[Batch, list[PricedTurn], bool] | None = None  # from `choose` to `drafted`
        self._check_began = self._expected_check = 0.0
        self._drafting_began: dict[str, float] = {}
        self._rows_before = main_cost.rule.num_rows([1])
        self._rest = 0  # rounds that begin until copies are considered again
        self._copy_budget = CopyBudget(clock)
        self._is_new = False  # whether an answer has begun
        self._seconds: dict[int, dict[int, float]] = {}  # by context, and the rows of a call; see `Batch`
        self._row_prices: dict[tuple[int, int], list[float]] = {}  # by answers and context, where the scale is 1
        self._version = main_cost.version  # for which these hold
        # By model: answers that it drafted for in the last round, and that share its price in this one; see `_price`.
        self._num_drafting = dict.fromkeys(self._models, 1)
        self._num_sharing = dict.fromkeys(self._models, 1)
        self._missed = dict.fromkeys(self._models, 0.0)  # seconds lost by all answers before a model's first call

    def choose(self, requests: Seq[DraftRequest]) -> list[PricedTurn]:
        """For each request the turn that is worth most: a copy, a draft of a model, or nothing."""
        batch = self._batch(requests)
        self._copy_budget.begin(batch.together, batch.plain)
        looks = not self._rest and (self._copy_budget.allows or self._is_new)
        if not looks and not self._models:  # a plain round, for which the host has nothing to do
            self._rest, self._rows_before = max(self._rest - 1, 0), batch.least
            self._copy_budget.chose(batch.plain, looks=False, is_plain=batch.before == batch.least, counts=True)
            return [PricedTurn(request) for request in requests]
        copies, lengths = [NO_DRAFT] * len(requests), [0] * len(requests)
        if self._copier and looks:
            copies = self._copies(self._copier, requests, batch)
            lengths = self._copy_lengths(requests, copies, batch)
        self._rest, self._is_new = max(self._rest - 1, 0), False
        prices = {name: self._price(name, requests, batch) for name in self._models}
        turns = [
            self._plan(request, copy, length, batch, prices)
            for request, copy, length in zip(requests, copies, lengths, strict=True)
        ]
        self._round = batch, turns, looks
        self._drafting_began = {name: model.seconds for name, model in self._models.items()}
        return turns

    def drafted(self) -> None:
        """Estimate the seconds of the round, from its drafts."""
        if self._round is None:
            return
        (batch, turns, looks), self._round = self._round, None
        self._price_drafts(turns)
        rows = [turn.draft.num_rows for turn in turns]
        self._rows_before = self._main_cost.rule.num_rows(rows)
        called = [batch.steady.peek(self._rows_before)] if batch.steady else rows
        self._expected_check = self._main_cost.together(called, batch.context, batch.before)
        for turn, count in zip(turns, rows, strict=True):
            turn.seconds += self._expected_check * count / sum(rows)
            turn.plain = batch.plain / len(turns)
            self._answers[turn.request.sequence].turn = turn
        self._check_began = self._main.seconds
        self._copy_budget.chose(
            self._expected_check,
            looks=looks,
            is_plain=not looks and batch.before == batch.least == self._rows_before,
            counts=all(turn.model is None for turn in turns),
        )

    def _price_drafts(self, turns: Seq[PricedTurn]) -> None:
        """Add the expected seconds of the models' drafts, and adapt their costs to the measured ones."""
        for name, model in self._models.items():
            asked = [(turn, turn.rule) for turn in turns if turn.model == name and turn.rule is not None]
            self._num_drafting[name] = len(asked)
            for turn, rule in asked:
                turn.seconds += rule.step * max(len(turn.draft.first_chain) - max(rule.num_ahead, 1), 0)
            if len(asked) == self._num_sharing[name] == 1 and len(asked[0][0].draft):  # the prompt is read
                model.follow(asked[0][0].seconds, model.seconds - self._drafting_began[name])

    def go_ahead(self, turns: Seq[Turn], check: Pending) -> None:
        """Let models draft ahead for their own drafts, if the guess is likely enough."""
        for name, model in self._models.items():
            if model.goes_ahead:
                own = [turn for turn in turns if isinstance(turn, PricedTurn) and turn.model == name]
                self._go_ahead(name, model, own, check)

    def _go_ahead(self, name: str, model: Drafter, turns: Seq[PricedTurn], check: Pending) -> None:
        step = model.seconds_for([1] * max(len(turns), 1), NEAR)
        # Calls that would end after the target pass are not begun: the round would wait for them.
        most = int(self._expected_check * self.contention.check / (step * self.contention.draft))
        slower = min(most * step * self.contention.draft, self._expected_check) * (1 - 1 / self.contention.check)
        mine = []
        for turn in turns:
            request, draft = turn.request, turn.draft
            answer = self._answers[request.sequence].models[name]
            guess = model.guess(request, draft, answer.chance, answer.share.mean)
            if guess is None:
                continue
            num_calls = most if guess.token_id is not None else most - 1  # the first gives the token that is expected
            if guess.chance * min(num_calls, len(draft)) * step > slower / len(turns):
                mine.append((request, draft, guess))
        if mine:
            asked, guessed, guesses = zip(*mine, strict=True)
            began = model.ahead_seconds
            model.draft_ahead(asked, guessed, check, guesses, most)
            held_up = (model.ahead_seconds - began) * (1 - 1 / self.contention.check)
            self._expected_check += held_up  # the machine is not slower

    def observe(self, sequence: Sequence, committed: Committed) -> None:
        """Learn from the outcome of the last draft."""
        answer = self._answers.get(sequence)
        self._copy_budget.committed(len(committed.path) + 1, counts=not committed.beside_prompts)
        if answer is None or answer.turn is None:
            return
        turn, answer.turn = answer.turn, None
        if self._expected_check:  # once per round, at its first answer
            if not committed.beside_prompts:
                self._main_cost.follow(self._expected_check, self._main.seconds - self._check_began)
            self._expected_check = 0.0
        answer.add(turn, committed.path)

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
        steady, change = self._main.capabilities.steady, cost.scale * (cost.change or 0.0)
        before = steady.current if steady else self._rows_before
        if cost.version != self._version:  # calls have shown other seconds
            self._version, self._seconds, self._row_prices = cost.version, {}, {}
        seconds = self._seconds.setdefault(int(context) // _SIMILAR, {})
        return Batch(cost, together, context, plain, rate, least, before, change, steady, seconds)

    def _copies(self, copier: Drafter, requests: Seq[DraftRequest], batch: Batch) -> list[Draft]:
        """A copy for each request, as far as a token could be worth its row."""
        key = batch.together, int(batch.context) // NEAR
        if key not in self._row_prices:
            self._row_prices[key] = row_prices(batch)
        prices = [batch.rate * self._main_cost.scale * seconds for seconds in self._row_prices[key]]
        prices[: batch.num_idle] = [0.0] * batch.num_idle
        answers, asked = [self._answers[request.sequence] for request in requests], []
        for answer, request in zip(answers, requests, strict=True):
            answer.observe_copy(request.sequence)
            asked.append(dataclasses.replace(request, rule=WorthCopying(answer.copy_chances, prices)))
        copies = copier.propose(asked)
        for answer, request, copy in zip(answers, requests, copies, strict=True):
            answer.copy, answer.copied_at = copy, len(request.sequence)
        return copies

    def _copy_lengths(self, requests: Seq[DraftRequest], copies: Seq[Draft], batch: Batch) -> list[int]:
        """How many tokens of each copy to draft.

        Tokens that pay by a careful estimate are always drafted. Others have a budget, so that an answer whose copies
        are all wrong is hardly slower. A single answer's copy may begin with a part; see `Batch`.
        """
        answers = [self._answers[request.sequence] for request in requests]
        confidences = [confidences_of(c)[: min(r.limit, LONGEST)] for c, r in zip(copies, requests, strict=True)]
        both = [*zip(answers, confidences, strict=True)]
        chances = [answer.copy_chances(each) for answer, each in both]
        best = batch.allot(chances)
        if not any(best):  # lower chances are worth even less
            self._rest = min(int(math.log(1 + batch.rate * batch.cheapest, _PER_MATCHED)), _LONGEST_REST)
            return best
        if batch.together == 1:
            best = [batch.first_part(chances[0], best[0])]
        budget, added = sum(answer.budget for answer in answers), batch.added(best)
        if added <= budget:
            return best
        safe = batch.allot([answer.copy_chances(each, careful=True) for answer, each in both])
        return best if added - batch.added(safe) <= budget else safe

    def _price(self, name: str, requests: Seq[DraftRequest], batch: Batch) -> ModelPrice:
        """A model's price in this round. Answers share its calls, so it depends on how many it drafts for.

        That is all of them, if it is worth the shared price to all that have been read by it; else as many as in the
        last round, by the same condition; else one, which pays for a call alone.
        """
        model, before = self._models[name], self._num_drafting[name]
        answers = [(self._answers[each.sequence].models[name], each) for each in requests]
        read = [(answer.careful_share, each.limit) for answer, each in answers if _is_read(model, answer, each)]
        for share in sorted({len(read), min(before, len(read))} - {0, 1}, reverse=True):
            price = ModelPrice.of(model, batch, share)
            if sum(price.pays(chance, limit, batch.rate) for chance, limit in read) >= share:
                break
        else:
            price = ModelPrice.of(model, batch, 1)
        self._num_sharing[name] = price.share
        return price

    def _plan(
        self, request: DraftRequest, copy: Draft, length: int, batch: Batch, prices: Mapping[str, ModelPrice]
    ) -> PricedTurn:
        """One answer's turn: `length` tokens of the copy, or a draft of the model that is worth most, with a rule."""
        answer = self._answers[request.sequence]
        turn = PricedTurn(request, draft=copy.cut(length), copier=self._copier)
        able = [name for name, model in self._models.items() if model.can_draft(request)]
        if not able:
            return turn
        chances = answer.copy_chances(confidences_of(copy)[:length])
        kept = sum(accumulate(chances, mul))
        best, tried = turn, None
        share = prices[able[0]].share
        best_value = by_copy = (
            kept - batch.rate * batch.added([length] * share + [0] * (batch.together - share)) / share
        )
        # A model reads a prompt for what it gains over a copy, and once it is known, over models that have read it.
        for name in sorted(able, key=lambda name: not _is_read(self._models[name], answer.models[name], request)):
            others = best_value if answer.models[name].record.share.weight >= _KNOWN else by_copy
            value, worth, asked = self._plan_model(name, request, answer, batch, prices[name], others)
            if worth and value > best_value:
                best, best_value = asked, value
            elif not worth and asked.model is not None and tried is None:
                tried = asked
        return tried if best is turn and tried is not None else best

    def _plan_model(
        self, name: str, request: DraftRequest, answer: Answer, batch: Batch, price: ModelPrice, others: float
    ) -> tuple[float, bool, PricedTurn]:
        """The value of a model's draft in tokens, whether that is more than the others', and its turn.

        others: the value of a copy, or of another model's draft. A turn of a model whose draft is worth less is a try:
        it names the model. Otherwise it names none.
        """
        model, own, rate = self._models[name], answer.models[name], batch.rate
        plain, sequence = batch.plain / batch.together, request.sequence
        longest, context = min(request.limit, price.most), len(sequence)
        check = price.check[: longest + 1]
        generated = context - sequence.num_prompt_tokens
        unread = max(model.num_unread(sequence), 1)
        first = model.seconds_for([unread] + [1] * (price.share - 1), context, price.share)
        first -= (price.share - 1) * price.call  # the others' share of that call
        num_ahead = model.num_ahead(sequence)
        if num_ahead:
            first = 0.0  # using them must not depend on how many there are: that may depend on the tokens
        costs = [rate * (seconds + price.drafting(k, num_ahead)) for k, seconds in enumerate(check)]
        value, _ = best_length([own.careful_share] * longest, costs)
        own.reading = own.reading or unread == 1  # there is nothing to read before
        if not own.reading:
            # Reading the prompt pays later, if the answer goes on (estimated: as long again as so far) and others do
            # worse. Unless it clearly pays, the estimated loss without the model first has to reach the cost of
            # reading. So does the first call after a load, which takes longer. All answers' losses count against that.
            missed = max(value - others, 0.0) / rate
            own.regret += missed
            self._missed[name] += missed
            left = min(request.num_left, max(generated, answer.record.length.mean))
            is_missed = own.regret >= first - _QUICKLY_READ * plain
            price_left = first + max(model.first_seconds - self._missed[name], 0.0)
            gain = (value - max(others, 0.0)) * left / (1 + own.share.mean)
            own.reading = gain > (1 if is_missed else _CLEARLY) * rate * price_left
            value = value if own.reading else 0.0
        is_worth = own.reading and value > others
        if not is_worth:
            known, _ = best_length([own.record.share.careful] * (len(costs) - 1), costs)
            least = 0.0 if known > 0 else first + price.step + check[min(1, len(check) - 1)]
            # A try would replace a copy: while copies are right, it waits.
            waits = answer.goes_on and others > 0
            if waits or not own.probes(value, least, answer.budget):
                return value, False, PricedTurn(request)
        # Cap early drafts at generated + 2 tokens: acceptance is not yet known.
        there = longest if price.at_once else num_ahead
        second = own.record.seconds.mean if request.trees else 0.0
        longest = min(longest, generated + 2)
        rule = WorthIt(own.chance, own.share.mean, rate, price.step, price.check, longest, there, second, self._fork)
        asked = dataclasses.replace(request, rule=rule)
        return value, is_worth, PricedTurn(asked, model, model=name, rule=rule, seconds=first)

    @property
    def _fork(self) -> float:
        """Seconds of a branch besides its rows."""
        return self._main_cost.scale * self._main_cost.fork

    def _answer(self, request: DraftRequest, plain: float) -> Answer:
        """The state of an answer. plain: seconds of a round without drafts."""
        answer = self._answers.get(request.sequence)
        if answer is None:
            verifier, adapter = request.verifier, request.sequence.adapter
            models = {name: ModelAnswer.of(self.records.of_model(verifier, name, adapter)) for name in self._models}
            record = self.records.of(verifier, adapter)
            self._rest, self._is_new = 0, True
            answer = self._answers[request.sequence] = Answer(record, tokens=1.0, seconds=plain, models=models)
        return answer


def _is_read(model: Drafter, answer: ModelAnswer, request: DraftRequest) -> bool:
    """Whether a model can draft for an answer without reading its prompt first."""
    return model.can_draft(request) and (answer.reading or model.num_unread(request.sequence) <= 1)
