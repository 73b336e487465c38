"""What each library can do with a model on a device: known before the model is loaded, and asked instead of names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outrider.config import format_of_property, is_npu_property
from outrider.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Collection
    from collections.abc import Sequence as Seq
    from pathlib import Path

    import openvino as ov

    from outrider.bundle.manifest import ModelEntry
    from outrider.config import DeviceConfig
    from outrider.models.backends.adapters import Adapters
    from outrider.models.backends.heads import Head


@dataclass(frozen=True, slots=True)
class Support:
    """What can be done with models of one format on one device. What is measured is in `Capabilities`.

    library: by its name in properties. fixed_shapes: the model is compiled as a whole, for sizes that the options give.
    paged: it has a paged cache, so that it can be cut and apply adapters. windows: its layers may have sliding
    windows. states: some of them may keep a state instead of keys and values. saves_compiled: compiled models can be
    saved. tries_settings: precisions, threads and slices of the model can be tried.
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


def support_of(model: ModelEntry, device: str) -> Support:
    """What can be done with a model on a device."""
    if model.format == "onnx":
        return Support("onnx")
    fixed, on_cpu = device.split(".")[0] == "NPU", device == "CPU"
    return Support(
        "openvino",
        fixed_shapes=fixed,
        paged=not fixed and model.encoder is None,
        windows=True,
        states=not fixed,
        saves_compiled=not on_cpu,
        tries_settings=on_cpu,
    )


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model to load: its file, which a bundle describes as `model`, a device, and what is wanted of it.

    is_main: whether the model verifies drafts, so that its calls have many rows. encoder_path: of an encoder-decoder
    model. features: hidden states that it has to give. head: of a drafter that is no decoder. cuts: the layers before
    which it is cut, for drafters that are made of its layers. adapters: that it is to apply. graph: is evaluated
    instead of the file's, such as a slice of it; bytes for a model in ONNX. columns: of a decoder on a CPU, to which
    products are widened; 0: none is.
    """

    path: Path
    model: ModelEntry
    device: str
    options: DeviceConfig
    is_main: bool = True
    encoder_path: Path | None = None
    features: Seq[str] = ()
    head: Head | None = None
    cuts: Collection[int] = ()
    adapters: Adapters | None = None
    graph: ov.Model | bytes | None = None
    columns: int = 0

    @property
    def support(self) -> Support:
        """What can be done with it."""
        return support_of(self.model, self.device)

    @property
    def shared(self) -> dict[str, Any]:
        """The arguments that all backends take.

        Raises:
            DeviceError: when it is to apply adapters, and cannot.
        """
        support, options, geometry = self.support, self.options, self.model.geometry
        if self.adapters and not support.paged:
            raise DeviceError(
                f"Adapters ({', '.join(self.adapters.names)}) are for main models in OpenVINO's format on a processor "
                f"or GPU, and this one is {'on an NPU' if support.fixed_shapes else 'in ONNX'}. Load it with "
                "adapters=(), or merge one at export: outrider export MODEL --adapter FOLDER."
            )
        return {
            "vocab_size": min(self.model.vocab_size, geometry.logits_width),  # fewer logits where they were cut
            "device": self.device,
            "precision": options.precision,
            "cache_precision": options.cache_precision,
            "num_threads": options.num_threads,
            "properties": support.properties(dict(options.properties)),
        }
