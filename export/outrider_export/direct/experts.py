"""Layers whose feed-forward part is a mixture of experts: of each token, a router chooses some of them.

experts = experts_of("softmax", "", config, 3)     # of layer 3; None if its feed-forward part is dense
experts.shapes                                  # of all experts' matrices, one below the other
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider.bundle.manifest import MOST_WIDTH

ROUTER, CHOICE = "mlp.router", "mlp.router_choice"  # of a layer; the second has a bias that only chooses
GATE, UP, DOWN = "mlp.experts.gate_proj", "mlp.experts.up_proj", "mlp.experts.down_proj"
SHARED_GATE = "mlp.shared_gate"  # of a shared expert: one row
GATE_UP = "mlp.experts.gate_up_proj"  # both in one tensor, of each expert gate first
_MOST_EXPERTS = 4096


@dataclass(frozen=True)
class Experts:
    """A mixture of experts.

    active: experts of a token. size: numbers between an expert's products. router: how scores become weights:
    "softmax" of all experts and then the best ones, "top_softmax" of the best ones alone, or "sigmoid" of each. shared:
    what a dense part, the shared expert, gives beside them: "" if there is none, "added", or "gated" by a sigmoid.
    normalised: whether the weights of a token are divided by their sum, to which `eps` is added. scale: of weights.
    """

    hidden: int
    count: int
    active: int
    size: int
    router: str
    normalised: bool = False
    eps: float = 0.0
    scale: float = 1.0
    shared: str = ""

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Of the experts' matrices, by their names in a layer: those of all experts, one below the other."""
        wide, narrow = (self.count * self.size, self.hidden), (self.count * self.hidden, self.size)
        return {GATE: wide, UP: wide, DOWN: narrow}


def experts_of(router: str, shared: str, config: Mapping[str, Any], i: int) -> Experts | None:
    """The mixture of layer i by a config.json; None if its feed-forward part is dense. router: "" for dense models.

    Raises:
        KeyError, ValueError: when it says nothing, or too much.
    """
    if (
        not router
        or config.get("num_experts") == 0
        or i < int(config.get("num_dense_layers", 0))
        or i in config.get("mlp_only_layers", ())
    ):
        return None
    if (i + 1) % int(config.get("decoder_sparse_step", 1)):
        return None
    hidden, count, active, size = (
        int(config[key]) for key in ("hidden_size", "num_experts", "num_experts_per_tok", "moe_intermediate_size")
    )
    if not (0 < active <= count <= _MOST_EXPERTS and 0 < size <= MOST_WIDTH):
        raise ValueError(f"{active} of {count} experts with {size} numbers")
    is_sigmoid = router == "sigmoid"
    return Experts(
        hidden, count, active, size, router,
        normalised=bool(config.get("norm_topk_prob", False)),
        eps=1e-6 if is_sigmoid else 0.0,
        scale=float(config.get("routed_scaling_factor", 1.0)) if is_sigmoid else 1.0,
        shared=shared,
    )  # fmt: skip
