"""The file of earlier answers: what it saves, with crashes and with other processes."""

import contextlib
import hashlib
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.bundle import Bundle
from outrider.drafters import AnswerStore
from outrider.drafters.references import References
from outrider.errors import OptionError
from toys import load_toy

VOCAB = "ab" * 32


def filled(path: Path, answers: list[list[int]], max_tokens: int = 200_000) -> None:
    store = AnswerStore(path, VOCAB, max_tokens)
    for answer in answers:
        store.add(answer)


def sha256(path: Path) -> str:
    """The file's hash: pytest needs hours to show the difference of two files of this size."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def answers_in(path: Path, max_tokens: int = 200_000) -> list[list[int]]:
    return list(AnswerStore(path, VOCAB, max_tokens)._answers)


ACTIONS = st.tuples(st.sampled_from(["add", "add soon", "open"]), st.lists(st.integers(0, 200_000), max_size=30))


@settings(max_examples=25)
@given(st.lists(ACTIONS, max_size=12), st.sampled_from([1, 25, 200]))
def test_the_newest_answers_are_kept_and_found(
    tmp_path_factory: pytest.TempPathFactory, actions: list[tuple[str, list[int]]], max_tokens: int
) -> None:
    """At once and after a restart, in a small file of its owner's that nothing stands beside."""
    path = tmp_path_factory.mktemp("store") / "answers.bin"
    store, expected = AnswerStore(path, VOCAB, max_tokens), list[list[int]]()
    for kind, answer in actions:
        if kind == "open":
            wait_for_writer(store)
            store = AnswerStore(path, VOCAB, max_tokens)
        else:
            (store.add if kind == "add" else store.add_soon)(answer)
            expected += [answer] if answer else []
            while sum(map(len, expected)) > max_tokens and len(expected) > 1:
                del expected[0]
        assert list(store._answers) == expected
        for context in (each[:-1] for each in expected if len(each) > 1):
            lengths = [match.length for each in store.references() if (match := each.find(context))]
            assert max(lengths, default=0) == min(len(context), 16)
    wait_for_writer(store)
    assert [p.name for p in path.parent.iterdir()] == ["answers.bin"]
    assert path.stat().st_size <= 5 * 4096
    assert os.name == "nt" or path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(("statement", "message"), [
    ("PRAGMA user_version = 3", "is no answer store of this version. Delete it, or name another file"),
    ("DROP TABLE answers", "answers.bin' is damaged: a table is missing. Delete it"),
    ("UPDATE vocabulary SET sha256 = 'cd'", "another vocabulary. Name another file for this model"),
    ("UPDATE answers SET token_ids = NULL", "is damaged: an answer is not what was written. Delete it"),
])  # fmt: skip
def test_a_store_with_another_content_is_refused(tmp_path: Path, statement: str, message: str) -> None:
    path = tmp_path / "answers.bin"
    filled(path, [[1]])
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.execute(statement)
    with pytest.raises(OptionError, match=message):
        AnswerStore(path, VOCAB)


CRASH = """
import sys
from outrider.drafters import AnswerStore
store = AnswerStore(sys.argv[1], "ab" * 32)
with store._transaction() as database:
    database.execute("PRAGMA cache_size = 1")  # so that the file itself is being written
    database.execute("DELETE FROM answers")
    for i in range(100):
        database.execute("INSERT INTO answers VALUES (?, ?, 0)", (i, bytes(5000)))
    print("halfway", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("answers", [[], [[1, 2, 3], [7], [4, 5, 6, 2**31]]])
def test_what_a_crash_left_half_written_is_undone(tmp_path: Path, answers: list[list[int]]) -> None:
    path, journal = tmp_path / "answers.bin", tmp_path / "answers.bin-journal"
    filled(path, answers)
    before = path.read_bytes()
    other = subprocess.Popen(
        [sys.executable, "-c", CRASH, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "halfway\n"
    finally:
        other.kill()
        other.communicate()
    assert journal.exists()
    assert path.read_bytes() != before
    assert answers_in(path) == answers
    assert [p.name for p in tmp_path.iterdir()] == ["answers.bin"]
    filled(path, [[8, 9]])
    assert answers_in(path) == [*answers, [8, 9]]


ANSWERS = [[1, 2, 3], [4] * 2000, [5, 6, 7]]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file with `ANSWERS`."""
    path = tmp_path_factory.mktemp("written") / "answers.bin"
    filled(path, ANSWERS)
    return path.read_bytes()


@given(st.data())
@settings(max_examples=100)
def test_damage_is_found_and_nothing_is_touched(
    written: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """For any cut, and any wrong bit. Answers that can still be read are answers that were written."""
    path, content = tmp_path_factory.mktemp("store") / "answers.bin", bytearray(written)
    at = data.draw(st.integers(1, len(content) - 1), label="at")
    if data.draw(st.booleans(), label="cut"):
        del content[at:]
    else:
        content[at] ^= 1 << data.draw(st.integers(0, 7), label="bit")
    path.write_bytes(content)
    try:
        kept, said = answers_in(path), ""
    except OptionError as error:
        kept, said = [], str(error)
    assert all(answer in ANSWERS for answer in kept)
    assert kept or said
    assert not said or re.search(r"answers.bin' (is|holds|cannot be) .*\. (Delete|Name) ", said)
    assert sha256(path) == hashlib.sha256(content).hexdigest()
    assert [p.name for p in path.parent.iterdir()] == ["answers.bin"]


@pytest.mark.parametrize(("content", "message"), [
    (b"hello", "is no answer store. Name another file"),
    (b"o", "is no answer store. Name another file"),
    (b"SQLite format 3\0", "is no answer store. Name another file"),
    (bytes(500), "is no answer store. Name another file"),
])  # fmt: skip
def test_a_foreign_file_is_refused_and_left_alone(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "answers.bin"
    path.write_bytes(content)
    with pytest.raises(OptionError, match=message):
        AnswerStore(path, VOCAB)
    assert path.read_bytes() == content
    assert [p.name for p in tmp_path.iterdir()] == ["answers.bin"]  # nor is anything put beside it


@pytest.mark.parametrize("mode", ["DELETE", "WAL"])
def test_a_foreign_database_is_refused_with_what_stands_beside_it(tmp_path: Path, mode: str) -> None:
    """All stays as its app left it. SQLite itself would read the files beside it, and delete them."""
    folder = tmp_path / "folder"
    folder.mkdir()
    database = sqlite3.connect(tmp_path / "answers.bin", isolation_level=None)
    database.execute(f"PRAGMA journal_mode = {mode}")
    database.execute("CREATE TABLE answers (begin INTEGER)")
    database.execute("PRAGMA cache_size = 1")
    database.execute("BEGIN")
    for number in range(2000):
        database.execute("INSERT INTO answers VALUES (?)", (number,))
    for file in tmp_path.glob("answers.bin*"):
        shutil.copy(file, folder)
    database.close()
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    assert len(before) > 1
    with pytest.raises(OptionError, match="is no answer store. Name another file; this one is not changed"):
        AnswerStore(folder / "answers.bin", VOCAB)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="cannot be opened: .*Name a file in a folder that is there"):
        AnswerStore(tmp_path / "nowhere" / "answers.bin", VOCAB)
    (tmp_path / "folder").mkdir()
    with pytest.raises(OptionError, match="cannot be opened: it is no file. Name a file"):
        AnswerStore(tmp_path / "folder", VOCAB)
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]
    with pytest.raises(OptionError, match="cannot be opened"):
        AnswerStore(tmp_path / ("x" * 5000), VOCAB)


OTHER = """
import sys
from outrider.drafters import AnswerStore, store
store._LOCK_SECONDS = 60
store = AnswerStore(sys.argv[1], "ab" * 32)
store.add([1, 2, 3])
print("open", flush=True)
for i in range(50):
    store.add([9, i])
sys.stdin.read()
store.add([5])
"""


def test_processes_share_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the same time, and after one of them has crashed: no lock is left."""
    monkeypatch.setattr("outrider.drafters.store._LOCK_SECONDS", 60)
    path = tmp_path / "answers.bin"
    others = [
        subprocess.Popen([sys.executable, "-c", OTHER, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        for other in others:
            assert other.stdout is not None
            assert other.stdout.readline() == "open\n"
        store = AnswerStore(path, VOCAB)
        for i in range(50):
            store.add([4, i])
        others[0].communicate(timeout=300)
    finally:
        for other in others:
            other.kill()
            other.communicate()
    answers = answers_in(path)
    assert answers.count([1, 2, 3]) == 2
    assert answers.count([5]) == 1
    assert [answer for answer in answers if answer[0] == 4] == [[4, i] for i in range(50)]
    assert answers.count([9, 49]) >= 1
    filled(path, [[6]])  # takes away a journal that the other had just begun
    assert answers_in(path) == [*answers, [6]]
    assert [p.name for p in tmp_path.iterdir()] == ["answers.bin"]


FORK = """
import os, signal, sys, threading, time
from outrider.drafters import AnswerStore
store = AnswerStore(sys.argv[1], "ab" * 32)
writing = threading.Event()

def work():
    with store._transaction():
        writing.set()
        time.sleep(0.3)

thread = threading.Thread(target=work)
thread.start()
writing.wait()
pid = os.fork()
if not pid:
    signal.alarm(20)  # if it waits for ever
    AnswerStore(sys.argv[1], "ab" * 32).add([2])
    store.add([3])
    os._exit(0)
thread.join()
store.add([1])
os.waitpid(pid, 0)
"""


@pytest.mark.needs("fork")
def test_a_fork_shares_the_file(tmp_path: Path) -> None:
    path = tmp_path / "answers.bin"
    subprocess.run([sys.executable, "-c", FORK, path], check=True, timeout=300)
    assert sorted(answers_in(path)) == [[1], [2], [3]]


def test_a_file_that_another_program_holds_is_waited_for_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.drafters.store._LOCK_SECONDS", 0.05)
    path = tmp_path / "answers.bin"
    store = AnswerStore(path, VOCAB)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute("BEGIN EXCLUSIVE")
        with pytest.raises(OptionError, match="cannot be opened: database is locked"):
            AnswerStore(path, VOCAB)
        with pytest.warns(UserWarning, match=r"answers.bin was not written: database is locked"):
            store.add([1])
    store.add([2])
    assert answers_in(path) == [[1], [2]]


def test_an_engine_does_not_wait_for_the_file(
    openvino_bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is lost of what it has answered meanwhile, and no answer is kept that would be deleted again."""
    path = tmp_path / "answers.bin"
    with load_toy(openvino_bundle, answer_store=str(path), drafter="suffix") as engine:
        store = engine._preparation.store
        assert store is not None
        engine.generate("warm up", max_new_tokens=4)
        wait_for_writer(store)
        for name in ("_LOCK_SECONDS", "_LOCK_SECONDS_LATER"):  # who waits for the file waits too long for this test
            monkeypatch.setattr(f"outrider.drafters.store.{name}", 900)
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
            database.execute("BEGIN EXCLUSIVE")
            answers = [
                engine.generate(f"answer {i}", max_new_tokens=4, seed=i, temperature=1).token_ids for i in range(5)
            ]
            assert store.references()  # they can be copied from already
    assert list(AnswerStore(path, openvino_bundle.manifest.main.vocab_sha256)._answers)[1:] == answers


def test_what_waits_for_the_file_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.drafters.store._LOCK_SECONDS_LATER", 0.01)
    path = tmp_path / "answers.bin"
    store = AnswerStore(path, VOCAB, max_tokens=20)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        database.execute("BEGIN EXCLUSIVE")
        for i in range(50):
            store.add_soon([i] * 5)
            assert len(store._pending) <= 4
        wait_for_writer(store)
    store.flush()
    assert answers_in(path, max_tokens=20) == [[i] * 5 for i in range(46, 50)]


def wait_for_writer(store: AnswerStore) -> None:
    """Until its thread has ended."""
    while (writer := store._writer) is not None:
        writer.join(0.01)


def test_answers_are_taken_while_others_are_indexed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = AnswerStore(tmp_path / "answers.bin", VOCAB)
    store.add([1, 2])
    begun, goes_on, taken = threading.Event(), threading.Event(), threading.Event()

    def slow(answers: list[list[int]]) -> References:
        begun.set()
        assert goes_on.wait(600)
        return References(answers)

    def take() -> None:
        store.add_soon([3, 4])
        taken.set()

    monkeypatch.setattr("outrider.drafters.store.References", slow)
    reader, engine = threading.Thread(target=store.references), threading.Thread(target=take)
    reader.start()
    assert begun.wait(300)
    engine.start()
    is_taken = taken.wait(300)
    goes_on.set()
    reader.join()
    engine.join()
    assert is_taken  # before the index was there
    (found,) = store.references()
    assert found.find([3])
    assert found.find([1])


def test_a_write_that_fails_as_never_before_is_done_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = AnswerStore(tmp_path / "answers.bin", VOCAB)

    goes_on = threading.Event()

    def fail(*_: object) -> None:
        assert goes_on.wait(600)
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(store, "_insert", fail)
        patch.setattr(threading, "excepthook", lambda _: None)
        store.add_soon([1, 2])
        writer = store._writer
        assert writer is not None
        goes_on.set()
        writer.join()
    store.add_soon([3, 4])
    if (writer := store._writer) is not None:
        writer.join(300)
    assert answers_in(store.path) == [[1, 2], [3, 4]]


def test_a_process_that_ends_writes_all(tmp_path: Path) -> None:
    path = tmp_path / "answers.bin"
    code = (
        "import sys\nfrom outrider.drafters import AnswerStore\nstore = AnswerStore(sys.argv[1], 'ab' * 32)\n"
        "for i in range(30): store.add_soon([i])"
    )
    subprocess.run([sys.executable, "-c", code, path], check=True, timeout=300)
    assert answers_in(path) == [[i] for i in range(30)]
