"""Which backend a model has on its device: what it refuses, and how it is compiled.

compile_model(spec, setting)    # a `CompiledModel`

Each backend's library is imported when a model needs it.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from outrider.bundle.architectures import refusal_of
from outrider.errors import BundleError, DeviceError, needs
from outrider.models.backends.attention import SLIDING, describe_windows

if TYPE_CHECKING:
    from outrider.models.backends.openvino_paged import OpenVINOPaged
    from outrider.models.tuning.model_spec import ModelSpec
    from outrider.models.tuning.setting import Setting
    from outrider.types import CompiledModel


def compile_model(spec: ModelSpec, setting: Setting | None = None) -> CompiledModel:
    """Compile a model on its device, in a setting or with its options as they are. Raises as `check` and backends."""
    check(spec)
    if spec.model.encoder is not None:
        make = _encoder_decoder
    elif spec.support.fixed_shapes:
        make = _fixed
    else:
        make = _paged if spec.support.paged else _onnx
    return make(spec, _arguments(spec, setting))


def compile_beside(spec: ModelSpec, main: OpenVINOPaged) -> CompiledModel:
    """Compile a drafter that uses the cache of `main`, on its device: some of its layers, or what reads it.

    Raises:
        BundleError: when the cache has another shape than it reads.
        DeviceError: when the cache is in a form that it cannot read.
    """
    from outrider.models.backends.openvino_assistant import OpenVINOAssistant
    from outrider.models.backends.openvino_layers import OpenVINOLayers

    if spec.layers:
        return OpenVINOLayers(main, spec.layers)
    if spec.head is None:
        raise AssertionError("the manifest was checked")
    return OpenVINOAssistant(spec.path, main, main_path=spec.head.main, **_arguments(spec, None))


def check(spec: ModelSpec) -> None:
    """Raise BundleError for a model that cannot be run there, and DeviceError for what it cannot do there."""
    geometry, support = spec.model.geometry, spec.support
    if refusal := refusal_of(geometry.architecture):
        raise BundleError(f"The model {spec.path} cannot be run. {refusal}")
    if not support.windows and any(windows := geometry.sliding_windows or ()):
        said = SLIDING.format(windows=describe_windows(windows))
        raise BundleError(f"The model {spec.path} cannot be run: its layers have {said}")
    if geometry.layer_states and not support.states:
        where, remedy = "in ONNX", "Export its checkpoint for OpenVINO: outrider export MODEL"
        if support.fixed_shapes:
            where, remedy = "on an NPU", "Load it with main_device='CPU', draft_device='CPU'"
        raise BundleError(
            f"The model {spec.path} cannot be run {where}: {geometry.num_state_layers} of its "
            f"{geometry.num_layers} layers keep a state, from which rejected draft tokens are dropped in "
            f"OpenVINO's format on a CPU or GPU alone. {remedy}."
        )
    needs_decoder = spec.features or spec.head or spec.cuts or spec.adapters
    if spec.model.encoder is not None and (support.fixed_shapes or needs_decoder):
        raise DeviceError(
            f"The model {spec.path} is an encoder-decoder model, which runs on a CPU or GPU only, without heads, "
            "adapters or drafters of its own layers. Load with main_device='CPU', draft_device='CPU'."
        )
    if spec.adapters and not support.paged:
        raise DeviceError(
            f"Adapters ({', '.join(spec.adapters.names)}) are for main models in OpenVINO's format on a processor "
            f"or GPU, and this one is {'on an NPU' if support.fixed_shapes else 'in ONNX'}. Load it with "
            "adapters=(), or merge one at export: outrider export MODEL --adapter FOLDER."
        )


def _arguments(spec: ModelSpec, setting: Setting | None) -> dict[str, Any]:
    """What all backends take."""
    own, width = spec.compile_options, spec.model.geometry.logits_width
    options = own if setting is None else setting.options(own)
    columns = {"columns": setting.columns} if setting and setting.columns else {}  # of decoders with a paged cache
    return {
        "vocab_size": min(spec.model.vocab_size, width),  # fewer logits where they were cut
        "device": spec.device,
        "precision": options.precision,
        "cache_precision": options.cache_precision,
        "num_threads": options.num_threads,
        "properties": spec.support.properties(dict(options.properties)),
        **columns,
    }


def _encoder_decoder(spec: ModelSpec, arguments: dict[str, Any]) -> CompiledModel:
    from outrider.models.backends.encoder_decoder import EncoderDecoder

    encoder = spec.model.encoder
    if encoder is None:
        raise AssertionError("it was chosen for its encoder")
    return EncoderDecoder(spec.path, spec.bundle.folder / encoder.folder / spec.path.name, encoder, **arguments)


def _fixed(spec: ModelSpec, arguments: dict[str, Any]) -> CompiledModel:
    from outrider.models.backends.openvino_npu import OpenVINONpu

    return OpenVINONpu(
        spec.path,
        context_length=spec.model.geometry.long_from or spec.model.geometry.context_length,
        # A draft model reads one token, or two after a draft that was accepted whole.
        max_rows=(spec.options.npu_window or 16) if spec.is_main else 2,
        max_prompt_tokens=spec.options.npu_max_prompt_tokens,
        max_new_tokens=spec.options.npu_max_new_tokens,
        **arguments,
    )


def _paged(spec: ModelSpec, arguments: dict[str, Any]) -> CompiledModel:
    from outrider.models.backends.heads import load_head
    from outrider.models.backends.openvino_paged import OpenVINOPaged
    from outrider.models.backends.paged_graph import read_decoder

    if spec.head is not None:
        return load_head(spec.path, spec.head, arguments)
    geometry, vision = spec.model.geometry, spec.model.vision
    if vision is not None and vision.both_ways != "none" and not spec.device.startswith("CPU"):
        vision = None  # see `embeds.add_embeds`
    build = functools.partial(
        read_decoder,
        features=spec.features,
        adapters=spec.adapters,
        attended=geometry.attended_size,
        embeds=vision.num_parts if vision else 0,
        both_ways=vision.both_ways if vision else "none",
        place_token_id=vision.place_token_id if vision else None,
        windows=geometry.sliding_windows,
        kinds=geometry.layer_states,
    )
    return OpenVINOPaged(
        spec.path,
        **arguments,
        features=spec.features,
        build=build,
        cuts=spec.cuts,
        adapters=spec.adapters,
        long_from=geometry.long_from,
    )


def _onnx(spec: ModelSpec, arguments: dict[str, Any]) -> CompiledModel:
    with needs(f"The model {spec.path} is in ONNX, and onnxruntime cannot be imported", "onnx", DeviceError):
        from outrider.models.backends.onnxruntime import OnnxRuntime
    return OnnxRuntime(spec.path, **arguments, features=spec.features)
