"""The MTP module that a main model's own files have, which an export takes along as its drafter.

    if (own := find_own(plan, progress)) is not None:
        head = own.read(plan.geometry)

Checkpoints of Qwen3-Next, Qwen3.5 and their successors have it as `mtp.*`; GGUF files as the layer after the model's
last one, with `nextn` in the names of what other layers do not have.

Source: llama.cpp, conversion/qwen.py and gguf-py/gguf/constants.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.bundle.manifest import Geometry
from outrider_export.describe.plan import Plan
from outrider_export.heads import qwen
from outrider_export.heads.formats import HeadCheckpoint, make_head
from outrider_export.progress import Progress
from outrider_export.sources.gguf_file import GGUFHeader
from outrider_export.sources.gguf_names import from_gguf, to_gguf
from outrider_export.sources.safetensors import tensors_of

NAME = "mtp"  # of the drafter, and its kind
_PREFIX = re.compile(r"^(?:model\.|language_model\.)*mtp\.")
_LAYER = re.compile(r"^layers\.(\d+)\.")
_GGUF = {"qwen3next": "qwen3_next", "qwen35": "qwen3_5", "qwen35moe": "qwen3_5_moe"}  # by `general.architecture`
# Whose modules have another form, by the model's `model_type`.
_OTHERS = ("cohere2_moe", "exaone4", "mellum", "nemotron_h")
_KEYS = ("hidden_size", "num_attention_heads", "head_dim", "max_position_embeddings")
_DENSE_KEYS = ("intermediate_size",)
_MIXED_KEYS = (
    "moe_intermediate_size", "num_experts", "num_experts_per_tok", "shared_expert_intermediate_size"
)  # fmt: skip


@dataclass(frozen=True)
class OwnModule:
    """A module in a main model's files. names: its tensors there, by their names in a checkpoint without "mtp."."""

    path: Path
    header: GGUFHeader | None
    config: Mapping[str, Any]
    names: Mapping[str, str]

    def read(self, main: Geometry) -> HeadCheckpoint:
        """Read its weights.

        Raises:
            ExportError: when they are damaged, or do not fit the configuration.
        """
        tensors = self._of_checkpoint() if self.header is None else self._of_gguf(self.header)
        config = dict(self.config) if self.header is None else _config_of(self.header, main)
        return make_head(NAME, config, tensors, main, self.path)

    def _of_checkpoint(self) -> dict[str, NDArray[Any]]:
        stored = tensors_of(self.path)
        return {ours: stored[theirs].numbers() for ours, theirs in self.names.items()}

    def _of_gguf(self, header: GGUFHeader) -> dict[str, NDArray[Any]]:
        """As in a checkpoint, where the weights of norms are less by 1."""
        from outrider_export.sources.gguf_values import values_of

        made = {}
        for ours, theirs in self.names.items():
            values = np.array(values_of(header, theirs))
            made[ours] = values - np.float32(1) if qwen.is_norm(ours) else values
        return made


def find_own(plan: Plan, progress: Progress) -> OwnModule | None:
    """The module in a main model's files; None if they have none, or one that cannot be a drafter, which is noted."""
    if plan.header is not None:
        names = _gguf_names(plan.header)
    else:
        names = {_PREFIX.sub("", name): name for name in tensors_of(plan.path) if _PREFIX.match(name)}
    if not names:
        return None
    if plan.geometry.architecture in _OTHERS:
        progress.note(
            f"{plan.source.id} has an MTP module of the architecture {plan.geometry.architecture!r}, which "
            "cannot be its drafter here. It is left out."
        )
        return None
    layers = {found[1] for name in names if (found := _LAYER.match(name))}
    if len(layers) > 1:
        progress.note(
            f"{plan.source.id} has an MTP module with {len(layers)} layers, which cannot be its drafter here. It is "
            "left out."
        )
        return None
    return OwnModule(plan.path, plan.header, plan.config, names)


def _gguf_names(header: GGUFHeader) -> dict[str, str]:
    """As `OwnModule.names`; empty if the file has none of a kind that is known."""
    if header.architecture not in _GGUF or not header.num_modules:
        return {}
    names, top, parts = {}, from_gguf("mtp"), from_gguf("layer", "mtp_layer")
    for at in range(header.num_modules):
        known = top | {theirs: f"layers.{at}.{ours}" for theirs, ours in parts.items()}
        prefix = f"blk.{header.num_layers + at}."
        for name in header.tensors:
            module, _, kind = name.removeprefix(prefix).rpartition(".")
            if name.startswith(prefix) and module in known:
                names[f"{known[module]}.{kind}"] = name
    if names and "norm.weight" not in names and "output_norm.weight" in header.tensors:
        names["norm.weight"] = "output_norm.weight"
    return names


def _config_of(header: GGUFHeader, main: Geometry) -> dict[str, Any]:
    """What config.json says of a module."""
    is_dense = header.value(".expert_count") is None
    theirs, keys = to_gguf("keys"), (*_KEYS, *(_DENSE_KEYS if is_dense else _MIXED_KEYS))
    config: dict[str, Any] = {key: header.integer(f".{theirs[key]}", least=1) for key in keys}
    return config | {
        "num_key_value_heads": main.num_kv_heads,
        "model_type": _GGUF[header.architecture],
        "rms_norm_eps": header.real(".attention.layer_norm_rms_epsilon"),
        "rope_theta": header.real(".rope.freq_base"),
        "partial_rotary_factor": header.integer(".rope.dimension_count", least=1) / config["head_dim"],
    }
