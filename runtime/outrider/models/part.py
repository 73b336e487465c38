"""The models of a bundle, and the options that each is compiled with."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import openvino as ov

from outrider import __version__
from outrider.bundle.fit import check_writes
from outrider.bundle.folder import Bundle, draft_models_of
from outrider.bundle.manifest import DrafterEntry, FileEntry, ModelEntry
from outrider.config import DeviceConfig
from outrider.config.files import user_path
from outrider.errors import OptionError, nearest
from outrider.models.backends import load_model
from outrider.models.backends.adapters import Adapter, Adapters
from outrider.models.backends.columns import can_append
from outrider.models.backends.heads import Head
from outrider.models.backends.processor import Processor, find_processor
from outrider.models.backends.slices import Slices, find_slices
from outrider.models.backends.support import ModelSpec, support_of
from outrider.models.backends.taps import read_ir
from outrider.system import saved
from outrider.system.core import new_core
from outrider.types import CompiledModel

SMALL = 16_000_000  # bytes of a model's files
_NPU_SIZES = ("npu_max_prompt_tokens", "npu_max_new_tokens", "npu_window")


@dataclass(frozen=True)
class Part:
    """A model of a bundle, with its role: "main", or a drafter's name."""

    role: str
    bundle: Bundle
    model: ModelEntry
    drafter: DrafterEntry | None = None  # None for the main model
    features: tuple[str, ...] = ()  # the main model's hidden states that drafters read
    adapters: Adapters | None = None  # that the main model applies
    cuts: tuple[int, ...] = ()  # layers where its graph is cut, for a drafter that runs some of them

    def __str__(self) -> str:
        return "The main model" if self.role == "main" else f"The draft model '{self.role}'"

    @property
    def files(self) -> dict[str, str]:
        """The sha256 of each of its files."""
        return {entry.path: entry.sha256 for entry in self._entries}

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

    def options(self, options: DeviceConfig, device: str) -> DeviceConfig:
        """The model's own options, with OpenVINO's folder for compiled models among its properties.

        Not on the CPU: OpenVINO 2026.4 writes a compiled model with a paged cache there, but cannot read it
        ("k_head_size and num_k_heads are required"): these are numbers in the runtime info of the attention's nodes,
        which a compiled model's file does not keep. Every start would compile and write it again.
        """
        own = options.of(self.role)
        unwanted = own.compiled_cache == "off" or "CACHE_DIR" in own.properties
        if unwanted or not support_of(self.model, device).saves_compiled:
            return own
        folder = saved.FOLDER / "compiled" if own.compiled_cache == "auto" else user_path(own.compiled_cache)
        # OpenVINO's own key covers the model's bits, but not all options that it was compiled with.
        asked = json.dumps([device, self.asked(own, device)], sort_keys=True, default=str)
        folder /= hashlib.sha256(asked.encode()).hexdigest()[:12]
        return dataclasses.replace(own, properties={**own.properties, "CACHE_DIR": str(folder)})

    def asked(self, own: DeviceConfig, device: str) -> dict[str, Any]:
        """Those of its own options that matter for compiling on a device."""
        names = ("precision", "cache_precision", "num_threads", "properties")
        sizes = _NPU_SIZES if support_of(self.model, device).fixed_shapes else ()
        return {name: getattr(own, name) for name in (*names, *sizes)}

    def slices(self, device: str) -> Slices | None:
        """Slices of it, on which settings can be measured; None for a small model, or one that has none.

        None, too, for a model that is cut, as slices are not.
        """
        if self.cuts:
            return None
        support = support_of(self.model, device)
        if not (support.tries_settings and support.paged) or self.is_small:
            return None
        if self.drafter is not None and self.drafter.kind != "draft_model":
            return None
        geometry = self.model.geometry
        return find_slices(new_core(), self.path, geometry.num_layers, geometry.windows_by_layer)

    def onnx_slice(self, device: str) -> bytes | None:
        """A slice of a model in ONNX, on which bits can be measured; None for a small model, or one that has none.

        None, too, on other devices than the CPU, where it is not known what kernels are chosen by.
        """
        if self.model.format != "onnx" or device != "CPU" or self.is_small:
            return None
        from outrider.models.backends.onnx_slices import slice_of  # imports a package of the extra `onnx`

        return slice_of(self.path)

    def can_append(self, device: str) -> bool:
        """Whether `append_columns` changes its graph on this device, and adds few weights."""
        support = support_of(self.model, device)
        return support.tries_settings and support.paged and can_append(read_ir(new_core(), self.path))

    def compile(
        self, own: DeviceConfig, device: str, graph: ov.Model | bytes | None = None, columns: int = 0
    ) -> CompiledModel:
        """Compile it with its own options; see `outrider.models.backends.load_model`. columns: see `Setting`."""
        return load_model(self.spec(own, device, graph, columns))

    def spec(
        self, own: DeviceConfig, device: str, graph: ov.Model | bytes | None = None, columns: int = 0
    ) -> ModelSpec:
        """What is to be compiled; see `compile`."""
        main = self.bundle.model_path(self.bundle.manifest.main)
        return ModelSpec(
            self.path,
            self.model,
            device,
            own,
            self.is_main,
            self.bundle.encoder_path(self.model),
            features=self.features,
            head=None if self.drafter is None or self.drafter.kind == "draft_model" else Head.of(self.drafter, main),
            cuts=self.cuts,
            adapters=self.adapters,
            graph=graph,
            columns=columns,
        )

    @property
    def versions(self) -> dict[str, str]:
        """The versions of Outrider and the library that runs the model."""
        versions = {"outrider": __version__}
        if support_of(self.model, "").library == "openvino":
            return versions | {"openvino": ov.get_version()}
        if find_spec("onnxruntime"):
            import onnxruntime  # several packages contain it, so its metadata cannot be asked

            versions["onnxruntime"] = onnxruntime.__version__
        return versions


def parts_of(
    bundle: Bundle, draft_bundle: Bundle, names: Seq[str] | None = None, adapters: Seq[str] | None = None
) -> tuple[Part, list[Part]]:
    """The main model of a bundle, and its drafters, which may be in another bundle.

    names: of the drafters; by default all. The main model gives the hidden states that they read, and is cut for those
    that are made of its layers. adapters: the names of the main model's; by default all.

    Raises:
        OptionError: for an adapter that the bundle does not have.
        BundleError: for a model that writes no text.
    """
    check_writes(bundle.manifest, bundle.folder)
    entries = [entry for entry in draft_models_of(draft_bundle, bundle) if names is None or entry.name in names]
    drafts = [Part(entry.name, draft_bundle, entry.model, entry) for entry in entries]
    features = dict.fromkeys(name for part in drafts if part.drafter for name in part.drafter.features)
    num_layers = bundle.manifest.main.geometry.num_layers
    cuts = sorted({cut for part in drafts if part.layers for cut in cuts_for(part.layers, num_layers)})
    main = bundle.manifest.main
    own = adapters_of(bundle, adapters)
    return Part("main", bundle, main, None, tuple(features), own, tuple(cuts)), drafts


def adapters_of(bundle: Bundle, names: Seq[str] | None = None) -> Adapters | None:
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

    The embedding and what is behind the last layer, which `num_layers` stands for, are in every call.
    """
    known = {-1, *kept, num_layers}
    return {i for i in range(num_layers + 1) if (i in known) != (i - 1 in known)}


def describe(part: Part, backend: CompiledModel) -> dict[str, Any]:
    """What the time of a model's calls depends on, as far as it is known."""
    geometry = part.model.geometry
    # Costs that were measured before the experts of a model were known are too low.
    experts = {"experts": f"{geometry.num_active_experts} of {geometry.num_experts}"} if geometry.num_experts else {}
    return (
        {"role": part.role, "files": part.files, **backend.fingerprint, "outrider": __version__} | experts | machine()
    )


def machine() -> dict[str, str]:
    """What kernels and threads are chosen by. Processors of one name may have different instructions."""
    return this_processor().description


@functools.cache
def this_processor() -> Processor:
    """The processor, which is asked once: counting its cores takes a tenth of a second."""
    return find_processor()
