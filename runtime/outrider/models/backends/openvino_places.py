"""OpenVINO for heads without a cache; see `outrider.models.backends.heads.places`."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from outrider.models.backends.openvino_paged import OpenVINOPaged
from outrider.models.backends.paged_graph import HIDDEN_IN, input_width
from outrider.models.backends.paged_step import PagedPending, PagedStep
from outrider.types import Chunk, RowRule


class OpenVINOPlaces(OpenVINOPaged):
    """Heads whose chunks have the hidden states of one token, float32 [1, hidden], and read nothing else.

        Chunk(slot, [newest], num_rows=num_places, hidden_states=row)    # all heads
        Chunk(slot, [newest, *drafted], num_rows=1, hidden_states=row)   # one after the other, if `others`

    A chunk without hidden states, of a measurement, stands for as many sequences as it has tokens. Slots take no
    memory.

    others: build the graphs of the heads behind the first, if each has one of its own.
    """

    def __init__(
        self,
        model_path: Path,
        *,
        build: Callable[[ov.Core, Path], ov.Model],
        others: Seq[Callable[[ov.Core, Path], ov.Model]] = (),
        **options: Any,
    ) -> None:
        super().__init__(model_path, build=build, **options)
        self._first: OpenVINOPlaces | None = None
        self._others = [OpenVINOPlaces(model_path, build=each, **options) for each in others]
        for each in self._others:
            each._first = self

    @property
    def separate_rules(self) -> Seq[RowRule]:
        """None: no row reads another."""
        return ()

    def allocate(self, max_tokens: int) -> None:
        """Make the pool of slots."""
        super().allocate(max_tokens)
        for each in self._others:
            each.allocate(max_tokens)

    def submit(self, chunks: Seq[Chunk]) -> PagedPending:
        """Evaluate the heads for several sequences in one call. With `others`, all are at the same place."""
        place = 0 if chunks[0].hidden_states is None else len(chunks[0].token_ids) - 1
        if not self._others or not place:
            return super().submit(chunks)
        return self._others[min(place, len(self._others)) - 1].submit(chunks)

    def finish(self, began: float, unless: Callable[[], bool] | None = None) -> PagedStep:
        """Wait for the call that began at `began`. Its seconds are the first head's, too."""
        before = self.seconds
        step = super().finish(began, unless)
        if self._first is not None:
            self._first.seconds += self.seconds - before
        return step

    def _append(self, chunk: Chunk) -> None:
        """Do nothing: there is no cache."""

    def _inputs_of(self, chunks: Seq[Chunk]) -> tuple[dict[str, NDArray[Any]], dict[int, NDArray[np.int64]]]:
        known = [chunk.hidden_states for chunk in chunks if chunk.hidden_states is not None]
        texts = [[*chunk.token_ids[: self._num_read]] for chunk in chunks]
        if not known:  # a measurement
            texts = [[token_id] for chunk in chunks for token_id in chunk.token_ids]
        rows = np.concatenate(known) if known else np.zeros((len(texts), self._hidden_width), dtype=np.float32)
        inputs: dict[str, NDArray[Any]] = {HIDDEN_IN: rows}
        if self._num_read:
            inputs["input_ids"] = np.array(texts, dtype=np.int64)
        return inputs, {}

    @property
    def _num_read(self) -> int:
        """Tokens of each sequence that the graph reads."""
        return input_width(self._compiled, "input_ids")
