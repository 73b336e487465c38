"""The loop's promises, for any model, drafter, draft length, batch and end of the answer."""

import _thread
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from in_the_loop import finish, request_with
from outrider.decoding.answer import Answer
from outrider.decoding.request_queue import RequestQueue
from outrider.decoding.row_budget import RowBudget
from outrider.drafters import DraftModel, Ngram, References, Suffix
from outrider.errors import RequestError
from outrider.testing import FakeBackend
from outrider.types import NO_PROMPT, Committed, Draft, Drafter, DraftRequest, TokenSequence
from outrider_bench.modes.ours import Shuffled
from serving import wait_until
from toys import in_threads

VOCAB_SIZE = 6
SEED = st.integers(0, 2**20)


def draft_model(backend: FakeBackend, context_length: int = 1000) -> DraftModel:
    return DraftModel(backend, context_length=context_length, max_num_batched_tokens=32)


def drafter_of(kind: str, seed: int, noise: float) -> Drafter:
    if kind == "ngram":
        return Ngram(max_ngram_size=2)
    if kind == "suffix":
        rng = np.random.default_rng(seed)
        return Suffix([References(rng.integers(VOCAB_SIZE, size=(5, 40)).tolist())] if noise else (), min_chance=0)
    if kind == "draft":
        return draft_model(FakeBackend(VOCAB_SIZE, seed=seed, noise=noise))
    if kind == "shuffled":
        return Shuffled([drafter_of(each, seed, noise) for each in ("ngram", "suffix", "draft", "random")], seed)
    return RandomDrafter(seed)


class RandomDrafter(Drafter):
    """Proposes any number of any tokens, within the limit."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.open: set[int] = set()

    def reserve(self, sequence: TokenSequence, max_tokens: int, num_cached: int) -> bool:
        self.open.add(id(sequence))
        return True

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        assert all(id(request.sequence) in self.open for request in requests)
        return [
            Draft(self.rng.integers(VOCAB_SIZE, size=self.rng.integers(request.limit + 1)).tolist())
            for request in requests
        ]

    def release(self, sequence: TokenSequence) -> None:
        self.open.discard(id(sequence))


requests = st.fixed_dictionaries(
    {
        "prompt": st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=80),
        "max_new_tokens": st.integers(1, 40),
        "eos": st.sets(st.integers(0, VOCAB_SIZE - 1), max_size=1),
        "stop": st.lists(st.text("abcdef", min_size=1, max_size=3), max_size=2),
        "repetition_penalty": st.sampled_from([1.0, 1.5]),
        "presence_penalty": st.sampled_from([0.0, 0.7]),
        "frequency_penalty": st.sampled_from([0.0, 0.4]),
    }
)
drafters = st.tuples(
    st.sampled_from(["ngram", "suffix", "draft", "random", "shuffled"]), SEED, st.sampled_from([0.0, 0.5, 2.0])
)


samplings: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.just({}),
    st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.3, 1.0, 3.0]),
            "seed": st.integers(0, 5),
            "top_k": st.sampled_from([0, 3]),
            "top_p": st.sampled_from([1.0, 0.8]),
        }
    ),
)


@settings(max_examples=200)
@given(SEED, requests, samplings, drafters, st.integers(1, 9), st.sampled_from([32, 64, 512]))
def test_greedy_and_coupled_text_is_plain_text(
    seed: int,
    options: dict[str, Any],
    sampling: dict[str, Any],
    drafter: tuple[str, int, float],
    n: int,
    batched: int,
) -> None:
    options = options | sampling
    plain = finish(FakeBackend(VOCAB_SIZE, seed=seed), request_with(**options))
    made = drafter_of(drafter[0], seed, drafter[2])
    backend = FakeBackend(VOCAB_SIZE, seed=seed)
    request = finish(backend, request_with(drafter=made, n=n, **options), batched)

    assert request.sequence.token_ids == plain.sequence.token_ids
    assert request.result().text == plain.result().text
    assert request.result().token_ids == plain.result().token_ids
    assert request.finish_reason == plain.finish_reason
    check_bookkeeping(request, backend)
    check_bookkeeping(plain, None)


@settings(max_examples=60)
@given(SEED, st.lists(st.tuples(requests, samplings, drafters, st.integers(1, 6)), min_size=2, max_size=4))
def test_a_batch_gives_what_each_request_gives_alone(seed: int, batch: list[Any]) -> None:
    """Requests in threads of their own share the main model's calls and their draft model's."""
    queue = RequestQueue(FakeBackend(VOCAB_SIZE, seed=seed), RowBudget(64))
    shared = draft_model(FakeBackend(VOCAB_SIZE, seed=seed, noise=0.5))
    together = []
    for options, sampling, drafter, n in batch:
        made = shared if drafter[0] == "draft" else drafter_of(*drafter)
        together.append(request_with(drafter=made, n=n, **options, **sampling))
    in_threads(lambda request: finish(queue, request), together)
    for request, (options, sampling, _, _) in zip(together, batch, strict=True):
        alone = finish(FakeBackend(VOCAB_SIZE, seed=seed), request_with(**options, **sampling))
        assert request.result().token_ids == alone.result().token_ids
        check_bookkeeping(request, None)


@settings(max_examples=100)
@given(SEED, requests, drafters, st.integers(1, 6), st.floats(0.1, 2.0))
def test_rejection_sampling_ends_and_counts_as_it_should(
    seed: int, options: dict[str, Any], drafter: tuple[str, int, float], n: int, temperature: float
) -> None:
    backend = FakeBackend(VOCAB_SIZE, seed=seed)
    made = drafter_of(drafter[0], seed, drafter[2])
    request = request_with(drafter=made, n=n, temperature=temperature, seed=seed, sampling="rejection", **options)
    check_bookkeeping(finish(backend, request, 64), backend)


def check_bookkeeping(request: Answer, backend: FakeBackend | None) -> None:
    """Check that no token after the end is committed or counted, and that the counts agree."""
    stats, generated = request.stats, request.sequence.generated_token_ids
    assert len(generated) == stats.num_generated_tokens <= request.request.max_new_tokens
    ends = [i for i, token_id in enumerate(generated) if token_id in request.request.eos_token_ids]
    if request.finish_reason == "stop":
        assert request.delivery.text.stopped or ends == [len(generated) - 1]
    else:
        assert request.finish_reason == "length"
        assert len(generated) == request.request.max_new_tokens
        assert not ends
    assert stats.num_accepted_tokens == sum(stats.num_accepted_tokens_per_position) <= stats.num_draft_tokens
    # Every round yields one token more than it accepts, but for the one that ended inside its draft.
    assert generated == [] or stats.num_rounds + stats.num_accepted_tokens - len(generated) + 1 in (0, 1)
    assert request.slot.length <= len(request.sequence) - 1
    if backend:
        num_prompt_calls = len(backend.calls) - stats.num_rounds
        assert sum(map(sum, backend.calls[:num_prompt_calls])) == request.sequence.num_prompt_tokens


def test_a_prompt_is_read_in_pieces_and_asks_for_one_row() -> None:
    backend = FakeBackend(VOCAB_SIZE)
    finish(backend, request_with([1] * 100, max_new_tokens=1), 32)
    assert backend.calls == [[32], [32], [32], [4]]


def test_nothing_is_drafted_past_max_new_tokens() -> None:
    """The bonus token is always there, so the last token is never drafted."""
    draft = FakeBackend(VOCAB_SIZE)
    backend = FakeBackend(VOCAB_SIZE)
    finish(backend, request_with([1, 2], draft_model(draft), max_new_tokens=4, n=8), 32)
    assert backend.calls == [[2], [3]]  # the first token; then two drafts, accepted, and the bonus
    assert len(draft.calls) == 2


def test_a_draft_model_that_is_always_right_is_read_once() -> None:
    """After an accepted draft it reads its own last token and the bonus token. It reads no token twice."""
    draft = FakeBackend(VOCAB_SIZE, seed=3)
    backend = FakeBackend(VOCAB_SIZE, seed=3)
    request = finish(backend, request_with([1, 2], draft_model(draft), max_new_tokens=13, n=3))
    assert request.stats.acceptance_rate == 1
    assert draft.calls == [[3], [1], [1], [2], [1], [1], [2], [1], [1]]
    assert backend.calls == [[2], [4], [4], [4]]


def test_a_draft_model_reads_a_long_prompt_piece_by_piece() -> None:
    """It reads one piece per round, so that other requests do not wait. Until all is read, its drafts are empty."""
    draft, backend = FakeBackend(VOCAB_SIZE, seed=3), FakeBackend(VOCAB_SIZE, seed=3)
    finish(backend, request_with([1] * 70, draft_model(draft), max_new_tokens=9, n=3))
    assert draft.calls == [[32], [32], [9], [1], [1], [2]]
    assert backend.calls == [[70], [1], [1], [4], [2]]


def test_nothing_is_drafted_after_an_end() -> None:
    plain = finish(FakeBackend(VOCAB_SIZE, seed=3), request_with([1, 2], max_new_tokens=20))
    token_ids = plain.sequence.generated_token_ids
    end = next(i for i in range(2, 20) if token_ids[i] not in token_ids[:i])
    draft, backend = FakeBackend(VOCAB_SIZE, seed=3), FakeBackend(VOCAB_SIZE, seed=3)
    request = request_with([1, 2], draft_model(draft), max_new_tokens=20, n=12, eos={token_ids[end]})
    finish(backend, request)
    assert request.sequence.generated_token_ids == token_ids[: end + 1]
    assert len(draft.calls) == end  # all but the first token, and none behind the end
    assert request.stats.num_draft_tokens == end


def test_a_reader_that_pauses_is_waited_for() -> None:
    """The worker goes some rounds ahead, and then waits until the reader comes back."""
    backend = FakeBackend(VOCAB_SIZE)
    queue = RequestQueue(backend, RowBudget(512))
    stream = queue.run(request_with([1], max_new_tokens=100))
    text = next(stream).text
    num_calls = -1
    while num_calls != len(backend.calls):
        num_calls = len(backend.calls)
        time.sleep(0.1)
    assert num_calls < 20
    text += "".join(chunk.text for chunk in stream)
    assert len(text) == 100


@pytest.mark.parametrize("at_call", range(1, 9))
@pytest.mark.parametrize("error", [None, KeyError("no flag")])
def test_an_answer_that_is_cancelled_at_any_moment_ends(at_call: int, error: Exception | None) -> None:
    class Cancel(threading.Event):
        num_calls = 0

        def is_set(self) -> bool:
            self.num_calls += 1
            if self.num_calls >= at_call and error:
                raise error
            return self.num_calls >= at_call

    request = request_with([1], max_new_tokens=1000)
    request.delivery.cancel = Cancel()
    ended, said = list[object](), list[str]()

    def read() -> None:
        try:
            ended.append(finish(FakeBackend(VOCAB_SIZE), request).finish_reason)
        except RequestError as caught:
            ended.append(caught.__cause__)
            said.append(str(caught))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(timeout=300)
    assert ended == [error or "cancelled"]
    assert not error or said[0].startswith("cancel.is_set(), of a Cancel, raised")


def test_interrupts_at_any_time_harm_no_other_request() -> None:
    """After each of a hundred Ctrl-C at random times, requests get their text, and every slot is released."""
    backend = FakeBackend(VOCAB_SIZE, seed=1)
    drafter = draft_model(FakeBackend(VOCAB_SIZE, seed=1, noise=0.5))
    queue = RequestQueue(backend, RowBudget(512))
    alone = finish(FakeBackend(VOCAB_SIZE, seed=1), request_with([1, 2, 3], max_new_tokens=20))
    slots: list[Any] = []
    open_slot = backend.open

    def remember(max_tokens: int, prompt: Any = NO_PROMPT) -> Any:
        slots.append(open_slot(max_tokens, prompt))
        return slots[-1]

    backend.open = remember  # type: ignore[method-assign]
    interrupted = 0
    for delay in np.random.default_rng(0).uniform(1e-5, 8e-3, 100):
        timer = threading.Timer(delay, _thread.interrupt_main)
        try:
            timer.start()
            finish(queue, request_with([4], drafter, max_new_tokens=25))
            timer.join()
            time.sleep(0.001)  # it may be on its way
        except KeyboardInterrupt:
            interrupted += 1
        calm = finish(queue, request_with([1, 2, 3], drafter, max_new_tokens=20))
        assert calm.sequence.token_ids == alone.sequence.token_ids
    assert interrupted > 10
    assert all(slot.closed for slot in slots)


class Listening(RandomDrafter):
    """A drafter that records what it observes, and the sequence at that time. Some of its drafts are right."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.heard: list[Committed] = []
        self.lengths: list[int] = []
        self.drafts: list[Draft] = []

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        drafts = super().propose(requests)
        self.drafts.extend(drafts)
        return drafts

    def observe(self, sequence: TokenSequence, committed: Committed) -> None:
        self.heard.append(committed)
        self.lengths.append(len(sequence))


@given(SEED, st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=80), st.sampled_from([(), (1,)]))
def test_a_drafter_hears_all_that_was_read_after_the_commit(seed: int, prompt: list[int], eos: tuple[int, ...]) -> None:
    drafter = Listening(seed)
    queue = RequestQueue(FakeBackend(VOCAB_SIZE, seed=seed, memory=1), RowBudget(32))
    request = finish(queue, request_with(prompt, drafter, eos=set(eos), n=4, max_new_tokens=40))
    token_ids = request.sequence.token_ids
    assert [token_id for committed in drafter.heard for token_id in committed.token_ids] == token_ids[:-1]
    rounds = [
        committed for committed, length in zip(drafter.heard, drafter.lengths, strict=True) if length > len(prompt)
    ]
    assert drafter.lengths[-1] == len(token_ids)
    assert len(drafter.heard) - len(rounds) == (len(prompt) - 1) // 32
    assert [len(committed.path) for committed in rounds[1:-1]] == request.stats.num_accepted_tokens_per_round[:-1]
    num_read = 0
    for committed, length in zip(drafter.heard, drafter.lengths, strict=True):
        num_read += len(committed.token_ids)
        assert length == (num_read + 1 if length > len(prompt) else len(prompt))
    assert 0 <= len(rounds) - 1 - len(drafter.drafts) <= 1  # the last token is never drafted
    for committed, draft in zip(rounds[1:], drafter.drafts, strict=False):
        accepted = [draft.token_ids[i] for i in committed.path]
        assert committed.token_ids[1:] == accepted[: len(committed.token_ids) - 1]


class Narrow(FakeBackend):
    """Has room for one sequence."""

    def __init__(self, **options: Any) -> None:
        super().__init__(VOCAB_SIZE, **options)
        self.slots: list[Any] = []
        self.num_asked = 0

    def open(self, max_tokens: int, prompt: Any = NO_PROMPT) -> Any:
        self.num_asked += 1
        if any(not slot.closed for slot in self.slots):
            return None
        self.slots.append(super().open(max_tokens, prompt))
        return self.slots[-1]


def test_a_request_without_room_waits_and_moves_the_others_along() -> None:
    """In one thread, too: the second stream begins before the first one is read to its end."""
    queue = RequestQueue(backend := Narrow(), RowBudget(512))
    first, second = request_with([1], max_new_tokens=20), request_with([2], max_new_tokens=20)
    stream = queue.run(first)
    begun = next(stream).text
    finish(queue, second)
    assert second.finish_reason == "length"
    assert backend.num_asked == 3, "it is asked for room again when the first has ended, not in each round"
    assert begun + "".join(chunk.text for chunk in stream) == first.result().text
    alone = finish(Narrow(), request_with([1], max_new_tokens=20))
    assert first.sequence.token_ids == alone.sequence.token_ids


def test_the_worker_ends_with_its_queue() -> None:
    before = {*threading.enumerate()}  # other tests' threads may end meanwhile
    queue = RequestQueue(FakeBackend(VOCAB_SIZE), RowBudget(512))
    finish(queue, request_with([1], max_new_tokens=5))
    stream = queue.run(request_with([1], max_new_tokens=500))
    next(stream)
    (worker,) = {*threading.enumerate()} - before
    del queue, stream
    wait_until(lambda: not worker.is_alive(), 60)


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_an_error(broken: float) -> None:
    class Broken(FakeBackend):
        def logits_after(self, token_ids: Sequence[int]) -> Any:
            return np.where(np.arange(VOCAB_SIZE) == 2, broken, super().logits_after(token_ids)).astype(np.float32)

    for temperature in (0.0, 1.0):
        with pytest.raises(Exception, match=r"not finite \((nan|inf) for token 2\)"):
            finish(Broken(VOCAB_SIZE), request_with([1], temperature=temperature))
