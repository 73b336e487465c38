"""Random LoRA adapters in PEFT's format, written without PEFT or torch."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def widths_of(config: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """In and out of each linear layer of a Llama or Qwen2, by its name, from config.json's fields."""
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    narrow = hidden * config["num_key_value_heads"] // config["num_attention_heads"]
    return {
        "q_proj": (hidden, hidden), "k_proj": (hidden, narrow), "v_proj": (hidden, narrow), "o_proj": (hidden, hidden),
        "gate_proj": (hidden, wide), "up_proj": (hidden, wide), "down_proj": (wide, hidden),
    }  # fmt: skip


def write_adapter(
    folder: Path,
    config: Mapping[str, int],
    *,
    seed: int = 0,
    rank: int = 4,
    targets: Sequence[str] = ALL,
    layers: Sequence[int] | None = None,
    size: float = 0.15,
    ranks: Mapping[str, int] | None = None,
    **fields: Any,
) -> Path:
    """A folder as PEFT writes it. ranks: rank_pattern. size: of the random numbers. fields: of adapter_config.json."""
    from safetensors.numpy import save_file

    rng = np.random.default_rng(seed)
    tensors = {}
    for i in range(config["num_hidden_layers"]) if layers is None else layers:
        for name in targets:
            num_in, num_out = widths_of(config)[name]
            r = (ranks or {}).get(name, rank)
            part = "self_attn" if name in ALL[:4] else "mlp"
            place = f"base_model.model.model.layers.{i}.{part}.{name}"
            tensors[f"{place}.lora_A.weight"] = rng.normal(0, size, (r, num_in)).astype(np.float32)
            tensors[f"{place}.lora_B.weight"] = rng.normal(0, size, (num_out, r)).astype(np.float32)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    described = {
        "peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": [*targets], "bias": "none",
        "base_model_name_or_path": "org/tiny", "rank_pattern": dict(ranks or {}), "alpha_pattern": {},
        "layers_to_transform": None if layers is None else [*layers], "modules_to_save": None, "use_dora": False,
        "use_rslora": False, "fan_in_fan_out": False, "init_lora_weights": True, "lora_dropout": 0.05,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(described | fields), encoding="utf-8")
    return folder


def changes_of(folder: Path) -> dict[str, np.ndarray]:
    """What a plain adapter adds to each weight, float32 [out, in], by the names of the checkpoint; by hand."""
    from safetensors.numpy import load_file

    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    tensors = load_file(folder / "adapter_model.safetensors")
    made = {}
    for name, down in tensors.items():
        if ".lora_A." not in name:
            continue
        place = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        alpha = config["alpha_pattern"].get(place.rsplit(".", 1)[-1], config["lora_alpha"])
        scale = alpha / (len(down) ** 0.5 if config["use_rslora"] else len(down))
        made[f"{place}.weight"] = scale * tensors[name.replace("lora_A", "lora_B")] @ down
    return made
