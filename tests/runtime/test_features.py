"""Drafters that ask for hidden states get those of the committed tokens."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import outrider
from in_the_loop import ask, new_request, run
from outrider.decoding.answer import Answer
from outrider.decoding.slots import admit
from outrider.errors import BundleError, RequestError
from outrider.testing import FakeBackend
from outrider.tokens.verifiers import Threshold
from outrider.types import Chunk, Committed, Draft, Drafter, DraftRequest, Requirements, TokenSequence
from toys import load_toy

pytestmark = pytest.mark.any_format

VOCAB_SIZE = 6
NAMES = ("late", "early")


class Reading(Drafter):
    """A drafter that is right about half of the time, and records the hidden states that it is given."""

    def __init__(self, main: FakeBackend, requirements: Requirements) -> None:
        self.main, self.requirements = main, requirements
        self.begins: dict[TokenSequence, int] = {}
        self.rows: dict[TokenSequence, list[Any]] = {}
        self.token_ids: dict[TokenSequence, list[int]] = {}

    def reserve(self, sequence: TokenSequence, max_tokens: int, num_cached: int) -> bool:
        self.begins[sequence], self.rows[sequence], self.token_ids[sequence] = num_cached, [], []
        return True

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [self.propose_one(request) for request in requests]

    def propose_one(self, request: DraftRequest) -> Draft:
        context = list(request.sequence.token_ids)
        for i in range(request.limit):
            right = int(self.main.logits_after(context).argmax())
            context.append(right if (len(context) + i) % 4 else (right + 1) % VOCAB_SIZE)
        return Draft(context[len(request.sequence) :])

    def observe(self, sequence: TokenSequence, committed: Committed) -> None:
        self.token_ids[sequence] += committed.token_ids
        if self.requirements.features:
            assert committed.features is not None
            assert committed.features.dtype == np.float32
            assert committed.features.shape == (len(committed.token_ids), len(self.requirements.features) * 4)
            self.rows[sequence] += list(committed.features)
        else:
            assert committed.features is None


def check(request: Answer, drafter: Reading) -> None:
    """Check that a drafter got the states of all tokens from `begin` on, except the newest, which is not read yet."""
    token_ids, begin = request.sequence.token_ids, drafter.begins[request.sequence]
    names, features_after = drafter.requirements.features, drafter.main.features_after
    assert drafter.token_ids[request.sequence] == token_ids[begin:-1]
    expected = [
        np.concatenate([features_after(token_ids[: i + 1], name) for name in names])
        for i in range(begin, len(token_ids) - 1)
    ]
    np.testing.assert_array_equal(drafter.rows[request.sequence], expected)


prompts = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=90)


@settings(max_examples=50)
@given(st.integers(0, 2**20), prompts, prompts, st.sampled_from([NAMES, NAMES[:1]]))
def test_each_row_is_of_its_token(seed: int, prompt: list[int], other: list[int], names: tuple[str, ...]) -> None:
    """Also for prompts that are read in pieces, and beside requests for other hidden states, or none."""
    main = FakeBackend(VOCAB_SIZE, seed=seed, features=NAMES)
    reading, beside, none = (Reading(main, Requirements(each)) for each in (names, NAMES[1:], ()))
    requests = [new_request(prompt, reading), new_request(other, beside), new_request([*other, 3], none)]
    run(main, *requests, new_request(prompt, None))
    assert requests[0].stats.num_accepted_tokens > 0
    check(requests[0], reading)
    check(requests[1], beside)
    assert not none.rows[requests[2].sequence]


def test_what_was_found_in_the_cache_has_none() -> None:
    """The main model does not read cached tokens, so they have no states. The drafter is told where states begin."""
    main = FakeBackend(VOCAB_SIZE, features=NAMES)
    reading = Reading(main, Requirements(NAMES))
    first = new_request([1, 2, 3] * 20, reading)
    run(main, first)
    second = new_request([*first.sequence.token_ids, 4, 5], reading)
    run(main, second)
    assert reading.begins[first.sequence] == 0
    assert reading.begins[second.sequence] == len(first.sequence) - 1 == second.stats.num_cached_tokens
    check(second, reading)


def test_a_drafter_that_needs_trees_is_refused_by_a_verifier_of_chains() -> None:
    main = FakeBackend(VOCAB_SIZE)
    request = new_request([1], Reading(main, Requirements(trees=True)))
    assert admit(request, main)
    ask(request, verifier=Threshold())
    with pytest.raises(RequestError, match="needs drafts to be verified as trees, and Threshold verifies chains only"):
        admit(request, main)


@pytest.mark.parametrize("kind", ["openvino", "onnx"])
def test_steps_without_hidden_states_say_so(kind: Any, tmp_path: Any) -> None:
    bundle = outrider.testing.save_toy_bundle(tmp_path / "toy", formats=(kind, kind))
    engine = load_toy(bundle)
    assert engine.main.capabilities.features == ()
    slot = engine.main.open(4)
    chunk = Chunk(slot, [1, 2], 1, features=("late",))
    with pytest.raises(BundleError, match=r"Hidden states were asked for \('late'\), and the model has no output but"):
        engine.main.submit([chunk]).wait().features(chunk)
