"""Make a drafter for a main model on the user's own machine: `outrider distill`.

from outrider_distill import Options, distill

distill(Options("my-model", Path("my-drafter"), kind="eagle3", num_tokens=500_000, hours=2), tell=print)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider_distill.plan import Options as Options
    from outrider_distill.run import distill as distill

_MODULE_OF = {"Options": "plan", "distill": "run"}
__all__ = [*_MODULE_OF]


def __getattr__(name: str) -> object:
    # Lazily (PEP 562), because most modules of this package need PyTorch.
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'outrider_distill' has no attribute '{name}'")
    return getattr(importlib.import_module(f"outrider_distill.{_MODULE_OF[name]}"), name)
