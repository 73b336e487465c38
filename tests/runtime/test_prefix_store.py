"""The prefix cache on disk: after a restart, texts go on from there, and nothing else changes."""

import errno
import itertools
import json
import logging
import os
import re
import shutil
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import outrider
from hybrids import save_hybrid
from outrider.bundle import Bundle
from outrider.cli import run
from outrider.errors import OptionError
from outrider.models.kv import chunk_files
from outrider.models.kv.chunk_files import ChunkFile, ChunkFiles, files_in, root_of
from outrider.models.kv.state_worth import state_worths
from toys import load_toy, random_ids

ASKED: dict[str, Any] = {"max_new_tokens": 20, "ignore_eos": True, "logprobs": 2}


def make(bundle: Bundle, folder: Path | None, **options: Any) -> outrider.Engine:
    return load_toy(bundle, prefix_store=folder, **options)


def saved(folder: Path) -> list[Path]:
    return sorted(file.path for file in files_in(folder))


@pytest.mark.fast_cases(1)
@pytest.mark.every_format
@pytest.mark.parametrize("drafter", [None, "draft"])
def test_a_restart_changes_no_bit(toy_bundle: Bundle, tmp_path: Path, drafter: str | None) -> None:
    text, other = random_ids(1, 300), random_ids(1, 180) + random_ids(2, 60)
    options: dict[str, Any] = {"drafter": drafter} | ({"num_assistant_tokens": 3} if drafter else {})
    plain = make(toy_bundle, None, enable_prefix_caching=False, **options)
    expected = [plain.generate(each, **ASKED) for each in (text, other)]
    with make(toy_bundle, tmp_path, **options) as engine:
        assert engine.generate(text, **ASKED).stats.num_cached_tokens == 0
    for _ in range(2):  # the second time all files are there
        with make(toy_bundle, tmp_path, **options) as engine:
            found = [engine.generate(each, **ASKED) for each in (text, other)]
            assert [each.token_ids for each in found] == [each.token_ids for each in expected]
            assert [each.logprobs for each in found] == [each.logprobs for each in expected]
            assert found[0].stats.num_cached_tokens == 299  # the last one's row is wanted
            assert found[1].stats.num_cached_tokens >= 180
            if drafter:
                assert engine.cache[drafter].num_cached_tokens >= 2 * 180 - 2
    if os.name == "posix":
        assert {path.stat().st_mode & 0o777 for path in saved(tmp_path)} == {0o600}


def test_only_the_same_model_setting_and_version_finds_it(
    openvino_bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = random_ids(4, 200)
    with make(openvino_bundle, tmp_path) as engine:
        engine.generate(text, **ASKED)
    with make(openvino_bundle, tmp_path, cache_precision="u8") as engine:
        assert engine.generate(text, **ASKED).stats.num_cached_tokens == 0
    with monkeypatch.context() as patched:
        patched.setattr("outrider.models.tuning.identity.__version__", "0.0.0")
        with make(openvino_bundle, tmp_path) as engine:
            assert engine.generate(text, **ASKED).stats.num_cached_tokens == 0
    with make(openvino_bundle, tmp_path) as engine:
        assert engine.generate(text, **ASKED).stats.num_cached_tokens == 199
        assert engine.generate(outrider.Prompt(text, scope=b"other"), **ASKED).stats.num_cached_tokens == 0


def resealed(content: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """A file whose header was changed, with the checksum that it has now."""
    magic, line, rest = content.split(b"\n", 2)
    return b"\n".join([magic, b"%08x %b" % (zlib.crc32(text := change(line[9:])), text), rest])


DAMAGES: dict[str, Callable[[bytes, bytes], bytes]] = {  # of a file's content, and that of another one
    "cut": lambda whole, _: whole[:-1],
    "byte": lambda whole, _: whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:],
    "tokens": lambda whole, _: whole.replace(b" 3 ", b" 4 ", 1),
    "empty": lambda *_: b"",
    "longer": lambda whole, other: whole + other,
    "another's name": lambda _, other: other,
    "another version": lambda whole, _: whole.replace(b" 3\n", b" 2\n", 1),
    "tokens, with a checksum": lambda whole, _: resealed(whole, lambda line: line.replace(b" 3 ", b" 4 ", 1)),
    "place, with a checksum": lambda whole, _: resealed(
        whole, lambda line: re.sub(b'"parent":"[0-9a-f]*"', b'"parent":"%b"' % root_of(b"").encode()[::-1], line)
    ),
}


@pytest.fixture(scope="module", params=["attention", "states"])
def either(openvino_bundle: Bundle, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Bundle:
    """A toy with attention alone, and one whose states have files of their own."""
    if request.param == "attention":
        return openvino_bundle
    return save_hybrid(tmp_path_factory.mktemp("states") / "bundle", "gdn")


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_left_out_with_one_warning(
    either: Bundle, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    text = random_ids(5, 300)
    with make(either, tmp_path, drafter=None) as engine:
        expected = engine.generate(text, **ASKED)
    contents = [path.read_bytes() for path in saved(tmp_path)]
    for path, content, other in zip(saved(tmp_path), contents, [*contents[1:], contents[0]], strict=True):
        path.write_bytes(DAMAGES[damage](content, other))
    with caplog.at_level(logging.WARNING, "outrider"), make(either, tmp_path, drafter=None) as engine:
        found = engine.generate(text, **ASKED)
    assert found.stats.num_cached_tokens == 0
    assert found.logprobs == expected.logprobs
    assert len([each for each in caplog.records if "was deleted" in each.message]) == 1
    for _ in range(2):  # they were written again; where states were damaged, the others are read at the next start
        with make(either, tmp_path, drafter=None) as engine:
            found = engine.generate(text, **ASKED)
    assert found.stats.num_cached_tokens == 299


def test_engines_share_a_folder(openvino_bundle: Bundle, tmp_path: Path) -> None:
    text = random_ids(6, 300)
    with make(openvino_bundle, tmp_path, drafter=None) as second:
        with make(openvino_bundle, tmp_path, drafter=None) as first:
            expected = first.generate(text, **ASKED)
        found = second.generate(text, **ASKED)  # written since it was loaded
        assert found.stats.num_cached_tokens == 299
        assert found.logprobs == expected.logprobs
        for path in saved(tmp_path):
            path.unlink()
        assert second.generate(random_ids(6, 280), **ASKED).stats.num_cached_tokens == 279  # in memory
        assert second.generate(random_ids(7, 280), **ASKED).stats.num_cached_tokens == 0


def full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_stops_no_answer(
    openvino_bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "outrider"), make(openvino_bundle, tmp_path, drafter=None) as engine:
        monkeypatch.setattr(chunk_files, "write_whole", full)
        for seed in range(3):
            assert len(engine.generate(random_ids(seed, 200), **ASKED).token_ids) == 20
    assert [each.message for each in caplog.records if "saved" in each.message] == [
        f"Prefixes cannot be saved in {tmp_path}: No space left on device."
    ]
    assert not saved(tmp_path)


def test_a_folder_that_cannot_be_made(openvino_bundle: Bundle, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match="prefix_store=.*file.* cannot be made"):
        make(openvino_bundle, tmp_path / "file")
    with make(openvino_bundle, tmp_path, enable_prefix_caching=False) as engine:  # a measurement
        engine.generate(random_ids(1, 200), **ASKED)
    assert not saved(tmp_path)


def test_the_command_shows_and_deletes(
    openvino_bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with make(openvino_bundle, tmp_path, drafter=None) as engine:
        engine.generate(random_ids(1, 200), **ASKED)
        assert run(["cache", "--folder", str(tmp_path), "--json"]) == 0
        (tmp_path / "other.kv").write_text("not ours")
    capsys.readouterr()
    assert run(["cache", "--folder", str(tmp_path), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["models"]
    assert found["tokens"] >= 219
    assert (found["model"], found["bundle"]) == ("main", openvino_bundle.folder.name)
    assert run(["cache", "--folder", str(tmp_path)]) == 0
    assert "CPU f32" in capsys.readouterr().out
    assert run(["cache", "--folder", str(tmp_path), "clear"]) == 0
    assert [path.name for path in tmp_path.rglob("*.kv")] == ["other.kv"]
    assert run(["cache", "--folder", str(tmp_path)]) == 0
    assert "is empty" in capsys.readouterr().out


def content(size: int = 1000) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.zeros(size, dtype=np.uint8)


def chain(ids: list[int], size: int = 4) -> list[ChunkFile]:
    made, parent = [], root_of(b"")
    for begin in range(0, len(ids), size):
        made.append(ChunkFile.of(parent, begin, ids[begin : begin + size]))
        parent = made[-1].key
    return made


def test_any_flipped_bit_of_a_header_is_found(tmp_path: Path) -> None:
    files, (chunk,) = ChunkFiles(tmp_path, {}, max_bytes=10**6), chain([1, 2, 3])
    files.write(chunk, content(90))
    path = files.folder / f"{chunk.key}.kv"
    whole = path.read_bytes()
    for bit in range(8 * (len(whole) - 90)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        assert files.read(chunk) is None
        assert not path.exists()  # so that it is written again


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 40), st.binary(max_size=40)), min_size=1, max_size=3))
@settings(max_examples=30)
def test_what_is_read_is_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[int, int, bytes]]
) -> None:
    files, (chunk,) = ChunkFiles(tmp_path_factory.getbasetemp() / "edits", {}, max_bytes=10**6), chain([1, 2, 3])
    files.write(chunk, content(90))
    path = files.folder / f"{chunk.key}.kv"
    whole = made = path.read_bytes()
    for begin, length, new in edits:
        made = made[:begin] + new + made[begin + length :]
    path.write_bytes(made)
    assert (files.read(chunk) is not None) == (made == whole)


def test_files_are_used_in_their_own_folder_alone_and_without_gaps(tmp_path: Path) -> None:
    mine, others = (ChunkFiles(tmp_path, {"model": i}, max_bytes=10**6) for i in range(2))
    text = [*range(12)]
    chunks = chain(text)
    for chunk in chunks:
        mine.write(chunk, content())
        shutil.copy(mine.folder / f"{chunk.key}.kv", others.folder)
        assert others.read(chunk) is None
        shutil.copy(mine.folder / f"{chunk.key}.kv", others.folder)
    assert others.chain(text, b"", 4) == []
    assert not saved(others.folder.parent / others.folder.name)
    (mine.folder / f"{chunks[1].key}.kv").unlink()
    again = ChunkFiles(tmp_path, {"model": 0}, max_bytes=10**6)
    assert [chunk for chunk, _ in again.chain(text, b"", 4)] == chunks[:1]


@pytest.mark.every_format
def test_a_cache_takes_no_content_that_does_not_fit(toy_bundle: Bundle) -> None:
    text = random_ids(9, 256)
    with make(toy_bundle, None, drafter=None) as engine:
        engine.generate([*text, 1], **ASKED)
        engine.settle()
        prefixes = engine.loaded["main"].backend.prefixes
        assert prefixes is not None
        first, last = (prefixes.read(text[: begin + 128], b"", begin) for begin in (0, 128))
        assert first is not None
        assert last is not None
        part = len(first) // 2
        for contents in (
            [],
            [(0, first)],
            [(0, first), (128, last[:-1])],
            [(0, first), (128, last[:0])],
            [(0, first[:part]), (128, last)],  # a gap
            [(0, first), (64, last)],
            [(0, first), (256, last)],
            [(0, np.concatenate([first, first])), (128, last)],  # more than once
            [(-128, first), (0, first), (128, last)],
            [(0, first), (128, last), (256, last)],
        ):
            with pytest.raises(ValueError, match=r"blocks|keys and values"):
                prefixes.restore(text, b"other", contents, 300)
            assert prefixes.num_cached(text, b"other") == 0
        prefixes.restore(text, b"other", [(128, last)], 300)  # what comes before was evicted since
        assert prefixes.num_cached(text, b"other") == 0
        prefixes.restore(text, b"other", [(0, first), (128, last)], 300)
        assert prefixes.num_cached(text, b"other") >= 224


def test_the_folder_keeps_its_size_and_what_is_used_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends of texts go before their beginnings, what was used once before what was used twice."""
    seconds = itertools.count(time.time())
    monkeypatch.setattr(chunk_files, "time", SimpleNamespace(time=lambda: next(seconds)))
    files = ChunkFiles(tmp_path, {"model": 1}, max_bytes=6000)
    system = chain([1, 2, 3, 4, 5, 6, 7, 8])
    for chunk in system:
        files.write(chunk, content())
    for each in system:
        files.use(each)
    for i in range(20):
        for chunk in chain([20 + i, 1, 1, 1, 20 + i]):
            files.write(chunk, content())
        assert sum(file.size for file in files_in(tmp_path)) <= 6000
    assert [count for _, count in files.chain([1, 2, 3, 4, 5, 6, 7, 8, 9], b"", 4)] == [4, 4]
    assert [count for _, count in files.chain([39, 1, 1, 1, 39], b"", 4)] == [4, 1]
    files = ChunkFiles(tmp_path, {"model": 2}, max_bytes=1500)  # another model: the bound is the folder's
    files.write(chain([1, 2, 3])[0], content())
    assert sum(file.size for file in files_in(tmp_path)) <= 1500


def states_in(files: ChunkFiles, ids: list[int]) -> list[int]:
    return [each.end for each in files.states(files.chain(ids, b"", 4))]


def test_states_are_deleted_by_the_reading_that_they_save_per_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a conversation the last ones stay; those of a long system prompt, and keys and values, outlive them."""
    seconds = itertools.count(time.time())
    monkeypatch.setattr(chunk_files, "time", SimpleNamespace(time=lambda: next(seconds)))
    files = ChunkFiles(tmp_path, {"model": 1}, max_bytes=24_000)
    texts = [[i, *range(2, 33)] for i in range(2)]  # a system prompt of 20 tokens, and turns of 2
    for ids in texts:
        for chunk in chain(ids):
            files.write(chunk, content(200))
            for end in {20, 22, 24, 26, 28, 30, 32}.intersection(range(chunk.begin + 1, chunk.end + 1)):
                files.write(chunk.state(end), content(1000))
    assert states_in(files, texts[0])[-1] == 20
    assert states_in(files, texts[1]) == [32, 30, 28, 26, 24, 22, 20]
    before = states_in(files, texts[0])
    for i in range(3):  # other texts, which have no states
        for chunk in chain([40 + i] * 12):
            files.write(chunk, content(900))
    assert states_in(files, texts[0]) != before
    for ids in texts:
        left = states_in(files, ids)
        assert left[0] >= 30
        assert left[-1] == 20
        assert len(files.chain(ids, b"", 4)) == 8


def test_small_states_are_worth_as_much_as_keys_and_values(tmp_path: Path) -> None:
    """Such as those of short convolutions; never more, as they are of no use without them."""
    one, two = chain([1, 2, 3, 4, 5, 6, 7, 8])
    states = [one.state(3), two.state(5), two.state(8)]
    parents = {each.key: each.parent for each in (one, two, *states)}
    children: dict[str, dict[str, tuple[int, ...]]] = {}
    for each in (one, two, *states):
        children.setdefault(each.parent, {})[each.key] = each.token_ids
    sizes = {one.key: 4000, two.key: 4000} | dict.fromkeys([each.key for each in states], 8000)
    worths = state_worths(children, parents, sizes)
    assert [worths[each.key] for each in states] == [3 / 16, 2 / 16, 3 / 8]
    small = state_worths(children, parents, sizes | dict.fromkeys([each.key for each in states], 10))
    assert [small[each.key] for each in states] == [0.495, 0.495, 0.99]


def test_what_a_killed_process_leaves_is_removed(tmp_path: Path) -> None:
    folder = ChunkFiles(tmp_path, {}, max_bytes=10**6).folder
    for name in (".old.kv.1.1", ".new.kv.1.1"):
        (folder / name).write_bytes(b"half")
    os.utime(folder / ".old.kv.1.1", (0, 0))
    ChunkFiles(tmp_path, {}, max_bytes=10**6)
    assert sorted(path.name for path in folder.iterdir()) == [".new.kv.1.1", chunk_files.ABOUT]
