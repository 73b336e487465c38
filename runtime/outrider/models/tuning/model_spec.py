"""The models of a bundle: which each is, where it runs, and what can be done with it there."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import openvino as ov

from outrider.bundle.fit import check_writes
from outrider.bundle.folder import Bundle, draft_models_of
from outrider.bundle.manifest import DrafterEntry, FileEntry, ModelEntry
from outrider.config import DeviceConfig, format_of_property, is_npu_property
from outrider.config.files import user_path
from outrider.errors import DeviceError, OptionError, nearest
from outrider.models.backends import load_model
from outrider.models.backends.adapters import Adapter, Adapters
from outrider.models.backends.columns import can_append
from outrider.models.backends.devices import find_device
from outrider.models.backends.heads import Head
from outrider.models.backends.slices import Slices, find_slices
from outrider.models.backends.taps import read_ir
from outrider.models.tuning.identity import ModelIdentity, machine, versions_of
from outrider.models.tuning.setting import Setting
from outrider.system import saved
from outrider.system.core import new_core
from outrider.types import CompiledModel

SMALL = 16_000_000  # bytes of a model's files
_NPU_SIZES = ("npu_max_prompt_tokens", "npu_max_new_tokens", "npu_window")


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


@dataclass(frozen=True)
class ModelSpec:
    """A model of a bundle on a device.

    spec, drafts = specs_of(bundle, bundle)
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
    def _entries(self) -> list[FileEntry]:
        encoder = self.model.encoder
        return self.bundle.files_of(self.model.folder, *([encoder.folder] if encoder else []))

    @property
    def path(self) -> Path:
        """The model file."""
        return self.bundle.model_path(self.model)

    @property
    def encoder_path(self) -> Path | None:
        """The file of an encoder-decoder model's encoder."""
        return self.bundle.encoder_path(self.model)

    @property
    def head(self) -> Head | None:
        """What it is made of if it is no decoder."""
        if self.drafter is None or self.drafter.kind == "draft_model":
            return None
        return Head.of(self.drafter, self.bundle.model_path(self.bundle.manifest.main))

    @property
    def layers(self) -> tuple[int, ...]:
        """The main model's layers that it is made of; none for a model with files of its own."""
        return self.drafter.layers if self.drafter else ()

    @property
    def uses_main_cache(self) -> bool:
        """Whether it has no cache, and uses the main model's on its device."""
        return self.drafter is not None and self.drafter.uses_main_cache

    @property
    def is_main(self) -> bool:
        """Whether it is the main model."""
        return self.role == "main"

    def on(self, device: str, options: DeviceConfig) -> ModelSpec:
        """The same on a device, with its own of these options."""
        return dataclasses.replace(self, device=device, options=options.of(self.role))

    @property
    def support(self) -> Support:
        """What can be done with it there."""
        return support_of(self.model, self.device)

    @functools.cached_property
    def identity(self) -> ModelIdentity:
        """What measurements of it depend on, before it is compiled."""
        main = self.bundle.manifest.main
        drafter: dict[str, Any] = {}
        if self.drafter is not None and self.drafter.kind != "draft_model":
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
            machine=machine(),
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
        """Compile it in a setting, or with its options as they are; see `outrider.models.backends.load_model`."""
        return load_model(self, setting, graph)

    def arguments(self, setting: Setting | None) -> dict[str, Any]:
        """What all backends take, in a setting or with its options as they are.

        Raises:
            DeviceError: when it is to apply adapters, and cannot.
        """
        own, geometry = self.compile_options, self.model.geometry
        options = own if setting is None else setting.options(own)
        if self.adapters and not self.support.paged:
            raise DeviceError(
                f"Adapters ({', '.join(self.adapters.names)}) are for main models in OpenVINO's format on a processor "
                f"or GPU, and this one is {'on an NPU' if self.support.fixed_shapes else 'in ONNX'}. Load it with "
                "adapters=(), or merge one at export: outrider export MODEL --adapter FOLDER."
            )
        return {
            "vocab_size": min(self.model.vocab_size, geometry.logits_width),  # fewer logits where they were cut
            "device": self.device,
            "precision": options.precision,
            "cache_precision": options.cache_precision,
            "num_threads": options.num_threads,
            "properties": self.support.properties(dict(options.properties)),
        }


def specs_of(
    bundle: Bundle, draft_bundle: Bundle, names: Sequence[str] | None = None, adapters: Sequence[str] | None = None
) -> tuple[ModelSpec, list[ModelSpec]]:
    """The main model of a bundle, and its drafters, which may be in another bundle.

    names: of the drafters; by default all. The main model gives the hidden states that they read, and is cut for those
    that are made of its layers. adapters: the names of the main model's; by default all.

    Raises:
        OptionError: for an adapter that the bundle does not have.
        BundleError: for a model that writes no text.
    """
    check_writes(bundle.manifest, bundle.folder)
    entries = [entry for entry in draft_models_of(draft_bundle, bundle) if names is None or entry.name in names]
    drafts = [ModelSpec(entry.name, draft_bundle, entry.model, entry) for entry in entries]
    features = dict.fromkeys(name for spec in drafts if spec.drafter for name in spec.drafter.features)
    num_layers = bundle.manifest.main.geometry.num_layers
    cuts = sorted({cut for spec in drafts if spec.layers for cut in cuts_for(spec.layers, num_layers)})
    main = bundle.manifest.main
    own = adapters_of(bundle, adapters)
    return ModelSpec("main", bundle, main, None, tuple(features), own, tuple(cuts)), drafts


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
