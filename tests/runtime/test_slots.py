"""What each backend's slots do, the fake's as well: the contract of `types.Slot`."""

from typing import Any

import numpy as np
import pytest

from calls import rows_of_call
from hybrids import save_hybrid
from outrider.bundle import Format
from outrider.models.tuning.loading import compile_settled
from outrider.models.tuning.model_spec import ModelSpec
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
    _, made = compile_settled(ModelSpec("main", bundle, bundle.manifest.main))
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
    return rows_of_call(backend, Chunk(slot, TEXT[slot.length :], 3, generated=True)).tobytes()


@pytest.fixture(scope="module")
def expected(backend: Any) -> bytes:
    slot = opened(backend)
    found = ends(backend, slot)
    slot.close()
    return found


@pytest.mark.fast_cases(2)
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


@pytest.mark.parametrize("length", [63, 64, 65])
def test_a_turn_goes_on_where_the_last_one_ended(backend: Any, length: int) -> None:
    """Also at the end of a block."""
    slot = opened(backend)
    backend.submit([Chunk(slot, TEXT[40:length], 1)]).wait()
    for _ in range(2):  # at the prompt's end, and at the answer's
        slot.publish(TEXT[:length])
    slot.close()
    slot = backend.open(200, Prompt([*TEXT[:length], 1]))
    assert slot.length == length
    slot.close()
    backend.clear_prefixes()


def test_a_branch_is_kept(backend: Any, expected: bytes) -> None:
    if not backend.capabilities.trees:
        pytest.skip("it evaluates chains only")
    for branch in range(3):
        slot = opened(backend)
        assert slot.fork(2, 5) == 2
        token_ids, parents = [TEXT[40]], list[int]()
        for number in range(3):
            for depth in range(3):
                parents.append(len(parents) - 1 if depth else -1)
                token_ids.append(TEXT[41 + depth] if number == branch else (TEXT[41 + depth] + 1 + number) % 39)
        backend.submit([Chunk(slot, token_ids, 10, parents=parents, generated=True)]).wait()
        slot.keep(range(3 * branch, 3 * branch + 2))
        assert slot.length == 43
        slot.trim(42)
        assert slot.length == 42
        assert ends(backend, slot) == expected
        slot.close()


class Checked:
    """Sequences on a backend with a small cache, each compared with a fresh reading of what was kept of it."""

    def __init__(self, backend: Any, seed: int) -> None:
        self.backend, self.rng = backend, np.random.default_rng(seed)
        self.beginnings = [random_ids(n, n) for n in (33, 70, 100)]
        self.open: list[tuple[Any, list[int], int]] = []  # a slot, its text, and how much of that is a prompt
        self.num_hits = self.num_short = 0

    def random_ids(self, count: int) -> list[int]:
        return [int(token_id) for token_id in self.rng.integers(0, 39, count)]

    def fresh(self, text: list[int], num_prompt: int, count: int) -> list[bytes]:
        """The last rows of a text that is read in one call, or two if it is answered."""
        slot = self.backend.open(200, NO_PROMPT)
        if slot is None:
            return []
        rows = rows_of_call(self.backend, Chunk(slot, text[:num_prompt], int(num_prompt == len(text))))
        if num_prompt < len(text):
            rows = rows_of_call(self.backend, Chunk(slot, text[num_prompt:], count, generated=True))
        slot.close()
        return [row.tobytes() for row in rows]

    def begin(self) -> None:
        """Open a slot, read its prompt in pieces, and sometimes publish it."""
        beginning = self.beginnings[int(self.rng.integers(3))]
        text = beginning[: int(self.rng.integers(5, len(beginning) + 1))] + self.random_ids(int(self.rng.integers(30)))
        slot = self.backend.open(len(text) + 60, Prompt(text))
        if slot is None:
            self.end()
            return
        self.num_hits += slot.length > 0
        while slot.length < len(text):
            piece = text[slot.length :][: int(self.rng.integers(1, 50))]
            rows = rows_of_call(self.backend, Chunk(slot, piece, int(slot.length + len(piece) == len(text))))
        assert self.fresh(text, len(text), 1) in ([], [rows[0].tobytes()])
        if self.rng.random() < 0.7:
            slot.publish(text)
        self.open.append((slot, text, len(text)))

    def round(self) -> None:
        """Read a token and a draft, a chain or a tree, for some sequences, and keep a part."""
        chosen = [each for each in self.open if self.rng.random() < 0.7 and len(each[1]) - each[2] < 40]
        drafts = [self.random_ids(int(self.rng.integers(0, 8))) for _ in chosen]
        chunks, halves = [], []
        for (slot, text, _), draft in zip(chosen, drafts, strict=True):
            newest = [*text[slot.length :], int(self.rng.integers(39))]  # more than one if it went back further
            self.num_short += len(newest) > 1
            count, half, parents = len(newest), len(draft) // 2, None
            if half and self.backend.capabilities.trees and slot.fork(1, count + len(draft)):
                parents = [*range(-1, half - 1), -1, *range(half, len(draft) - 1)]
            chunks.append(Chunk(slot, [*newest, *draft], len(draft) + 1, parents=parents, generated=True))
            halves.append(half if parents else 0)
            text.append(newest[-1])
        step: Any = self.backend.submit(chunks).wait() if chunks else None
        checks = []
        for (slot, text, num_prompt), draft, half, chunk in zip(chosen, drafts, halves, chunks, strict=True):
            branches = [range(half), range(half, len(draft))] if half else [range(len(draft))]
            branch = branches[int(self.rng.integers(len(branches)))]
            path = [*branch[: int(self.rng.integers(len(branch) + 1))]]
            rows = [step.rows(chunk)[i + 1].full().tobytes() for i in (-1, *path)]
            if half:
                slot.keep(path)
            text.extend(draft[i] for i in path)
            slot.trim(len(text))
            checks.append((text, num_prompt, rows))
        for text, num_prompt, rows in checks:
            assert self.fresh(text, num_prompt, len(rows) if num_prompt < len(text) else 1) in ([], rows)

    def end(self) -> None:
        """Publish and close a slot. Later prompts begin with its text."""
        if self.open:
            slot, text, _ = self.open.pop(int(self.rng.integers(len(self.open))))
            slot.publish(text)
            slot.close()
            slot.close()
            self.beginnings[int(self.rng.integers(3))] = text[:90]


def test_calls_in_any_order_have_the_bits_of_a_fresh_reading(backend: Any) -> None:
    """Prompts in pieces and from the prefix cache, chains and trees of which a part is kept, with too little room."""
    if isinstance(backend, FakeBackend):
        pytest.skip("it has room for everything")
    backend.allocate(24 * 32)
    checked = Checked(backend, 5)
    for _ in range(60):
        act = checked.rng.random()
        (checked.begin if act < 0.2 or len(checked.open) < 2 else checked.round if act < 0.9 else checked.end)()
    while checked.open:
        checked.end()
    assert checked.num_hits > 3
    use = backend.cache
    assert (use.num_used_tokens, use.num_used_rows) == (0, 0)
    assert bool(checked.num_short) == backend.capabilities.states  # rows were short, and tokens read again
    backend.allocate(4096)
