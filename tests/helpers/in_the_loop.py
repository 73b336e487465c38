"""Requests for the loop with fakes, and the loop until they have ended."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from outrider.config import GenerationConfig
from outrider.decoding.loop import step
from outrider.decoding.request import Request
from outrider.decoding.scheduler import Scheduler
from outrider.decoding.slots import admit, release
from outrider.drafters.controller import Fixed
from outrider.inputs.text import TextStream
from outrider.tokens.sampling import LogitsSampler
from outrider.tokens.verifiers import Greedy
from outrider.types import Committed, DraftRequest, Noise, Pending, Sequence, Turn


def letters(token_ids: Seq[int]) -> str:
    """The text of a toy's tokens, in which each is a letter."""
    return "".join(chr(ord("a") + token_id) for token_id in token_ids)


def new_request(
    prompt: Seq[int], drafter: Any = None, sampling: dict[str, Any] | None = None, **fields: Any
) -> Request:
    """A request that is greedy, unless a verifier is among `fields`.

    drafter: one, or a policy of several. sampling: options of `GenerationConfig`.
    """
    made: dict[str, Any] = {
        "sequence": Sequence([*prompt], len(prompt)),
        "sampler": LogitsSampler(GenerationConfig(**sampling or {}), [*prompt]),
        "verifier": Greedy(),
        "noise": Noise(0),
        "text": TextStream(letters),
        "max_new_tokens": 20,
        "eos_token_ids": frozenset(),
        "policy": Fixed(drafter) if hasattr(drafter, "propose") else drafter,
        "num_assistant_tokens": 4 if drafter else 0,
    }
    return Request(**made | fields)


@dataclass(eq=False)
class InTurns:
    """A policy that lets drafters take turns, as `order` says by number; 0 and what is behind the last: none."""

    drafters: Seq[Any]
    order: Seq[int]
    goes_ahead: bool = False
    num_rounds: int = 0

    def choose(self, requests: Seq[DraftRequest]) -> list[Turn]:
        self.num_rounds += 1
        chosen = self.order[self.num_rounds % len(self.order)] % (len(self.drafters) + 1)
        return [Turn(each, self.drafters[chosen - 1] if chosen else None) for each in requests]

    def drafted(self) -> None: ...
    def go_ahead(self, turns: Seq[Turn], check: Pending) -> None: ...
    def observe(self, sequence: Sequence, committed: Committed) -> None: ...
    def release(self, sequence: Sequence) -> None: ...


def run(main: Any, *requests: Request, rows: int = 32, spared: tuple[type[Exception], ...] = ()) -> list[list[int]]:
    """Answer requests together. Their tokens, prompts included. spared: errors that may end a request.

    Raises:
        Exception: what a request has failed of, unless it is spared.
    """
    running = [*requests]
    for request in requests:
        assert admit(request, main)
    while running:
        step(main, running, Scheduler(rows))
        for request in [request for request in running if request.ended or request.error]:
            release(request)
            running.remove(request)
            if request.error and not isinstance(request.error, spared):
                raise request.error
    return [request.sequence.token_ids for request in requests]
