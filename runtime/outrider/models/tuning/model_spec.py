"""The models of a bundle: which each is, where it runs, and what can be done with it there."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import openvino as ov

from outrider.bundle.architectures import refusal_of
from outrider.bundle.fit import check_writes
from outrider.bundle.folder import Bundle
from outrider.bundle.manifest import DrafterEntry, FileEntry, ModelEntry
from outrider.config import DeviceConfig
from outrider.config.files import user_path
from outrider.errors import BundleError, DeviceError, OptionError, nearest, needs
from outrider.models.backends import Support
from outrider.models.backends.adapters import Adapter, Adapters
from outrider.models.backends.attention import SLIDING, describe_windows
from outrider.models.backends.columns import can_append
from outrider.models.backends.devices import find_device
from outrider.models.backends.heads import Head
from outrider.models.backends.processor import this_processor
from outrider.models.backends.slices import Slices, find_slices
from outrider.models.backends.taps import read_ir
from outrider.models.tuning.identity import ModelIdentity, versions_of
from outrider.models.tuning.setting import Setting
from outrider.system import saved
from outrider.system.core import new_core
from outrider.types import CompiledModel

if TYPE_CHECKING:
    from outrider.models.backends.openvino_paged import OpenVINOPaged

SMALL = 16_000_000  # bytes of a model's files
_NPU_SIZES = ("npu_max_prompt_tokens", "npu_max_new_tokens", "npu_window")


@dataclass(frozen=True)
class ModelSpec:
    """A model of a bundle on a device.

    spec, drafts = specs_of(bundle, bundle, bundle.manifest.drafters)
    backend = spec.on("GPU", options).compile()
    """

    role: str  # "main", or a drafter's name
    bundle: Bundle
    model: ModelEntry
    drafter: DrafterEntry | None = None  # None for the main model
    features: tuple[str, ...] = ()  # the main model's hidden states that drafters read
    adapters: Adapters | None = None  # that the main model applies
    cuts: tuple[int, ...] = ()  # layers where its graph is cut, for a drafter that runs some of them
    device: str = "CPU"
    options: DeviceConfig = field(default_factory=DeviceConfig)  # its own

    def __str__(self) -> str:
        return "The main model" if self.role == "main" else f"The draft model '{self.role}'"

    @property
    def files(self) -> dict[str, str]:
        """The sha256 of each of its files, and of its vision encoder's."""
        seen = self.bundle.files_of(self.model.vision.folder) if self.model.vision else []
        return {entry.path: entry.sha256 for entry in (*self._entries, *seen)}

    @property
    def size(self) -> int:
        """Bytes of its files."""
        return sum(entry.size for entry in self._entries)

    @property
    def is_small(self) -> bool:
        """Whether trying settings and slices does not pay."""
        return self.size < SMALL

    @property
    def answers_first(self) -> bool:
        """Whether the engine answers before it is measured: a decoder on the CPU, in f32, in a setting of the table."""
        own, main = self.options, ModelSpec("main", self.bundle, self.bundle.manifest.main)
        if own.measure == "first" or self.device != "CPU" or self.model.encoder is not None or self.adapters:
            return False
        in_f32 = own.precision in ("auto", "f32") and own.cache_precision in ("auto", "f32")
        return in_f32 and (own.measure == "idle" or not (self.is_small and main.is_small))

    @property
    def _entries(self) -> list[FileEntry]:
        encoder = self.model.encoder
        return self.bundle.files_of(self.model.folder, *([encoder.folder] if encoder else []))

    @property
    def path(self) -> Path:
        """The model file."""
        return self.bundle.model_path(self.model)

    @property
    def head(self) -> Head | None:
        """What it is made of if it is no decoder."""
        if self.drafter is None or self.drafter.traits.design == "model":
            return None
        return Head.of(self.drafter, self.bundle.model_path(self.bundle.manifest.main))

    @property
    def layers(self) -> tuple[int, ...]:
        """The main model's layers that it is made of; none for a model with files of its own."""
        return self.drafter.layers if self.drafter else ()

    @property
    def uses_main_cache(self) -> bool:
        """Whether it has no cache, and uses the main model's on its device."""
        return self.drafter is not None and self.drafter.traits.uses_main_cache

    @property
    def is_main(self) -> bool:
        """Whether it is the main model."""
        return self.role == "main"

    def on(self, device: str, options: DeviceConfig) -> ModelSpec:
        """The same on a device, with its own of these options. Threads are as many as a container's quota allows."""
        own = options.of(self.role)
        threads = own.num_threads or this_processor().quota
        return dataclasses.replace(self, device=device, options=dataclasses.replace(own, num_threads=threads))

    @property
    def support(self) -> Support:
        """What can be done with it there."""
        return Support.of(self.model, self.device)

    @functools.cached_property
    def identity(self) -> ModelIdentity:
        """What measurements of it depend on, before it is compiled."""
        main = self.bundle.manifest.main
        drafter: dict[str, Any] = {}
        if self.drafter is not None and self.drafter.traits.design != "model":
            shared = self.bundle.files_of(main.folder)  # a head has the main model's embedding
            drafter = {"kind": self.drafter.kind, "layers": self.layers, "num_places": self.drafter.num_places}
            drafter["shared"] = {entry.path: entry.sha256 for entry in shared}
        here = None if self.device == "CPU" else find_device(self.device, self.model.format)
        return ModelIdentity(
            role="main" if self.is_main else "draft",
            files=self.files,
            geometry=msgspec.to_builtins(self.model.geometry),
            drafter=drafter,
            features=self.features,
            cuts=self.cuts,
            adapters=self.adapters.shapes if self.adapters else (),
            device=here.identity if here else {"device": self.device, "format": self.model.format},
            options=self.asked,
            versions=versions_of("openvino" if self.support.library == "openvino" else "onnxruntime"),
            machine=this_processor().description,
        )

    @property
    def asked(self) -> dict[str, Any]:
        """Those of its options that it is compiled with."""
        names = ("precision", "cache_precision", "num_threads", *(_NPU_SIZES if self.support.fixed_shapes else ()))
        given = self.support.properties(dict(self.options.properties))
        properties = {name: value for name, value in given.items() if name != "CACHE_DIR"}
        return {name: getattr(self.options, name) for name in names} | {"properties": properties}

    @property
    def compile_options(self) -> DeviceConfig:
        """Its options, with OpenVINO's folder for compiled models among the properties.

        Not on the CPU: OpenVINO 2026.4 writes a compiled model with a paged cache there, but cannot read it
        ("k_head_size and num_k_heads are required"): these are numbers in the runtime info of the attention's nodes,
        which a compiled model's file does not keep. Every start would compile and write it again.
        """
        own = self.options
        unwanted = own.compiled_cache == "off" or "CACHE_DIR" in own.properties
        if unwanted or not self.support.saves_compiled:
            return own
        folder = saved.FOLDER / "compiled" if own.compiled_cache == "auto" else user_path(own.compiled_cache)
        # OpenVINO's own key covers the model's bits, but not all options that it was compiled with.
        asked = json.dumps([self.device, self.asked], sort_keys=True, default=str)
        folder /= hashlib.sha256(asked.encode()).hexdigest()[:12]
        return dataclasses.replace(own, properties={**own.properties, "CACHE_DIR": str(folder)})

    def slices(self) -> Slices | None:
        """Slices of it, on which settings can be measured; None for a small model, or one that has none.

        None, too, for a model that is cut, as slices are not.
        """
        if self.cuts:
            return None
        if not (self.support.tries_settings and self.support.paged) or self.is_small:
            return None
        if self.head is not None:
            return None
        geometry = self.model.geometry
        windows, kinds = geometry.windows_by_layer, geometry.layer_states
        return find_slices(new_core(), self.path, geometry.num_layers, windows, kinds)

    def onnx_slice(self) -> bytes | None:
        """A slice of a model in ONNX, on which bits can be measured; None for a small model, or one that has none.

        None, too, on other devices than the CPU, where it is not known what kernels are chosen by.
        """
        if self.model.format != "onnx" or self.device != "CPU" or self.is_small:
            return None
        from outrider.models.backends.onnx_slices import slice_of  # imports a package of the extra `onnx`

        return slice_of(self.path)

    def can_append(self) -> bool:
        """Whether `append_columns` changes its graph on its device, and adds few weights."""
        return self.support.tries_settings and self.support.paged and can_append(read_ir(new_core(), self.path))

    def compile(self, setting: Setting | None = None, graph: ov.Model | bytes | None = None) -> CompiledModel:
        """Compile it on its device, in a setting or with its options as they are. Raises as the backends say.

        graph: is evaluated instead of the file's, such as a slice of it; bytes for a model in ONNX.
        """
        self._check()
        arguments = self._arguments(setting)
        if self.model.encoder is not None:
            from outrider.models.backends.encoder_decoder import EncoderDecoder

            encoder_path = self.bundle.folder / self.model.encoder.folder / self.path.name
            return EncoderDecoder(self.path, encoder_path, self.model.encoder, **arguments)
        if self.support.fixed_shapes:
            return self._compile_fixed(arguments)
        if self.support.paged:
            return self._compile_paged(arguments, setting.columns if setting else 0, graph)
        with needs(f"The model {self.path} is in ONNX, and onnxruntime cannot be imported", "onnx", DeviceError):
            from outrider.models.backends.onnxruntime import OnnxRuntime
        if isinstance(graph, bytes):  # a slice gives no hidden states
            return OnnxRuntime(self.path, **arguments, graph=graph)
        return OnnxRuntime(self.path, **arguments, features=self.features)

    def compile_beside(self, main: OpenVINOPaged) -> CompiledModel:
        """Compile a drafter that uses the cache of `main`, on its device: some of its layers, or what reads it.

        Raises:
            BundleError: when the cache has another shape than it reads.
            DeviceError: when the cache is in a form that it cannot read.
        """
        from outrider.models.backends.openvino_assistant import OpenVINOAssistant
        from outrider.models.backends.openvino_layers import OpenVINOLayers

        if self.layers:
            return OpenVINOLayers(main, self.layers)
        if self.head is None:
            raise AssertionError("the manifest was checked")
        return OpenVINOAssistant(self.path, main, main_path=self.head.main, **self._arguments(None))

    def _check(self) -> None:
        """Raise BundleError for a model that cannot be run there, and DeviceError for what it cannot do there."""
        geometry, support = self.model.geometry, self.support
        if refusal := refusal_of(geometry.architecture):
            raise BundleError(f"The model {self.path} cannot be run. {refusal}")
        if not support.windows and any(windows := geometry.sliding_windows or ()):
            said = SLIDING.format(windows=describe_windows(windows))
            raise BundleError(f"The model {self.path} cannot be run: its layers have {said}")
        if geometry.layer_states and not support.states:
            where, remedy = "in ONNX", "Export its checkpoint for OpenVINO: outrider export MODEL"
            if support.fixed_shapes:
                where, remedy = "on an NPU", "Load it with main_device='CPU', draft_device='CPU'"
            raise BundleError(
                f"The model {self.path} cannot be run {where}: {geometry.num_state_layers} of its "
                f"{geometry.num_layers} layers keep a state, from which rejected draft tokens are dropped in "
                f"OpenVINO's format on a CPU or GPU alone. {remedy}."
            )
        needs_decoder = self.features or self.head or self.cuts or self.adapters
        if self.model.encoder is not None and (support.fixed_shapes or needs_decoder):
            raise DeviceError(
                f"The model {self.path} is an encoder-decoder model, which runs on a CPU or GPU only, without heads, "
                "adapters or drafters of its own layers. Load with main_device='CPU', draft_device='CPU'."
            )
        if self.adapters and not support.paged:
            raise DeviceError(
                f"Adapters ({', '.join(self.adapters.names)}) are for main models in OpenVINO's format on a processor "
                f"or GPU, and this one is {'on an NPU' if support.fixed_shapes else 'in ONNX'}. Load it with "
                "adapters=(), or merge one at export: outrider export MODEL --adapter FOLDER."
            )
        if support.fixed_shapes and self.model.source.recipe.get("route") == "keep":
            raise BundleError(
                f"The model {self.path} has the weights of its GGUF file, {self.model.weights}, which NPUW does not "
                "take. Export it again with --weights int8 (--draft-weights for a draft model)."
            )

    def _arguments(self, setting: Setting | None) -> dict[str, Any]:
        """What all backends take, in a setting or with its options as they are."""
        own, width = self.compile_options, self.model.geometry.logits_width
        options = own if setting is None else setting.options(own)
        return {
            "vocab_size": min(self.model.vocab_size, width),  # fewer logits where they were cut
            "device": self.device,
            "precision": options.precision,
            "cache_precision": options.cache_precision,
            "num_threads": options.num_threads,
            "properties": self.support.properties(dict(options.properties)),
        }

    def _compile_fixed(self, arguments: dict[str, Any]) -> CompiledModel:
        from outrider.models.backends.openvino_npu import OpenVINONpu

        return OpenVINONpu(
            self.path,
            context_length=self.model.geometry.long_from or self.model.geometry.context_length,
            # A draft model reads one token, or two after a draft that was accepted whole.
            max_rows=(self.options.npu_window or 16) if self.is_main else 2,
            max_prompt_tokens=self.options.npu_max_prompt_tokens,
            max_new_tokens=self.options.npu_max_new_tokens,
            **arguments,
        )

    def _compile_paged(self, arguments: dict[str, Any], columns: int, graph: ov.Model | bytes | None) -> CompiledModel:
        from outrider.models.backends.heads import load_head
        from outrider.models.backends.openvino_paged import OpenVINOPaged
        from outrider.models.backends.paged_graph import read_decoder

        if self.head is not None:
            return load_head(self.path, self.head, arguments)
        if graph is not None and not isinstance(graph, bytes):  # other slices read the same pages
            arguments |= {"columns": columns, "releases": False}
            return OpenVINOPaged(self.path, **arguments, build=lambda *_: graph.clone())
        geometry, vision = self.model.geometry, self.model.vision
        if vision is not None and vision.both_ways != "none" and not self.device.startswith("CPU"):
            vision = None  # see `embeds.add_embeds`
        build = functools.partial(
            read_decoder,
            features=self.features,
            adapters=self.adapters,
            attended=geometry.attended_size,
            embeds=vision.num_parts if vision else 0,
            both_ways=vision.both_ways if vision else "none",
            place_token_id=vision.place_token_id if vision else None,
            windows=geometry.sliding_windows,
            kinds=geometry.layer_states,
        )
        return OpenVINOPaged(
            self.path,
            **arguments,
            features=self.features,
            build=build,
            cuts=self.cuts,
            adapters=self.adapters,
            columns=columns,
            long_from=geometry.long_from,
        )


def specs_of(
    bundle: Bundle,
    draft_bundle: Bundle,
    drafters: Sequence[DrafterEntry],
    adapters: Sequence[str] | None = None,
) -> tuple[ModelSpec, list[ModelSpec]]:
    """The main model of a bundle, and its drafters, which are in `draft_bundle`: the same, or another one.

    The main model gives the hidden states that they read, and is cut for those that are made of its layers. adapters:
    the names of the main model's; by default all.

    Raises:
        OptionError: for an adapter that the bundle does not have.
        BundleError: for a model that writes no text.
    """
    check_writes(bundle.manifest, bundle.folder)
    main = bundle.manifest.main
    features = tuple(dict.fromkeys(name for entry in drafters for name in entry.features))
    cuts = {cut for entry in drafters if entry.layers for cut in cuts_for(entry.layers, main.geometry.num_layers)}
    own = adapters_of(bundle, adapters)
    drafts = [ModelSpec(entry.name, draft_bundle, entry.model, entry) for entry in drafters]
    return ModelSpec("main", bundle, main, None, features, own, tuple(sorted(cuts))), drafts


def adapters_of(bundle: Bundle, names: Sequence[str] | None = None) -> Adapters | None:
    """Adapters of a bundle, by default all; None for none.

    Raises:
        OptionError: for one that it does not have.
    """
    entries = {entry.name: entry for entry in bundle.manifest.adapters}
    for name in names or ():
        if name not in entries:
            raise OptionError(f"{bundle.folder} has no adapter '{name}'. {nearest(name, entries)}")
    wanted = [entry for name, entry in entries.items() if names is None or name in names]
    items = tuple(Adapter(each.name, bundle.adapter_path(each), each.rank, each.targets) for each in wanted)
    return Adapters(items) if items else None


def cuts_for(kept: Iterable[int], num_layers: int) -> set[int]:
    """Where a model has to be cut so that calls can do with the layers `kept`: before these layers.

    The embedding and what is after the last layer, which `num_layers` stands for, are in every call.
    """
    known = {-1, *kept, num_layers}
    return {i for i in range(num_layers + 1) if (i in known) != (i - 1 in known)}
