"""Train drafter heads for a frozen main model, in PyTorch, and write them in the formats that others publish.

    python -m outrider_export.train data main.gguf --bundle my-bundle --data data --questions questions.txt
    python -m outrider_export.train eagle3 main.gguf --data data -o my-eagle3 --minutes 60

    head = load(Path("my-eagle3"), main_embedding, main_lm_head)     # a torch module

Kinds: eagle3, eagle and mtp (`recurrent`), medusa, hydra and blockwise (`heads`), `dflash`, and `masks`. The torch
modules are also the reference that other implementations are compared with.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider_export.train.data import Data, add_conversations, write_features
    from outrider_export.train.files import KINDS, load, save
    from outrider_export.train.fit import evaluate, fit, start_head
    from outrider_export.train.layers import Teacher

__all__ = [
    "KINDS", "Data", "Teacher", "add_conversations", "evaluate", "fit", "load", "save", "start_head", "write_features",
]  # fmt: skip

_MODULE_OF = {
    "Data": "data", "add_conversations": "data", "write_features": "data", "KINDS": "files", "load": "files",
    "save": "files", "evaluate": "fit", "fit": "fit", "start_head": "fit", "Teacher": "layers",
}  # fmt: skip


def __getattr__(name: str) -> object:
    # Lazily (PEP 562): torch takes seconds to import.
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'outrider_export.train' has no attribute '{name}'")
    return getattr(importlib.import_module(f"outrider_export.train.{_MODULE_OF[name]}"), name)
