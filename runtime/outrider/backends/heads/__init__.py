"""Drafters that read the main model's hidden states: their graphs, built from their weights at load.

load_head(path, Head("eagle3", main_path), options)
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    import openvino as ov

    from outrider.backends.openvino_paged import OpenVINOPaged
    from outrider.bundle.manifest import DrafterEntry


@dataclass(frozen=True, slots=True)
class Head:
    """A drafter that is no decoder. main: the main model's IR, whose embedding it shares; None if it is not in IR."""

    kind: str
    main: Path | None
    num_places: int = 1

    @classmethod
    def of(cls, entry: DrafterEntry, main: Path) -> Head:
        """The head that a bundle describes. main: the main model's file."""
        return cls(entry.kind, main if main.suffix == ".xml" else None, entry.num_places or 1)


def load_head(path: Path, head: Head, options: dict[str, Any]) -> OpenVINOPaged:
    """Load a head's weights from the file `path`. options: those of `OpenVINOPaged`."""
    from outrider.backends.heads import block, places, recurrent
    from outrider.backends.heads.weights import Weights
    from outrider.backends.openvino_block import OpenVINOBlock
    from outrider.backends.openvino_paged import OpenVINOPaged
    from outrider.backends.openvino_places import OpenVINOPlaces
    from outrider.backends.paged_graph import gather_rows

    def build(core: ov.Core, path: Path, make: Any, gathers: bool = True) -> ov.Model:
        model: ov.Model = make(Weights.read(core, path, head.main))
        if gathers:
            gather_rows(model)
        return model

    if head.kind in (makers := {"eagle": recurrent.eagle, "eagle3": recurrent.eagle3, "mtp": recurrent.mtp}):
        made = functools.partial(build, make=makers[head.kind])
        return OpenVINOPaged(path, **options, build=made, features=(recurrent.HIDDEN_OUT,))
    if head.kind == "dflash":
        return OpenVINOBlock(path, **options, build=functools.partial(build, make=block.dflash))
    if head.kind == "hydra":
        each = [functools.partial(places.hydra, place=i) for i in range(head.num_places)]
        first, *others = [functools.partial(build, make=make, gathers=False) for make in each]
        return OpenVINOPlaces(path, **options, build=first, others=others)
    make = {"medusa": places.medusa, "blockwise": places.blockwise}[head.kind]
    return OpenVINOPlaces(path, **options, build=functools.partial(build, make=make, gathers=False))
