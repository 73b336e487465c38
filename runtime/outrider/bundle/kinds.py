"""The kinds of drafters: one row for each, which all parts that depend on the kind read.

A new kind of a known design is a row here, its graph, and the reader of its checkpoints in `outrider_export.heads`.
One that copies is a row, and its class in `outrider.drafters`.
"""

from dataclasses import dataclass
from typing import Literal

# "copy": copies from texts, without a model. "model": a draft model. "layers": some of the main model's layers. All
# others read the main model's hidden states. "module": a decoder layer that drafts token by token. "block": fills in a
# block of masks. "reader": layers that read the main model's keys and values.
Design = Literal["copy", "model", "layers", "module", "block", "reader"]


@dataclass(frozen=True, slots=True)
class DrafterKind:
    """What a kind of drafter is made of."""

    name: str
    design: Design
    graph: str = ""  # the module and function of `outrider.models.backends.heads` that make its graph of its weights
    keeps_own_states: bool = False  # a module reads its own hidden states besides the main model's, not in their place
    has_markov_head: bool = False  # a block's tokens are corrected by the token before each

    @property
    def uses_main_cache(self) -> bool:
        """Whether it has no keys and values of its own, and uses the main model's."""
        return self.design in ("layers", "reader")

    @property
    def has_cache(self) -> bool:
        """Whether it has keys and values of its own."""
        return self.design in ("model", "module", "block")

    @property
    def reads_states(self) -> bool:
        """Whether it reads hidden states of the main model."""
        return self.design in ("module", "block", "reader")


_ROWS = (
    DrafterKind("ngram", "copy"),
    DrafterKind("suffix", "copy"),
    DrafterKind("draft_model", "model"),
    DrafterKind("self", "layers"),
    DrafterKind("eagle3", "module", "recurrent.eagle3", keeps_own_states=True),
    DrafterKind("mtp", "module", "recurrent.mtp"),
    DrafterKind("dflash", "block", "block.dflash"),
    DrafterKind("dflash2", "block", "block.dflash", has_markov_head=True),
    DrafterKind("dspark", "block", "block.dflash", has_markov_head=True),
    DrafterKind("assistant", "reader", "assistant.assistant"),
)

KINDS = {row.name: row for row in _ROWS}
COPYING = tuple(row.name for row in _ROWS if row.design == "copy")  # drafters that every engine has
RESERVED_NAMES = ("main", "auto", "none", *COPYING)  # not allowed as names of a bundle's drafters
