"""Saved values: a damaged file is treated like a missing one."""

import errno
import json
import math
import shutil
import threading
from collections.abc import Callable
from dataclasses import make_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.bundle import Bundle
from outrider.models.cost.table import MAIN_ROWS, CallCost
from outrider.models.tuning.measure.overlap import Contention
from outrider.models.tuning.probe import Verdict
from outrider.system import saved
from outrider.system.files import sealed
from outrider.system.saved import SavedValue
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


def test_values_do_not_wait_for_each_other(tmp_path: Path) -> None:
    class Slow:
        def __str__(self) -> str:
            thread = threading.Thread(target=lambda: SavedValue(tmp_path, {}, Verdict).path, daemon=True)
            thread.start()
            thread.join(20)
            assert not thread.is_alive()
            return "slow"

    assert SavedValue(tmp_path, {"of": Slow()}, Verdict).path


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


@pytest.mark.parametrize(("change", "message"), [
    ({"rows": ()}, "rows that ascend"),
    ({"rows": (2, 2)}, "rows that ascend"),
    ({"near": (0.1, 0.0)}, "a call takes from"),
    ({"far": (0.1, math.inf)}, "a call takes from"),
    ({"contexts": (256, 16)}, "contexts of a cost ascend"),
    ({"calls": (4,)}, "a number of calls for each number of rows"),
    ({"calls": (4, -1)}, "a number of calls for each number of rows"),
    ({"calls": (4, 17)}, "a number of calls for each number of rows"),
    ({"scale": math.nan}, "scale"),
])  # fmt: skip
def test_a_cost_checks_itself(change: dict[str, Any], message: str) -> None:
    whole: dict[str, Any] = {"rows": (2, 4), "near": (0.1, 0.2), "far": (0.2, 0.3)}
    CallCost(**whole)
    with pytest.raises(ValueError, match=message):
        CallCost(**whole | change)
