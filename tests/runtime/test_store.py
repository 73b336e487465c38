"""The file of earlier answers: what is kept, through crashes and beside other processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import warnings
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.drafters import AnswerStore
from outrider.errors import OptionError

if TYPE_CHECKING:
    from pathlib import Path

VOCAB = "ab" * 32
MAGIC, HEADER, RECORD = 16, 52, 8  # bytes of the magic, before the first answer, and before each one's tokens


def filled(path: Path, answers: list[list[int]], max_tokens: int = 200_000) -> None:
    store = AnswerStore(path, VOCAB, max_tokens)
    for answer in answers:
        store.add(answer)
    store.close()


def answers_in(path: Path, max_tokens: int = 200_000) -> list[list[int]]:
    store = AnswerStore(path, VOCAB, max_tokens)
    store.close()
    return list(store._answers)


def test_answers_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "answers.bin"
    filled(path, [[1, 2, 3], [], [4]])
    filled(path, [[200_000, 0]])
    assert answers_in(path) == [[1, 2, 3], [4], [200_000, 0]]
    assert path.stat().st_size == HEADER + 3 * RECORD + 4 * 6


def test_answers_are_found_at_once_and_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "answers.bin"
    filled(path, [[1, 2, 3]])
    store = AnswerStore(path, VOCAB)

    def found(context: list[int]) -> list[int]:
        return [r.followers(m).token_id for r in store.references() if (m := r.find(context))]

    assert found([1, 2]) == [3]
    assert found([4]) == []
    store.add([4, 5])
    assert found([4]) == [5]
    old = store.references()[0]
    store.add([6, 7])
    assert (found([4]), found([6]), found([1])) == ([5], [7], [2])
    assert store.references()[0] is old  # only what is new was indexed
    for i in range(20):
        store.add([*range(1000 * i, 1000 * i + 500)])
        assert found([1000 * i + 8]) == [1000 * i + 9]
    assert len(store.references()) <= 2
    assert found([6]) == [7]
    assert sum(r.num_tokens for r in store.references()) == 3 + 2 + 2 + 20 * 500


@given(st.integers(0, 10**6), st.booleans())
@settings(max_examples=60)
def test_an_answer_that_a_crash_cut_short_is_dropped(
    tmp_path_factory: pytest.TempPathFactory, at: int, zeros: bool
) -> None:
    """Wherever the file ends, and whether the rest is missing or was never written to the disk.

    But for the header's first bytes, which may be the text of somebody else's file.
    """
    path = tmp_path_factory.mktemp("store") / "answers.bin"
    answers = [[1, 2, 3], [7], [4, 5, 6, 2**31]]
    filled(path, answers)
    whole = path.read_bytes()
    cuts = range(HEADER, len(whole)) if zeros else [0, *range(MAGIC + 4, len(whole))]
    at = cuts[at % len(cuts)]
    path.write_bytes(whole[:at] + bytes((len(whole) - at) * zeros))
    ends = [HEADER + RECORD + 12, HEADER + 2 * RECORD + 16, len(whole)]
    num_whole = sum(end <= at for end in ends)
    # A record that lacks nothing but zeros is whole.
    kept = answers_in(path)
    assert kept == answers[: len(kept)]
    assert len(kept) == num_whole or (zeros and path.read_bytes() == whole[: ends[num_whole]])
    filled(path, [[8, 9]])
    assert answers_in(path) == [*kept, [8, 9]]
    if not zeros:
        assert path.stat().st_size == ([HEADER, *ends][num_whole]) + RECORD + 8


@pytest.mark.parametrize("at", [HEADER, HEADER + 3, HEADER + 4, HEADER + RECORD, HEADER + RECORD + 11])
def test_damage_is_named_and_nothing_is_touched(tmp_path: Path, at: int) -> None:
    path = tmp_path / "answers.bin"
    filled(path, [[1, 2, 3], [4] * 100])
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)
    with pytest.raises(OptionError, match=r"answers.bin' is damaged at byte 52. Delete it"):
        AnswerStore(path, VOCAB)
    assert path.read_bytes() == data


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"hello", "is no answer store. Name another file"),
        (b"o", "is no answer store. Name another file"),
        (b"outrider", "is no answer store. Name another file"),
        (b"outrider answers", "is no answer store. Name another file"),
        (b"outrider answers\x01\0\0", "is no answer store. Name another file"),
        (bytes(500), "is no answer store"),
        (b"outrider answers" + b"\x02\0\0\0" + bytes(40), "has format 2, and this Outrider knows 1"),
    ],
)
def test_a_foreign_file_is_refused_and_left_alone(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "answers.bin"
    path.write_bytes(content)
    with pytest.raises(OptionError, match=message):
        AnswerStore(path, VOCAB)
    assert path.read_bytes() == content
    assert [p.name for p in tmp_path.iterdir()] == ["answers.bin"]  # nor is anything put beside it


def test_answers_of_another_vocabulary_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "answers.bin"
    filled(path, [[1, 2, 3]])
    with pytest.raises(OptionError, match="another vocabulary. Name another file for this model"):
        AnswerStore(path, "cd" * 32)
    assert answers_in(path) == [[1, 2, 3]]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="cannot be opened: .*Name a file in a folder that is there"):
        AnswerStore(tmp_path / "nowhere" / "answers.bin", VOCAB)
    (tmp_path / "folder").mkdir()
    with pytest.raises(OptionError, match="cannot be opened: it is no file. Name a file"):
        AnswerStore(tmp_path / "folder", VOCAB)
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]
    with pytest.raises(OptionError, match="cannot be opened"):
        AnswerStore(tmp_path / ("x" * 5000), VOCAB)


@pytest.mark.parametrize("max_tokens", [1, 10, 25])
def test_the_newest_answers_are_kept(tmp_path: Path, max_tokens: int) -> None:
    path = tmp_path / "answers.bin"
    answers = [[i] * 5 for i in range(50)]
    store = AnswerStore(path, VOCAB, max_tokens)
    for answer in answers:
        store.add(answer)
        assert path.stat().st_size <= HEADER + (2 * max_tokens + 5) * (4 + RECORD / 5)
    store.close()
    expected = answers[-max(max_tokens // 5, 1) :]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["answers.bin", "answers.bin.lock"]
    assert answers_in(path, max_tokens) == expected
    filled(path, [[99]], max_tokens)
    assert answers_in(path, max_tokens)[-1] == [99]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["answers.bin", "answers.bin.lock"]


def test_what_stands_beside_the_file_stays(tmp_path: Path) -> None:
    """Writing it anew takes a name that nobody has, and the file keeps its permissions."""
    path, other = tmp_path / "answers.bin", tmp_path / "answers.bin.tmp"
    other.write_text("mine")
    filled(path, [[1]])
    path.chmod(0o640)
    filled(path, [[i] * 5 for i in range(50)], max_tokens=10)
    assert other.read_text() == "mine"
    assert os.name == "nt" or path.stat().st_mode & 0o777 == 0o640
    assert answers_in(path, max_tokens=10)[-1] == [49] * 5


OTHER = """
import sys
from outrider.drafters import AnswerStore
store = AnswerStore(sys.argv[1], "ab" * 32)
store.add([1, 2, 3])
print("open", flush=True)
sys.stdin.read()
"""


def test_another_process_is_told_that_the_file_is_in_use(tmp_path: Path) -> None:
    path = tmp_path / "answers.bin"
    other = subprocess.Popen(
        [sys.executable, "-c", OTHER, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        with pytest.raises(OptionError, match="is in use by another engine, here or in another process"):
            AnswerStore(path, VOCAB)
    finally:
        other.kill()  # as a crash would: nothing is left locked
        other.communicate()
    filled(path, [[4]])
    assert answers_in(path) == [[1, 2, 3], [4]]


def test_another_engine_of_this_process_is_told_so(tmp_path: Path) -> None:
    store = AnswerStore(tmp_path / "answers.bin", VOCAB)
    with pytest.raises(OptionError, match="is in use"):
        AnswerStore(tmp_path / "answers.bin", VOCAB)
    store.close()
    AnswerStore(tmp_path / "answers.bin", VOCAB).close()


def test_threads_share_a_store(tmp_path: Path) -> None:
    path = tmp_path / "answers.bin"
    store = AnswerStore(path, VOCAB, 5000)

    def work(number: int) -> None:
        for i in range(100):
            store.add([number, i, number + i])
            store.references()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store.close()
    assert sorted(answers_in(path)) == sorted([n, i, n + i] for n in range(1, 5) for i in range(100))


def test_a_file_that_cannot_be_written_to_any_more_is_warned_of(tmp_path: Path) -> None:
    store = AnswerStore(tmp_path / "answers.bin", VOCAB)
    store._file.close()
    with pytest.warns(UserWarning, match=r"answers.bin was not written"):
        store.add([1, 2])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        store.add([3, 4])
    assert [bool(r.find([3])) for r in store.references()] == [True]
