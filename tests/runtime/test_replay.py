"""Ended answers that a draft model without records drafts again, while an engine is idle."""

from collections.abc import Iterator
from typing import Any

import pytest

from outrider.bundle import Bundle
from outrider.decoding.idle import Replaying
from outrider.decoding.request_queue import RequestQueue
from outrider.decoding.row_budget import RowBudget
from outrider.testing import FakeBackend
from outrider.tokens.verifiers import Coupled, Greedy
from outrider.types import DraftPolicy
from serving import wait_until
from toys import load_toy
from virtual_time import World


def prompt(num: int, size: int = 400) -> list[int]:
    return [(7 * i * i + 3 * num) % 50 for i in range(size)]


def seen(world: World, verifier: Any = None) -> float:
    """Tokens that the draft model's record is of, and the prior."""
    return world.controller.records.of_model(verifier or Greedy(), "draft").share.weight


@pytest.mark.parametrize("noise", [0.1, 50.0])
def test_short_answers_to_long_prompts_show_what_a_model_is_worth(noise: float) -> None:
    """They may not lose what reading the prompt takes. Within five answers that have been drafted again it is known."""
    drafts = {}
    for pauses in (False, True):
        world, drafts[pauses] = World(noise, draft_cost=0.35, pauses=pauses), list[int]()
        for i in range(6):
            text, _, request = world.decode(prompt(i), num=24)
            assert text == world.decode(prompt(i), drafted=False, num=24)[0]
            drafts[pauses].append(request.stats.num_drafts)
    assert not any(drafts[False])
    assert not drafts[True][0]
    assert (drafts[True][-1] > 0) == (noise < 1)


def test_a_program_that_ends_after_its_answer_can_learn_from_it(openvino_bundle: Bundle) -> None:
    with load_toy(openvino_bundle) as engine:
        engine.generate("hello", max_new_tokens=60, ignore_eos=True)
        (known,) = engine._registry.unknown_models()
        engine.settle()  # leaves the models to who measures
        engine.learn()
        assert known[1].share.weight == 10  # what is taken for granted
        engine.generate("hello there", max_new_tokens=60, ignore_eos=True)
        engine._queue.wake()  # as a store's thread does
        engine.learn()
        assert not engine._registry.unknown_models()


@pytest.mark.parametrize("sampled", [False, True])
def test_an_answer_is_drafted_again_as_it_would_have_been(sampled: bool) -> None:
    """A model that equals the main model has all its tokens accepted."""
    options: dict[str, Any] = {"temperature": 1.0, "seed": 3, "verifier": Coupled()} if sampled else {}
    world = World(0.0, pauses=True)
    world.decode(prompt(1), num=20, **options)
    record = world.controller.records.of_model(options.get("verifier") or Greedy(), "draft")
    assert 14 < sum(record.by_confidence.seen) < 20  # after each draft of four, one token is not drafted
    assert record.share.mean > 0.85


def test_options_that_depend_on_the_answer_are_not_drafted_again() -> None:
    """Their state is that of the end."""
    world = World(0.0, pauses=True)
    world.decode(prompt(1), num=20, repetition_penalty=1.1)
    assert not world.draft.seconds


def test_a_request_that_comes_waits_for_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has begun is dropped: its slot is closed, and no answer's is touched."""
    world = World(0.0)
    world.decode(prompt(1), num=20)
    opened: list[Any] = []
    open_slot = world.draft.open

    def open_noted(*args: Any) -> Any:
        opened.append(open_slot(*args))
        return opened[-1]

    monkeypatch.setattr(world.draft, "open", open_noted)
    replaying, come = Replaying(), list[str]()

    def has_come() -> bool:
        return bool(come)

    for come_at in ("between drafts", "in a draft"):
        replaying.add(world.controller)
        replaying.go_on(world.main, has_come)
        assert replaying.has_begun
        num_calls = len(world.draft.num_rows)
        if come_at == "in a draft":
            come.append("a request")
            replaying.go_on(world.main, has_come)
        replaying.pause()
        assert not replaying.is_due
        assert len(world.draft.num_rows) == num_calls
        assert opened[-1].closed
        assert opened[-1].num_published  # the next turn of the conversation has it read
        world.decode(prompt(2), num=20)


def test_a_policy_that_fails_harms_no_request(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(DraftPolicy):
        def replay(self, is_cancelled: Any) -> Iterator[None]:
            raise RuntimeError("of ours")

    replaying = Replaying()
    replaying.add(Failing())
    replaying.go_on(FakeBackend(4), lambda: False)
    assert "of ours" in caplog.text
    assert not replaying.is_due


def test_an_engine_drafts_an_answer_again_once_it_is_idle() -> None:
    world = World(0.0)
    queue = RequestQueue(world.main, RowBudget(512))
    request = world.request(prompt(1), True, 20)
    list(queue.run(request))
    wait_until(lambda: seen(world) > 25)
    assert world.controller.records.of_model(Greedy(), "draft").share.mean > 0.8
    again = world.request(prompt(1), False, 20)
    list(queue.run(again))
    assert again.sequence.token_ids == request.sequence.token_ids
    queue.close()
