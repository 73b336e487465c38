"""Backends: they evaluate tokens. There is one module per library, imported when a model needs it."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from outrider.bundle.architectures import refusal_of
from outrider.config import format_of_property, is_npu_property
from outrider.errors import BundleError, DeviceError, install
from outrider.models.backends.attention import SLIDING, describe_windows

if TYPE_CHECKING:
    from collections.abc import Collection
    from collections.abc import Sequence as Seq
    from pathlib import Path

    import openvino as ov

    from outrider.bundle.manifest import ModelEntry
    from outrider.config import DeviceConfig
    from outrider.models.backends.adapters import Adapters
    from outrider.models.backends.heads import Head
    from outrider.models.backends.masks import Masks
    from outrider.types import CompiledModel


def on_npu(model: ModelEntry, device: str) -> bool:
    """Whether a model on this device is run by NPUW, in fixed shapes."""
    return device.split(".")[0] == "NPU" and model.format == "openvino"


def load_model(
    path: Path,
    model: ModelEntry,
    device: str,
    options: DeviceConfig,
    *,
    is_main: bool = True,
    features: Seq[str] = (),
    head: Head | None = None,
    masks: Masks | None = None,
    cuts: Collection[int] = (),
    adapters: Adapters | None = None,
    encoder_path: Path | None = None,
    graph: ov.Model | None = None,
) -> CompiledModel:
    """Load the model at `path`, which a bundle describes as `model`, on a device.

    is_main: whether the model verifies drafts, so that its calls have many rows. features: hidden states that it has to
    give. head: of a drafter that is no decoder. masks: mask tokens that it is to read; a model in ONNX or on an NPU
    reads none. cuts: the layers before which it is cut, for drafters that are made of its layers.
    adapters: that it is to apply; a model in ONNX, on an NPU or with an encoder applies none. encoder_path: of an
    encoder-decoder model. graph: evaluates this one instead of the file's, such as a slice of it.

    Raises:
        OptionError, BundleError, DeviceError: as the backends say.
    """
    if refusal := refusal_of(model.geometry.architecture):
        raise BundleError(f"The model {path} cannot be run. {refusal}")
    fixed = on_npu(model, device)
    if adapters and (fixed or model.format != "openvino"):
        raise DeviceError(
            f"Adapters ({', '.join(adapters.names)}) are for main models in OpenVINO's format on a processor or GPU, "
            f"and this one is {'on an NPU' if fixed else 'in ONNX'}. Load it with adapters=(), or merge one at "
            "export: outrider export MODEL --adapter FOLDER."
        )
    shared: dict[str, Any] = {
        "vocab_size": min(model.vocab_size, model.geometry.logits_width),  # fewer logits where they were cut
        "device": device,
        "precision": options.precision,
        "cache_precision": options.cache_precision,
        "num_threads": options.num_threads,
        "properties": {
            name: value
            for name, value in options.properties.items()
            if format_of_property(name) == model.format and (fixed or not is_npu_property(name))
        },
    }
    if model.encoder is not None and encoder_path is not None:
        from outrider.models.backends.encoder_decoder import EncoderDecoder

        if fixed or features or head or masks or cuts or adapters:
            raise DeviceError(
                f"The model {path} is an encoder-decoder model, which runs on a processor or GPU only, without heads, "
                "mask tokens, adapters or drafters of its own layers. Load with main_device='CPU', draft_device='CPU'."
            )
        return EncoderDecoder(path, encoder_path, model.encoder, **shared)
    if fixed:
        from outrider.models.backends.openvino_npu import OpenVINONpu

        if model.source.recipe.get("route") == "keep":
            raise BundleError(
                f"The model {path} has the weights of its GGUF file, {model.weights}, which NPUW does not take. "
                "Export it again with --weights int8 (--draft-weights for a draft model)."
            )
        return OpenVINONpu(
            path,
            context_length=model.geometry.context_length,
            # A draft model reads one token, or two after a draft that was accepted whole.
            max_rows=(options.npu_window or 16) if is_main else 2,
            max_prompt_tokens=options.npu_max_prompt_tokens,
            max_new_tokens=options.npu_max_new_tokens,
            **shared,
        )
    if model.format == "openvino":
        from outrider.models.backends.heads import load_head
        from outrider.models.backends.openvino_paged import OpenVINOPaged
        from outrider.models.backends.paged_graph import read_decoder

        if head is not None:
            return load_head(path, head, shared)
        if graph is not None:
            shared |= {"build": lambda *_: graph.clone(), "releases": False}  # other slices read the same pages
            return OpenVINOPaged(path, **shared, top_logits=options.top_logits)
        attended = model.geometry.num_heads * model.geometry.head_size
        build = functools.partial(
            read_decoder,
            features=features,
            masks=masks,
            adapters=adapters,
            attended=attended,
            embeds=model.vision is not None,
            windows=model.geometry.sliding_windows,
        )
        return OpenVINOPaged(
            path,
            **shared,
            top_logits=options.top_logits,
            features=features,
            mask_token_ids=masks.token_ids if masks else (),
            build=build,
            cuts=cuts,
            adapters=adapters,
        )
    if any(windows := model.geometry.sliding_windows or ()):
        said = SLIDING.format(windows=describe_windows(windows))
        raise BundleError(f"The model {path} cannot be run: its layers have {said}")
    try:
        from outrider.models.backends.onnxruntime import OnnxRuntime
    except ImportError as error:
        raise DeviceError(
            f"The model {path} is in ONNX, and onnxruntime cannot be imported: {error}. Run: {install('onnx')}"
        ) from error
    return OnnxRuntime(path, **shared, features=features)
