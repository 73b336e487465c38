"""Training data on disk: conversations of the main model, what it would have said, and its hidden states.

    data = Data(folder)
    for conversations in data.batches(2048, seed=epoch):
        batch = data.read(conversations)

A folder holds shards shard-00000, …, which `Shard` writes: of the C conversations of a shard and their T tokens, one
after the other,

    tokens.npy     int32   [T]
    answer.npy     bool    [T]         whether the main model wrote the token
    starts.npy     int64   [C + 1]     where conversation c begins; the last is T
    greedy.npy     bool    [C]         whether the answer is greedy; otherwise it was sampled
    top_ids.npy    int32   [T, 32]     the likeliest tokens after token t at temperature 1, descending; -1 beyond those
    top_probs.npy  float16 [T, 32]     their probabilities; 0 where token t + 1 is not of an answer
    taps.npy       float16 [T, 3 * h]  if needed: the hidden states that EAGLE-3 reads (`tap_names`)
    prompts.jsonl  a line for each conversation: {"prompt": text or messages, "source": see `DistillPrompt`}
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from outrider.errors import ExportError
from outrider.models.backends.taps import after_layers
from outrider.system.files import why
from outrider_distill.texts import NUM_KEPT

HELD_OUT = 20  # every 20th conversation is never trained on
NUM_TAPS = 3
LEAST_ANSWER = 4  # tokens
USUAL_PROMPT, USUAL_ANSWER = 128, 200
_USER_SHARE = 0.5  # of the prompts
_SHARDS, _LEAST_SIZE, _MOST_SIZE = 8, 64, 512  # conversations of a shard
_LEAST_LAYERS = 6
_SPREAD = 20  # tokens: of the noise by which lengths are sorted


@dataclass(frozen=True)
class Recipe:
    """What determines the data, besides the prompts and the main model.

    num_tokens: of answers, at least; the last shard is written whole. taps: whether it has the hidden states that heads
    read. user_share: of the prompts, that are the user's or general ones, as long as there are some.
    """

    num_tokens: int
    taps: bool = False
    seed: int = 0
    max_new_tokens: int = 256
    user_share: float = _USER_SHARE

    @property
    def shard_size(self) -> int:
        """Conversations of a shard: small amounts are divided, too."""
        return min(_MOST_SIZE, max(_LEAST_SIZE, self.num_tokens // (_SHARDS * USUAL_ANSWER)))


def tap_names(num_layers: int) -> tuple[str, ...]:
    """The hidden states that EAGLE-3 reads: the inputs of layers 2, n/2 and n - 3.

    Source: EAGLE-3 (Li et al. 2025), as vLLM and SGLang take them.

    Raises:
        ExportError: for a model of fewer than 6 layers.
    """
    if num_layers < _LEAST_LAYERS:
        raise ExportError(
            f"The main model has {num_layers} layers; hidden states of layers 2, n/2 and n - 3 need at least "
            f"{_LEAST_LAYERS}. Choose a kind that reads none: draft."
        )
    return tuple(map(after_layers, (2, num_layers // 2, num_layers - 3)))


def columns(hidden_size: int, *, taps: bool) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
    """The arrays that have a row for each token: their types, and the shapes of a row. taps: with hidden states."""
    found: dict[str, tuple[Any, tuple[int, ...]]] = {
        "tokens": (np.int32, ()), "answer": (np.bool_, ()),
        "top_ids": (np.int32, (NUM_KEPT,)), "top_probs": (np.float16, (NUM_KEPT,)),
    }  # fmt: skip
    if taps:
        found["taps"] = np.float16, (NUM_TAPS * hidden_size,)
    return {name: (np.dtype(kind), shape) for name, (kind, shape) in found.items()}


def bytes_per_token(hidden_size: int, *, taps: bool) -> int:
    """Bytes on disk of a token, of a prompt or an answer."""
    return sum(kind.itemsize * int(np.prod(shape)) for kind, shape in columns(hidden_size, taps=taps).values())


class TrainingBatch(NamedTuple):
    """Conversations side by side, as torch tensors, padded on the right. taps: None if shards have none."""

    token_ids: Any  # int64 [rows, tokens]
    answer: Any  # bool [rows, tokens]: whether the main model wrote the token
    taps: Any  # float32 [rows, tokens, 3 * h]
    top_ids: Any  # int64 [rows, tokens, 32]; padding is -1
    top_probs: Any  # float32 [rows, tokens, 32]

    def to(self, device: Any) -> TrainingBatch:
        """The same on another device."""
        return TrainingBatch(*(None if each is None else each.to(device) for each in self))


class Data:
    """Training data, read from disk as it is needed.

    Raises:
        ExportError: when the folder has no shards, or a shard lacks an array that the first one has.
    """

    def __init__(self, folder: Path) -> None:
        shards = find_shards(folder)
        if not shards:
            raise ExportError(f"{folder} has no training data: outrider distill writes it.")
        names = [name for name in _ARRAYS if (shards[0] / f"{name}.npy").is_file()]
        self._shards = [_open(shard, names) for shard in shards]
        # (shard, first token, end, greedy) of every conversation.
        self._all = [
            (index, int(shard["starts"][i]), int(shard["starts"][i + 1]), bool(shard["greedy"][i]))
            for index, shard in enumerate(self._shards)
            for i in range(len(shard["starts"]) - 1)
        ]
        self.num_tokens = sum(len(shard["tokens"]) for shard in self._shards)
        self.num_answer_tokens = sum(int(shard["answer"].sum()) for shard in self._shards)
        self.has_taps = "taps" in names

    @property
    def num_conversations(self) -> int:
        """Held-out ones included."""
        return len(self._all)

    @property
    def hidden_size(self) -> int:
        """Of the main model; 0 if there are no hidden states."""
        return int(self._shards[0]["taps"].shape[1]) // NUM_TAPS if self.has_taps else 0

    def counts(self, vocab_size: int) -> NDArray[np.int64]:
        """How often each token is in answers, int64 [vocab]."""
        seen = np.zeros(vocab_size, dtype=np.int64)
        for shard in self._shards:
            seen += np.bincount(shard["tokens"][shard["answer"]], minlength=vocab_size)
        return seen

    def frequent_tokens(self, count: int, vocab_size: int) -> NDArray[np.int64]:
        """The ids of the tokens that answers have most, in ascending order; of those they lack, the lowest."""
        return np.sort(np.argsort(-self.counts(vocab_size), kind="stable")[:count])

    def batches(self, tokens_in_batch: int, seed: int, share: float = 1.0) -> list[list[int]]:
        """One epoch of training conversations in random order, each batch of similar lengths: for `read`.

        share: of the training data, the same conversations whatever the seed.
        """
        generator = np.random.default_rng(seed)
        train = [i for i in range(len(self._all)) if i % HELD_OUT]
        count = max(round(share * len(train)), min(1, len(train)))
        train = [train[k * len(train) // count] for k in range(count)]
        generator.shuffle(train)
        # Lengths are sorted with some noise, so that each epoch has other batches.
        lengths = np.array([self._length(i) for i in train]) + generator.normal(0, _SPREAD, len(train))
        found = self._split([train[i] for i in np.argsort(lengths)], tokens_in_batch)
        generator.shuffle(found)
        return found

    def held_out(self, tokens_in_batch: int, max_tokens: int) -> list[list[int]]:
        """Batches of held-out conversations, `max_tokens` in all or a little more.

        Those with greedy answers; where little data has none of these, those with sampled ones.
        """
        picked: list[int] = []
        num_tokens = 0
        held_out = range(0, len(self._all), HELD_OUT)
        for i in [i for i in held_out if self._all[i][-1]] or held_out:
            if num_tokens < max_tokens:
                picked.append(i)
                num_tokens += self._length(i)
        return self._split(sorted(picked, key=self._length), tokens_in_batch)

    def read(self, conversations: Sequence[int]) -> TrainingBatch:
        """The conversations of one batch."""
        return TrainingBatch(
            self._stack("tokens", conversations, np.int64),
            self._stack("answer", conversations, np.bool_),
            self._stack("taps", conversations, np.float32) if self.has_taps else None,
            self._stack("top_ids", conversations, np.int64, padding=-1),
            self._stack("top_probs", conversations, np.float32),
        )

    def _stack(self, name: str, conversations: Sequence[int], kind: Any, padding: int = 0) -> Any:
        import torch

        width = max(map(self._length, conversations))
        shape = self._shards[0][name].shape[1:]
        array = np.full((len(conversations), width, *shape), padding, dtype=kind)
        for row, i in enumerate(conversations):
            shard, start, end, _ = self._all[i]
            array[row, : end - start] = self._shards[shard][name][start:end]
        return torch.from_numpy(array)

    def _length(self, conversation: int) -> int:
        _, start, end, _ = self._all[conversation]
        return end - start

    def _split(self, ordered: Sequence[int], tokens_in_batch: int) -> list[list[int]]:
        """Conversations in their order, in batches of `tokens_in_batch` at most, with their padding."""
        found: list[list[int]] = []
        widest = 0
        for i in ordered:
            widest = max(widest, self._length(i))
            if not found or widest * (len(found[-1]) + 1) > tokens_in_batch:
                found.append([])
                widest = self._length(i)
            found[-1].append(i)
        return found


_ARRAYS = ("tokens", "answer", "starts", "greedy", "top_ids", "top_probs", "taps")


def num_tokens_in(folder: Path) -> int:
    """The tokens of answers in a folder's finished shards."""
    return Data(folder).num_answer_tokens if find_shards(folder) else 0


def find_shards(folder: Path) -> list[Path]:
    """A folder's finished shards, in their order."""
    return sorted(folder.glob("shard-[0-9][0-9][0-9][0-9][0-9]"))


def _open(shard: Path, names: Sequence[str]) -> dict[str, Any]:
    try:
        return {name: np.load(shard / f"{name}.npy", mmap_mode="r") for name in names}
    except (OSError, ValueError) as error:
        raise ExportError(f"{shard} is damaged: {error}. Delete it, and it is written again.") from error


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation of T tokens. rows: the arrays with T rows by name, as in a shard; prompt, source: as asked."""

    prompt: Any
    source: str
    greedy: bool
    rows: Mapping[str, NDArray[Any]]


class Shard:
    """A shard that is being written: in a temporary folder, which becomes the shard when the block ends without error.

    Conversations go to disk one by one, so that memory does not grow. removed: how many were left out, by reason.

    Raises:
        ExportError: when the folder cannot be written to, such as when the disk is full.
    """

    def __init__(self, folder: Path, index: int, hidden_size: int, *, taps: bool) -> None:
        self.path = folder / f"shard-{index:05}"
        self.removed: Mapping[str, int] = {}
        self._columns = columns(hidden_size, taps=taps)
        self._made = folder / f"unfinished-{index:05}"
        self._files: dict[str, BinaryIO] = {}
        self._starts, self._greedy, self._prompts = [0], list[bool](), list[str]()
        self._open = ExitStack()

    def __enter__(self) -> Self:
        try:
            shutil.rmtree(self._made, ignore_errors=True)
            self._made.mkdir(parents=True)
            for name in self._columns:
                self._files[name] = self._open.enter_context((self._made / f"{name}.npy").open("wb"))
                self._write_header(name, 0)
        except OSError as error:
            raise self._failed(error) from error
        return self

    def add(self, conversation: Conversation) -> None:
        """Append a conversation."""
        length = len(conversation.rows["tokens"])
        try:
            for name, (kind, shape) in self._columns.items():
                rows = conversation.rows[name]
                if rows.shape != (length, *shape):
                    raise ValueError(f"{name} has the shape {rows.shape}, not {(length, *shape)}")
                self._files[name].write(np.ascontiguousarray(rows, dtype=kind).data)
        except OSError as error:
            raise self._failed(error) from error
        self._starts.append(self._starts[-1] + length)
        self._greedy.append(conversation.greedy)
        asked = {"prompt": conversation.prompt, "source": conversation.source}
        self._prompts.append(json.dumps(asked, ensure_ascii=False))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with self._open:
                if kind is None:
                    for name in self._columns:
                        self._files[name].seek(0)
                        self._write_header(name, self._starts[-1])
            if kind is None:
                self._finish()
            else:
                shutil.rmtree(self._made, ignore_errors=True)
        except OSError as failure:
            raise self._failed(failure) from failure

    def _finish(self) -> None:
        np.save(self._made / "starts.npy", np.array(self._starts, dtype=np.int64))
        np.save(self._made / "greedy.npy", np.array(self._greedy, dtype=np.bool_))
        (self._made / "prompts.jsonl").write_text("".join(f"{line}\n" for line in self._prompts), encoding="utf-8")
        (self._made / "removed.json").write_text(json.dumps(self.removed, sort_keys=True), encoding="utf-8")
        self._made.rename(self.path)

    def _write_header(self, name: str, count: int) -> None:
        """NumPy leaves room in headers for a larger first axis, so that its length can be written at the end."""
        kind, shape = self._columns[name]
        header = {"descr": np.lib.format.dtype_to_descr(kind), "fortran_order": False, "shape": (count, *shape)}
        np.lib.format.write_array_header_1_0(self._files[name], header)

    def _failed(self, error: OSError) -> ExportError:
        return ExportError(
            f"{self.path} cannot be written: {why(error)}. Free some disk space, or name another folder."
        )
