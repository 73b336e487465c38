"""Files with keys and values of texts' tokens, in a folder of bounded size that several processes may share."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import math
import os
import shutil
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from outrider.errors import one_line
from outrider.models.kv.state_worth import key_of, state_worths, states_of
from outrider.system.files import FAULTS, NO_ROOM, write_whole
from outrider.types import num_common_tokens

log = logging.getLogger("outrider")

SUFFIX = ".kv"
ABOUT = "about.json"  # says what a folder's files belong to
_MAGIC = b"outrider keys and values 3\n"  # with the version of the format; files of another one are deleted
_LONGEST = 1 << 20  # bytes of a header
_HALF_LIFE = 3 * 86_400.0  # seconds, after which a use counts half
# For each token before it, by which a file counts as used earlier: ends go before beginnings.
_SECONDS_PER_TOKEN = 1e-3
_FREE_BYTES = 1_000_000_000  # bytes of the disk that are left to others
_OLD = 3_600.0  # seconds, after which a temporary file belongs to nobody


class _Header(msgspec.Struct):
    """The second line of a file, after a checksum of the line: all that is believed of a file is under a checksum.

    identity: of the folder. token_ids: decimal numbers, as keys of images have more than 64 bits. crc: of the content.
    is_state: whether that is the states after these tokens.
    """

    identity: str
    parent: str
    token_ids: str
    num_bytes: int
    crc: int
    is_state: bool = False

    def tokens(self) -> tuple[int, ...]:
        """The tokens, as the prefix cache tells them apart."""
        return tuple(int(each) for each in self.token_ids.split())


@dataclass(frozen=True, slots=True)
class ChunkFile:
    """Some of a text's tokens, whose keys and values are in a file, or the states after them.

    key: identifies these tokens and all before them; the file's name. parent: the key of those before. begin: how many
    those are, counted along the chain; no file says it. token_ids: as the prefix cache tells tokens apart. is_state:
    whether the file has states.
    """

    key: str
    parent: str
    begin: int
    token_ids: tuple[int, ...]
    is_state: bool = False

    @classmethod
    def of(cls, parent: str, begin: int, token_ids: Sequence[int]) -> ChunkFile:
        """The chunk of these tokens after those of `parent`."""
        text = f"{parent} {' '.join(map(str, token_ids))}"
        return cls(key_of(text.encode()), parent, begin, tuple(token_ids))

    @property
    def end(self) -> int:
        """The text's tokens up to its last one."""
        return self.begin + len(self.token_ids)

    def state(self, end: int) -> ChunkFile:
        """The states after the text's first `end` tokens, which end in this chunk."""
        made = ChunkFile.of(states_of(self.parent), self.begin, self.token_ids[: end - self.begin])
        return replace(made, is_state=True)


@dataclass(frozen=True, slots=True)
class File:
    """A file, as the folder lists it. used: seconds since 1970. rank: the least is deleted first."""

    path: Path
    size: int
    used: float
    rank: float


def root_of(scope: bytes) -> str:
    """What the first chunk of a text of this scope has as its parent."""
    return key_of(scope)


class ChunkFiles:
    """The files of one model in one setting: a folder of its own in the store's folder.

        files = ChunkFiles(Path("prefixes"), {"model": "…", "precision": "f32"}, max_bytes=4 * 10**9)
        files.write(ChunkFile.of(root_of(b""), 0, token_ids), content)
        files.chain(token_ids, b"")    # the chunks that a text begins with

    identity: all that keys and values depend on besides the tokens. max_bytes: of all folders in `folder` together.
    about: whose files these are, in words.

    A use weighs half as much after three days; a file's rank is the logarithm of its uses' weights (LRFU, Lee et al.
    2001), in seconds, and its time of modification, so that no file is written for it. A file that others go on from is
    used whenever they are. So texts go from their ends, and those that are used often go last. Where room is made, a
    use of states counts by what they save per byte (`state_worths`). Threads may share it.

    Raises:
        OSError: when the folder cannot be made. On a full disk there is none, or none with `ABOUT`; what is written
            later fails then.
    """

    def __init__(
        self, folder: Path, identity: Mapping[str, Any], max_bytes: int, about: Mapping[str, str] | None = None
    ) -> None:
        name = json.dumps(identity, sort_keys=True, default=str)
        self._root, self._max_bytes = folder, max_bytes
        self._identity = hashlib.sha256(name.encode()).hexdigest()
        self.folder = folder / self._identity[:16]
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_whole(self.folder / ABOUT, msgspec.json.encode(about or {}), private=True)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
        for path in self.folder.glob(".*"):  # left by a process that was killed
            with contextlib.suppress(OSError):
                if path.stat().st_mtime < time.time() - _OLD:
                    path.unlink()
        self._mutex = threading.RLock()  # of what follows
        self._children: dict[str, dict[str, tuple[int, ...]]] = {}  # tokens, by the parent and the key
        self._parents: dict[str, str] = {}  # of each known key
        self._listed = -1  # the folder's time of modification when it was listed
        self._has_warned = False

    def chain(self, token_ids: Sequence[int], scope: bytes, size: int) -> list[tuple[ChunkFile, int]]:
        """The chunks that a text begins with, each with how many of its tokens the text has.

        size: of a whole chunk. The last one may have more tokens than the text shares with it.
        """
        found: list[tuple[ChunkFile, int]] = []
        parent, begin = root_of(scope), 0
        with self._mutex:
            self._list()
            while begin < len(token_ids):
                whole = ChunkFile.of(parent, begin, token_ids[begin : begin + size])
                if len(whole.token_ids) < size or whole.key not in self._parents:
                    children = self._children.get(parent, {})
                    near = [(num_common_tokens(each, whole.token_ids), key) for key, each in children.items()]
                    count, key = max(near, key=lambda pair: pair[0], default=(0, ""))
                    return [*found, (ChunkFile(key, parent, begin, children[key]), count)] if count else found
                found.append((whole, size))
                parent, begin = whole.key, whole.end
        return found

    def states(self, chain: Sequence[tuple[ChunkFile, int]]) -> list[ChunkFile]:
        """The states that files have for a text, after the most tokens first. chain: of the text, as `chain` gives it.

        They have files of their own, because a text that comes later may need those after fewer tokens.
        """
        found: list[ChunkFile] = []
        with self._mutex:
            for chunk, count in reversed(chain):
                of_chunk = self._children.get(states_of(chunk.parent), {}).values()
                lengths = {len(each) for each in of_chunk if each == chunk.token_ids[:count][: len(each)]}
                found += [chunk.state(chunk.begin + length) for length in sorted(lengths, reverse=True)]
        return found

    def has(self, chunk: ChunkFile) -> bool:
        """Whether there is a file, as the folder was last listed."""
        return chunk.key in self._parents

    def read(self, chunk: ChunkFile) -> NDArray[np.uint8] | None:
        """A chunk's content, uint8 [bytes]; None if the file is gone, damaged or another's, which is logged once."""
        path = self._path(chunk.key)
        try:
            with path.open("rb") as file:
                header = self._read_header(file, chunk.key)  # it may be another file than when it was listed
                is_whole = os.fstat(file.fileno()).st_size - file.tell() == header.num_bytes
                content = np.empty(header.num_bytes if is_whole else 0, dtype=np.uint8)
                if not is_whole or file.readinto(content.data) != header.num_bytes:
                    raise ValueError("it has another size than it was written with")
            if zlib.crc32(content.data) != header.crc:
                raise ValueError("its content is not what was written")
        except FileNotFoundError:  # another process has deleted it
            self._forget(chunk.key)
            return None
        except FAULTS as error:
            self._discard(path, error)
            return None
        return content

    def write(self, chunk: ChunkFile, content: NDArray[np.uint8]) -> None:
        """Write a chunk's file whole or not at all, and delete what is of less use where there is no room.

        If files that are of more use take all the room, nothing is written.

        Raises:
            OSError: when it cannot be written, or the disk is nearly full.
        """
        text = " ".join(map(str, chunk.token_ids))
        crc = zlib.crc32(content.data)
        header = _Header(self._identity, chunk.parent, text, len(content), crc, chunk.is_state)
        head = _MAGIC + _line(msgspec.json.encode(header))
        now = time.time()
        if not self._make_room(chunk, len(head) + len(content), now - _SECONDS_PER_TOKEN * chunk.begin):
            return
        path = self._path(chunk.key)
        write_whole(path, head + content.tobytes(), private=True)
        with contextlib.suppress(FileNotFoundError):  # another process has deleted it at once
            os.utime(path, (now, now - _SECONDS_PER_TOKEN * chunk.begin))
        with self._mutex:
            for key, each in list(self._children.get(chunk.parent, {}).items()):
                if each == chunk.token_ids[: len(each)] and key != chunk.key and not chunk.is_state:
                    self._delete(self._path(key))  # beginnings of it are of no use any more
            self._add(chunk.key, chunk.parent, chunk.token_ids)

    def clear(self) -> None:
        """Delete all files of this model in this setting."""
        for file in files_in(self._root, self.folder.name):
            self._delete(file.path)

    def use(self, chunk: ChunkFile) -> None:
        """Count a use of a file."""
        path, now = self._path(chunk.key), time.time()
        with contextlib.suppress(OSError):
            ranks = np.array([path.stat().st_mtime, now - _SECONDS_PER_TOKEN * chunk.begin]) / _HALF_LIFE
            os.utime(path, (now, _HALF_LIFE * float(np.logaddexp2(*ranks))))

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{SUFFIX}"

    def _list(self) -> None:
        """Learn of files that other processes have written or deleted."""
        try:
            listed = self.folder.stat().st_mtime_ns
            if listed == self._listed:
                return
            names = {path.stem for path in self.folder.iterdir() if path.suffix == SUFFIX}
        except OSError:
            names, listed = set(), -1
        for key in self._parents.keys() - names:
            self._forget(key)
        for key in names - self._parents.keys():
            path = self._path(key)
            try:
                with path.open("rb") as file:
                    header = self._read_header(file, key)
                self._add(key, header.parent, header.tokens())
            except FileNotFoundError:
                pass
            except FAULTS as error:
                self._discard(path, error)
        self._listed = listed

    def _read_header(self, file: Any, key: str) -> _Header:
        """Read the header of the file that is named by a key. Raises as `_read_header`, or if it is another's."""
        header = _read_header(file)
        if header.identity != self._identity:
            raise ValueError("it is of another model or setting")
        if ChunkFile.of(header.parent, 0, header.tokens()).key != key:
            raise ValueError("its tokens are not those that it is named by")
        return header

    def _add(self, key: str, parent: str, token_ids: tuple[int, ...]) -> None:
        self._parents[key] = parent
        self._children.setdefault(parent, {})[key] = token_ids

    def _forget(self, key: str) -> None:
        with self._mutex:
            parent = self._parents.pop(key, None)
            if parent is not None:
                self._children[parent].pop(key, None)

    def _delete(self, path: Path) -> None:
        with contextlib.suppress(OSError):  # on Windows, another process may be reading it
            path.unlink()
            self._forget(path.name.removesuffix(SUFFIX))

    def _discard(self, path: Path, error: BaseException) -> None:
        """Delete a damaged file, so that it is written again."""
        self._delete(path)
        self._forget(path.name.removesuffix(SUFFIX))
        if not self._has_warned:
            self._has_warned = True
            log.warning("The prefix store's file %s cannot be used, and was deleted: %s.", path, one_line(error))

    def _make_room(self, new: ChunkFile, num_bytes: int, rank: float) -> bool:
        """Delete files of a lower rank until there is room for a new one of so many bytes. Returns whether there is.

        If the folder has more than it may, files of any rank are deleted.
        """
        found = list(files_in(self._root))
        size, free = sum(file.size for file in found), shutil.disk_usage(self.folder).free - _FREE_BYTES
        if num_bytes <= min(self._max_bytes - size, free):
            return True
        ranks = self._ranks([*found, File(self._path(new.key), num_bytes, rank, rank)], new)
        files = deque(sorted(found, key=lambda file: ranks[file.path]))
        lower = sum(file.size for file in files if ranks[file.path] < ranks[self._path(new.key)])
        fits = num_bytes <= min(self._max_bytes - size, free) + lower
        if num_bytes <= self._max_bytes - size + lower and not fits:
            raise OSError(errno.ENOSPC, f"less than {_FREE_BYTES / 1e9:g} GB of the disk is free")
        while files and (size > self._max_bytes or (fits and num_bytes > min(self._max_bytes - size, free))):
            file = files.popleft()
            self._delete(file.path)
            size, free = size - file.size, free + file.size
        return fits

    def _ranks(self, files: Sequence[File], new: ChunkFile) -> dict[Path, float]:
        """The rank of each file, by what those of this model's states are worth."""
        ranks = {file.path: file.rank for file in files}
        sizes = {file.path.stem: file.size for file in files if file.path.parent == self.folder}
        with self._mutex:
            children = {**self._children, new.parent: {**self._children.get(new.parent, {}), new.key: new.token_ids}}
            worths = state_worths(children, {**self._parents, new.key: new.parent}, sizes)
        for key in worths.keys() & sizes:
            ranks[self._path(key)] += _HALF_LIFE * math.log2(worths[key])
        return ranks


@dataclass(frozen=True, slots=True)
class Folder:
    """The files of one model in one setting. about: whose they are. used: seconds since 1970."""

    path: Path
    about: dict[str, str]
    num_tokens: int
    size: int
    used: float


def folders_in(folder: Path) -> list[Folder]:
    """What is in a store, the last used first."""
    found = []
    for path in folder.glob(f"*/{ABOUT}"):
        about: dict[str, str] = {}
        with contextlib.suppress(*FAULTS):
            about = msgspec.json.decode(path.read_bytes(), type=dict[str, str])
        files = list(files_in(folder, path.parent.name))
        num_tokens = 0
        for each in files:
            with contextlib.suppress(*FAULTS), each.path.open("rb") as file:
                header = _read_header(file)
                num_tokens += 0 if header.is_state else len(header.token_ids.split())
        used = max((each.used for each in files), default=0.0)
        found.append(Folder(path.parent, about, num_tokens, sum(each.size for each in files), used))
    return sorted(found, key=lambda each: -each.used)


def empty(folder: Path) -> int:
    """Delete a store's files, and nothing else. Engines that use it go on. Returns the bytes that were deleted."""
    size = 0
    for about in list(folder.glob(f"*/{ABOUT}")):
        for path in [*about.parent.glob(f"*{SUFFIX}"), *about.parent.glob(f".*{SUFFIX}.*")]:
            with contextlib.suppress(OSError):
                num_bytes = path.stat().st_size
                path.unlink()
                size += num_bytes
    return size


def files_in(folder: Path, name: str = "*") -> Iterator[File]:
    """The files of a store, or of one model in it."""
    for path in folder.glob(f"{name}/*{SUFFIX}"):
        with contextlib.suppress(OSError):
            found = path.stat()
            yield File(path, found.st_size, found.st_atime, found.st_mtime)


def _line(text: bytes) -> bytes:
    """A line of a file, with its checksum before it."""
    return b"%08x %b\n" % (zlib.crc32(text), text)


def _read_header(file: Any) -> _Header:
    """Read a file's first lines; raises ValueError or MsgspecError if they are not what was written."""
    if file.read(len(_MAGIC)) != _MAGIC:
        raise ValueError("it does not begin as one of this version")
    line = file.readline(_LONGEST)
    text = line[9:-1]
    if line != _line(text):
        raise ValueError("its first lines are not what was written")
    return msgspec.json.decode(text, type=_Header)
