"""The answer store: earlier answers in a file, to copy drafts from."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import warnings
import zlib
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from outrider.config.files import user_path
from outrider.drafters.references import References
from outrider.errors import OptionError, one_line
from outrider.files import shown, why

if TYPE_CHECKING:
    from collections.abc import Iterator
    from collections.abc import Sequence as Seq
    from pathlib import Path

_DATABASE = b"SQLite format 3\0"  # the file's first bytes
_APPLICATION = 0x4F757472  # "Outr": marks the database as ours
_VERSION = 2  # of the tables; version 1 was no database, and began as follows
_OLD = b"outrider answers\1\0\0\0"
_PATIENCE = 1.0  # seconds to wait while other processes write
_MIN_MERGED = 4096  # recent tokens; fewer have a separate index, which is rebuilt for each request

# Closing a file drops all of the process's locks on it (POSIX), so only one store at a time uses its file. Forks wait
# for this lock, so that they start with it free and with no open database.
_FILES = threading.Lock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_FILES.acquire, after_in_parent=_FILES.release, after_in_child=_FILES.release)


class AnswerStore:
    """A file of an app's newest answers, for `Suffix` to copy from: answers often repeat earlier ones.

        store = AnswerStore("answers.db", manifest.main.vocab_sha256)
        store.add(result.token_ids)
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
        self._answers: deque[list[int]] = deque()  # the newest, with at most `max_tokens` tokens in all
        self._num_tokens = 0  # of these
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

    def add(self, token_ids: Seq[int]) -> None:
        """Store an answer. If the file cannot be written, warns, and stores the answer in memory only."""
        if not token_ids:
            return
        with self._mutex:
            self._append(list(token_ids))
            self._recent.append(list(token_ids))
            self._recent_indexed = None
        data = np.asarray(token_ids, dtype="<u4").tobytes()
        try:
            with self._transaction() as database:
                last = database.execute("SELECT begin + length(token_ids) / 4 FROM answers ORDER BY begin DESC LIMIT 1")
                (begin,) = last.fetchone() or (0,)
                database.execute("INSERT INTO answers VALUES (?, ?, ?)", (begin, data, zlib.crc32(data)))
                oldest = min(begin, begin + len(token_ids) - self.max_tokens)
                database.execute("DELETE FROM answers WHERE begin < ?", (oldest,))
        except (OSError, ValueError, sqlite3.Error) as error:
            warnings.warn(f"The answer store {self.path} was not written: {one_line(error)}.", stacklevel=2)

    def references(self) -> tuple[References, ...]:
        """Indexes of all stored answers.

        Recent answers have a separate index, so that no request waits for all answers to be indexed again.
        """
        with self._mutex:
            if self._recent_indexed is None:
                if sum(map(len, self._recent)) > max(_MIN_MERGED, self._num_tokens // 8):
                    self._indexed, self._recent, self._recent_indexed = (References(self._answers),), [], ()
                else:
                    self._recent_indexed = (References(self._recent),)
            return self._indexed + self._recent_indexed

    def _append(self, answer: list[int]) -> None:
        self._answers.append(answer)
        self._num_tokens += len(answer)
        while self._num_tokens > self.max_tokens and len(self._answers) > 1:
            self._num_tokens -= len(self._answers.popleft())

    @contextlib.contextmanager
    def _transaction(self, writes: bool = True) -> Iterator[sqlite3.Connection]:
        """The file, made if there is none. The block's writes are one transaction."""
        with _FILES:
            self._check_ours()
            # Python begins no transactions of its own (isolation_level). The journal is SQLite's default, a file that
            # is deleted after the write. A write-ahead log would need two more files while the database is open.
            database = sqlite3.connect(self._file, timeout=_PATIENCE, isolation_level=None)
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
        if head.startswith(_OLD) or (ours and head[60:64] != _VERSION.to_bytes(4, "big")):
            raise self._error("is no answer store of this version. Delete it, or name another file")
        if head and not ours:
            raise self._error("is no answer store. Name another file; this one stays as it is")

    def _error(self, what: str) -> OptionError:
        return OptionError(f"answer_store={shown(self.path)!r} {what}.")
