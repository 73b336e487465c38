"""What a whole GGUF file has beside a main model's tensors: its tokenizer, and an MTP module as llama.cpp writes it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from outrider_export.sources.gguf_names import to_gguf
from tiny import add_key, tokenizer_keys


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path, pre: str, **changes: Any) -> None:
    """The tokenizer of a checkpoint. changes: of keys, by their last part."""
    size = json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    keys = tokenizer_keys(json.loads((folder / "tokenizer.json").read_text(encoding="utf-8")), pre, size)
    for key, value in keys.items():
        add_key(writer, key, changes.get(key.rpartition(".")[2], value))


def add_module(writer: gguf.GGUFWriter, tensors: Mapping[str, Any], at: int) -> None:
    """The MTP module of a checkpoint as block `at`, of which norms have their whole weights."""
    writer.add_uint32(f"{writer.arch}.nextn_predict_layers", 1)
    stored = to_gguf("mtp") | {f"layers.0.{ours}": theirs for ours, theirs in to_gguf("layer", "mtp_layer").items()}
    for name, values in tensors.items():
        module = name.removeprefix("mtp.").removesuffix(".weight")
        parts = {module: values + np.float32(1) if "norm" in module else values}
        if module.endswith("gate_up_proj"):
            halves = np.split(values, 2, axis=1)
            parts = {module.replace("gate_up", part): half for part, half in zip(("gate", "up"), halves, strict=True)}
        elif module.endswith("shared_expert_gate"):
            parts = {module: values[0]}
        for part, each in parts.items():
            writer.add_tensor(f"blk.{at}.{stored[part]}.weight", np.ascontiguousarray(each))
