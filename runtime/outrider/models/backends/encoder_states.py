"""Runs the encoder of an encoder-decoder model, and makes the keys and values of its decoder's cross-attention."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from outrider.bundle.manifest import CROSS_NAME, EncoderEntry
from outrider.errors import BundleError, DeviceError, one_line
from outrider.models.backends.infer_calls import GraphState
from outrider.models.backends.taps import read_ir
from outrider.types import EncoderSource

_TRIAL_POSITIONS = 128  # of a text that measurements stand in for


@dataclass(eq=False)
class Cross:
    """The keys and values of cross-attention for one source, by the names of the decoder's inputs.

    arrays: float32 [1, heads, source, head size] each.
    """

    arrays: dict[str, NDArray[np.float32]]


class Encoder:
    """An encoder with one decoder's cross-attention.

        encoder = Encoder(core, path, model_path, entry, "CPU", {"INFERENCE_PRECISION_HINT": "f32"}, GraphState("CPU"))
        cross = encoder.read(source)

    The encoder is compiled when it runs for the first time: that of a draft model never runs if it is the main model's.

    Raises:
        BundleError: when a file cannot be read.
        DeviceError: when the device cannot compile a graph.
    """

    def __init__(
        self,
        core: ov.Core,
        path: Path,
        model_path: Path,
        entry: EncoderEntry,
        device: str,
        hints: Mapping[str, Any],
        graph: GraphState,
    ) -> None:
        self._graph = graph
        self.entry, self._core, self._path, self._device, self._hints = entry, core, path, device, dict(hints)
        self._cross = self._compile(model_path.with_name(CROSS_NAME))
        self._encoder: ov.CompiledModel | None = None
        self.num_runs = 0  # of the encoder
        self._trial: weakref.ref[Cross] | None = None

    def _compile(self, path: Path) -> ov.CompiledModel:
        model = read_ir(self._core, path)
        try:
            return self._core.compile_model(model, self._device, self._hints)
        except (RuntimeError, TypeError) as error:
            raise DeviceError(f"{self._device} cannot compile {path}: {one_line(error)}") from error

    def read(self, source: EncoderSource) -> Cross:
        """The keys and values for a source. The encoder runs once for a source, for all models that have it."""
        states = source.states.get(self.entry.sha256)
        if states is None:
            if self._encoder is None:
                self._encoder = self._compile(self._path)
            self.num_runs += 1
            states = self._run(self._encoder, source.values[None])["last_hidden_state"]
            source.states[self.entry.sha256] = states
        return self._cross_of(states)

    def trial(self) -> Cross:
        """Keys and values for measurements: of random states. All slots that are open share one set."""
        found = None if self._trial is None else self._trial()
        if found is None:
            length = self.entry.context_length
            if self.entry.kind == "text":
                length = min(length, _TRIAL_POSITIONS)
            shape = 1, length, self.entry.hidden_size
            found = self._cross_of(np.random.default_rng(0).normal(size=shape).astype(np.float32))
            self._trial = weakref.ref(found)
        return found

    def _cross_of(self, states: NDArray[np.float32]) -> Cross:
        if states.shape[2] != self.entry.hidden_size:
            raise BundleError(
                f"The encoder in {self._path.parent} gives {states.shape[2]} numbers a position; outrider.json says "
                f"{self.entry.hidden_size}. Export the bundle again."
            )
        return Cross(self._run(self._cross, states))

    def _run(self, compiled: ov.CompiledModel, values: NDArray[Any]) -> dict[str, NDArray[np.float32]]:
        """The outputs by name, copied."""
        with self._graph.calling():
            made = compiled(np.ascontiguousarray(values))
        return {port.get_any_name(): np.array(array, dtype=np.float32) for port, array in made.items()}
