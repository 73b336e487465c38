"""Backends: they evaluate tokens. There is one module per library, imported when a model needs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outrider.config import format_of_property, is_npu_property

if TYPE_CHECKING:
    from outrider.bundle.manifest import ModelEntry


@dataclass(frozen=True, slots=True)
class Support:
    """What can be done with models of one format on one device. What is measured is in `Capabilities`.

    library: by its name in properties. fixed_shapes: the model is compiled as a whole, for sizes that the options give.
    paged: it has a paged cache, so that it can be cut and apply adapters. windows: its layers may have sliding
    windows. states: some of them may keep a state instead of keys and values. saves_compiled: compiled models can be
    saved. tries_settings: precisions and threads can be tried.
    """

    library: str
    fixed_shapes: bool = False
    paged: bool = False
    windows: bool = False
    states: bool = False
    saves_compiled: bool = False
    tries_settings: bool = False

    def properties(self, given: dict[str, Any]) -> dict[str, Any]:
        """Those of the properties that are for this library and device."""
        return {
            name: value
            for name, value in given.items()
            if format_of_property(name) == self.library and (self.fixed_shapes or not is_npu_property(name))
        }

    @classmethod
    def of(cls, model: ModelEntry, device: str) -> Support:
        """What can be done with a model on a device."""
        if model.format == "onnx":
            return cls("onnx")
        fixed, on_cpu = device.split(".")[0] == "NPU", device == "CPU"
        return cls(
            "openvino",
            fixed_shapes=fixed,
            paged=not fixed and model.encoder is None,
            windows=True,
            states=not fixed,
            saves_compiled=not on_cpu,
            tries_settings=on_cpu,
        )
