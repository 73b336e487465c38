"""The answers that an app has given, kept in a file to copy from."""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
import sys
import tempfile
import threading
import warnings
import zlib
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from outrider.config.files import user_path
from outrider.drafters.references import References
from outrider.errors import OptionError, one_line
from outrider.files import shown, why

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq
    from typing import IO

_MAGIC = b"outrider answers"
_VERSION = 1
_HEADER = struct.Struct("<16sI32s")  # magic, version, sha256 of the vocabulary
_LEAST = len(_MAGIC) + 4  # bytes that tell a torn header of ours from a text that begins like it
_RECORD = struct.Struct("<II")  # number of tokens, CRC-32 of them; then each as a little-endian uint32
_LONGEST = 1 << 24  # tokens of one answer; a number above is damage
_MIN_MERGED = 4096  # recent tokens; fewer have an index of their own, which is made anew for every request


class AnswerStore:
    """A file of the newest answers of an app, for `Suffix` to copy from: what was said once is often said again.

        store = AnswerStore("answers.bin", manifest.main.vocab_sha256)
        store.add(result.token_ids)
        Suffix(store.references())

    The file holds the answers in the clear, as token ids: whoever reads it can read them. Delete it to forget them. It
    is appended to, and written anew when it holds twice `max_tokens`. An answer that was half written when the app or
    the machine stopped is dropped. One store at a time may use a file, which a second one, its name and ".lock", shows;
    its calls are thread-safe.

    Source: He et al. 2023, "REST", and Oliaro et al. 2024, "SuffixDecoding", which keep earlier answers, too.

    Raises:
        OptionError: when the file cannot be opened, is in use, damaged, or of another vocabulary.
    """

    def __init__(self, path: str | Path, vocab_sha256: str, max_tokens: int = 200_000) -> None:
        self.path, self.max_tokens = user_path(path), max_tokens
        self._header = _HEADER.pack(_MAGIC, _VERSION, bytes.fromhex(vocab_sha256))
        self._mutex = threading.Lock()
        self._answers: deque[list[int]] = deque()  # the newest, of `max_tokens` together at most
        self._num_tokens = 0  # of these
        self._num_written = 0  # tokens in the file
        self._end = 0  # bytes of the file
        self._check_ours()  # before the lock's file is made: beside a file that is not ours there is none
        try:
            # A file of its own, since the other is replaced now and then.
            self._lock_file = self.path.with_name(self.path.name + ".lock").open("ab")
        except (OSError, ValueError) as error:
            raise self._error(f"cannot be opened: {one_line(error)}. Name a file in a folder that is there") from error
        try:
            _lock(self._lock_file)
        except OSError as error:
            self._lock_file.close()
            raise self._error("is in use by another engine, here or in another process. Give each its own") from error
        try:
            self._open()
        except BaseException:
            self._lock_file.close()
            raise
        self._recent: list[list[int]] = []  # answers that `_indexed` does not hold
        self._indexed = (References(self._answers),) if self._answers else ()
        self._recent_indexed: tuple[References, ...] | None = ()  # None: not up to date

    def add(self, token_ids: Seq[int]) -> None:
        """Keep an answer. When the file cannot be written, it warns, and keeps the answer in memory."""
        if not token_ids:
            return
        with self._mutex:
            self._keep(list(token_ids))
            self._recent.append(list(token_ids))
            self._recent_indexed = None
            try:
                self._write(_record(token_ids))
                self._num_written += len(token_ids)
                if self._num_written > 2 * self.max_tokens:
                    self._compact()
            except (OSError, ValueError) as error:
                warnings.warn(f"The answer store {self.path} was not written: {one_line(error)}.", stacklevel=2)

    def references(self) -> tuple[References, ...]:
        """All answers that are kept, the newest included.

        Recent ones have an index of their own, so that no request waits for all to be indexed again.
        """
        with self._mutex:
            if self._recent_indexed is None:
                if sum(map(len, self._recent)) > max(_MIN_MERGED, self._num_tokens // 8):
                    self._indexed, self._recent, self._recent_indexed = (References(self._answers),), [], ()
                else:
                    self._recent_indexed = (References(self._recent),)
            return self._indexed + self._recent_indexed

    def close(self) -> None:
        """Leave the file to others."""
        with self._mutex:
            self._file.close()
            self._lock_file.close()

    def _keep(self, answer: list[int]) -> None:
        self._answers.append(answer)
        self._num_tokens += len(answer)
        while self._num_tokens > self.max_tokens and len(self._answers) > 1:
            self._num_tokens -= len(self._answers.popleft())

    def _check_ours(self) -> None:
        """See whether there is no file yet, or one that is a store for this vocabulary, as far as its header says."""
        try:
            if self.path.exists() and not self.path.is_file():  # a folder, or a device that never ends
                raise self._error("cannot be opened: it is no file. Name a file")
            with self.path.open("rb") as file:
                self._read_header(file.read(_HEADER.size))
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            if isinstance(error, OptionError):
                raise
            raise self._error(f"cannot be opened: {why(error)}. Name a file that can be read and written") from error

    def _open(self) -> None:
        """Open the file, read and leave it ready to be appended to."""
        try:
            file = self.path.open("a+b", buffering=0)
        except OSError as error:
            raise self._error(f"cannot be opened: {one_line(error)}. Name a file that can be written") from error
        self._file = file
        try:
            file.seek(0)
            self._end = self._read(file.read())
            file.truncate(self._end)
            if not self._end:
                self._write(self._header)
        except OSError as error:
            file.close()
            raise self._error(f"cannot be read or written: {one_line(error)}. Name another file") from error
        except BaseException:
            file.close()
            raise

    def _read(self, data: bytes) -> int:
        """Take the answers of a file; returns where the last whole one ends."""
        if not self._read_header(data):
            return 0
        at = _HEADER.size
        while at < len(data):
            num_tokens, checksum = _RECORD.unpack_from(data[at : at + _RECORD.size].ljust(_RECORD.size, b"\0"))
            begin = at + _RECORD.size
            end = begin + 4 * num_tokens
            whole = num_tokens and end <= len(data) and zlib.crc32(data[begin:end]) == checksum
            if not whole:
                # What a crash leaves is an end that is missing, or zeros where the disk was not written yet.
                if num_tokens <= _LONGEST and not any(data[end:]):
                    break
                raise self._error(f"is damaged at byte {at:,}. Delete it to begin a new one")
            self._keep(np.frombuffer(data[begin:end], dtype="<u4").tolist())
            self._num_written += num_tokens
            at = end
        return at

    def _read_header(self, data: bytes) -> bool:
        """Whether a file has its header; not where it is empty, or was torn at once. OptionError for all others."""
        if not data or (len(data) >= _LEAST and data != self._header and self._header.startswith(data)):
            return False
        magic, version, vocabulary = _HEADER.unpack_from(data.ljust(_HEADER.size, b"\0"))
        if magic != _MAGIC or len(data) < _LEAST:
            raise self._error("is no answer store. Name another file; this one stays as it is")
        if version != _VERSION:
            raise self._error(f"has format {version}, and this Outrider knows {_VERSION}. Delete it, or name another")
        if vocabulary != self._header[-len(vocabulary) :]:
            raise self._error("holds answers of a model with another vocabulary. Name another file for this model")
        return True

    def _write(self, data: bytes) -> None:
        """Append to the file, all or nothing."""
        try:
            if self._file.write(data) != len(data):
                raise OSError("no space is left")
        except OSError:
            self._file.truncate(self._end)
            raise
        self._end += len(data)

    def _compact(self) -> None:
        """Write the file anew, with the newest answers only, and put it in place of the old one."""
        data = self._header + b"".join(map(_record, self._answers))
        # A name that nobody has: beside a user's file there may be others.
        descriptor, name = tempfile.mkstemp(".tmp", f"{self.path.name}.", self.path.parent)
        temporary = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            with contextlib.suppress(OSError):
                shutil.copymode(self.path, temporary)
            self._file.close()  # Windows replaces no open file
            try:
                temporary.replace(self.path)
                self._num_written, self._end = self._num_tokens, len(data)
            finally:
                self._file = self.path.open("a+b", buffering=0)
        finally:
            temporary.unlink(missing_ok=True)

    def _error(self, what: str) -> OptionError:
        return OptionError(f"answer_store={shown(self.path)!r} {what}.")


def _record(token_ids: Seq[int]) -> bytes:
    data = np.asarray(token_ids, dtype="<u4").tobytes()
    return _RECORD.pack(len(token_ids), zlib.crc32(data)) + data


if sys.platform == "win32":
    import msvcrt

    def _lock(file: IO[bytes]) -> None:
        """Claim a file until it is closed, or the process ends; OSError when it is claimed."""
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
else:
    import fcntl

    def _lock(file: IO[bytes]) -> None:
        """Claim a file until it is closed, or the process ends; OSError when it is claimed."""
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
