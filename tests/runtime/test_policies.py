"""Policies and their drafters in the loop: shared calls, observations, and releases."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from in_the_loop import ask, new_request
from outrider.decoding.answer import Answer
from outrider.decoding.loop import step
from outrider.decoding.request_queue import RequestQueue
from outrider.decoding.row_budget import RowBudget
from outrider.decoding.scheduler import Scheduler
from outrider.decoding.slots import admit, release
from outrider.drafters import DraftModel, Ngram, Suffix
from outrider.drafters.controller import Controller, Fixed, Records
from outrider.drafters.drafter_registry import DrafterRegistry
from outrider.models.cost.table import CallCost
from outrider.testing import FakeBackend
from outrider.types import Committed, Draft, Drafter, DraftPolicy, DraftRequest, TokenSequence

COST = CallCost((1, 16), (1.0, 1.1), (1.0, 1.1))


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


def test_a_drafter_that_fails_ends_the_requests_that_use_it() -> None:
    class Failing(Counting):
        def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
            raise KeyError("odd")

    main, failing = FakeBackend(6), Failing()
    requests = [make_request(policy) for policy in (Fixed(failing), Fixed(failing), Fixed(Counting()), None)]
    for request in requests:
        assert admit(request, main)
    for _ in range(2):
        step(main, Scheduler(main, RowBudget(64), requests))
    assert [type(request.error) for request in requests] == [KeyError, KeyError, type(None), type(None)]


class Noting:
    """An observer that notes the stages of drafting, and the main model's call between them."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def drafting(self, stage: str, requests: Sequence[Answer]) -> None:
        self.told.append((stage, len(requests)))

    def drafted(self, drafts: Sequence[Draft], error: BaseException | None = None) -> None:
        self.told.append([len(draft) for draft in drafts] if error is None else error)

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self.told.append(name)


def test_an_observer_is_told_of_each_stage_of_drafting() -> None:
    main, drafter = FakeBackend(6), Counting()
    requests = [make_request(policy) for policy in (Fixed(drafter), None, Fixed(drafter))]
    for request in requests:
        assert admit(request, main)
    step(main, Scheduler(main, RowBudget(64), requests))  # reads the prompts
    observer: Any = Noting()
    step(main, Scheduler(main, RowBudget(64), requests), observer)
    assert observer.told == [("choose", 2), [0, 0], ("propose", 2), [1, 1], "called", *["verified", "committed"] * 3]


def test_an_observer_is_told_what_a_stage_failed_of() -> None:
    class Failing(Counting):
        goes_ahead = True

        def draft_ahead(self, *_: Any, **__: Any) -> None:
            raise error

    error = KeyError("odd")
    main, request = FakeBackend(6), make_request(Fixed(Failing()))
    ask(request, ahead=True)
    assert admit(request, main)
    step(main, Scheduler(main, RowBudget(64), [request]))
    observer: Any = Noting()
    step(main, Scheduler(main, RowBudget(64), [request]), observer)
    assert observer.told[:6] == [("choose", 1), [0], ("propose", 1), [1], ("draft ahead", 1), error]
    assert request.error is error


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


def test_a_drafter_of_two_policies_is_timed_once() -> None:
    main, drafter = FakeBackend(6), Counting()
    queue = RequestQueue(main, RowBudget(64))
    first = queue.run(make_request(Fixed(drafter)))
    second = make_request(Fixed(drafter))
    next(first)
    for _ in queue.run(second):
        pass
    *_, last = first
    assert last.result is not None
    for stats in (last.result.stats, second.stats):
        assert 0 < stats.draft_seconds <= drafter.seconds


def test_what_a_drafter_can_do_it_says_itself() -> None:
    backend: Any = FakeBackend(6)
    unpriced, model = (DraftModel(backend, context_length=9, cost=cost) for cost in (None, COST))
    assert [each.is_priced for each in (Ngram(), Suffix(), model, unpriced, Counting())] == [True] * 3 + [False] * 2
    assert [each.goes_ahead for each in (Suffix(), model, Counting())] == [False, True, False]
    assert [Fixed(each).goes_ahead for each in (Suffix(), model, Counting())] == [False, True, False]
    assert Controller(backend, COST, copier=Suffix(), models={"draft": model}).goes_ahead
    assert not Controller(backend, COST, copier=Suffix()).goes_ahead
    assert model.seconds_for([1, 1], 256) == COST.together([1, 1])
    copier, request = Suffix(), make_request(None).draft_request()
    assert copier.is_free
    assert copier.can_draft(request)
    assert copier.seconds_for([9], 256) == copier.num_unread(request.sequence) == copier.ahead_seconds == 0


def test_shared_records_are_read_once() -> None:
    """Requests are prepared in several threads. Of two sets of records, the one saved last would replace the other."""
    barrier = threading.Barrier(4)
    made: list[Records] = []

    def read() -> Records:
        time.sleep(0.05)
        made.append(Records())
        return made[-1]

    registry = DrafterRegistry({}, {}, [], encode=lambda _: [], records=read)

    def ask() -> Records:
        barrier.wait()
        return registry._records_of("auto")

    with ThreadPoolExecutor(4) as threads:
        found = [each.result() for each in [threads.submit(ask) for _ in range(4)]]
    assert len(made) == 1
    assert all(each is made[0] for each in found)
