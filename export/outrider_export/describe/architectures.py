"""The architectures that are tried, and what Transformers' configurations say of their layers.

Each is exported from random weights and compared with Transformers in slow tests.

`docs/models.md` is made of this list. Others are exported, too, if optimum-intel knows them, and are compared with
Transformers then; see `outrider_export.with_torch.comparison`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outrider_export.direct.archs import TABLES

LAST_TRANSFORMERS = "5.5.99"  # the newest that optimum-intel 2.2 installs with, and that this list was tried with


@dataclass(frozen=True)
class Architecture:
    """An architecture by its `model_type` in config.json.

    models: some that have it. attention: "full", "sliding" in all layers, or "mixed". states: what layers without
    attention have; "" if there are none. experts: whether layers are mixtures of experts. onnx: whether `--format onnx`
    is tried, too. features: whether its hidden states are found, so that heads can read them. real: published
    checkpoints that were run, too. like: the architecture whose export optimum-intel is to use, which has none for this
    one, of those that PyTorch converts.
    """

    name: str
    models: str
    attention: str = "full"
    states: str = ""
    experts: bool = False
    onnx: bool = False
    features: bool = True
    real: str = ""
    like: str = ""


ARCHITECTURES: dict[str, Architecture] = {name: Architecture(name, **table["tried"]) for name, table in TABLES.items()}


def describe_layers(config: Any) -> dict[str, Any]:
    """The fields of `Geometry` that a loaded model's configuration tells: those of its experts."""
    experts = ("num_experts", "num_local_experts", "n_routed_experts")
    num_experts = next((getattr(config, name) for name in experts if getattr(config, name, None)), 0)
    return {
        "num_experts": num_experts,
        "num_active_experts": (getattr(config, "num_experts_per_tok", None) or 0) if num_experts else 0,
    }


def settle_positions(config: Any) -> dict[str, int]:
    """Have a loaded model rotate by one set of frequencies; the fields of `Geometry` that this changes.

    LongRoPE (Phi 3 and later) has two, and takes the second as soon as any position of a call is above a limit. Then a
    draft that passes the limit would change the rows before it, and so would another sequence in the same call. The
    first set is taken for all, and the context ends at the limit: there, Transformers' own text is the same.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return {}
    for name in ("factor", "mscale"):
        if f"short_{name}" in rope:
            rope[f"long_{name}"] = rope[f"short_{name}"]
    return {"context_length": int(rope["original_max_position_embeddings"])}
