"""Saved values: a damaged file is treated like a missing one."""

import errno
import json
import math
import shutil
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
from outrider.models.cost.stored import cost_of
from outrider.models.cost.table import DRAFT_ROWS, MAIN_ROWS, CallCost
from outrider.models.tuning.measure import Contention
from outrider.models.tuning.model_spec import ModelSpec
from outrider.models.tuning.probe import Verdict
from outrider.system import saved
from outrider.system.files import sealed
from outrider.system.saved import SavedValue
from outrider.testing import FakeBackend, ToyTokenizer
from outrider.testing.fake import FakeSlot
from outrider.types import NO_PROMPT, CompiledModel, Prompt, RowCost
from toys import in_threads, load_toy, random_ids

COST = CallCost(MAIN_ROWS, (0.1,) * len(MAIN_ROWS), (0.2,) * len(MAIN_ROWS), calls=(4,) * len(MAIN_ROWS))
VALUES = (COST, Contention(1.5, 2.0), Verdict(False, "it fell"))


def reseal(file: SavedValue[Any], content: bytes | str) -> None:
    """Write a file, with the checksum that its value has now."""
    record = json.loads(content)
    try:
        file.path.write_bytes(sealed({"key": record["key"], "value": record["value"]}))
    except (OverflowError, UnicodeEncodeError):  # numbers and texts that no file of ours has
        file.path.write_text(json.dumps(record))


def test_nothing_is_saved_where_there_is_no_home_folder(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """As in a container whose user has no entry in passwd."""

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("could not determine the home directory")

    monkeypatch.delenv("OUTRIDER_CACHE", raising=False)
    monkeypatch.setattr("platformdirs.user_cache_path", refuse)
    value = SavedValue(saved._folder() / "verdicts", {"device": "GPU"}, Verdict)
    assert "Set OUTRIDER_CACHE to a folder" in caplog.text
    value.write(Verdict(works=True))
    assert value.read() is None


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
    if isinstance(value, CallCost):
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
    file = SavedValue(tmp_path, {}, CallCost)
    file.path.write_bytes(content)
    assert file.read() is None


def test_a_flipped_bit_is_found_or_changes_nothing(tmp_path: Path) -> None:
    file = SavedValue(tmp_path, {"device": "CPU"}, Verdict)
    file.write(value := Verdict(False, "it fell"))
    whole, num_found = file.path.read_bytes(), 0
    for bit in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        file.path.write_bytes(flipped)
        found = file.read()
        assert found in (None, value), bit
        assert file.path.exists() == (found is not None)  # it is made again
        num_found += found is None
    assert num_found > 0.7 * 8 * len(whole)  # the others are in white space


def test_a_file_under_another_name_is_not_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one, other = (SavedValue(tmp_path, {"device": device}, Verdict) for device in ("CPU", "GPU"))
    one.write(Verdict(True))
    shutil.copy(one.path, other.path)
    assert [other.read(), other.read()] == [None, None]
    assert one.read() == Verdict(True)
    assert [each.message for each in caplog.records] == [
        f"The file {other.path} is damaged, and is made again: it is another value's."
    ]


def test_a_full_disk_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for step in ("write_bytes", "replace"):
        with monkeypatch.context() as patched:
            patched.setattr(Path, step, full)
            for kind in ("settings", "costs", "costs"):
                SavedValue(tmp_path / step / kind, {}, Verdict).write(Verdict(True))
        assert not [path for path in (tmp_path / step).rglob("*") if path.is_file()]
    assert [each.message for each in caplog.records] == [
        f"Measurements cannot be saved in {tmp_path / step}: No space left on device. They are made again at the next "
        "start."
        for step in ("write_bytes", "replace")
    ]


def test_threads_write_the_same_value(tmp_path: Path) -> None:
    """As processes do: each reads a whole one."""
    values = [Verdict(False, str(i) * 1000) for i in range(3)]
    file = SavedValue(tmp_path, {}, Verdict)
    file.write(values[0])
    found: list[Verdict | None] = []

    def work(value: Verdict) -> None:
        for _ in range(30):
            SavedValue(tmp_path, {}, Verdict).write(value)
            found.append(SavedValue(tmp_path, {}, Verdict).read())

    in_threads(work, values)
    assert len(found) == 90
    assert all(each in values for each in found)
    assert [*tmp_path.iterdir()] == [file.path]


def damaged_number(value: Any, new: Any) -> Any:
    """A value with each of its numbers replaced."""
    if isinstance(value, dict):
        return {key: damaged_number(each, new) for key, each in value.items()}
    if isinstance(value, list):
        return [damaged_number(each, new) for each in value]
    return new if isinstance(value, int | float) and not isinstance(value, bool) else value


def with_numbers(content: bytes, new: Any) -> bytes:
    """A file with each number of its value replaced, and the checksum that it has then."""
    record = json.loads(content)
    return sealed({"key": record["key"], "value": damaged_number(record["value"], new)})


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "flips": lambda whole: bytes(byte ^ (16 if i % 97 == 60 else 0) for i, byte in enumerate(whole)),
    "cut": lambda whole: whole[: len(whole) // 2],
    "negative": lambda whole: with_numbers(whole, -1),
    "huge": lambda whole: with_numbers(whole, 1e300),
}
ASKED: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True}


@pytest.fixture(scope="module")
def filled(openvino_bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """A folder with all that an engine saves, and the tokens of an answer."""
    folder = tmp_path_factory.mktemp("saved")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(saved, "FOLDER", folder)
        with load_toy(openvino_bundle, prefix_store=str(folder / "prefixes")) as engine:
            token_ids = engine.generate(random_ids(1, 200), **ASKED).token_ids
    return folder, token_ids


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_change_no_text(
    openvino_bundle: Bundle,
    filled: tuple[Path, list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    damage: str,
) -> None:
    folder, expected = tmp_path / "saved", filled[1]
    shutil.copytree(filled[0], folder)
    monkeypatch.setattr(saved, "FOLDER", folder)
    files = [*folder.glob("*/*.json")]
    assert {path.parent.name for path in files} >= {"settings", "costs", "records"}
    for path in files:
        path.write_bytes(DAMAGES[damage](path.read_bytes()))
    for path in folder.glob("prefixes/*/*"):
        path.write_bytes(b"{" + path.read_bytes())
    with load_toy(openvino_bundle, prefix_store=str(folder / "prefixes")) as engine:
        assert engine.generate(random_ids(1, 200), **ASKED).token_ids == expected


def test_a_record_of_an_earlier_version_is_not_read_as_never_accepted(tmp_path: Path) -> None:
    record = Record()
    record.copies.observe(0.8, accepted=True)
    file = SavedValue(tmp_path, {}, dict[str, Record])
    file.write({"Greedy": record})
    assert file.read() == {"Greedy": record}
    reseal(file, file.path.read_text().replace('"accepted"', '"kept"'))
    assert file.read() is None


@pytest.mark.parametrize(("change", "message"), [
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
    ({"calls": (4,)}, "a number of calls for each number of rows"),
    ({"calls": (4, -1)}, "a number of calls for each number of rows"),
    ({"calls": (4, 17)}, "a number of calls for each number of rows"),
    ({"scale": 0.0}, "scale"),
    ({"scale": math.nan}, "scale"),
    ({"scale": math.inf}, "scale"),
])  # fmt: skip
def test_a_cost_checks_itself(change: dict[str, Any], message: str) -> None:
    whole: dict[str, Any] = {"rows": (2, 4), "near": (0.1, 0.2), "far": (0.2, 0.3)}
    CallCost(**whole)
    with pytest.raises(ValueError, match=message):
        CallCost(**whole | change)


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

    def keep_rows(self, cost: RowCost) -> None:
        """Keeps none."""


class StrictSlot(FakeSlot):
    def skip_to(self, length: int) -> None:
        assert 0 <= length <= self.max_tokens
        super().skip_to(length)


@pytest.mark.slow
@given(
    st.lists(st.integers(1, 5000), min_size=2, max_size=6, unique=True).map(sorted) | st.just([*DRAFT_ROWS]),
    st.lists(st.integers(0, 5000), min_size=2, max_size=2).map(sorted)
    | st.sampled_from([[256, 1024], [0, 1 << 29], [256, 256], [2047, 2048]]),
)
@settings(max_examples=25)
def test_a_cost_that_was_kept_of_another_cache_is_not_taken(
    openvino_bundle: Bundle, rows: list[int], contexts: list[int]
) -> None:
    part, backend = ModelSpec("draft", openvino_bundle, openvino_bundle.manifest.main), cast("CompiledModel", Strict())
    file = part.identity.compiled(backend).saved("costs", CallCost, ["features"])
    seconds = tuple(77.0 + row / 1000 for row in rows)
    file.write(CallCost(tuple(rows), seconds, seconds, (contexts[0], contexts[1])))
    cost = cost_of(part, backend)
    can_be = rows == [*DRAFT_ROWS] and contexts[1] < openvino_bundle.manifest.main.geometry.context_length
    assert (cost.near == seconds) == (can_be and contexts[1] >= 1024)  # the saved cost covers all contexts that now fit
    assert cost.rows == DRAFT_ROWS
    found = file.read()
    assert found is not None
    assert (found.near, found.contexts) == (cost.near, cost.contexts)
