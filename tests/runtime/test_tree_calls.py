"""Trees in the main model: their rows have the bits of chains, and what is accepted stays in the cache."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import outrider
from calls import rows_of_call
from in_the_loop import new_request, run
from outrider.bundle import Bundle
from outrider.testing import FakeBackend, ToyTokenizer
from outrider.testing.fake import FakeSlot
from outrider.types import Chunk, Draft, Drafter, Exactness, Prompt, Rounding, RowRule
from toys import load_toy

# Random trees of draft tokens, and a drafter that proposes them.


def random_tree(rng: np.random.Generator, most: int = 7, vocab_size: int = 39) -> Draft:
    """A tree whose siblings differ, sometimes a chain."""
    parents: list[int] = []
    token_ids: list[int] = []
    for i in range(int(rng.integers(1, most + 1))):
        parent = int(rng.integers(-1, i))
        siblings = [token_ids[j] for j in range(i) if parents[j] == parent]
        token_ids.append(int(rng.choice([n for n in range(vocab_size) if n not in siblings])))
        parents.append(parent)
    return Draft(token_ids, parents=parents)


@dataclass
class Trees(Drafter):
    """Proposes random trees. Every other one has the plain text's next tokens on one of its branches."""

    text: list[int]
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    num_assistant_tokens: int = 8
    shapes: set[int] = field(default_factory=set)

    def propose(self, requests: Any) -> list[Draft]:
        drafts = []
        for request in requests:
            draft = random_tree(self.rng, request.limit)
            if self.rng.random() < 0.7:
                leaf = draft.branches[int(self.rng.integers(len(draft.branches)))]
                done = len(request.sequence)
                token_ids = [*draft.token_ids]
                for depth, i in enumerate(leaf):
                    if done + depth < len(self.text):
                        token_ids[i] = self.text[done + depth]
                draft = Draft(token_ids, parents=draft.parents)
            self.shapes.add(len(draft.branches))
            drafts.append(draft)
        return drafts


RULES = ("as it is chosen", "separate", "two rows a sequence")


@pytest.fixture(scope="module", params=["toy", pytest.param("SmolLM2", marks=pytest.mark.slow)])
def loaded(request: pytest.FixtureRequest) -> outrider.Engine:
    """An engine with OpenVINO, as ONNX Runtime evaluates no trees."""
    if request.param == "toy":
        bundle, config = request.getfixturevalue("openvino_bundle"), outrider.Config().replace(cache_size=0.01)
        return outrider.Engine(bundle, config, tokenizer=ToyTokenizer())
    return outrider.load(request.getfixturevalue("smollm2"), drafter=None, cache_size=0.3)


@pytest.fixture
def engine(loaded: outrider.Engine) -> Iterator[outrider.Engine]:
    """The same, whose rule a test may change."""
    main: Any = loaded.main
    chosen = main.exactness
    yield loaded
    main.use(chosen)


@pytest.mark.parametrize("rule", RULES)
def test_rows_of_trees_have_the_bits_of_chains(engine: outrider.Engine, rule: str) -> None:
    """At all places in a block, and with other sequences in the call; and what is kept is read as a chain's."""
    main: Any = engine.main
    if not main.exactness.holds:
        pytest.skip("nothing is claimed of this setting here")
    if rule != "as it is chosen":
        if main.precision != "f32":
            pytest.skip("which other rules are exact depends on the processor")
        padding = main.separate_rules[0] if rule == "separate" else RowRule(sequence=Rounding(2))
        main.use(Exactness(rule=padding, differences={"said": 0.0}))
    rng = np.random.default_rng(1)
    for length in (29, 30, 31, 32, 33, 61, 64):
        text = rng.integers(0, 39, length).tolist()
        draft, other = random_tree(rng), rng.integers(0, 39, 9).tolist()
        newest = int(rng.integers(39))
        forked, chain, beside = (main.open(120, Prompt(())) for _ in range(3))
        main.submit([Chunk(forked, text, 0), Chunk(chain, text, 0)]).wait()
        assert forked.fork(len(draft.branches) - 1, 9) == len(draft.branches) - 1
        tree = Chunk(forked, [newest, *draft.token_ids], len(draft) + 1, parents=draft.parents, generated=True)
        _, *rows = rows_of_call(main, Chunk(beside, other, 1), tree)
        for leaf in draft.branches:
            token_ids = [newest, *(draft.token_ids[i] for i in leaf)]
            alone = rows_of_call(main, Chunk(chain, token_ids, len(token_ids), generated=True))
            chain.trim(length)
            for k, i in enumerate([-1, *leaf]):
                assert bool((rows[i + 1] == alone[k]).all()), (length, draft, i)
        path = draft.path_to(int(rng.integers(-1, len(draft))))
        forked.keep(path)
        assert forked.length == length + 1 + len(path)
        main.submit([Chunk(chain, [newest, *(draft.token_ids[i] for i in path)], 1, generated=True)]).wait()
        ends = [rows_of_call(main, Chunk(slot, [5, 6], 2, generated=True))[1] for slot in (forked, chain)]
        assert bool((ends[0] == ends[1]).all()), (length, draft, path)
        for slot in (forked, chain, beside):
            slot.close()
    assert main.cache.num_used_tokens == 0


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("options", [{}, {"temperature": 1.2, "seed": 5}], ids=["greedy", "coupled"])
@pytest.mark.parametrize("repetition_penalty", [1.0, 1.3])
def test_trees_leave_the_text_as_it_is(toy_bundle: Bundle, options: dict[str, Any], repetition_penalty: float) -> None:
    """On ONNX Runtime, their first candidates are verified."""
    engine = load_toy(toy_bundle)
    options = {**options, "max_new_tokens": 60, "ignore_eos": True, "repetition_penalty": repetition_penalty}
    for number in range(3):
        prompt = np.random.default_rng(number).integers(0, 39, 20 + 9 * number).tolist()
        plain = engine.generate(prompt, drafter=None, **options)
        drafter = Trees([*prompt, *plain.token_ids], np.random.default_rng(number))
        engine.add_drafter(f"trees {number}", drafter)
        drafted = engine.generate(prompt, drafter=f"trees {number}", num_assistant_tokens=8, **options)
        assert drafted.token_ids == plain.token_ids
        assert len(drafter.shapes) > 2
        assert drafted.stats.num_accepted_tokens > (10 if engine.main.capabilities.trees else 2)


def test_a_backend_keeps_the_accepted_branch() -> None:
    """On the fake, whose logits depend on all that is in its slot."""
    main = FakeBackend(12, memory=6)
    slot = main.open(50)
    assert slot.fork(2, 4) == 2
    main.submit([Chunk(slot, [7, 1, 2, 3], 4, parents=[-1, -1, 1])])
    slot.keep([1, 2])
    assert slot.token_ids == [7, 2, 3]


@dataclass
class SameTree(Drafter):
    """Proposes one tree of two branches."""

    def propose(self, requests: Any) -> list[Draft]:
        return [Draft([0, 1, 2], parents=[-1, -1, 0]) for _ in requests]


@pytest.mark.parametrize(("room", "num_tokens"), [(0, 3), (1, 4)])
def test_without_room_for_its_branches_only_first_candidates_are_read(
    room: int, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeSlot, "fork", lambda self, count, length: min(count, room))
    main, request = FakeBackend(3), new_request([0, 1, 2], SameTree())
    run(main, request)
    assert {count for (count,) in main.calls[1:-4]} == {num_tokens}
    assert run(FakeBackend(3), new_request([0, 1, 2])) == [request.sequence.token_ids]
