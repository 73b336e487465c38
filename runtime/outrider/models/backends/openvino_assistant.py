"""OpenVINO for drafters that read the main model's keys and values; see `outrider.models.backends.heads.assistant`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from outrider.config import PRECISIONS
from outrider.errors import DeviceError
from outrider.models.backends.features import NEXT_HIDDEN
from outrider.models.backends.heads.assistant import BEGINS, BLOCKS, assistant, windows_of
from outrider.models.backends.heads.weights import HeadWeights
from outrider.models.backends.openvino_layers import OpenVINOSharing
from outrider.models.backends.openvino_paged import OpenVINOPaged
from outrider.models.backends.paged_graph import HIDDEN_IN
from outrider.models.backends.paged_slot import SCRATCH
from outrider.types import Chunk, RowCost, RowRule


class OpenVINOAssistant(OpenVINOSharing):
    """A drafter whose chunks have one token with hidden states float32 [1, width], after all tokens of a slot.

        assistant = OpenVINOAssistant(path, main, main_path=main_path, vocab_size=262_144)
        assistant.allocate(max_tokens=8_192)
        assistant.submit([Chunk(slot, [newest], 1, (NEXT_HIDDEN,), hidden_states=rows)]).wait()  # the main model's slot

    It reads the keys and values in the slot's blocks, and writes none: the slot is left as it is. A chunk without
    hidden states, of a measurement, stands for as many sequences as it has tokens.

    main_path: of the main model's IR, whose embedding it shares. options: those of `OpenVINOPaged`.

    Raises:
        BundleError: when the cache has another shape than it reads.
        DeviceError: when the cache is quantised, or has keys in another order than on a CPU.
    """

    def __init__(self, model_path: Path, main: OpenVINOPaged, *, main_path: Path | None, **options: Any) -> None:
        if main.cache_precision not in PRECISIONS:
            raise DeviceError(
                f"cache_precision is {main.cache_precision!r}, and an assistant reads a cache that is not quantised. "
                "Leave cache_precision at 'auto', or load with another drafter, such as drafter='suffix'."
            )
        keys = next(port for name, port in main._caches.items() if name.startswith("key_cache."))
        if keys.partial_shape[2] != main.block_size:
            raise DeviceError(
                f"{main.device} stores the numbers of a key apart from each other, and an assistant reads keys as a "
                "CPU stores them. Load with main_device='CPU', or with another drafter, such as drafter='suffix'."
            )
        self._main = main
        self._windows: dict[int, int] = {}  # tokens that are read of each cache; 0: all

        def build(core: ov.Core, path: Path) -> ov.Model:
            weights = HeadWeights.read(core, path, main_path)
            self._windows = windows_of(weights)
            return assistant(weights, main._caches)

        super().__init__(model_path, build=build, features=(NEXT_HIDDEN,), **options)

    @property
    def separate_rules(self) -> Sequence[RowRule]:
        """None: no row reads another."""
        return ()

    def keep_rows(self, cost: RowCost) -> None:
        """Do nothing: each row is a sequence."""

    def _append(self, chunk: Chunk) -> None:
        """Do nothing: no keys and values are written."""

    def _inputs_of(self, chunks: Sequence[Chunk]) -> tuple[dict[str, NDArray[Any]], dict[Chunk, Sequence[int]]]:
        token_ids, slots, states = list[int](), list[Any](), list[NDArray[np.float32]]()
        places: dict[Chunk, Sequence[int]] = {}
        for chunk in chunks:
            count = len(chunk.token_ids)
            places[chunk] = range(len(slots), len(slots) + count)
            token_ids += chunk.token_ids
            slots += [chunk.slot] * count
            known = chunk.hidden_states
            states.append(np.zeros((count, self._hidden_width), np.float32) if known is None else known)
        lengths = np.array([slot.length for slot in slots], dtype=np.int64)
        inputs: dict[str, NDArray[Any]] = {
            "input_ids": np.array(token_ids, dtype=np.int64),
            "position_ids": lengths,
            HIDDEN_IN: np.concatenate(states),
        }
        size = self.block_size
        for number, window in self._windows.items():
            firsts = np.maximum(lengths - window + 1, 0) // size if window else np.zeros_like(lengths)
            ends = np.maximum(-(-lengths // size), firsts + 1)
            table = np.full((len(slots), int((ends - firsts).max())), SCRATCH[0], dtype=np.int64)
            for row, slot, first, end in zip(table, slots, firsts, ends, strict=True):
                blocks = slot.blocks[first:end]
                row[: len(blocks)] = blocks
            inputs |= {f"{BLOCKS}{number}": table, f"{BEGINS}{number}": firsts * size}
        return inputs, places
