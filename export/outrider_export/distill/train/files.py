"""Heads as folders: config.json and model.safetensors, with the names of tensors that others publish.

Embedding and output matrix of the main model are not stored: a head is of use beside its main model only.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from outrider.errors import ExportError, nearest
from outrider_export.diet.diet import TRAINED_NAME, read_trained
from outrider_export.distill.train.dflash import DFlash
from outrider_export.distill.train.dspark import DSpark
from outrider_export.distill.train.heads import Blockwise, Hydra, Medusa
from outrider_export.distill.train.layers import Shape
from outrider_export.distill.train.recurrent import Eagle, Eagle3, Mtp
from outrider_export.sources.source import configuring

KINDS = ("eagle3", "eagle", "mtp", "medusa", "hydra", "blockwise", "dflash", "dspark")
NUM_PLACES = 4  # heads of Medusa and its like
_ARCHITECTURES = {
    "eagle3": "LlamaForCausalLMEagle3", "eagle": "LlamaForCausalLMEagle", "mtp": "LlamaMTP", "medusa": "MedusaHeads",
    "hydra": "HydraHeads", "blockwise": "BlockwiseHeads", "dflash": "DFlashDraftModel", "dspark": "Qwen3DSparkModel",
}  # fmt: skip
# Heads without attention: the class, and the name of their number in config.json.
_PLACES: dict[str, tuple[Any, str]] = {
    "medusa": (Medusa, "medusa_num_heads"), "hydra": (Hydra, "hydra_num_heads"), "blockwise": (Blockwise, "num_heads"),
}  # fmt: skip


def new_config(kind: str, shape: Shape, *, draft_vocab_size: int, mask_token_id: int | None = None) -> dict[str, Any]:
    """The config.json of a new head for a main model of this shape."""
    if kind not in KINDS:
        raise ExportError(f"Unknown kind of head {kind!r}: {nearest(kind, KINDS)}")
    config: dict[str, Any] = {"architectures": [_ARCHITECTURES[kind]], "main_num_hidden_layers": shape.num_layers}
    layer = {"model_type": "llama", **shape.to_config(), "num_hidden_layers": 1}
    sizes = {"hidden_size": shape.hidden_size, "vocab_size": shape.vocab_size}
    if kind == "eagle3":
        return config | layer | {"draft_vocab_size": draft_vocab_size}
    if kind in ("eagle", "mtp"):
        return config | layer
    if kind in _PLACES:
        own = {f"{kind}_num_layers": 1, "draft_vocab_size": draft_vocab_size} if kind in ("medusa", "hydra") else {}
        return config | {_PLACES[kind][1]: NUM_PLACES, **own, **sizes}
    if mask_token_id is None:
        raise ExportError(f"A head of kind {kind} needs mask_token_id: a token that texts do not have.")
    config |= layer | {"model_type": "qwen3", "num_hidden_layers": 2, "attention_bias": False}
    block = {"mask_token_id": mask_token_id, "target_layer_ids": [1, shape.num_layers // 2 - 1, shape.num_layers - 4]}
    if kind == "dflash":
        return config | {"block_size": 8, "dflash_config": block}
    config |= {"markov_head_type": "vanilla", "enable_confidence_head": True, "confidence_head_with_markov": True}
    rank = min(max(shape.hidden_size // 4 // 64, 1), 4) * 64
    return config | block | {"block_size": 5, "markov_rank": rank, "draft_vocab_size": draft_vocab_size}


def build(config: dict[str, Any], embedding: Any, lm_head: Any) -> Any:
    """A head with fresh weights, as its config.json says. embedding, lm_head: the main model's, [vocab, h]."""
    name = (config.get("architectures") or ["MedusaHeads" if "medusa_num_heads" in config else "none"])[0]
    kinds = {architecture: kind for kind, architecture in _ARCHITECTURES.items()}
    if name not in kinds:
        raise ExportError(f"config.json has architectures [{name!r}]: {nearest(name, kinds)}")
    kind = kinds[name]
    for size, has in zip(("vocab_size", "hidden_size"), embedding.shape, strict=True):
        if config[size] != has:
            raise ExportError(
                f"The head is for {size} {config[size]}, the main model has {has}: give the main model that the head "
                "was trained for."
            )
    if kind in _PLACES:
        made, count = _PLACES[kind]
        proposed = [config.get("draft_vocab_size") or config["vocab_size"]] if kind in ("medusa", "hydra") else []
        return made(_bare_shape(config), embedding, lm_head, config[count], *proposed)
    shape = Shape.of(config)
    if kind == "eagle3":
        return Eagle3(shape, embedding, lm_head, config["draft_vocab_size"])
    if kind == "dflash":
        mask_token_id = config["dflash_config"]["mask_token_id"]
        sizes = {"num_layers": config["num_hidden_layers"], "block_size": config["block_size"]}
        return DFlash(shape, embedding, lm_head, mask_token_id=mask_token_id, **sizes)
    if kind == "dspark":
        sizes = {name: config[name] for name in ("block_size", "mask_token_id", "draft_vocab_size")}
        layers, rank = config["num_hidden_layers"], config["markov_rank"]
        return DSpark(shape, embedding, lm_head, num_layers=layers, rank=rank, **sizes)
    return (Eagle if kind == "eagle" else Mtp)(shape, embedding, lm_head)


def save(head: Any, config: dict[str, Any], folder: Path, training: dict[str, Any]) -> None:
    """Write a head's folder, whole or not at all: weights in float16, integers as they are."""
    from safetensors.torch import save_file

    new = folder.with_name(folder.name + ".new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    tensors = {
        name: (tensor.to(torch.float16) if tensor.is_floating_point() else tensor).contiguous().clone()
        for name, tensor in (head.published() if isinstance(head, DSpark) else head.state_dict()).items()
    }
    if isinstance(head, DSpark):
        (new / TRAINED_NAME).write_text(json.dumps({"token_ids": head.token_ids.tolist()}), encoding="utf-8")
    save_file(tensors, new / "model.safetensors", metadata={"format": "pt"})
    (new / "config.json").write_text(json.dumps(config | {"dtype": "float16"}, indent=2) + "\n", encoding="utf-8")
    (new / "training.json").write_text(json.dumps(training, indent=2) + "\n", encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    new.rename(folder)


def load(folder: Path, main_embedding: Any, main_lm_head: Any) -> Any:
    """A head as a torch module, in float32. main_embedding, main_lm_head: the main model's, [vocab, h].

    The module's `forward` is documented at its class; the names of its tensors are those of the file.
    """
    from safetensors.torch import load_file

    for name in ("config.json", "model.safetensors"):
        if not (folder / name).is_file():
            raise ExportError(f"{folder / name} is missing: give the folder of a trained head.")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    only = "Only heads in the layout that this package writes can be read."
    with configuring(folder / "config.json"):
        head = build(config, main_embedding.float(), main_lm_head.float())
    tensors = load_file(folder / "model.safetensors")
    if isinstance(head, DSpark):
        token_ids = read_trained(folder, head.vocab_size)
        if token_ids is None:
            raise ExportError(f"{folder / TRAINED_NAME} is missing. {only}")
        tensors = head.restore(tensors, torch.from_numpy(token_ids).long())
    has, needed = ({name: each.shape for name, each in all_of.items()} for all_of in (tensors, head.state_dict()))
    if wrong := sorted(name for name in has.keys() | needed.keys() if has.get(name) != needed.get(name)):
        raise ExportError(
            f"{folder / 'model.safetensors'} does not fit its config.json: {', '.join(wrong[:3])} are missing, unknown "
            f"or of another shape. {only}"
        )
    head.load_state_dict(tensors)
    return head.eval()


def _bare_shape(config: dict[str, Any]) -> Shape:
    """The shape for heads without attention, whose config.json says sizes only."""
    sizes = {"hidden_size": config["hidden_size"], "vocab_size": config["vocab_size"]}
    return Shape(**sizes, intermediate_size=0, num_heads=0, num_kv_heads=0, head_size=0, num_layers=0,
                 context_length=0, norm_epsilon=0.0, rope_theta=0.0)  # fmt: skip
