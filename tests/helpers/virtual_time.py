"""A main and a draft model in virtual time, with a controller between them."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from in_the_loop import new_request
from outrider.config import GenerationConfig
from outrider.decoding.answer import Answer
from outrider.decoding.loop import step
from outrider.decoding.row_budget import RowBudget
from outrider.decoding.scheduler import Scheduler
from outrider.decoding.slots import admit, release
from outrider.drafters import DraftModel, Ngram
from outrider.drafters.controller import Controller
from outrider.models.cost.table import CallCost
from outrider.testing import FakeBackend
from outrider.tokens.verifiers import Greedy
from outrider.types import Chunk, Draft, Drafter, DraftRequest, Logits, Noise, RowRule, SteadyRows

# Milliseconds as they are on two cores, of a 1.5B main model and its 0.5B draft model.
MAIN_MS = {2: 39.4, 3: 39.7, 4: 41.8, 5: 43.2, 6: 45.3, 8: 49.9, 12: 60.3, 16: 70.2}
DRAFT_MS = {1: 14.5, 2: 14.7, 4: 15.2, 8: 17.5, 32: 40.0, 128: 124.0}
HEAD_MS = {1: 2.1, 2: 2.2, 4: 2.4, 8: 3.0, 32: 8.0, 128: 30.0}
_PIECE = 2048  # tokens of prompts that are read in a round: all at once
_COPIED = 0.85  # share of a repeated text's tokens that do not change, where some do
_END, _FAR = 63, 1000  # the token that ends an answer, and the limit of one that ends by it


def cost_of(milliseconds: dict[int, float], scale: float = 1.0, change: float = 0.0) -> CallCost:
    """scale: all seconds are so many times as long. change: extra seconds of a call with another number of rows."""
    seconds = tuple(scale * ms / 1e3 for ms in milliseconds.values())
    return CallCost(tuple(milliseconds), seconds, seconds, change=change)


class ClockedBackend(FakeBackend):
    """Its calls take the seconds of `cost`.

    noises: (position, the model's noise from there on). periods: (position, tokens after which the text repeats itself
    from there on; 0: it does not; negative: with changes). end: the position of the token that ends the answer; None:
    nothing ends it.
    """

    end: int | None = None

    def __init__(
        self,
        cost: CallCost,
        vocab_size: int = 64,
        noises: Sequence[tuple[int, float]] = (),
        periods: Sequence[tuple[int, int]] = (),
        **options: Any,
    ) -> None:
        super().__init__(vocab_size, **options)
        self.cost, self.noises, self.periods = cost, noises, periods
        self._rows_before: int | None = None

    def submit(self, chunks: Sequence[Chunk]) -> FakeBackend.Step:
        rows, steady = [max(sum(map(len, chunk.layout.branches)), 1) for chunk in chunks], self.capabilities.steady
        rows = [steady.next(sum(rows))] if steady else rows
        self.seconds += self.cost.together(rows, before=self._rows_before)
        self._rows_before = sum(rows)
        return super().submit(chunks)

    def logits_after(self, token_ids: Sequence[int]) -> Logits:
        length, last = len(token_ids), tuple(token_ids[-self.memory :])
        self.noise = next((noise for begin, noise in reversed(self.noises) if length >= begin), self.noise)
        period = next((period for begin, period in reversed(self.periods) if length >= begin), 0)
        if period and (period > 0 or length * 0.618 % 1 < _COPIED):
            length, last = 2 + length % abs(period), (0,) * self.memory
        logits = _logits(self.vocab_size, self.seed, self.noise, self.memory, length, last)
        if self.end is not None:
            logits = logits.copy()
            logits[_END] = 1e3 if len(token_ids) >= self.end else -1e3
        return logits


@functools.lru_cache(maxsize=1 << 17)
def _logits(vocab_size: int, seed: int, noise: float, memory: int, length: int, last: tuple[int, ...]) -> Logits:
    """FakeBackend's. They depend on the last tokens and on their number."""
    token_ids = [*[0] * (length - len(last)), *last]
    return FakeBackend(vocab_size, seed=seed, noise=noise, memory=memory).logits_after(token_ids)


class World:
    """A main and a draft model in virtual time, with a controller between them.

    controller: chooses drafts; another policy may take its place. longest: most draft tokens. noise, periods: see
    `ClockedBackend`. copies: whether the controller has a drafter that copies; or this one. scale, draft_scale: how
    many times as long as measured the calls take. draft_cost: how many times as long the draft model's were
    measured to take. change: extra seconds of a call of the main model with another number of rows than the one
    before. keeps_rows: whether its calls keep their rows where that saves time. pauses: whether the engine is idle
    after each answer, or batch of answers, for as long as it has something to do. cost: of the main model's calls, as
    they were measured.
    """

    def __init__(
        self,
        noise: float | Sequence[tuple[int, float]] = 0.0,
        *,
        copies: bool | Drafter = False,
        model: bool = True,
        periods: Sequence[tuple[int, int]] = (),
        scale: float = 1.0,
        draft_scale: float | None = None,
        draft_cost: float = 1.0,
        change: float = 0.0,
        keeps_rows: bool = True,
        pauses: bool = False,
        cost: CallCost | None = None,
    ) -> None:
        self.longest = 15
        noises = [(0, noise)] if isinstance(noise, float) else noise
        draft_scale = scale if draft_scale is None else draft_scale
        self.main = ClockedBackend(cost_of(MAIN_MS, scale, scale * change), periods=periods)
        self.cost = cost or cost_of(MAIN_MS, change=change)
        if change and keeps_rows:
            steady = SteadyRows(self.cost, RowRule(), 32)
            self.main.capabilities = dataclasses.replace(self.main.capabilities, steady=steady)
        actual = cost_of(DRAFT_MS, draft_cost * draft_scale)
        self.draft = ClockedBackend(actual, noises=noises, periods=periods)
        self.model = DraftModel(self.draft, context_length=4000, cost=cost_of(DRAFT_MS, draft_cost))
        self.models: dict[str, Drafter] = {"draft": self.model}
        self._others: list[ClockedBackend] = []  # the models' besides the draft model's
        self._copier = (Ngram() if copies else None) if isinstance(copies, bool) else copies
        self.pauses = pauses
        self.controller = self.controller_of(["draft"] if model else [])

    def add_model(self, name: str, noise: float, milliseconds: dict[int, float]) -> None:
        """Another model that drafts, whose calls take as long as that."""
        cost = cost_of(milliseconds)
        self._others.append(ClockedBackend(cost, noises=[(0, noise)]))
        self.models[name] = DraftModel(self._others[-1], context_length=4000, cost=cost)

    def controller_of(self, names: Sequence[str]) -> Controller:
        """A new controller between these models."""
        return Controller(
            self.main,
            self.cost,
            copier=self._copier,
            models={name: self.models[name] for name in names},
            clock=lambda: self.seconds,  # the host's work takes no time
        )

    def decode(
        self,
        prompt: Sequence[int] = (1, 2, 3),
        drafted: bool = True,
        num: int = 200,
        verifier: Any = None,
        *,
        ends: bool = False,
        **options: Any,
    ) -> tuple[list[int], float, Answer]:
        """The answer, the seconds after its first token, and the request.

        ends: whether it ends by a token of its own, so that nobody knows before that it has `num` tokens.
        """
        for backend in (self.main, self.draft, *self._others):
            backend.end = len(prompt) + num - 1 if ends else None
        fields = {"eos_token_ids": frozenset([_END])} if ends else {}
        request = self.request(prompt, drafted, _FAR if ends else num, verifier, fields, **options)
        (seconds,) = self.run([request])
        return request.sequence.generated_token_ids, seconds, request

    def decode_together(
        self, prompts: Sequence[Sequence[int]], drafted: bool, num: int | Sequence[int]
    ) -> tuple[list[list[int]], list[float]]:
        """The answers to several prompts at the same time, and the seconds of each after the first tokens."""
        nums = [num] * len(prompts) if isinstance(num, int) else num
        requests = [self.request(prompt, drafted, num) for prompt, num in zip(prompts, nums, strict=True)]
        seconds = self.run(requests)
        return [request.sequence.generated_token_ids for request in requests], seconds

    def run(self, requests: Sequence[Answer]) -> list[float]:
        """The seconds until each request has ended, after the first tokens."""
        ended, began = [0.0] * len(requests), 0.0
        while running := [i for i, request in enumerate(requests) if not request.ended]:
            step(self.main, Scheduler(self.main, RowBudget(_PIECE), [requests[i] for i in running], cost=self.cost))
            began = began or self.seconds
            for i in running:
                assert requests[i].error is None
                if requests[i].ended:
                    release(requests[i])
                    ended[i] = self.seconds
        if self.pauses:
            for _ in self.controller.replay(lambda: False):
                pass
        return [seconds - began for seconds in ended]

    def request(
        self,
        prompt: Sequence[int],
        drafted: bool,
        num: int,
        verifier: Any = None,
        fields: dict[str, Any] | None = None,
        **options: Any,
    ) -> Answer:
        """fields: of the request; see `new_request`."""
        config = GenerationConfig(max_new_tokens=num, **options)
        request = new_request(
            prompt,
            self.controller if drafted else None,
            options,
            verifier=verifier or Greedy(),
            noise=Noise(config.seed or 0),
            max_new_tokens=num,
            num_assistant_tokens=self.longest,
            **fields or {},
        )
        assert admit(request, self.main)
        return request

    @property
    def seconds(self) -> float:
        return sum(each.seconds for each in (self.main, self.draft, *self._others))


class Liar(Ngram):
    """A drafter with high confidences in so many tokens, which are always wrong."""

    def __init__(self, count: int = 8) -> None:
        super().__init__()
        self._count = count

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [Draft([63] * self._count, confidences=[0.9] * self._count) for _ in requests]


def speed_up(world: World, **options: Any) -> float:
    plain, plain_seconds, _ = world.decode(drafted=False, **options)
    drafted, seconds, _ = world.decode(**options)
    assert drafted == plain
    return plain_seconds / seconds
