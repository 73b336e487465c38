"""What evaluates tokens: one module a library, loaded when a model needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outrider.config import format_of_property
from outrider.errors import DeviceError

if TYPE_CHECKING:
    from pathlib import Path

    from outrider.bundle import ModelEntry
    from outrider.config import DeviceConfig
    from outrider.types import CompiledModel


def load_model(path: Path, model: ModelEntry, device: str, options: DeviceConfig, *, exact: bool) -> CompiledModel:
    """Load the model at `path`, which a bundle describes as `model`, on a device.

    exact: pads calls to what makes logits bit-identical; see `Capabilities`.

    Raises:
        OptionError, BundleError, DeviceError: as the backends say.
    """
    shared: dict[str, Any] = {
        "vocab_size": min(model.vocab_size, model.geometry.logits_width),  # fewer logits where they were cut
        "device": device,
        "precision": options.precision,
        "cache_precision": options.cache_precision,
        "num_threads": options.num_threads,
        "properties": {k: v for k, v in options.properties.items() if format_of_property(k) == model.format},
        "exact": exact,
    }
    if model.format == "openvino":
        from outrider.backends.openvino_paged import OpenVINOPaged

        return OpenVINOPaged(path, **shared, top_logits=options.top_logits)
    try:
        from outrider.backends.onnxruntime import OnnxRuntime
    except ImportError as error:
        raise DeviceError(
            f"The model {path} is in ONNX, and onnxruntime cannot be imported: {error}. "
            'Run: pip install "outrider[onnx]"'
        ) from error
    return OnnxRuntime(path, **shared)
