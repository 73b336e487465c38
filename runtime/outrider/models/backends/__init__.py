"""Backends: they evaluate tokens. There is one module per library, imported when a model needs it."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from outrider.bundle.architectures import refusal_of
from outrider.errors import BundleError, DeviceError, needs
from outrider.models.backends.attention import SLIDING, describe_windows

if TYPE_CHECKING:
    import openvino as ov

    from outrider.models.backends.openvino_paged import OpenVINOPaged
    from outrider.models.tuning.model_spec import ModelSpec
    from outrider.models.tuning.setting import Setting
    from outrider.types import CompiledModel


def load_model(spec: ModelSpec, setting: Setting | None = None, graph: ov.Model | bytes | None = None) -> CompiledModel:
    """Load a model on its device. Raises as the backends say.

    setting: how it is compiled; None: as its options say. graph: is evaluated instead of the file's, such as a slice of
    it; bytes for a model in ONNX.
    """
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
            f"{geometry.num_layers} layers keep a state, from which rejected draft tokens are dropped in OpenVINO's "
            f"format on a CPU or GPU alone. {remedy}."
        )
    if spec.model.encoder is not None and spec.encoder_path is not None:
        return _load_encoder_decoder(spec, setting)
    if support.fixed_shapes:
        return _load_fixed(spec, setting)
    if support.paged:
        return _load_paged(spec, setting, graph)
    shared = spec.arguments(setting)
    with needs(f"The model {spec.path} is in ONNX, and onnxruntime cannot be imported", "onnx", DeviceError):
        from outrider.models.backends.onnxruntime import OnnxRuntime
    if isinstance(graph, bytes):  # a slice gives no hidden states
        return OnnxRuntime(spec.path, **shared, graph=graph)
    return OnnxRuntime(spec.path, **shared, features=spec.features)


def load_beside(spec: ModelSpec, main: OpenVINOPaged) -> CompiledModel:
    """Load a drafter that reads the cache of a main model. Raises as `load_model`."""
    from outrider.models.backends.heads import load_assistant

    if spec.head is None:
        raise AssertionError("the manifest was checked")
    return load_assistant(spec.path, spec.head, main, spec.arguments(None))


def _load_encoder_decoder(spec: ModelSpec, setting: Setting | None) -> CompiledModel:
    from outrider.models.backends.encoder_decoder import EncoderDecoder

    if spec.support.fixed_shapes or spec.features or spec.head or spec.cuts or spec.adapters:
        raise DeviceError(
            f"The model {spec.path} is an encoder-decoder model, which runs on a CPU or GPU only, without heads, "
            "adapters or drafters of its own layers. Load with main_device='CPU', draft_device='CPU'."
        )
    if spec.encoder_path is None or spec.model.encoder is None:
        raise AssertionError("it was asked for before")
    return EncoderDecoder(spec.path, spec.encoder_path, spec.model.encoder, **spec.arguments(setting))


def _load_fixed(spec: ModelSpec, setting: Setting | None) -> CompiledModel:
    from outrider.models.backends.openvino_npu import OpenVINONpu

    shared, options = spec.arguments(setting), spec.options
    if spec.model.source.recipe.get("route") == "keep":
        raise BundleError(
            f"The model {spec.path} has the weights of its GGUF file, {spec.model.weights}, which NPUW does not take. "
            "Export it again with --weights int8 (--draft-weights for a draft model)."
        )
    return OpenVINONpu(
        spec.path,
        context_length=spec.model.geometry.long_from or spec.model.geometry.context_length,
        # A draft model reads one token, or two after a draft that was accepted whole.
        max_rows=(options.npu_window or 16) if spec.is_main else 2,
        max_prompt_tokens=options.npu_max_prompt_tokens,
        max_new_tokens=options.npu_max_new_tokens,
        **shared,
    )


def _load_paged(spec: ModelSpec, setting: Setting | None, graph: ov.Model | bytes | None) -> CompiledModel:
    from outrider.models.backends.heads import load_head
    from outrider.models.backends.openvino_paged import OpenVINOPaged
    from outrider.models.backends.paged_graph import read_decoder

    shared, geometry, columns = spec.arguments(setting), spec.model.geometry, setting.columns if setting else 0
    if spec.head is not None:
        return load_head(spec.path, spec.head, shared)
    if graph is not None and not isinstance(graph, bytes):  # other slices read the same pages
        return OpenVINOPaged(spec.path, **shared, build=lambda *_: graph.clone(), columns=columns, releases=False)
    vision = spec.model.vision
    if vision is not None and vision.both_ways != "none" and not str(shared["device"]).startswith("CPU"):
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
        **shared,
        features=spec.features,
        build=build,
        cuts=spec.cuts,
        adapters=spec.adapters,
        columns=columns,
        long_from=geometry.long_from,
    )
