"""Train drafter heads for a frozen main model, in PyTorch, and write them in the formats that others publish.

    head, config = start_head("eagle3", teacher, data)
    save(head, config, Path("my-eagle3"), fit(head, data, num_steps=4000))
    head = load(Path("my-eagle3"), main_embedding)     # a torch module

`outrider distill` makes the data and does all of this; see `outrider_distill`.

The kind of head is `eagle3`; `outrider_distill.draft` has draft models.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider_distill.train.files import KINDS, load, save
    from outrider_distill.train.fit import evaluate, fit, start_head
    from outrider_distill.train.layers import Teacher

__all__ = ["KINDS", "Teacher", "evaluate", "fit", "load", "save", "start_head"]

_MODULE_OF = {
    "KINDS": "files", "load": "files", "save": "files", "evaluate": "fit", "fit": "fit", "start_head": "fit",
    "Teacher": "layers",
}  # fmt: skip


def __getattr__(name: str) -> object:
    # Lazily (PEP 562): torch takes seconds to import.
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'outrider_distill.train' has no attribute '{name}'")
    return getattr(importlib.import_module(f"outrider_distill.train.{_MODULE_OF[name]}"), name)
