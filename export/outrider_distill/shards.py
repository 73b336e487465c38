"""Writes a shard of training data; see `outrider_distill.data`.

with Shard(folder, index=3, needs={"taps"}, hidden_size=576) as shard:
    shard.add(conversation)
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from outrider.errors import ExportError
from outrider.system.files import why
from outrider_distill.data import columns


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

    def __init__(self, folder: Path, index: int, needs: Collection[str], hidden_size: int) -> None:
        self.path = folder / f"shard-{index:05}"
        self.removed: Mapping[str, int] = {}
        self._columns = columns(needs, hidden_size)
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
