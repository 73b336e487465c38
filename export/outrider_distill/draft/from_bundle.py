"""A checkpoint of a bundle's own draft model, whose weights are unpacked, so that it can be cut and trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch

from outrider.bundle import Bundle
from outrider.bundle.manifest import DrafterEntry
from outrider_distill.main_model import read_layers, read_teacher
from outrider_distill.train.files import written_whole

# The architectures whose layers have nothing but what `read_layers` reads.
_PLAIN = ("llama", "qwen2", "mistral")
_MOST_DIFFERENT = 0.1  # relative: an output matrix that is as close to the embedding as rounding leaves it


def draft_model_of(bundle: Bundle, name: str) -> DrafterEntry | None:
    """A draft model of the main model's vocabulary that can be written as a checkpoint; none of this name."""
    models = (each for each in bundle.manifest.drafters if each.kind == "draft_model" and each.vocabulary == "same")
    return next((each for each in models if each.name != name and each.model.geometry.architecture in _PLAIN), None)


def write_checkpoint(bundle: Bundle, drafter: DrafterEntry, folder: Path) -> None:
    """Write it, whole or not at all.

    Raises:
        ExportError: when its graph has no known form.
    """
    from safetensors.torch import save_file

    teacher = read_teacher(bundle, drafter.model)
    tensors = {"model.embed_tokens.weight": teacher.embedding, "model.norm.weight": teacher.norm}
    for index, layer in enumerate(read_layers(bundle, drafter.model)):
        tensors |= {f"model.layers.{index}.{name}": each.half() for name, each in layer.items()}
    head, rows = teacher.lm_head, teacher.embedding
    token_ids = torch.arange(len(head))
    if drafter.num_proposed_tokens is not None:
        token_ids = torch.from_numpy(bundle.read_proposed(drafter).astype("int64"))
    is_tied = bool((rows[token_ids] - head).norm() < _MOST_DIFFERENT * head.norm())
    if not is_tied:
        tensors["lm_head.weight"] = torch.zeros_like(rows).index_copy(0, token_ids, head)
    family = "Qwen2" if any(name.endswith("bias") for name in tensors) else "Llama"
    config = teacher.shape.to_config() | {
        "architectures": [f"{family}ForCausalLM"], "model_type": family.lower(), "tie_word_embeddings": is_tied,
        "head_dim": teacher.shape.head_size, "num_hidden_layers": teacher.shape.num_layers, "dtype": "float16",
        "eos_token_id": list(bundle.manifest.tokenizer.eos_token_ids),
    }  # fmt: skip
    with written_whole(folder) as new:
        shutil.copytree(bundle.tokenizer_path, new)
        save_file({name: each.half().contiguous() for name, each in tensors.items()}, new / "model.safetensors")
        (new / "config.json").write_text(json.dumps(config), encoding="utf-8")
