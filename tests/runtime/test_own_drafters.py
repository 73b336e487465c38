"""Apps' drafters: whatever they do, only time is lost, and no reader waits for ever."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

import outrider
from outrider.drafters import Suffix
from outrider.errors import OptionError
from outrider.testing import ToyTokenizer
from outrider.types import Draft

if TYPE_CHECKING:
    from collections.abc import Callable

    from outrider.bundle import Bundle

OPTIONS: dict[str, Any] = {"max_new_tokens": 20, "ignore_eos": True}


@dataclass
class Own:
    """A drafter that has no hash and length 0, and proposes `draft`."""

    draft: Callable[[Any], Draft] = lambda request: Draft([1] * request.limit)
    failing: str = ""
    sequences: list[Any] = field(default_factory=list)
    num_assistant_tokens: int = 4

    def __len__(self) -> int:
        return 0

    def _perhaps_fail(self, name: str) -> None:
        if self.failing == name:
            raise ValueError(f"no {name}")

    @property
    def seconds(self) -> float:
        self._perhaps_fail("seconds")
        return 0.0

    def reserve(self, sequence: Any, max_tokens: int, num_cached: int) -> bool:
        self._perhaps_fail("reserve")
        self.sequences.append(sequence)
        return True

    def propose(self, requests: Any) -> list[Draft]:
        self._perhaps_fail("propose")
        return [self.draft(request) for request in requests]

    def observe(self, sequence: Any, committed: Any) -> None:
        self._perhaps_fail("observe")

    def release(self, sequence: Any) -> None:
        self._perhaps_fail("release")
        self.sequences.remove(sequence)


@pytest.fixture
def engine(toy_bundle: Bundle) -> outrider.Engine:
    return outrider.Engine(toy_bundle, outrider.Config().replace(cache_size=0.005), tokenizer=ToyTokenizer())


@pytest.mark.parametrize(
    "draft",
    [
        lambda request: Draft([1] * request.limit),
        lambda request: Draft([1] * (request.limit + 60)),
        lambda request: Draft([1, 2, 10**9]),
        lambda request: Draft([-1]),
        lambda request: Draft([]),
    ],
)
def test_any_draft_leaves_the_text_as_it_is(engine: outrider.Engine, draft: Callable[[Any], Draft]) -> None:
    own = Own(draft)
    engine.add_drafter("own", own)
    assert "own" in engine.drafters
    sampled: dict[str, Any] = {"temperature": 1.0, "seed": 3}
    for options in ({}, sampled):
        plain = engine.generate("hello", drafter=None, **OPTIONS, **options)
        drafted = engine.generate("hello", drafter="own", **OPTIONS, **options)
        assert drafted.token_ids == plain.token_ids
    assert not own.sequences


@pytest.mark.filterwarnings("ignore:A drafter failed to release")
@pytest.mark.parametrize("failing", ["reserve", "propose", "observe", "seconds", "release"])
def test_a_drafter_that_fails_ends_its_request_alone(engine: outrider.Engine, failing: str) -> None:
    engine.add_drafter("own", Own(failing=failing))
    plain = engine.generate("hello", drafter=None, **OPTIONS)
    for _ in range(2):
        beside = engine.stream("hello", drafter=None, **OPTIONS)
        first = next(beside).text
        if failing == "release":
            assert engine.generate("hello", drafter="own", **OPTIONS).token_ids == plain.token_ids
        else:
            with pytest.raises(ValueError, match=f"no {failing}"):
                engine.generate("hello", drafter="own", **OPTIONS)
        if failing != "seconds":  # which is the whole round's
            assert first + "".join(chunk.text for chunk in beside) == plain.text
        assert engine.generate("hello", drafter=None, **OPTIONS).token_ids == plain.token_ids


@pytest.mark.parametrize("failing", ["admitted", "left"])
def test_an_observer_that_fails_is_told_no_more(engine: outrider.Engine, failing: str) -> None:
    """No reader waits for an end that does not come, and no room is lost."""

    class Failing:
        def __getattr__(self, name: str) -> Callable[..., None]:
            def told(*_: Any, **__: Any) -> None:
                assert name != failing

            return told

    plain = engine.generate("hello", drafter=None, **OPTIONS)
    engine._queue.observer = Failing()
    for _ in range(2):
        assert engine.generate("hello", **OPTIONS).token_ids == plain.token_ids
        assert engine._queue.observer is None


def test_an_own_drafters_records_are_not_saved(engine: outrider.Engine) -> None:
    """Its name may stand for another drafter the next time."""
    engine.add_drafter("own", Suffix())
    engine.generate("hello hello hello", drafter="own", **OPTIONS)
    records = engine._registry._records_of("own")
    assert records.found
    assert records._file is None


def test_what_is_given_up_leaves_its_prompt_at_most(engine: outrider.Engine) -> None:
    """If a whole round fails, the committed tokens of its requests are not certain."""

    class Failing(Own):
        num_asked = 0

        @property
        def seconds(self) -> float:
            self.num_asked += 1
            if self.num_asked == 15:
                raise ValueError("no seconds")
            return 0.0

    prompt = [i % 39 for i in range(50)]
    engine.add_drafter("own", Failing())
    chunks = engine.stream(prompt, drafter="own", max_new_tokens=60, ignore_eos=True)
    texts: list[str] = []
    with pytest.raises(ValueError, match="no seconds"):
        texts.extend(chunk.text for chunk in chunks)
    assert len(texts) > 1
    prompt += ToyTokenizer().encode("".join(texts))
    assert engine.generate(prompt, max_new_tokens=1).stats.num_cached_tokens == 50


def test_a_release_that_fails_where_warnings_are_errors_ends_its_request_alone(engine: outrider.Engine) -> None:
    """Many apps' tests turn warnings into errors."""
    engine.add_drafter("own", Own(failing="release"))
    plain = engine.generate("hello", drafter=None, **OPTIONS)
    beside = engine.stream("hello", drafter=None, **OPTIONS)
    first = next(beside).text
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="A drafter failed to release"):
            engine.generate("hello", drafter="own", **OPTIONS)
    assert first + "".join(chunk.text for chunk in beside) == plain.text


def test_a_drafter_without_room_is_asked_again_when_a_request_has_ended(engine: outrider.Engine) -> None:
    class Full(Own):
        num_asked = 0

        def reserve(self, sequence: Any, max_tokens: int, num_cached: int) -> bool:
            self.num_asked += 1
            return not self.sequences and super().reserve(sequence, max_tokens, num_cached)

    drafter = Full()
    engine.add_drafter("own", drafter)
    first, second = (engine.stream("hello", drafter="own", **OPTIONS) for _ in range(2))
    begun = next(first).text
    assert "".join(chunk.text for chunk in second) == begun + "".join(chunk.text for chunk in first)
    assert drafter.num_asked == 3


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
