"""Requests for the loop with fakes, and the loop until they have ended."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outrider.config import GenerationConfig
from outrider.decoding.answer import Answer, Status
from outrider.decoding.delivery import Delivery
from outrider.decoding.loop import step
from outrider.decoding.request import Request
from outrider.decoding.request_queue import RequestQueue
from outrider.decoding.row_budget import RowBudget
from outrider.decoding.scheduler import Scheduler
from outrider.decoding.slots import admit, release
from outrider.drafters.controller import Fixed
from outrider.inputs.text import TextStream
from outrider.tokens.sampling import LogitsSampler
from outrider.tokens.verifiers import BlockRejection, Coupled, Greedy
from outrider.types import Backend, Committed, DraftRequest, Noise, Pending, Prompt, TokenSequence, Turn


def letters(token_ids: Sequence[int]) -> str:
    """The text of a toy's tokens, in which each is a letter."""
    return "".join(chr(ord("a") + token_id) for token_id in token_ids)


def new_request(
    prompt: Sequence[int] | Prompt, drafter: Any = None, sampling: dict[str, Any] | None = None, **fields: Any
) -> Answer:
    """The answer to a request that is greedy, unless a verifier is among `fields`.

    drafter: one, or a policy of several. sampling: options of `GenerationConfig`. fields: of the request, the answer or
    its delivery.
    """
    prompt = prompt if isinstance(prompt, Prompt) else Prompt([*prompt])
    asked: dict[str, Any] = {
        "prompt": prompt,
        "verifier": Greedy(),
        "noise": Noise(0),
        "max_new_tokens": 20,
        "policy": Fixed(drafter) if hasattr(drafter, "propose") else drafter,
        "num_assistant_tokens": 4 if drafter else 0,
    }
    made: dict[str, Any] = {
        "sequence": TokenSequence.of(prompt),
        "sampler": LogitsSampler(GenerationConfig(**sampling or {}), [*prompt.token_ids]),
    }
    sent: dict[str, Any] = {"text": TextStream(letters)}
    for of_it, kind in ((asked, Request), (made, Answer), (sent, Delivery)):
        of_it |= {name: fields.pop(name) for name in [*fields] if name in kind.__dataclass_fields__}
    assert not fields
    return Answer(request=Request(**asked), delivery=Delivery(**sent), **made)


VERIFIERS: dict[str, Any] = {"coupled": Coupled(), "rejection": BlockRejection()}


def request_with(
    prompt: Any, drafter: Any = None, *, eos: Iterable[int] = (), n: int = 3, decode: Any = letters, **options: Any
) -> Answer:
    """The answer to a request with these options of `GenerationConfig`, of which a draft has `n` tokens at most."""
    config = GenerationConfig(**options)
    return new_request(
        prompt,
        drafter,
        options,
        verifier=VERIFIERS[config.sampling] if config.temperature else Greedy(),
        sampled=config.temperature > 0,
        noise=Noise(config.seed or 0),
        text=TextStream(decode, config.stop),
        max_new_tokens=config.max_new_tokens or 30,
        eos_token_ids=frozenset(eos),
        num_assistant_tokens=n if drafter else 0,
    )


def finish(main: RequestQueue | Backend, request: Answer, rows: int = 512) -> Answer:
    """Bring an answer to its end, in a queue or on a model that nobody else uses."""
    queue = main if isinstance(main, RequestQueue) else RequestQueue(main, RowBudget(rows))
    for _ in queue.run(request):
        pass
    return request


def ask(answer: Answer, **fields: Any) -> None:
    """Change what an answer's request asks for."""
    answer.request = replace(answer.request, **fields)


def say(answer: Answer, *token_ids: int) -> None:
    """Let an answer have got these tokens, in a loop or without one."""
    answer.sequence.token_ids += token_ids
    answer.status = Status.DECODING


@dataclass(eq=False)
class InTurns:
    """A policy that lets drafters take turns, as `order` says by number; 0 and what is after the last: none."""

    drafters: Sequence[Any]
    order: Sequence[int]
    goes_ahead: bool = False
    num_rounds: int = 0

    def choose(self, requests: Sequence[DraftRequest]) -> list[Turn]:
        self.num_rounds += 1
        chosen = self.order[self.num_rounds % len(self.order)] % (len(self.drafters) + 1)
        return [Turn(each, self.drafters[chosen - 1] if chosen else None) for each in requests]

    def drafted(self) -> None: ...
    def go_ahead(self, turns: Sequence[Turn], check: Pending) -> None: ...
    def observe(self, sequence: TokenSequence, committed: Committed) -> None: ...
    def release(self, sequence: TokenSequence) -> None: ...


def run(main: Any, *requests: Answer, rows: int = 32, spared: tuple[type[Exception], ...] = ()) -> list[list[int]]:
    """Answer requests together. Their tokens, prompts included. spared: errors that may end a request.

    Raises:
        Exception: what a request has failed of, unless it is spared.
    """
    running = [*requests]
    for request in requests:
        assert admit(request, main)
    while running:
        step(main, Scheduler(main, RowBudget(rows), running))
        for request in [request for request in running if request.ended or request.error]:
            release(request)
            running.remove(request)
            if request.error and not isinstance(request.error, spared):
                raise request.error
    return [request.sequence.token_ids for request in requests]
