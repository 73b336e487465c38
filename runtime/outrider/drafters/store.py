"""The answer store: earlier answers in a file, to copy drafts from."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import warnings
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from outrider.config.files import user_path
from outrider.drafters.references import References
from outrider.errors import OptionError, one_line
from outrider.system.files import shown, why

_DATABASE = b"SQLite format 3\0"  # the file's first bytes
_APPLICATION = 0x4F757472  # "Outr": marks the database as ours
_VERSION = 2  # of the tables
_LOCK_SECONDS = 1.0  # seconds to wait while other processes write
_LOCK_SECONDS_LATER = 10.0  # the same where no caller waits
_MIN_MERGED = 4096  # recent tokens; fewer have a separate index, which is rebuilt for each request

# Closing a file drops all of the process's locks on it (POSIX), so only one store at a time uses its file. Forks wait
# for this lock, so that they start with it free and with no open database.
_FILES = threading.Lock()
_forking = False  # whether a fork has taken the lock


def _before_fork() -> None:
    global _forking
    _FILES.acquire()
    _forking = True


def _after_fork() -> None:
    """Free the lock, unless the fork began before these functions were registered: OpenVINO's telemetry forks, too."""
    global _forking
    if _forking:
        _forking = False
        _FILES.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)


class AnswerStore:
    """A file of an app's newest answers, for `Suffix` to copy from: answers often repeat earlier ones.

        store = AnswerStore("answers.db", manifest.main.vocab_sha256)
        store.add(result.token_ids)    # or add_soon, in the engine's thread
        Suffix(store.references())

    The file holds the answers unencrypted, as token ids: whoever can read the file can read them. To remove them,
    delete the file. It is an SQLite database, which is open only while it is read or written. A write that a crash
    interrupts is undone. Threads may share a store. Processes may share its file: each copies from the answers that
    were in it at the start, and from its own.

    Source: He et al. 2023, "REST", and Oliaro et al. 2024, "SuffixDecoding", which also store earlier answers.

    Raises:
        OptionError: when the file cannot be opened, is no store, damaged, or of another vocabulary.
    """

    def __init__(self, path: str | Path, vocab_sha256: str, max_tokens: int = 200_000) -> None:
        self.path, self.max_tokens = user_path(path), max_tokens
        self._vocab_sha256 = vocab_sha256
        self._mutex = threading.Lock()
        self._indexing = threading.Lock()  # taken before the mutex, by readers only: no answer waits for an index
        self._answers: deque[list[int]] = deque()  # the newest, with at most `max_tokens` tokens in all
        self._num_tokens = 0  # of these
        self._pending: deque[list[int]] = deque()  # answers that are not in the file yet
        self._writer: threading.Thread | None = None  # writes them, for those who do not wait
        try:
            self._file = self.path.absolute()  # stays valid if the app changes its folder
            with self._transaction(writes=False) as database:
                for data, checksum in database.execute("SELECT token_ids, checksum FROM answers ORDER BY begin"):
                    if not isinstance(data, bytes) or zlib.crc32(data) != checksum:
                        raise sqlite3.DatabaseError("an answer is not what was written")
                    self._append(np.frombuffer(data, dtype="<u4").tolist())
        except OSError as error:
            raise self._error(f"cannot be opened: {why(error)}. Name a file that can be read and written") from error
        except sqlite3.OperationalError as error:
            next_step = "Name a file in a folder that is there, and that can be written"
            raise self._error(f"cannot be opened: {one_line(error)}. {next_step}") from error
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:  # the latter: SQLite's message quotes the file
            raise self._error(f"is damaged: {one_line(error)}. Delete it to begin a new one") from error
        self._recent: list[list[int]] = []  # answers that `_indexed` does not hold
        self._indexed = (References(self._answers),) if self._answers else ()
        self._recent_indexed: tuple[References, ...] | None = ()  # None: not up to date

    def add(self, token_ids: Sequence[int]) -> None:
        """Store an answer. If the file cannot be written, warns, and writes the answer with a later one."""
        if self._take(token_ids):
            self.flush()

    def add_soon(self, token_ids: Sequence[int]) -> None:
        """The same without waiting for the file: a thread writes it, which a process that ends waits for."""
        if not self._take(token_ids):
            return
        with self._mutex:
            if self._writer is not None:
                return
            self._writer = writer = threading.Thread(target=self._write_on, name="outrider answers")
        try:
            writer.start()
        except RuntimeError:  # the interpreter ends, and starts no more threads
            self._write_on()

    def flush(self) -> None:
        """Write the answers that are not in the file yet. If it cannot be written, warns."""
        self._write(_LOCK_SECONDS)

    def _take(self, token_ids: Sequence[int]) -> bool:
        """Keep an answer in memory. Returns whether there is something to write."""
        if not token_ids:
            return False
        with self._mutex:
            self._append(list(token_ids))
            self._recent.append(list(token_ids))
            self._recent_indexed = None
            self._pending.append(list(token_ids))
            while len(self._pending) > len(self._answers):  # these would be deleted with the next answer
                self._pending.popleft()
        return True

    def _write_on(self) -> None:
        """Write until all is written, or a write fails. The body of the thread."""
        is_done = False
        while not is_done:
            could = False
            try:
                could = self._write(_LOCK_SECONDS_LATER)
            finally:
                with self._mutex:
                    is_done = not (could and self._pending)
                    if is_done:
                        self._writer = None

    def _write(self, patience: float) -> bool:
        """Write what is not in the file yet. Returns whether that could be done."""
        if not self._pending:
            return True
        pending, is_written = deque[list[int]](), False
        try:
            with self._transaction(patience=patience) as database:
                with self._mutex:
                    pending, self._pending = self._pending, pending
                for token_ids in pending:
                    self._insert(database, token_ids)
            is_written = True
        except (OSError, ValueError, sqlite3.Error) as error:
            with contextlib.suppress(UserWarning):  # if the app turns warnings into errors
                warnings.warn(f"The answer store {self.path} was not written: {one_line(error)}.", stacklevel=4)
        finally:
            if not is_written:
                with self._mutex:
                    self._pending = pending + self._pending
        return is_written

    def _insert(self, database: sqlite3.Connection, token_ids: list[int]) -> None:
        data = np.asarray(token_ids, dtype="<u4").tobytes()
        last = database.execute("SELECT begin + length(token_ids) / 4 FROM answers ORDER BY begin DESC LIMIT 1")
        (begin,) = last.fetchone() or (0,)
        database.execute("INSERT INTO answers VALUES (?, ?, ?)", (begin, data, zlib.crc32(data)))
        oldest = min(begin, begin + len(token_ids) - self.max_tokens)
        database.execute("DELETE FROM answers WHERE begin < ?", (oldest,))

    def references(self) -> tuple[References, ...]:
        """Indexes of all stored answers.

        Recent answers have a separate index, so that no request waits for all answers to be indexed again.
        """
        with self._indexing:
            with self._mutex:
                if self._recent_indexed is not None:
                    return self._indexed + self._recent_indexed
                num_recent, num_tokens = len(self._recent), sum(map(len, self._recent))
                is_merged = num_tokens > max(_MIN_MERGED, self._num_tokens // 8)
                answers = [*(self._answers if is_merged else self._recent)]
            made = (References(answers),)
            with self._mutex:
                is_current = len(self._recent) == num_recent  # else the next reader indexes what has come since
                if is_merged:
                    self._indexed, self._recent = made, self._recent[num_recent:]
                    self._recent_indexed = () if is_current else None
                    return made
                self._recent_indexed = made if is_current else None
                return self._indexed + made

    def _append(self, answer: list[int]) -> None:
        self._answers.append(answer)
        self._num_tokens += len(answer)
        while self._num_tokens > self.max_tokens and len(self._answers) > 1:
            self._num_tokens -= len(self._answers.popleft())

    @contextlib.contextmanager
    def _transaction(self, writes: bool = True, patience: float | None = None) -> Iterator[sqlite3.Connection]:
        """The file, made if there is none, for its owner alone. The block's writes are one transaction."""
        with _FILES:
            self._check_ours()
            with contextlib.suppress(OSError):  # that it is there, or SQLite says why it cannot be
                os.close(os.open(self._file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            # Python begins no transactions of its own (isolation_level). The journal is SQLite's default, a file that
            # is deleted after the write. A write-ahead log would need two more files while the database is open.
            database = sqlite3.connect(
                self._file, timeout=_LOCK_SECONDS if patience is None else patience, isolation_level=None
            )
            with contextlib.closing(database):
                database.execute("BEGIN IMMEDIATE")
                with database:  # commits, or rolls back
                    is_new = database.execute("PRAGMA user_version").fetchone() == (0,)
                    if is_new:
                        self._create(database)
                    tables = "SELECT count(*) FROM sqlite_master WHERE name IN ('vocabulary', 'answers')"
                    if database.execute(tables).fetchone() != (2,):
                        raise sqlite3.DatabaseError("a table is missing")
                    if database.execute("SELECT sha256 FROM vocabulary").fetchone() != (self._vocab_sha256,):
                        what = "holds answers of a model with another vocabulary. Name another file for this model"
                        raise self._error(what)
                    yield database
                    if not writes and not is_new:
                        database.execute("ROLLBACK")  # SQLite would repair its header, which no one asked for

    def _create(self, database: sqlite3.Connection) -> None:
        database.execute(f"PRAGMA application_id = {_APPLICATION}")
        database.execute(f"PRAGMA user_version = {_VERSION}")
        database.execute("CREATE TABLE vocabulary (sha256 TEXT)")
        database.execute("INSERT INTO vocabulary VALUES (?)", (self._vocab_sha256,))
        # begin: tokens of all answers before this one, including deleted ones. token_ids: little-endian uint32.
        database.execute("CREATE TABLE answers (begin INTEGER PRIMARY KEY, token_ids BLOB, checksum INTEGER)")

    def _check_ours(self) -> None:
        """Raise OptionError for a file that is not ours, before SQLite deletes the journals beside it."""
        if self._file.exists() and not self._file.is_file():  # a folder, or an endless device
            raise self._error("cannot be opened: it is no file. Name a file")
        try:
            with self._file.open("rb") as file:
                head = file.read(100)
        except FileNotFoundError:
            return
        ours = head.startswith(_DATABASE) and head[68:72] == _APPLICATION.to_bytes(4, "big")
        if ours and head[60:64] != _VERSION.to_bytes(4, "big"):
            raise self._error("is no answer store of this version. Delete it, or name another file")
        if head and not ours:
            raise self._error("is no answer store. Name another file; this one is not changed")

    def _error(self, what: str) -> OptionError:
        return OptionError(f"answer_store={shown(self.path)!r} {what}.")
