"""Policies and their drafters in the loop: shared calls, observations, and releases."""

from collections.abc import Sequence

import pytest

from in_the_loop import new_request
from outrider.decoding.answer import Answer
from outrider.decoding.loop import step
from outrider.decoding.row_budget import RowBudget
from outrider.decoding.scheduler import Scheduler
from outrider.decoding.slots import admit, release
from outrider.drafters.controller import Fixed
from outrider.testing import FakeBackend
from outrider.types import Committed, Draft, Drafter, DraftPolicy, DraftRequest, TokenSequence


def make_request(policy: DraftPolicy | None, prompt: Sequence[int] = (1, 2)) -> Answer:
    return new_request(prompt, policy, max_new_tokens=12, num_assistant_tokens=3)


class Counting(Drafter):
    """Proposes one token. Records calls, reserved sequences and observations. It has no hash."""

    __hash__ = None  # type: ignore[assignment]
    num_assistant_tokens = 1

    def __init__(self, *, room: bool = True, error: Exception | None = None) -> None:
        self.room, self.error = room, error
        self.seconds = 0.0
        self.asked: list[int] = []
        self.held: list[TokenSequence] = []
        self.heard = 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Counting)

    def reserve(self, sequence: TokenSequence, max_tokens: int, num_cached: int) -> bool:
        if self.error and self.room:
            raise self.error
        if self.room:
            self.held.append(sequence)
        return self.room

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        self.asked.append(len(requests))
        self.seconds += 1.0
        return [Draft([0]) for _ in requests]

    def observe(self, sequence: TokenSequence, committed: Committed) -> None:
        self.heard += 1

    def release(self, sequence: TokenSequence) -> None:
        self.held.remove(sequence)


def several(*drafters: Drafter) -> Fixed:
    """A policy with several drafters."""
    policy = Fixed(drafters[0])
    policy.drafters = drafters
    return policy


def test_requests_of_one_drafter_are_drafted_for_in_one_call() -> None:
    """Drafters are the same if they are one object. Equal objects are called separately."""
    main, drafter, other = FakeBackend(6), Counting(), Counting()
    assert Fixed(drafter) == Fixed(drafter) != Fixed(other)  # though their hashes may be equal
    requests = [make_request(Fixed(each)) for each in (drafter, other, drafter)]
    for request in requests:
        assert admit(request, main)
    for _ in range(3):
        step(main, Scheduler(main, RowBudget(64), requests))
    assert not any(request.error for request in requests)
    assert drafter.asked == [2, 2]  # the first round reads the prompts
    assert other.asked == [1, 1]
    assert (drafter.heard, other.heard) == (6, 3)


def test_places_are_taken_with_all_drafters_or_with_none() -> None:
    main, first, full = FakeBackend(6), Counting(), Counting(room=False)
    assert not admit(make_request(several(first, full)), main)
    assert first.held == []
    with pytest.raises(KeyError, match="odd"):
        admit(make_request(several(first, Counting(error=KeyError("odd")))), main)
    assert first.held == []
    request = make_request(several(first, Counting()))
    assert admit(request, main)
    assert first.held == [request.sequence]


def test_a_drafter_that_cannot_let_go_does_not_keep_the_others_from_it() -> None:
    main, first, stubborn, last = FakeBackend(6), Counting(), Counting(), Counting()
    request = make_request(several(first, stubborn, last))
    assert admit(request, main)
    stubborn.held.clear()
    with pytest.raises(ValueError, match="not in list"):
        release(request)
    assert first.held == last.held == []
    assert request.slot.closed  # type: ignore[attr-defined]
