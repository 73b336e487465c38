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
from in_the_loop import new_request
from in_the_loop import run as run_in_loop
from outrider.bundle import Bundle
from outrider.decoding.answer import Answer
from outrider.decoding.request_queue import RequestQueue
from outrider.decoding.row_budget import RowBudget
from outrider.drafters import DraftModel
from outrider.errors import OptionError
from outrider.models.backends.common import BufferPending
from outrider.models.backends.openvino_paged import OpenVINOPaged
from outrider.models.backends.paged_step import PagedPending
from outrider.models.cost.table import CallCost
from outrider.models.tuning.measure.overlap import Contention, pays
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


# --- whether it pays ---------------------------------------------------------------------------------------------


def cost(base: float, row: float) -> CallCost:
    return CallCost((1, 16), (base + row, base + 16 * row), (base + row, base + 16 * row))


def test_it_pays_where_devices_share_nothing_and_not_where_they_share_all() -> None:
    main, draft = cost(1.0, 0.01), cost(0.3, 0.01)
    assert pays(main, draft, Contention(1.0, 1.0))
    assert not pays(main, draft, Contention(2.0, 2.0))
    assert not pays(main, cost(3.0, 0.01), Contention(1.0, 1.0))  # a draft model that never pays


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


def test_overlap_needs_a_draft_model(toy_bundle: Bundle) -> None:
    config = outrider.Config().replace(cache_size=0.005, overlap=True, drafter="ngram")
    with pytest.raises(OptionError, match="overlap=True needs a draft model, and none is loaded"):
        outrider.Engine(toy_bundle, config, tokenizer=ToyTokenizer())
