"""Adds a LoRA adapter to a bundle, for requests to choose: `outrider add`.

bundle = add_adapter("my-bundle", "my-adapter", name="pirate")
outrider.load("my-bundle").generate("Hello", adapter="pirate")
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from outrider.bundle.fit import check_writes
from outrider.bundle.folder import Bundle, read_bundle
from outrider.bundle.manifest import ADAPTER_NAMES, AdapterEntry, Source
from outrider.config.files import user_path
from outrider.errors import ExportError
from outrider.models.backends.adapters import check_matrices
from outrider.models.backends.projections import NAMES, projections_of
from outrider.models.backends.taps import read_ir
from outrider.system.core import new_core
from outrider.system.files import usable
from outrider.version import __version__
from outrider_export.heads import container
from outrider_export.progress import Progress, Silent
from outrider_export.sources.peft_adapter import LoraAdapter, layer_of, read_adapter
from outrider_export.target import Target, check_new_name, rewrite


def add_adapter(
    bundle: str | Path, adapter: str | Path, *, name: str | None = None, progress: Progress | None = None
) -> Bundle:
    """Add an adapter to a bundle in place. Nothing is changed if that fails.

    adapter: a folder in PEFT's format. name: what requests call it; by default the folder's name.

    Raises:
        OptionError: for a name that is none, or taken.
        BundleError: when the bundle cannot be read, or the adapter does not fit its main model.
        ExportError: when the adapter is damaged or of another kind, or the bundle cannot be written.
    """
    old = read_bundle(bundle)
    check_writes(old.manifest, old.folder)
    main = old.manifest.main
    if main.format != "openvino":
        raise ExportError(
            f"An adapter is added to main models in OpenVINO's format, and this one is in {main.format}. Merge it at "
            "export: outrider export MODEL --adapter FOLDER."
        )
    read = read_adapter(usable(user_path(adapter)))
    name = read.id if name is None else name
    check_new_name(name, "an adapter", [each.name for each in old.manifest.adapters], old.folder / f"adapter-{name}")
    matrices = matrices_of(read)
    geometry = main.geometry
    if any(geometry.layer_states):
        raise ExportError(
            f"{old.folder} has a main model whose layers keep states, and adapters that requests choose are for "
            "models with attention in all layers. Merge it at export: outrider export MODEL --adapter FOLDER."
        )
    layers = projections_of(
        read_ir(new_core(), old.model_path(main)), geometry.num_layers, attended=geometry.num_heads * geometry.head_size
    )
    check_matrices(name, matrices, layers)
    entry = AdapterEntry(
        name=name,
        folder=f"adapter-{name}",
        rank=read.rank,
        targets=tuple(each for each in NAMES if any(f".{each}." in place for place in matrices)),
        source=Source(read.id, "peft", sha256=read.sha256, recipe={"base": read.base} if read.base else {}),
    )

    def change(target: Target) -> dict[str, object]:
        container.write(target.new / entry.folder / ADAPTER_NAMES[0], matrices, "fp32")
        return {"adapters": (*old.manifest.adapters, entry), "minimum_runtime": __version__}

    return rewrite(old, change, progress or Silent())


def matrices_of(adapter: LoraAdapter) -> dict[str, NDArray[np.float32]]:
    """An adapter's matrices as `outrider.models.backends.adapters.Adapter` has them.

    Raises:
        ExportError: for a module that is in no layer.
    """
    made = {}
    for module, change in adapter.modules.items():
        place = layer_of(module)
        if place is None:
            raise ExportError(
                f"The adapter {adapter.id} changes {module}, which is in no layer. Merge it at export: outrider export "
                "MODEL --adapter FOLDER."
            )
        number, name = place
        made[f"layers.{number}.{name}.A"] = change.down
        made[f"layers.{number}.{name}.B"] = change.up * np.float32(change.scale)
    return made
