"""The prefix cache on disk: what prompts begin with is read from there after a restart."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.errors import one_line
from outrider.models.kv.chunk_files import ChunkFile, ChunkFiles, root_of
from outrider.system import saved
from outrider.system.files import why
from outrider.types import CompiledModel, Prompt, embed_keys

log = logging.getLogger("outrider")

PREFIXES = saved.FOLDER / "prefixes"  # the folder of "auto"
_TOKENS = 128  # of a chunk, at most
_MIN_FILE_TOKENS = 64  # tokens that are worth a file, and to be read from one
_MOST_TEXTS = 16  # that wait to be copied
_MOST_BYTES = 64_000_000  # copies that wait to be written
_MOST_FETCHED = 1_000_000_000  # bytes that were read for prompts which have not begun yet
_LAST_SECONDS = 5.0  # that the end of an engine waits for what is still to be written


class Prefixes(Protocol):
    """A model's prefix cache, as the store reads and writes it. Only `num_cached` may be called from any thread."""

    block_size: int
    on_publish: Callable[[Sequence[int], bytes], object] | None  # is told of a text that stays when its slot is closed

    @property
    def has_states(self) -> bool:
        """Whether layers keep some: a text goes on only from where they were stored."""

    def num_cached(self, keys: Sequence[int], scope: bytes) -> int:
        """About how many of these tokens are in the cache: never more, and at most a block fewer."""

    def read(self, keys: Sequence[int], scope: bytes, begin: int) -> NDArray[np.uint8] | None:
        """A copy of what the last of these published tokens have, from `begin` on; None if they are evicted.

        begin: a multiple of `block_size`. uint8 [bytes], which `restore` takes.
        """

    def expect(self, keys: Sequence[int], scope: bytes) -> None:
        """Store the states after these tokens, with which a text begins that is about to be read."""

    def state_ends(self, keys: Sequence[int], scope: bytes) -> list[int]:
        """The lengths of this text's beginnings whose states are in the cache, in any order."""

    def read_state(self, keys: Sequence[int], scope: bytes) -> NDArray[np.uint8] | None:
        """A copy of the states after these published tokens, uint8 [bytes]; None if there are none, or no longer."""

    def restore(
        self,
        keys: Sequence[int],
        scope: bytes,
        contents: Sequence[tuple[int, NDArray[np.uint8]]],
        room: int,
        state: NDArray[np.uint8] | None = None,
    ) -> None:
        """Publish a text of which `contents` were read, each from a token on, if there is room.

        room: tokens of the sequence that is about to begin with it. state: the states after all of it, if it has some.

        Raises:
            ValueError: when they do not fit together, or this cache; see `check_contents`. Nothing is written then.
        """


def check_contents(
    contents: Sequence[tuple[int, NDArray[np.uint8]]], num_tokens: int, block_size: int, bytes_per_block: int
) -> None:
    """Raise ValueError if parts of a text do not follow one another in whole blocks, up to its last token."""
    end = contents[0][0] if contents else 0
    for begin, content in contents:
        num_blocks, rest = divmod(content.nbytes, bytes_per_block)
        if begin != end or begin % block_size or not 0 <= begin < num_tokens or rest or not num_blocks:
            raise ValueError(
                f"{content.nbytes:,} bytes from token {begin:,} on, of {num_tokens:,}, are no blocks of "
                f"{bytes_per_block:,} bytes that follow token {end:,}"
            )
        end += num_blocks * block_size
    if end < num_tokens:
        raise ValueError(f"a text of {num_tokens:,} tokens has keys and values for {end:,} of them")


@dataclass(eq=False)
class Fetched:
    """What was read from files for a prompt: goes to the prefix cache before the prompt's slot is opened.

    keys: the tokens of which something was read. common: those that files have of the prompt.
    """

    prefixes: Prefixes
    keys: Sequence[int]
    scope: bytes
    contents: list[tuple[int, NDArray[np.uint8]]]
    state: NDArray[np.uint8] | None = None
    common: Sequence[int] = ()

    @property
    def num_bytes(self) -> int:
        """Its memory."""
        return sum(len(content) for _, content in self.contents) + (0 if self.state is None else len(self.state))

    def restore(self, room: int) -> None:
        """Put it into the cache, if that has less of it. In the thread that makes the model's calls."""
        self.prefixes.expect(self.common, self.scope)
        if self.prefixes.num_cached(self.keys, self.scope) + self.prefixes.block_size < len(self.keys):
            try:
                self.prefixes.restore(self.keys, self.scope, self.contents, room, self.state)
            except Exception as error:  # the prompt is read then
                log.warning("A stored prefix could not be used: %s.", one_line(error))


@dataclass(eq=False)
class _Model:
    prefixes: Prefixes
    files: ChunkFiles
    marks_answers: bool

    @property
    def size(self) -> int:
        """Tokens of a whole chunk."""
        return max(_TOKENS // self.prefixes.block_size, 1) * self.prefixes.block_size

    def missing(self, keys: Sequence[int], scope: bytes, state_ends: Sequence[int]) -> list[ChunkFile]:
        """The chunks of a text, and the states after so many of its tokens, that have no file. The others were used."""
        chain = self.files.chain(keys, scope, self.size)
        num_whole = sum(count == self.size for _, count in chain)
        chunks: list[ChunkFile] = []
        for begin in range(0, len(keys), self.size):
            parent = chunks[-1].key if chunks else root_of(scope)
            chunks.append(ChunkFile.of(parent, begin, keys[begin : begin + self.size]))
        states = [chunks[(end - 1) // self.size].state(end) for end in sorted(state_ends)]
        gone_on_from = list(filter(self.files.has, states))[-1:]
        for each in (*(chunk for chunk, _ in chain), *gone_on_from):
            self.files.use(each)
        is_whole = bool(chain) and chain[-1][0].begin + chain[-1][1] == len(keys)
        found = [] if is_whole else chunks[num_whole:]
        found += [each for each in states if not self.files.has(each)]
        return sorted(found, key=lambda chunk: (chunk.begin, chunk.is_state, chunk.end))


@dataclass(eq=False)
class _Text:
    """A text whose slot was closed. state_ends: see `Prefixes`. missing: its chunks that are to be copied."""

    model: _Model
    keys: Sequence[int]
    scope: bytes
    state_ends: Sequence[int]
    missing: list[ChunkFile] = field(default_factory=list)


@dataclass(frozen=True)
class StoredModel:
    """A model whose prefix cache is saved. identity: all that its keys and values depend on besides what it reads.

    about: the same in words, for `outrider cache`.
    """

    backend: CompiledModel
    identity: Mapping[str, Any]
    about: Mapping[str, str]


class PrefixStore:
    """Saves an engine's prefix caches in files, and reads them for prompts that begin with what is there.

        store = PrefixStore(folder, {"main": StoredModel(backend, identity, about)}, max_bytes=4 * 10**9)
        fetched = store.fetch("main", prompt)    # in the thread that has the prompt
        fetched.restore(room)                    # in the thread that makes the models' calls
        store.copy_on()                          # there, too, between calls, while store.is_due
        store.finish()

    Texts are saved in chunks of `_TOKENS` tokens, so that those that begin alike share files. When a slot is closed, a
    thread finds out which of the text's chunks have no file. `copy_on` copies one of them, and the thread writes it. A
    text that is evicted before it is copied is not saved. States have files of their own, so that those that are stored
    later, where another text parts from this one, are saved, too, and a prompt reads those that it goes on from.

    max_bytes: of all files in the folder. Models whose prefix cache cannot be read, such as those on an NPU, are left
    out.

    Raises:
        OSError: when the folder cannot be made.
    """

    def __init__(self, folder: Path, models: Mapping[str, StoredModel], max_bytes: int) -> None:
        self.folder = folder
        self.wake: Callable[[], object] = lambda: None  # is called when there is something to copy
        self._models: dict[str, _Model] = {}
        self._max_bytes = max_bytes
        for role, model in models.items():
            self.add(role, model)
        self._inbox: SimpleQueue[Callable[[], object] | None] = SimpleQueue()  # what the thread does; None: it ends
        self._texts: deque[_Text] = deque(maxlen=_MOST_TEXTS)
        self._num_copied = self._num_written = 0  # bytes; each is counted by one thread
        self._fetched: weakref.WeakValueDictionary[tuple[str, str, int], Fetched] = weakref.WeakValueDictionary()
        self._thread: threading.Thread | None = None
        self._has_warned = False

    def add(self, role: str, model: StoredModel) -> None:
        """Save another model's prefix cache, too. Raises OSError when the folder cannot be made."""
        if (prefixes := model.backend.prefixes) is not None:
            files = ChunkFiles(self.folder, model.identity, self._max_bytes, model.about)
            self._models[role] = _Model(prefixes, files, model.backend.capabilities.marks_answers)
            prefixes.on_publish = partial(_note, weakref.ref(self), role)

    def fetch(self, role: str, prompt: Prompt, *, again: bool = True) -> Fetched | None:
        """Read what a prompt begins with, if the prefix cache has less of it. None if there is nothing to gain.

        again: try once more where a file is gone, because a longer one of the same text has just replaced it.
        """
        model = self._models.get(role)
        if model is None:
            return None
        keys = embed_keys((prompt.with_marked_answers() if model.marks_answers else prompt).token_ids, prompt.embeds)
        chain = model.files.chain(keys, prompt.scope, model.size)
        least = model.prefixes.num_cached(keys, prompt.scope) + _MIN_FILE_TOKENS
        num_common = chain[-1][0].begin + chain[-1][1] if chain else 0
        if num_common < least:
            return None
        name = role, chain[-1][0].key, num_common
        if (known := self._fetched.get(name)) is not None:  # for another request, which has not begun yet
            return known
        common = keys[:num_common]
        found = Fetched(model.prefixes, common, prompt.scope, [], common=common)
        room = _MOST_FETCHED - sum(each.num_bytes for each in list(self._fetched.values()))
        end, state = num_common, None
        if model.prefixes.has_states:  # the last token is never taken from the cache
            states = [each for each in model.files.states(chain) if least <= each.end < len(keys)]
            read = ((each.end, model.files.read(each)) for each in states if room > 0)
            end, state = next((each for each in read if each[1] is not None), (0, None))
            found = replace(found, state=state)
        contents = found.contents
        for chunk, count in chain:
            if chunk.begin >= end:
                break
            if chunk.begin + count > least - _MIN_FILE_TOKENS:
                content = model.files.read(chunk) if room > found.num_bytes else None
                if content is None:
                    if again and room > found.num_bytes:
                        return self.fetch(role, prompt, again=False)
                    end = 0 if state is not None else chunk.begin
                    break
                contents.append((chunk.begin, content))
        if end < least:
            if not model.prefixes.has_states:
                return None
            end, found = 0, replace(found, state=None)
            contents.clear()
        self._fetched[name] = found = replace(found, keys=keys[:end])
        return found

    def note(self, role: str, keys: Sequence[int], scope: bytes) -> None:
        """Save a text that is in the prefix cache now, as soon as there is time. In the thread that made its calls."""
        if len(keys) < _MIN_FILE_TOKENS or role not in self._models:
            return
        model = self._models[role]
        self._send(partial(self._look_up, _Text(model, keys, scope, model.prefixes.state_ends(keys, scope))))

    def _send(self, job: Callable[[], object]) -> None:
        """Give the store's thread something to do."""
        self._inbox.put(job)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="outrider prefixes", daemon=True)
            with contextlib.suppress(RuntimeError):  # the interpreter ends, and starts no more threads
                self._thread.start()

    @property
    def is_due(self) -> bool:
        """Whether `copy_on` has something to copy."""
        return bool(self._texts) and self._num_copied - self._num_written < _MOST_BYTES

    def copy_on(self) -> None:
        """Copy the next chunk. In the thread that makes the models' calls, between them."""
        text = self._texts[0]
        chunk, prefixes = text.missing.pop(0), text.model.prefixes
        keys = text.keys[: chunk.end]
        if chunk.is_state:
            content = prefixes.read_state(keys, text.scope)
        else:
            content = prefixes.read(keys, text.scope, chunk.begin)
        if not text.missing or (content is None and not chunk.is_state):  # what is after it is gone, too
            with contextlib.suppress(ValueError):  # the other thread has added newer ones
                self._texts.remove(text)
        if content is not None:
            self._num_copied += len(content)
            self._inbox.put(partial(self._write, text.model, chunk, content))

    def forget(self, role: str) -> None:
        """Delete a model's files, also those of what was copied before."""
        if (model := self._models.get(role)) is not None:
            self._send(model.files.clear)

    def finish(self) -> None:
        """Save what is left, for some seconds, and drop the models. In the thread that made their calls."""
        until = time.monotonic() + _LAST_SECONDS
        self._inbox.put(None)
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(_LAST_SECONDS)
        while time.monotonic() < until and (self._texts or not self._inbox.empty()):
            if self._inbox.empty():
                self.copy_on()
            elif (job := self._inbox.get()) is not None:
                self._do(job)
        for model in self._models.values():
            model.prefixes.on_publish = None
        self._models.clear()
        self._texts.clear()

    def _work(self) -> None:
        while (job := self._inbox.get()) is not None:
            self._do(job)
            del job  # it has a text's memory

    def _look_up(self, text: _Text) -> None:
        """Find a text's chunks that are to be copied."""
        text.missing = text.model.missing(text.keys, text.scope, text.state_ends)
        if text.missing:
            self._texts.append(text)

    def _write(self, model: _Model, chunk: ChunkFile, content: NDArray[np.uint8]) -> None:
        self._num_written += len(content)
        model.files.write(chunk, content)

    def _do(self, job: Callable[[], object]) -> None:
        try:
            job()
        except Exception as error:  # a full disk, or a folder that is gone: requests go on without
            if not self._has_warned:
                self._has_warned = True
                log.warning("Prefixes cannot be saved in %s: %s.", self.folder, why(error))
        self.wake()


def _note(store: weakref.ref[PrefixStore], role: str, keys: Sequence[int], scope: bytes) -> None:
    if (found := store()) is not None:
        found.note(role, keys, scope)
