"""Apps' drafters: whatever they do, only time is lost, and no reader waits for ever."""

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from typing import Any, cast

import numpy as np
import pytest

import outrider
from outrider.bundle import Bundle
from outrider.drafters import Suffix
from outrider.errors import DrafterError, OptionError
from outrider.models.cost.table import CallCost
from outrider.types import Distribution, Draft, Drafter
from toys import load_toy

pytestmark = pytest.mark.any_format

OPTIONS: dict[str, Any] = {"max_new_tokens": 20, "ignore_eos": True}


@dataclass
class Own(Drafter):
    """A drafter that has no hash and length 0, and proposes `draft`."""

    draft: Callable[[Any], Draft] = lambda request: Draft([1] * request.limit)
    sequences: list[Any] = field(default_factory=list)
    num_assistant_tokens: int = 4

    def __len__(self) -> int:
        return 0

    def reserve(self, sequence: Any, max_tokens: int, num_cached: int) -> bool:
        self.sequences.append(sequence)
        return True

    def propose(self, requests: Any) -> list[Draft]:
        return [self.draft(request) for request in requests]

    def release(self, sequence: Any) -> None:
        self.sequences.remove(sequence)


@pytest.fixture
def engine(toy_bundle: Bundle) -> outrider.Engine:
    return load_toy(toy_bundle)


def test_another_package_brings_a_drafter(engine: outrider.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    brought = EntryPoint("mine", "outrider.drafters.suffix:Suffix", "outrider.drafters")
    monkeypatch.setattr("outrider.drafters.drafter_registry.plugins", lambda kind: {"mine": brought, "draft": brought})
    assert engine.drafters.count("mine") == 1
    own = engine.find_drafter("mine")
    assert engine.find_drafter("mine") is own
    plain = engine.generate("hello", drafter=None, **OPTIONS)
    assert engine.generate("hello", drafter="mine", **OPTIONS).token_ids == plain.token_ids
    assert engine.find_drafter("draft") is engine.find_drafter("auto")  # a bundle's own come first


@pytest.mark.parametrize("draft", [
    lambda request: Draft([1] * request.limit),
    lambda request: Draft([1] * (request.limit + 60)),
    lambda request: Draft([1, 2, 10**9]),
    lambda request: Draft([-1]),
    lambda request: Draft([]),
    lambda request: Draft([], parents=[]),
    lambda request: Draft([10**9, 1], parents=[-1, -1]),
])  # fmt: skip
def test_any_draft_leaves_the_text_as_it_is(engine: outrider.Engine, draft: Callable[[Any], Draft]) -> None:
    own = Own(draft)
    engine.add_drafter("own", own)
    assert "own" in engine.drafters
    sampled: dict[str, Any] = {"temperature": 1.0, "seed": 3}
    for options in ({}, sampled):
        plain = engine.generate("hello", drafter=None, **OPTIONS, **options)
        drafted = engine.generate("hello", drafter="own", **OPTIONS, **options)
        assert drafted.token_ids == plain.token_ids
        assert max(drafted.stats.num_draft_tokens_per_round) <= own.num_assistant_tokens
    assert not own.sequences


SURE = Distribution(np.array([1]), np.array([1.0]))
FAR = Distribution(np.array([10**6]), np.array([1.0]))
HALF = Distribution(np.array([1]), np.array([0.5]))
BAD_DRAFTS: dict[str, Any] = {
    r"\[1\] \(a list\) instead of a Draft": [1],
    r"token_ids=array\(\[17\]\) \(a ndarray\), which is no list of integers": Draft(cast("Any", np.array([17]))),
    r"token_ids=\[np.int64\(1\)\]": Draft([cast("Any", np.int64(1))]),
    "parents=.*is no tree": Draft([1, 2], parents=cast("Any", np.array([-1, 0]))),
    r"confidences=\[nan\]": Draft([1], confidences=[float("nan")]),
    r"confidences=\[0\.5\].* for 2 tokens": Draft([1, 2], confidences=[0.5]),
    "probs=.* for 2 tokens": Draft([1, 2], probs=[SURE]),
    r"probs\[0\]=.*is no Distribution": Draft([1], probs=cast("Any", [np.ones(3)])),
    r"probs\[0\]=.*does not sum to 1": Draft([1], probs=[HALF]),
    r"probs\[0\]=.*none below 0": Draft([1], probs=[Distribution(np.array([1, 2]), np.array([1.5, -0.5]))]),
    r"probs\[0\]=.*do not ascend": Draft([1], probs=[Distribution(np.array([2, 1]), np.array([0.5, 0.5]))]),
    r"token_ids=\[1000000\] .* with probs, and the main model has no token 1000000": Draft([10**6], probs=[FAR]),
    r"probs\[0\]=.*its token 2 no chance": Draft([2], probs=[SURE]),
}


@pytest.mark.fast_cases(14)
@pytest.mark.parametrize("message", BAD_DRAFTS)
@pytest.mark.parametrize("sampled", [False, True])
def test_a_draft_that_breaks_a_rule_ends_its_own_request_alone(
    engine: outrider.Engine, message: str, sampled: bool
) -> None:
    """Neither one that uses another drafter, nor one that gets a sound draft out of the same call."""
    more: dict[str, Any] = {"temperature": 1.0, "seed": 3, "sampling": "rejection"} if sampled else {}
    bad = BAD_DRAFTS[message]

    class Mixed(Own):
        def propose(self, requests: Any) -> list[Any]:
            return [bad if request.sequence.num_prompt_tokens == 3 else Draft([]) for request in requests]

    engine.add_drafter("own", Mixed())
    plain = engine.generate("hello", drafter=None, **OPTIONS, **more)
    besides = [engine.stream("hello", drafter=name, **OPTIONS, **more) for name in ("own", None)]
    texts = [next(beside).text for beside in besides]
    with pytest.raises(DrafterError, match=f"^The drafter 'own' proposed {message}"):
        engine.generate([1, 2, 3], drafter="own", **OPTIONS, **more)
    assert [text + "".join(chunk.text for chunk in beside) for text, beside in zip(texts, besides, strict=True)] == [
        plain.text
    ] * 2


def test_a_draft_that_its_drafter_changes_later_is_as_it_was(engine: outrider.Engine) -> None:
    """The sequence's own list is the nearest trap: it grows before the round is counted."""
    engine.add_drafter("live", Own(lambda request: Draft(request.sequence.token_ids)))
    plain = engine.generate([1, 2], drafter=None, **OPTIONS)
    drafted = engine.generate([1, 2], drafter="live", num_assistant_tokens=64, **OPTIONS)
    assert drafted.token_ids == plain.token_ids
    first, *_ = drafted.stats.num_draft_tokens_per_round
    assert first == 3  # the prompt and the first token


def test_trees_of_a_drafter_that_a_controller_chooses_have_room(engine: outrider.Engine) -> None:
    """Their branches need blocks of their own, as those of any drafter: else the next round reads anywhere."""

    class Branching(Suffix):
        def propose(self, requests: Any) -> list[Draft]:
            return [Draft([1, 2, 3], parents=[-1, -1, 0], confidences=[0.9, 0.9, 0.9]) for _ in requests]

    slow = (0.040, 0.041)  # rows cost little, whatever the toy's own calls take
    engine.loaded["main"].cost = CallCost((2, 16), slow, slow)
    engine.add_drafter("branching", Branching())
    plain = engine.generate("hello", drafter=None, **OPTIONS)
    drafted = engine.generate("hello", drafter="branching", **OPTIONS)
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.num_draft_tokens


def fail(*_: Any) -> Any:
    raise SystemExit("no more")


@pytest.mark.parametrize(("member", "value", "rule"), [
    ("num_assistant_tokens", lambda: None, "is .*, not an integer from 0 to 64"),
    ("seconds", lambda: None, "is .*, not a finite number"),
    ("seconds", fail, r"raised SystemExit: no more\. Fix it"),
    ("ahead_seconds", lambda: None, "is .*, not a finite number"),
    ("requirements", lambda: ("hidden",), "is .*, not Requirements"),
    ("reserve", lambda: lambda *_: None, "is .*, not True or False"),
    ("propose", lambda: lambda _: None, "is .*, not a list of drafts"),
    ("propose", lambda: lambda requests: (Draft([]) for _ in requests), "is .*, not a list of drafts"),
    ("observe", lambda: fail, r"raised SystemExit: no more\. Fix it"),
])  # fmt: skip
def test_a_member_that_breaks_a_rule_is_named(
    engine: outrider.Engine, member: str, value: Callable[[], Any], rule: str
) -> None:
    """That other requests go on, `test_faults.py` shows."""

    class Bad(Own):
        def __getattribute__(self, name: str) -> Any:
            return value() if name == member else super().__getattribute__(name)

    engine.add_drafter("own", Bad())
    with pytest.raises(DrafterError, match=rf"^{member}(\(\))? of the drafter 'own' {rule}"):
        engine.generate("hello", drafter="own", **OPTIONS)


@pytest.mark.parametrize("name", ["auto", "ngram", "suffix", "draft", "main", "none"])
def test_names_that_are_taken_are_refused(engine: outrider.Engine, name: str) -> None:
    with pytest.raises(OptionError, match="that is taken"):
        engine.add_drafter(name, Own())


@pytest.mark.parametrize("name", ["", None, 5, ["own"], b"own"])
def test_what_is_no_name_is_refused(toy_engine: outrider.Engine, name: Any) -> None:
    drafters = toy_engine.drafters
    with pytest.raises(OptionError, match="cannot be named .*: a name is a text, and not empty. Choose another name."):
        toy_engine.add_drafter(name, Own())
    assert toy_engine.drafters == drafters
