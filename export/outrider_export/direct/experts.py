"""Layers whose feed-forward part is a mixture of experts: of each token, a router chooses some of them.

experts = experts_of(form.experts, config, 3)  # of layer 3; None if its feed-forward part is dense
experts.shapes                                  # of all experts' matrices, one below the other
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.bundle.fields import MOST_WIDTH
from outrider.models.backends.mixture import DOWN, GATE, GATE_UP, STEEPNESS, UP, Experts
from outrider_export.direct.arch import ArchExperts

__all__ = [
    "BESIDE", "CHOICE", "DOWN", "EXPERT_SCALES", "GATE", "GATE_UP", "ROUTER", "ROUTER_SCALE", "SHARED_GATE",
    "STEEPNESS", "UP", "Experts", "experts_of",
]  # fmt: skip

ROUTER, CHOICE = "mlp.router", "mlp.router_choice"  # of a layer; the second has a bias that only chooses
ROUTER_SCALE, EXPERT_SCALES = "mlp.router_scale", "mlp.expert_scales"  # of what it reads, and of experts' weights
# Norms of experts beside a dense part: before and after them, and after that part.
BESIDE = ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_2", "post_feedforward_layernorm_1")
SHARED_GATE = "mlp.shared_gate"  # of a shared expert: one row
_MOST_EXPERTS = 4096


def experts_of(arch: ArchExperts, config: Mapping[str, Any], i: int, *, gated: bool = True) -> Experts | None:
    """The mixture of layer i by a config.json; None if its feed-forward part is dense. gated: as in `Experts`.

    Raises:
        KeyError, ValueError: when it says nothing, or too much.
    """
    router, grouped = arch.router, arch.grouped
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
    if router == "input" and active != 1:
        raise ValueError(f"num_experts_per_tok={active}, and what an expert reads can be scaled for one only")
    is_sigmoid = router == "sigmoid"
    groups, active_groups = _groups_of(config, is_sigmoid) if grouped else (1, 1)
    if count % groups or not 0 < active_groups <= groups or active > count // groups * active_groups:
        raise ValueError(f"{active} of {count} experts in {active_groups} of {groups} groups")
    return Experts(
        hidden, count, active, size, router,
        normalised=bool(config.get("norm_topk_prob", False)),
        eps=(1e-20 if grouped else 1e-6) if is_sigmoid else 0.0,
        scale=float(config.get("routed_scaling_factor", 1.0)) if is_sigmoid or grouped else 1.0,
        shared=arch.shared,
        clamped=arch.clamped,
        groups=groups,
        active_groups=active_groups,
        gated=gated,
    )  # fmt: skip


def _groups_of(config: Mapping[str, Any], is_sigmoid: bool) -> tuple[int, int]:
    """How many groups the experts are in, and how many of them a token chooses from."""
    method = config.get("topk_method", "noaux_tc" if is_sigmoid else "greedy")
    if method not in ("greedy", "noaux_tc" if is_sigmoid else "group_limited_greedy"):
        raise ValueError(f"topk_method={method!r}")
    scoring = config.get("scoring_func", "sigmoid" if is_sigmoid else "softmax")
    if is_sigmoid != (scoring in ("sigmoid", "noaux_tc")):
        raise ValueError(f"scoring_func={scoring!r}")
    if method == "greedy":
        return 1, 1
    return int(config.get("n_group", 1)), int(config.get("topk_group", 1))
