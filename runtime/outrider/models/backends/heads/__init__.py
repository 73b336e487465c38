"""Drafters that read the main model's hidden states: their graphs, built from their weights at load."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outrider.bundle.kinds import DrafterKind
from outrider.bundle.manifest import DrafterEntry
from outrider.models.backends.features import BLOCK_STATES, NEXT_HIDDEN
from outrider.system.core import new_core

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import openvino as ov

    from outrider.models.backends.heads.weights import HeadWeights
    from outrider.models.backends.openvino_paged import OpenVINOPaged


@dataclass(frozen=True, slots=True)
class Head:
    """A drafter that is no decoder. main: the main model's IR, whose embedding it shares; None if it is not in IR."""

    kind: DrafterKind
    main: Path | None

    @classmethod
    def of(cls, entry: DrafterEntry, main: Path) -> Head:
        """The head that a bundle describes. main: the main model's file."""
        return cls(entry.traits, main if main.suffix == ".xml" else None)


def graph_of(head: Head) -> Callable[[HeadWeights], ov.Model]:
    """What makes a head's graph of its weights."""
    module, name = head.kind.graph.split(".")
    make: Callable[[HeadWeights], ov.Model] = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    return make


def load_head(path: Path, head: Head, options: dict[str, Any]) -> OpenVINOPaged:
    """Load the weights of a head that has all that it reads from the file `path`. options: those of `OpenVINOPaged`."""
    from outrider.models.backends.heads.weights import HeadWeights
    from outrider.models.backends.openvino_heads import OpenVINOBlock
    from outrider.models.backends.openvino_paged import OpenVINOPaged
    from outrider.models.backends.paged_graph import gather_rows

    def build(core: ov.Core, path: Path) -> ov.Model:
        model = graph_of(head)(HeadWeights.read(core, path, head.main))
        if head.kind.has_cache:
            gather_rows(model)
        return model

    if head.kind.design == "block":
        has_states = f"{BLOCK_STATES}.weight" in HeadWeights.read(new_core(), path, None)
        return OpenVINOBlock(path, **options, build=build, features=(BLOCK_STATES,) if has_states else ())
    return OpenVINOPaged(path, **options, build=build, features=(NEXT_HIDDEN,))


def check_head(path: Path, head: Head) -> None:
    """Make a head's graph, without compiling it.

    Raises:
        BundleError: when weights are missing.
        RuntimeError: when weights do not fit each other, or the main model.
    """
    from outrider.models.backends.heads.weights import HeadWeights

    graph_of(head)(HeadWeights.read(new_core(), path, head.main))
