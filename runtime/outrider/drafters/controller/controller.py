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

from outrider.drafters.controller.answer import AnswerRecord, ModelAnswer, PricedTurn
from outrider.drafters.controller.batch import Batch
from outrider.drafters.controller.ledger import (
    COPIES,
    CREDIT_ROUNDS,
    FIRST_ROUNDS,
    Account,
    Ledger,
    LedgerEntry,
)
from outrider.drafters.controller.pricing import (
    ModelPrice,
    affordable,
    best_length,
    is_known_to_pay,
    should_read,
    should_try,
)
from outrider.drafters.controller.records import Records, confidences_of
from outrider.drafters.controller.replay import ENOUGH_TOKENS, replay
from outrider.drafters.controller.rules import WorthIt
from outrider.models.cost.table import LONGEST, NEAR
from outrider.models.tuning.measure.overlap import ALONE
from outrider.types import NO_DRAFT, DraftPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from outrider.models.cost.table import CallCost
    from outrider.models.tuning.measure.overlap import Contention
    from outrider.types import Backend, Committed, Draft, Drafter, DraftRequest, Pending, TokenSequence, Turn

_SIMILAR_TOKENS = 32  # tokens by which contexts may differ that are priced alike
_QUICK_READING_ROUNDS = 0.1  # plain rounds: what takes less to read is no prompt
_LONGEST_REST_ROUNDS = 4  # that a single answer waits until copies are considered: they may gain much
KNOWN_TOKENS = 32.0  # drafted tokens from which on a drafter's acceptance is known


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
        main_cost: CallCost,
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
        self._answers: dict[TokenSequence, AnswerRecord] = {}
        self._round: tuple[Batch, list[PricedTurn]] | None = None  # from `choose` to `drafted`
        self._expected_check = 0.0  # seconds of this round's target pass
        self._ended: DraftRequest | None = None  # of the answer that ended last
        self._rows_before = main_cost.rule.num_rows([1])
        drafting = self._models  # not through `self`: a closed engine does not wait for the garbage collector
        self._ledger = Ledger(clock, lambda: main.seconds + sum(model.seconds for model in drafting.values()))
        self._accounts: list[Account] = []  # of the answers of this round
        self._unlooked = 0  # rounds since copies were considered
        self._seconds: dict[int, dict[int, float]] = {}  # by context, and the rows of a call; see `Batch`
        self._version = main_cost.version  # for which these hold
        self._num_drafting = dict.fromkeys(self._models, 1)  # by model, answers that it drafted for in the last round

    def add(self, name: str, model: Drafter) -> None:
        """Choose among one more model, also for answers that have begun. Between two rounds."""
        self._models[name], self.drafters = model, (*self.drafters, model)
        self.goes_ahead |= model.goes_ahead
        self._num_drafting[name] = 1

    def choose(self, requests: Sequence[DraftRequest]) -> list[PricedTurn]:
        """For each request the turn that is worth most: a copy, a draft of a model, or nothing."""
        batch = self._batch(requests)
        self._unlooked += 1
        rested = len(requests) == 1 and self._unlooked > _LONGEST_REST_ROUNDS
        looks = self._copier is not None and (rested or self._ledger.is_open(COPIES))
        considered = [name for name in self._models if self._is_considered(name, requests, batch)]
        if self._main_cost.is_blind:  # a plain round first shows what that takes
            looks, considered = False, []
        copies, lengths = [NO_DRAFT] * len(requests), [0] * len(requests)
        if self._copier and looks:
            self._unlooked = 0
            copies = self._copies(self._copier, requests)
            lengths = self._copy_lengths(requests, copies, batch)
        prices = {name: self._price(name, requests, batch) for name in considered}
        turns = [
            self._plan(request, copy, length, batch, prices)
            for request, copy, length in zip(requests, copies, lengths, strict=True)
        ]
        self._round = batch, turns
        self._ledger.decided([*([COPIES] if looks else []), *considered])
        return turns

    def drafted(self) -> None:
        """Estimate the seconds of the round, from its drafts."""
        if self._round is None:
            return
        (batch, turns), self._round = self._round, None
        self._price_drafts(turns)
        rows = [turn.draft.num_rows for turn in turns]
        self._rows_before = self._main_cost.rule.num_rows(rows)
        called = [batch.steady.peek(self._rows_before)] if batch.steady else rows
        self._expected_check = self._main_cost.together(called, batch.context, batch.before)
        entries = []
        for turn, count in zip(turns, rows, strict=True):
            turn.seconds += self._expected_check * count / sum(rows)
            answer = self._answers[turn.request.sequence]
            answer.turn = turn
            drafter = turn.model or (COPIES if len(turn.draft) else None)
            entries.append(LedgerEntry(answer.account, drafter, turn.seconds, len(turn.draft), turn.granted))
        is_plain = not any(entry.drafter for entry in entries) and batch.before == batch.least == self._rows_before
        self._ledger.chose(entries, is_plain=is_plain)

    def _price_drafts(self, turns: Sequence[PricedTurn]) -> None:
        """Add the expected seconds of the models' drafts."""
        for name in self._models:
            asked = [(turn, turn.rule) for turn in turns if turn.model == name and turn.rule is not None]
            self._num_drafting[name] = len(asked)
            for turn, rule in asked:
                turn.seconds += rule.step * max(len(turn.draft.first_chain) - max(rule.num_ahead, 1), 0)

    def go_ahead(self, turns: Sequence[Turn], check: Pending) -> None:
        """Let models draft ahead for their own drafts, if the guess is likely enough."""
        for name, model in self._models.items():
            if model.goes_ahead:
                own = [turn for turn in turns if isinstance(turn, PricedTurn) and turn.model == name]
                self._go_ahead(name, model, own, check)

    def _go_ahead(self, name: str, model: Drafter, turns: Sequence[PricedTurn], check: Pending) -> None:
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
            model.draft_ahead(asked, guessed, check, guesses, most)

    def observe(self, sequence: TokenSequence, committed: Committed) -> None:
        """Learn from the outcome of the last draft."""
        answer = self._answers.get(sequence)
        if answer is None or answer.turn is None:
            return
        turn, answer.turn, answer.length = answer.turn, None, len(sequence)
        self._ledger.committed(answer.account, len(committed.path) + 1, counts=not committed.beside_prompts)
        if turn.model is not None:
            answer.models[turn.model].add(turn.draft, committed.path)

    def replay(self, is_cancelled: Callable[[], bool]) -> Iterator[None]:
        """Have the models without records draft the answer again that ended last."""
        ended, self._ended = self._ended, None
        if ended is None or ended.sequence.source is not None or not ended.sampler.is_stateless:
            return
        for name, model in self._models.items():
            record = self.records.of_model(ended.verifier, name, ended.sequence.adapter)
            if model.replays and record.share.weight < ENOUGH_TOKENS:
                yield from replay(model, record, ended, is_cancelled)
                if record.share.weight >= ENOUGH_TOKENS:  # it is tried by what is known now
                    self._ledger.restore(name)
        self.records.save()

    def release(self, sequence: TokenSequence) -> None:
        """Drop a sequence's state. Its records stay."""
        if answer := self._answers.pop(sequence, None):
            if answer.request is not None:
                self._ended = dataclasses.replace(answer.request, slot=None, observer=None, is_cancelled=lambda: False)
            self._ledger.end(counts=answer.length == len(sequence))
            answer.record.ended(len(sequence.generated_token_ids))
            self.records.save()

    def _batch(self, requests: Sequence[DraftRequest]) -> Batch:
        together = len(requests)
        context = sum(len(request.sequence) for request in requests) / together
        plain = self._main_cost.together([1] * together, context)
        known = [(self._answers[each.sequence], each) for each in requests if each.sequence in self._answers]
        goes_on = all(answer.length == len(each.sequence) for answer, each in known)
        self._ledger.begin(plain, together, counts=goes_on)
        self._accounts = accounts = [self._answer(request, plain / together).account for request in requests]
        # Plain decoding is always possible.
        rate = max(sum(a.rate_tokens for a in accounts) / sum(a.rate_seconds for a in accounts), together / plain)
        cost = self._main_cost
        least = cost.rule.num_rows([1] * together)
        steady, change = self._main.capabilities.steady, cost.scale * (cost.change or 0.0)
        before = steady.current if steady else self._rows_before
        if cost.version != self._version:  # calls have shown other seconds
            self._version, self._seconds = cost.version, {}
        seconds = self._seconds.setdefault(int(context) // _SIMILAR_TOKENS, {})
        return Batch(cost, together, context, plain, rate, least, before, change, steady, seconds)

    def _copies(self, copier: Drafter, requests: Sequence[DraftRequest]) -> list[Draft]:
        """A copy for each request, of which a part may be worth its rows."""
        answers = [self._answers[request.sequence] for request in requests]
        for answer, request in zip(answers, requests, strict=True):
            answer.observe_copy(request.sequence)
        copies = copier.propose([dataclasses.replace(request, rule=None) for request in requests])
        for answer, request, copy in zip(answers, requests, copies, strict=True):
            answer.copy, answer.copied_at = copy, len(request.sequence)
        return copies

    def _copy_lengths(self, requests: Sequence[DraftRequest], copies: Sequence[Draft], batch: Batch) -> list[int]:
        """How many tokens of each copy to draft. A single answer's copy may begin with a part; see `Batch`."""
        answers = [self._answers[request.sequence] for request in requests]
        confidences = [confidences_of(c)[: min(r.limit, LONGEST)] for c, r in zip(copies, requests, strict=True)]
        chances = [answer.copy_chances(each) for answer, each in zip(answers, confidences, strict=True)]
        most = sum(account.limit(0.0, batch.plain / batch.together) for account in self._accounts)
        best = batch.allot(chances, max(most, 0.0))  # rows that cost nothing are free
        if batch.together == 1:
            best = [batch.first_part(chances[0], best[0])]
        return best

    def _price(self, name: str, requests: Sequence[DraftRequest], batch: Batch) -> ModelPrice:
        """A model's price in this round. Answers share its calls, so it depends on how many it drafts for.

        That is all of them, if it is worth the shared price to all that have been read by it; else as many as in the
        last round, by the same condition; else one, which pays for a call alone.
        """
        model, before = self._models[name], self._num_drafting[name]
        answers = [(self._answers[each.sequence].models[name], each) for each in requests]
        read = [(answer.share.mean, each.limit) for answer, each in answers if _is_read(model, each)]
        for count in sorted({len(read), min(before, len(read))} - {0, 1}, reverse=True):
            price = ModelPrice.of(model, batch, count)
            if sum(price.pays(chance, limit, batch.rate) for chance, limit in read) >= count:
                return price
        return ModelPrice.of(model, batch, 1)

    def _plan(
        self, request: DraftRequest, copy: Draft, length: int, batch: Batch, prices: Mapping[str, ModelPrice]
    ) -> PricedTurn:
        """One answer's turn: `length` tokens of the copy, or a draft of the model that is worth most, with a rule."""
        answer = self._answers[request.sequence]
        turn = PricedTurn(request, draft=copy.cut(length), copier=self._copier)
        able = [n for n in prices if self._may_draft(n, answer.account) and self._models[n].can_draft(request)]
        if not able:
            return turn
        chances = answer.copy_chances(confidences_of(copy)[:length])
        kept = sum(accumulate(chances, mul))
        best, tried = turn, None
        count = prices[able[0]].num_sharing
        best_value = by_copy = (
            kept - batch.rate * batch.added([length] * count + [0] * (batch.together - count)) / count
        )
        # A model reads a prompt for what it gains over a copy, and once it is known, over models that have read it.
        for name in sorted(able, key=lambda name: not _is_read(self._models[name], request)):
            others = best_value if answer.models[name].record.share.weight >= KNOWN_TOKENS else by_copy
            value, worth, asked = self._plan_model(name, request, answer, batch, prices[name], others)
            if worth and value > best_value:
                best, best_value = asked, value
            elif not worth and asked.model is not None and tried is None:
                tried = asked
        return tried if best is turn and tried is not None else best

    def _may_draft(self, name: str, account: Account) -> bool:
        """Whether a model may draft for an answer.

        One that has lost too much rests, but not where drafts save time, or where reading the prompt was granted.
        """
        return self._ledger.is_open(name) or account.balance > 0 or account.granted > 0

    def _is_considered(self, name: str, requests: Sequence[DraftRequest], batch: Batch) -> bool:
        """Whether a model may draft for an answer that can pay for it, as far as that is known before it is priced."""
        answers = [self._answers[request.sequence] for request in requests]
        able = [answer for answer in answers if self._may_draft(name, answer.account)]
        if not able or any(answer.models[name].record.share.weight >= KNOWN_TOKENS for answer in able):
            return bool(able)
        least = self._models[name].seconds_for([1] * batch.together, batch.context) / batch.together
        plain, credit = batch.plain / batch.together, self._ledger.credit(name)
        return any(answer.account.trial(credit, plain, self._accounts) >= least for answer in able)

    def _plan_model(
        self, name: str, request: DraftRequest, answer: AnswerRecord, batch: Batch, price: ModelPrice, others: float
    ) -> tuple[float, bool, PricedTurn]:
        """The value of a model's draft in tokens, whether that is more than the others', and its turn.

        others: the value of a copy, or of another model's draft. A turn of a model whose draft is worth less is a try:
        it names the model. Otherwise it names none.
        """
        model, own, rate = self._models[name], answer.models[name], batch.rate
        plain, account, none = batch.plain / batch.together, answer.account, PricedTurn(request)
        longest, num_ahead = min(request.limit, price.most), model.num_ahead(request.sequence)
        seconds = [check + price.drafting(k, num_ahead) for k, check in enumerate(price.check[: longest + 1])]
        costs = [rate * each for each in seconds]
        # Using tokens drafted ahead must not depend on how many there are: that may depend on the tokens.
        first = 0.0 if num_ahead else _first_call(model, request, price)
        reading = max(first - price.call, 0.0) if not num_ahead else 0.0
        value, length = best_length([own.share.mean] * longest, costs)
        gain = (value - max(others, 0.0)) / rate / (1 + value + costs[length])  # seconds a token
        # Reading the prompt pays later, if the answer goes on. So does the first call after a load, in all answers: as
        # many tokens again as so far.
        first_call = max(model.first_seconds - gain * self._ledger.num_tokens, 0.0)
        is_quick = reading + model.first_seconds <= _QUICK_READING_ROUNDS * plain
        is_worth = value > others and gain > 0
        if is_worth and not is_quick:
            left = answer.record.left(len(request.sequence.generated_token_ids), request.num_left)
            is_worth = should_read(gain, reading + first_call, left)
        # What is known to pay may use the drafter's credit, and read prompts. Else the answer pays.
        reading += model.first_seconds
        is_known = is_known_to_pay(own.record.share, costs, KNOWN_TOKENS)
        credit, granted = self._ledger.credit(name), 0.0
        most = (account.limit if is_known else account.trial)(credit, plain, self._accounts)
        if is_known and credit and is_worth and not is_quick:
            granted = reading + CREDIT_ROUNDS * plain  # with a few drafts, or it was read in vain
        losses = [reading + each for each in seconds[1:]]
        if not is_worth:
            cost = losses[0] + max(others, 0.0) / rate if losses else math.inf
            if cost > most or not should_try(cost, account.idle(), plain, leads=account.balance > 0):
                return value, False, none
        if not (longest := affordable(losses, most + granted)):
            return value, False, none
        there = longest if price.at_once else num_ahead
        second = own.record.branches.mean if request.trees else 0.0
        rule = WorthIt(own.chance, own.share.mean, rate, price.step, price.check, longest, there, second, self._fork)
        asked = dataclasses.replace(request, rule=rule)
        expected = first + model.first_seconds
        return value, is_worth, PricedTurn(asked, model, model=name, rule=rule, seconds=expected, granted=granted)

    @property
    def _fork(self) -> float:
        """Seconds of a branch besides its rows."""
        return self._main_cost.scale * self._main_cost.fork

    def _answer(self, request: DraftRequest, plain: float) -> AnswerRecord:
        """The state of an answer. plain: seconds of a round without drafts."""
        answer = self._answers.get(request.sequence)
        verifier, adapter = request.verifier, request.sequence.adapter
        if answer is None:
            self._ledger.open(COPIES, plain)
            account = Account(rate_tokens=1.0, rate_seconds=plain)
            answer = AnswerRecord(self.records.of(verifier, adapter), account, request=request)
            self._answers[request.sequence] = answer
        for name in self._models if len(answer.models) < len(self._models) else ():  # one may have been added
            if name not in answer.models:
                answer.models[name] = ModelAnswer.of(self.records.of_model(verifier, name, adapter))
                self._ledger.open(name, FIRST_ROUNDS * plain)
        return answer


def _is_read(model: Drafter, request: DraftRequest) -> bool:
    """Whether a model can draft for an answer without reading its prompt first."""
    unread, sequence = model.num_unread(request.sequence), request.sequence
    return model.can_draft(request) and (unread <= 1 or len(sequence) - unread >= sequence.num_prompt_tokens)


def _first_call(model: Drafter, request: DraftRequest, price: ModelPrice) -> float:
    """Seconds of a draft's first call, which reads what is unread, without the other answers' share of it."""
    unread = max(model.num_unread(request.sequence), 1)
    together = model.seconds_for([unread] + [1] * (price.num_sharing - 1), len(request.sequence), price.num_sharing)
    return together - (price.num_sharing - 1) * price.call
