"""What each backend's slots do, the fake's as well: the contract of `types.Slot`."""

from typing import Any

import numpy as np
import pytest

from hybrids import save_hybrid
from outrider.bundle import Format
from outrider.config import DeviceConfig
from outrider.models.part import Part
from outrider.models.settled import compile_settled
from outrider.testing import FakeBackend, save_toy_bundle
from outrider.types import NO_PROMPT, Chunk, Prompt
from toys import random_ids

TEXT = random_ids(1, 90)


@pytest.fixture(scope="module", params=["fake", "openvino", "onnx", "conv", "gdn", "ssm"])
def backend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    if request.param == "fake":
        return FakeBackend(40, memory=6)
    folder = tmp_path_factory.mktemp(request.param) / "bundle"
    if request.param in ("openvino", "onnx"):
        form: Format = request.param
        bundle = save_toy_bundle(folder, draft=False, padded=False, formats=(form, form))
    else:
        bundle = save_hybrid(folder, request.param)
    made = compile_settled(Part("main", bundle, bundle.manifest.main), "CPU", DeviceConfig())
    made.allocate(4096)
    return made


def opened(backend: Any, num_prompt: int = 40, prompt: Prompt = NO_PROMPT) -> Any:
    """A slot that has read the beginning of TEXT."""
    slot = backend.open(200, prompt)
    if slot.length < num_prompt:
        backend.submit([Chunk(slot, TEXT[slot.length : num_prompt], 0)]).wait()
    return slot


def ends(backend: Any, slot: Any) -> bytes:
    """The rows of the rest of TEXT, which a slot reads as an answer."""
    rest = TEXT[slot.length :]
    step = backend.submit([Chunk(slot, rest, 3, generated=True)]).wait()
    return b"".join(step.row(i).full().tobytes() for i in range(3))


@pytest.fixture(scope="module")
def expected(backend: Any) -> bytes:
    slot = opened(backend)
    found = ends(backend, slot)
    slot.close()
    return found


def test_a_slot_goes_back_to_each_token_of_an_answer(backend: Any, expected: bytes) -> None:
    """And to where its last call began: exactly there."""
    for kept in range(9):
        slot = opened(backend)
        wrong = [(token_id + 1) % 39 for token_id in TEXT[40 + kept : 48]]
        backend.submit([Chunk(slot, [*TEXT[40 : 40 + kept], *wrong], 8, generated=True)]).wait()
        slot.trim(100)  # no effect on a shorter slot
        assert slot.length == 48
        slot.trim(40 + kept)
        assert slot.length == 40 + kept
        assert ends(backend, slot) == expected
        slot.close()
        slot.close()


def test_a_slot_goes_back_through_several_calls(backend: Any, expected: bytes) -> None:
    """As a draft model's does, token by token: to any length since it was trimmed last."""
    for kept in range(6):
        slot = opened(backend)
        for i in range(6):
            right = TEXT[40 + i] if i < kept else 38 - TEXT[40 + i]
            backend.submit([Chunk(slot, [right], 1, generated=True)]).wait()
        slot.trim(40 + kept)
        assert slot.length == 40 + kept
        backend.submit([Chunk(slot, TEXT[slot.length : 50], 1, generated=True)]).wait()
        slot.trim(45)  # within the round
        assert slot.length == 45
        assert ends(backend, slot) == expected
        slot.close()


def test_any_length_is_read_on_with_the_same_rows(backend: Any, expected: bytes) -> None:
    """A slot may go back further than it was asked to; what it says is its length is."""
    rng = np.random.default_rng(3)
    slot = opened(backend)
    for _ in range(12):
        count = int(rng.integers(1, 6))
        backend.submit([Chunk(slot, random_ids(int(rng.integers(99)), count), 1, generated=True)]).wait()
        asked = int(rng.integers(41, 50))
        slot.trim(40)
        backend.submit([Chunk(slot, TEXT[40:asked], 1, generated=True)]).wait()
        slot.trim(int(rng.integers(40, asked + 1)))
        assert 40 <= slot.length <= asked
    assert ends(backend, slot) == expected
    slot.close()


def test_a_published_prompt_is_found_in_front_of_its_last_token(backend: Any, expected: bytes) -> None:
    """By the same prompt, and once it has been read, by one that goes on."""
    slot = backend.open(200, Prompt(TEXT[:40]))
    while slot.length < 40:
        backend.submit([Chunk(slot, TEXT[slot.length : 40], 1)]).wait()
    slot.publish(TEXT[:40])
    slot.close()
    for text in (TEXT[:40], TEXT):
        slot = opened(backend, 40, Prompt(text))
        assert ends(backend, slot) == expected
        slot.close()
    slot = backend.open(200, Prompt(TEXT[:40]))
    assert slot.length == 39
    slot.close()
    backend.clear_prefixes()


def test_a_branch_is_kept(backend: Any, expected: bytes) -> None:
    if not backend.capabilities.trees:
        pytest.skip("it evaluates chains only")
    for branch in range(3):
        slot = opened(backend)
        assert slot.fork(2, 5) == 2
        token_ids, parents = [TEXT[40]], [-1]
        for number in range(3):
            for depth in range(3):
                parents.append(len(token_ids) - 1 if depth else 0)
                token_ids.append(TEXT[41 + depth] if number == branch else (TEXT[41 + depth] + 1 + number) % 39)
        backend.submit([Chunk(slot, token_ids, 10, parents=parents, generated=True)]).wait()
        slot.keep([0, *range(1 + 3 * branch, 1 + 3 * branch + 2)])
        assert slot.length == 43
        slot.trim(42)
        assert slot.length == 42
        assert ends(backend, slot) == expected
        slot.close()
