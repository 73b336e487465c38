"""Overlap: it saves time if the guess is right, and never changes the text."""

import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import outrider
from in_the_loop import ask, new_request
from in_the_loop import run as run_in_loop
from outrider.bundle import Bundle
from outrider.decoding.answer import Answer
from outrider.decoding.request_queue import RequestQueue
from outrider.decoding.row_budget import RowBudget
from outrider.drafters import DraftModel, Suffix
from outrider.drafters.controller import Controller
from outrider.errors import DeviceError, OptionError
from outrider.models.backends.common import BufferPending
from outrider.models.backends.infer_calls import GraphState, InferCalls
from outrider.models.backends.openvino_paged import OpenVINOPaged
from outrider.models.backends.paged_step import PagedPending
from outrider.models.cost.table import CallCost
from outrider.models.tuning import loading
from outrider.models.tuning.measure import Contention, pays
from outrider.models.tuning.measure.overlap import rate
from outrider.testing import FakeBackend, ToyTokenizer
from outrider.tokens.verifiers import BlockRejection, Coupled, Greedy, TokenRejection
from outrider.types import Chunk, Noise
from toys import in_threads, load_toy

VOCAB_SIZE = 6
MEMORY = 12  # tokens that a logit depends on: what is left in a cache by mistake shows
VERIFIERS: dict[str, Any] = {
    "greedy": Greedy(), "coupled": Coupled(), "rejection": BlockRejection(), "token-rejection": TokenRejection(),
}  # fmt: skip


@dataclass
class SlowPending:
    """A call that is done after `done` was read `left` times."""

    main: "SlowBackend"
    step: FakeBackend.Step
    left: int

    @property
    def done(self) -> bool:
        self.left -= 1
        return self.left < 0

    def wait(self) -> FakeBackend.Step:
        self.main.ends.append(self.main.watch())
        return self.step


class SlowBackend(FakeBackend):
    """A device that is busy for as long as it takes to draft `patience` tokens."""

    def __init__(self, vocab_size: int, *, patience: int, seed: int = 0, watch: Callable[[], int] = lambda: 0) -> None:
        super().__init__(vocab_size, seed=seed, memory=MEMORY)
        self.patience, self.watch = patience, watch
        self.begins: list[int] = []
        self.ends: list[int] = []

    def submit(self, chunks: Sequence[Chunk]) -> SlowPending:  # type: ignore[override]
        self.begins.append(self.watch())
        return SlowPending(self, super().submit(chunks), self.patience)


def make_request(
    prompt: Sequence[int],
    drafter: Any,
    *,
    overlap: bool = True,
    n: int = 3,
    sampling: str = "greedy",
    eos: Sequence[int] = (),
    **options: Any,
) -> Answer:
    options |= {"temperature": 0.0 if sampling == "greedy" else 1.0}
    fields: dict[str, Any] = {
        "verifier": VERIFIERS[sampling], "noise": Noise(3), "max_new_tokens": 30, "ahead": overlap,
    }  # fmt: skip
    fields |= {"num_assistant_tokens": n} if drafter else {}
    return new_request(prompt, drafter, options, eos_token_ids=frozenset(eos), **fields)


def run(main: FakeBackend, *requests: Answer) -> None:
    """Answer requests together."""
    queue = RequestQueue(main, RowBudget(32))
    in_threads(lambda request: [*queue.run(request)], requests)


def draft_model(seed: int, noise: float) -> DraftModel:
    backend = FakeBackend(VOCAB_SIZE, seed=seed, noise=noise, memory=MEMORY)
    return DraftModel(backend, context_length=1000, max_num_batched_tokens=32)


@dataclass(frozen=True)
class Situation:
    """A test case: two models, how often they agree, how fast they are, and a request."""

    prompt: list[int]
    seed: int
    n: int
    noise: float
    patience: int
    eos: tuple[int, ...]
    penalty: float
    top_k: int

    def main(self) -> SlowBackend:
        return SlowBackend(VOCAB_SIZE, seed=self.seed, patience=self.patience)

    def model(self) -> DraftModel:
        return draft_model(self.seed, self.noise)

    def request(self, drafter: Any, **options: Any) -> Answer:
        options = {"n": self.n, "eos": self.eos, "presence_penalty": self.penalty, **options}
        if options.get("sampling", "greedy") != "greedy":
            options["top_k"] = self.top_k
        return make_request(self.prompt, drafter, **options)


situations = st.builds(
    Situation,
    prompt=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=70),
    seed=st.integers(0, 2**20),
    n=st.integers(1, 6),
    noise=st.sampled_from([0.0, 0.2, 1.0]),
    patience=st.integers(0, 9),
    eos=st.sampled_from([(), (1,)]),
    penalty=st.sampled_from([0.0, 0.7]),
    top_k=st.integers(0, 2),  # with 1, the next best has no chance
)


@settings(max_examples=150)
@given(situations, st.sampled_from(list(VERIFIERS)))
def test_the_text_and_the_rounds_are_those_without_overlap(situation: Situation, sampling: str) -> None:
    """Drafts that are made ahead equal later ones, so even rejection sampling draws the same tokens."""
    apart = situation.request(situation.model(), sampling=sampling, overlap=False)
    overlapped = situation.request(situation.model(), sampling=sampling)
    run(FakeBackend(VOCAB_SIZE, seed=situation.seed, memory=MEMORY), apart)
    run(situation.main(), overlapped)
    assert overlapped.sequence.token_ids == apart.sequence.token_ids
    assert overlapped.finish_reason == apart.finish_reason
    assert overlapped.stats.num_draft_tokens_per_round == apart.stats.num_draft_tokens_per_round
    assert overlapped.stats.num_accepted_tokens_per_round == apart.stats.num_accepted_tokens_per_round


@pytest.mark.slow
@settings(max_examples=100)
@given(situations, st.sampled_from(["greedy", "coupled"]))
def test_the_controllers_text_is_plain_text(situation: Situation, sampling: str) -> None:
    main, model = situation.main(), situation.model()
    model.cost = cost(0.1, 0.0)
    controller = Controller(main, cost(1.0, situation.n / 100), copier=Suffix(), models={"draft": model})
    plain = situation.request(None, sampling=sampling)
    overlapped = situation.request(model, sampling=sampling, n=15)
    ask(overlapped, policy=controller)
    run(main, plain)
    run(main, overlapped)
    assert overlapped.sequence.token_ids == plain.sequence.token_ids


class Between(FakeBackend):
    """A draft model that is sure of the main model's best tokens, or ranks its second best slightly above them."""

    def __init__(self, *, is_sure: bool) -> None:
        super().__init__(VOCAB_SIZE, memory=MEMORY)
        self.is_sure = is_sure

    def submit(self, chunks: Sequence[Chunk]) -> FakeBackend.Step:
        step = super().submit(chunks)
        for row in [row for rows in step.logits.values() for row in rows]:
            second, best = row.argsort()[-2:]
            row[best] = 50.0
            row[second] = 0.0 if self.is_sure else 50.1
        return step


@pytest.mark.parametrize(
    ("is_sure", "n", "num_calls"),
    [(True, 3, 4), (False, 1, 1), (False, 3, 3)],
    ids=["all is kept, and a token more", "the next best is recovered", "the next best of the first of three is"],
)
def test_a_guess_that_comes_true_leaves_nothing_to_draft(is_sure: bool, n: int, num_calls: int) -> None:
    model = DraftModel(backend := Between(is_sure=is_sure), context_length=1000)
    main = SlowBackend(VOCAB_SIZE, patience=num_calls, watch=lambda: len(backend.calls))
    request = make_request([1, 2], model, n=n)
    run(main, request)
    assert set(request.stats.num_accepted_tokens_per_round[:-1]) == {n if is_sure else 0}
    between = [begin - end for end, begin in zip(main.ends, main.begins[1:], strict=False)]
    assert between[0] == n  # the first draft
    assert set(between[1:-5]) == {0}  # towards the end there is no room for two drafts


def test_a_check_that_is_done_at_once_leaves_no_time() -> None:
    model = draft_model(0, noise=0.0)
    request = make_request([1, 2], model)
    run(SlowBackend(VOCAB_SIZE, patience=0), request)
    apart = draft_model(0, noise=0.0)
    run(FakeBackend(VOCAB_SIZE, memory=MEMORY), make_request([1, 2], apart, overlap=False))
    assert model.backend.calls == apart.backend.calls  # type: ignore[attr-defined]


def test_requests_overlap_together() -> None:
    prompts = [[1, 2], [3], [4, 5, 1]]
    plain = [make_request(prompt, None) for prompt in prompts]
    model = draft_model(0, noise=0.3)
    overlapped = [make_request(prompt, model) for prompt in prompts]
    run(FakeBackend(VOCAB_SIZE, memory=MEMORY), *plain)
    run(SlowBackend(VOCAB_SIZE, patience=3), *overlapped)
    for one, other in zip(plain, overlapped, strict=True):
        assert one.sequence.token_ids == other.sequence.token_ids


def test_a_draft_model_that_fails_ahead_ends_its_requests_alone() -> None:
    class Breaks(FakeBackend):
        def submit(self, chunks: Sequence[Chunk]) -> FakeBackend.Step:
            if len(self.calls) == 5:
                raise DeviceError("it broke")
            return super().submit(chunks)

    broken = make_request([1, 2], DraftModel(Breaks(VOCAB_SIZE), context_length=1000))
    plain, alone = make_request([3], None), make_request([3], None)
    main = SlowBackend(VOCAB_SIZE, patience=9)
    queue = RequestQueue(main, RowBudget(32))
    with pytest.raises(DeviceError, match="it broke"):
        [*queue.run(broken)]
    run(main, plain)
    run(FakeBackend(VOCAB_SIZE, memory=MEMORY), alone)
    assert plain.sequence.token_ids == alone.sequence.token_ids


# --- stopping ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gone", [False, True])
def test_a_draft_ends_between_two_calls_where_its_answer_is_cancelled(gone: bool) -> None:
    """A draft of many tokens by a slow device would take seconds; another answer in the same call goes on."""
    stop = threading.Event()

    class Slow(FakeBackend):
        def submit(self, chunks: Sequence[Chunk]) -> FakeBackend.Step:
            if len(self.calls) == 4:
                stop.set()
                stopped.delivery.abandoned = gone
            return super().submit(chunks)

    draft, main = Slow(VOCAB_SIZE, memory=MEMORY), FakeBackend(VOCAB_SIZE, memory=MEMORY)
    model = DraftModel(draft, context_length=1000)
    fields: dict[str, Any] = {"num_assistant_tokens": 16, "max_new_tokens": 40}
    stopped = new_request([1, 2], model, cancel=None if gone else stop, **fields)
    other, alone = new_request([3], model, **fields), new_request([3], None, max_new_tokens=40)
    found, _ = run_in_loop(main, stopped, other)
    assert stopped.finish_reason == "cancelled"
    assert found[:-1] == [1, 2]  # and the first token, of the round that read the prompt
    assert [len(call) for call in draft.calls[:7]] == [2, 2, 2, 2, 2, 1, 1]  # the call that ran, and none after it
    assert other.sequence.token_ids == run_in_loop(FakeBackend(VOCAB_SIZE, memory=MEMORY), alone)[0]


def test_nothing_is_checked_after_a_cancelled_draft() -> None:
    stop = threading.Event()

    class Slow(FakeBackend):
        def submit(self, chunks: Sequence[Chunk]) -> FakeBackend.Step:
            if len(self.calls) == 2:
                stop.set()
            return super().submit(chunks)

    draft, main = Slow(VOCAB_SIZE, memory=MEMORY), FakeBackend(VOCAB_SIZE, memory=MEMORY)
    request = new_request([1, 2], DraftModel(draft, context_length=1000), cancel=stop, num_assistant_tokens=16)
    run_in_loop(main, request)
    assert (request.finish_reason, len(draft.calls), len(main.calls)) == ("cancelled", 3, 1)  # one read the prompt


# --- whether it pays ---------------------------------------------------------------------------------------------


def cost(base: float, row: float) -> CallCost:
    return CallCost((1, 16), (base + row, base + 16 * row), (base + row, base + 16 * row))


def test_it_pays_where_devices_share_nothing_and_not_where_they_share_all() -> None:
    main, draft = cost(1.0, 0.01), cost(0.3, 0.01)
    assert pays(main, draft, Contention(1.0, 1.0))
    assert not pays(main, draft, Contention(2.0, 2.0))
    assert not pays(main, cost(3.0, 0.01), Contention(1.0, 1.0))  # a draft model that never pays


def test_drafting_ahead_hides_a_draft_that_is_always_right() -> None:
    """The round waits for half a call of the draft model."""
    main, draft = cost(0.040, 0.0), cost(0.002, 0.0)
    assert rate(main, draft, 15, 1.0, Contention(1.0, 1.0)) == pytest.approx(16 / 0.041)
    assert rate(main, draft, 15, 1.0) == pytest.approx(16 / 0.070)


@pytest.mark.every_format
def test_measuring_contention_leaves_no_trace(toy_bundle: Bundle) -> None:
    engine = load_toy(toy_bundle)
    before = engine.generate("abc", max_new_tokens=20, drafter="draft")
    engine.settle()
    engine.loaded["main"].contention_with(engine.loaded["draft"])
    for backend in (engine.main, engine.find_drafter("draft").backend):  # type: ignore[attr-defined]
        slot = backend.open(backend.max_tokens)
        assert slot, "the places are free again"
        slot.close()
    assert engine.generate("abc", max_new_tokens=20, drafter="draft").token_ids == before.token_ids


def test_a_model_that_ran_in_the_background_can_go(openvino_bundle: Bundle) -> None:
    """A callback that held the backend would keep the model in memory for ever."""
    backend = OpenVINOPaged(openvino_bundle.model_path(openvino_bundle.manifest.main), vocab_size=9)
    backend.run_in_background(True)
    gone = weakref.ref(backend)
    del backend
    gc.collect()
    assert gone() is None


# --- the engine ----------------------------------------------------------------------------------------------------


@pytest.mark.every_format
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 4}])
def test_an_engine_that_overlaps_gives_plain_text(
    toy_bundle: Bundle, sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load_toy(toy_bundle, overlap=True)
    assert engine.overlaps
    options = {"max_new_tokens": 40, "ignore_eos": True, **sampling}
    plain = engine.generate("abc abc", drafter=None, **options)
    for n in (1, 3, "auto"):
        result = engine.generate("abc abc", drafter="draft", num_assistant_tokens=n, **options)
        assert result.token_ids == plain.token_ids
    for pending in (PagedPending, BufferPending):
        monkeypatch.setattr(pending, "done", False)  # a toy's target pass may be done before anything is drafted
    result = engine.generate("abc abc", drafter="draft", num_assistant_tokens=3, **options)
    assert result.stats.ahead_seconds > 0
    assert result.token_ids == plain.token_ids


def test_models_on_one_device_overlap_only_if_that_is_wanted(
    openvino_bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "measure_contention", lambda *_: pytest.fail("nothing is measured"))
    assert not load_toy(openvino_bundle).overlaps


def test_overlap_needs_a_draft_model(toy_bundle: Bundle) -> None:
    config = outrider.Config().replace(cache_size=0.005, overlap=True, drafter="ngram")
    with pytest.raises(OptionError, match="overlap=True needs a draft model, and none is loaded"):
        outrider.Engine(toy_bundle, config, tokenizer=ToyTokenizer())


def test_a_call_that_failed_is_over() -> None:
    """It is done; its error is raised by `wait`."""

    class Request:
        def wait_for(self, milliseconds: int) -> bool:
            raise RuntimeError("[CPU] MatMul: shapes do not fit")

    request: Any = Request()
    assert InferCalls(request, GraphState("CPU")).is_idle
