"""Saved values: a damaged file is treated like a missing one."""

import json
import math
from collections.abc import Callable
from dataclasses import make_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import outrider
from outrider.bundle import Bundle
from outrider.drafters.controller import Record
from outrider.models.backends.probe import Verdict
from outrider.models.costs import cost_of
from outrider.models.measure import DRAFT_ROWS, MAIN_ROWS, Contention, PassCost
from outrider.models.part import Part, describe
from outrider.system import saved
from outrider.system.files import sealed
from outrider.system.saved import SavedValue
from outrider.testing import FakeBackend, ToyTokenizer
from outrider.testing.fake import FakeSlot
from outrider.types import NO_PROMPT, CompiledModel, Prompt

COST = PassCost(MAIN_ROWS, (0.1,) * len(MAIN_ROWS), (0.2,) * len(MAIN_ROWS))
VALUES = (COST, Contention(1.5, 2.0), Verdict(False, "it fell"))


def reseal(file: SavedValue[Any], content: bytes | str) -> None:
    """Write a file, with the checksum that its value has now."""
    record = json.loads(content)
    try:
        file.path.write_bytes(sealed({"key": record["key"], "value": record["value"]}))
    except (OverflowError, UnicodeEncodeError):  # numbers and texts that no file of ours has
        file.path.write_text(json.dumps(record))


def test_a_value_of_another_shape_is_not_read(tmp_path: Path) -> None:
    """As after an update: a field that is not in the file would silently have its default."""
    old, new = (make_dataclass("Made", fields) for fields in ([("a", int, 1)], [("a", int, 1), ("b", int, 2)]))
    SavedValue(tmp_path, {}, old).write(old(5))
    assert SavedValue(tmp_path, {}, old).read() == old(5)
    assert SavedValue(tmp_path, {}, new).read() is None


_NUMBERS = st.one_of(
    st.integers(-10, 10),
    st.integers(),
    st.floats(),
    st.sampled_from([10**30, 10**400, 1e-320, 1e308, 1 << 31, 1 << 63, -1, 0, 2047, 2048, 999_999]),
)
_OTHERS = st.recursive(
    st.one_of(_NUMBERS, st.none(), st.booleans(), st.text(max_size=3)), lambda inner: st.lists(inner, max_size=7)
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths to all parts of a value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in items for place in places(item, (*path, key)))]


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy of a value, with the part at `path` replaced."""
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = changed(value[path[0]], path[1:], new)
    return copy


def is_sound(value: Any) -> bool:
    """Whether a value is valid for calculations, and for addressing a cache."""
    if isinstance(value, PassCost):
        seconds = [value(rows, context) for rows in (1, 2, 9, 500) for context in (0, 1, 256, 100_000)]
        ascends = all(a < b for a, b in pairwise((0, *value.rows))) and 0 <= value.contexts[0] <= value.contexts[1]
        return ascends and all(0 < each < math.inf and 0 < 1 / each < math.inf for each in seconds)
    if isinstance(value, Contention):
        return all(1 <= times < 1e300 for times in (value.check, value.draft))
    return isinstance(value, Verdict)


def test_a_draft_model_is_not_called_before_its_first_draft(
    openvino_bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first call packs the weights, which takes longer than the first token."""
    monkeypatch.setattr(saved, "FOLDER", tmp_path)
    config = outrider.Config().replace(cache_size=0.005)
    for seconds in (1, 0):
        engine = outrider.Engine(openvino_bundle, config, tokenizer=ToyTokenizer())
        assert (engine.loaded["draft"].backend.seconds > 0) == bool(seconds)
        options: dict[str, Any] = {"drafter": "draft", "num_assistant_tokens": 2}
        assert engine.generate("abc", max_new_tokens=8, ignore_eos=True, **options).stats.num_drafts
        assert engine.loaded["draft"].backend.seconds > 0
        engine.close()


@given(st.data(), st.sampled_from(VALUES))
@settings(max_examples=150)
def test_numbers_that_nothing_measures_are_not_taken(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, value: Any
) -> None:
    file = SavedValue(tmp_path_factory.getbasetemp() / "numbers", {"of": type(value).__name__}, type(value))
    file.write(value)
    record = json.loads(file.path.read_text())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.sampled_from(places(record["value"])))
        record["value"] = changed(record["value"], at, data.draw(_OTHERS))
    reseal(file, json.dumps(record))
    found = file.read()
    assert found is None or is_sound(found)


@given(st.sampled_from(VALUES), st.integers(0), st.integers(0, 60), st.binary(max_size=20))
@settings(max_examples=150)
def test_bytes_that_are_damaged_are_not_taken(
    tmp_path_factory: pytest.TempPathFactory, value: Any, at: int, length: int, new: bytes
) -> None:
    file = SavedValue(tmp_path_factory.getbasetemp() / "bytes", {"of": type(value).__name__}, type(value))
    file.write(value)
    content = file.path.read_bytes()
    at %= len(content) + 1
    file.path.write_bytes(content[:at] + new + content[at + length :])
    assert file.read() in (None, value)


@pytest.mark.parametrize(
    "content",
    [b'{"key": "\xff", "value": 1}', b'{"key": "", "value": %s}' % (b"[" * 100_000 + b"]" * 100_000), b"9" * 5000],
    ids=["not UTF-8", "nested too deeply", "too many digits"],
)
def test_what_no_parser_takes_is_not_taken(tmp_path: Path, content: bytes) -> None:
    file = SavedValue(tmp_path, {}, PassCost)
    file.path.write_bytes(content)
    assert file.read() is None


def test_a_record_of_an_earlier_version_is_not_read_as_never_accepted(tmp_path: Path) -> None:
    record = Record()
    record.copies.observe(0.8, accepted=True)
    file = SavedValue(tmp_path, {}, dict[str, Record])
    file.write({"Greedy": record})
    assert file.read() == {"Greedy": record}
    reseal(file, file.path.read_text().replace('"accepted"', '"kept"'))
    assert file.read() is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": ()}, "rows that ascend"),
        ({"rows": (0, 2)}, "rows that ascend"),
        ({"rows": (2, 2)}, "rows that ascend"),
        ({"rows": (2, 1 << 31)}, "rows that ascend"),
        ({"rows": (2, 4, 8)}, "seconds for each number of rows"),
        ({"near": (0.1,)}, "seconds for each number of rows"),
        ({"near": (0.1, 0.0)}, "a call takes from"),
        ({"near": (0.1, math.nan)}, "a call takes from"),
        ({"far": (0.1, math.inf)}, "a call takes from"),
        ({"far": (-0.1, 0.1)}, "a call takes from"),
        ({"contexts": (-5, 999_999)}, "contexts of a cost ascend"),
        ({"contexts": (256, 16)}, "contexts of a cost ascend"),
        ({"contexts": (256, 1 << 40)}, "contexts of a cost ascend"),
        ({"scale": 0.0}, "scale"),
        ({"scale": math.nan}, "scale"),
        ({"scale": math.inf}, "scale"),
    ],
)
def test_a_cost_checks_itself(change: dict[str, Any], message: str) -> None:
    whole: dict[str, Any] = {"rows": (2, 4), "near": (0.1, 0.2), "far": (0.2, 0.3)}
    PassCost(**whole)
    with pytest.raises(ValueError, match=message):
        PassCost(**whole | change)


@pytest.mark.parametrize("number", [0.5, -1.0, math.nan, math.inf, 1e300])
def test_a_contention_checks_itself(number: float) -> None:
    with pytest.raises(ValueError, match="beside another"):
        Contention(1.0, number)
    with pytest.raises(ValueError, match="beside another"):
        Contention(number, 1.0)


class Strict(FakeBackend):
    """A compiled model, as far as costs need one. It fails if its cache is addressed beyond its capacity."""

    def __init__(self) -> None:
        super().__init__(4)
        self.fingerprint = {"fake": "yes"}

    def open(self, max_tokens: int, prompt: Prompt = NO_PROMPT) -> FakeSlot:
        assert 0 < max_tokens <= self.max_tokens
        return StrictSlot(self, max_tokens)

    def keep_rows(self, cost: Callable[[int], float], change: float) -> None:
        """Keeps none."""


class StrictSlot(FakeSlot):
    def skip_to(self, length: int) -> None:
        assert 0 <= length <= self.max_tokens
        super().skip_to(length)


@given(
    st.lists(st.integers(1, 5000), min_size=2, max_size=6, unique=True).map(sorted) | st.just([*DRAFT_ROWS]),
    st.lists(st.integers(0, 5000), min_size=2, max_size=2).map(sorted)
    | st.sampled_from([[256, 1024], [0, 1 << 29], [256, 256], [2047, 2048]]),
)
@settings(max_examples=25)
def test_a_cost_that_was_kept_of_another_cache_is_not_taken(
    openvino_bundle: Bundle, rows: list[int], contexts: list[int]
) -> None:
    part, backend = Part("draft", openvino_bundle, openvino_bundle.manifest.main), cast("CompiledModel", Strict())
    file = SavedValue(saved.FOLDER / "costs", describe(part, backend), PassCost)
    seconds = tuple(77.0 + row / 1000 for row in rows)
    file.write(PassCost(tuple(rows), seconds, seconds, (contexts[0], contexts[1])))
    cost = cost_of(part, backend)
    can_be = rows == [*DRAFT_ROWS] and contexts[1] < openvino_bundle.manifest.main.geometry.context_length
    assert (cost.near == seconds) == (can_be and contexts[1] >= 1024)  # the saved cost covers all contexts that now fit
    assert cost.rows == DRAFT_ROWS
    found = file.read()
    assert found is not None
    assert (found.near, found.contexts) == (cost.near, cost.contexts)
