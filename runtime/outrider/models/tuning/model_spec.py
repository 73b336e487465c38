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

from outrider.bundle.fit import check_writes
from outrider.bundle.folder import Bundle
from outrider.bundle.manifest import DrafterEntry, FileEntry, ModelEntry
from outrider.config import DeviceConfig
from outrider.config.files import user_path
from outrider.errors import OptionError, nearest
from outrider.models.backends import Support
from outrider.models.backends.adapters import Adapter, Adapters
from outrider.models.backends.devices import find_device
from outrider.models.backends.heads import Head
from outrider.models.backends.processor import this_processor
from outrider.models.tuning.identity import ModelIdentity, versions_of
from outrider.models.tuning.setting import Choice
from outrider.system import saved

SMALL = 16_000_000  # bytes of a model's files
_NPU_SIZES = ("npu_max_prompt_tokens", "npu_max_new_tokens", "npu_window")


@dataclass(frozen=True)
class ModelSpec:
    """A model of a bundle on a device.

    spec, drafts = specs_of(bundle, bundle, bundle.manifest.drafters)
    backend = compile_model(spec.on("GPU", options))
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
        """Whether trying settings does not pay."""
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
        """The same on a device, with its own of these options. Threads are as many as a container's quota allows.

        A draft model in ONNX, whose cache changes no text, keeps the one that it was exported with beside u8.
        """
        own = options.of(self.role)
        threads = own.num_threads or this_processor().quota
        kept = not self.is_main and self.model.format == "onnx" and own.cache_precision == "u8"
        cache = "auto" if kept else own.cache_precision
        changed = dataclasses.replace(own, num_threads=threads, cache_precision=cache)
        return dataclasses.replace(self, device=device, options=changed)

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
    def saved_choice(self) -> saved.SavedValue[Choice]:
        """Its setting, as an earlier load or search saved it.

        Hidden states that drafters read change no setting: with one file for them all, a text is the same with each.
        """
        return self.identity.saved("settings", Choice, ["features"])

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
