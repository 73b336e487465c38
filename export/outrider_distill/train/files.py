"""Heads as folders: config.json and model.safetensors, with the names of tensors that others publish.

Embedding and output matrix of the main model are not stored: a head is of use beside its main model only.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from outrider.errors import ExportError, nearest
from outrider_distill.train.eagle3 import Eagle3
from outrider_distill.train.layers import Shape
from outrider_export.sources.source import configuring

_ARCHITECTURE = "LlamaForCausalLMEagle3"


def new_config(shape: Shape, *, draft_vocab_size: int) -> dict[str, Any]:
    """The config.json of a new head for a main model of this shape."""
    return {
        "architectures": [_ARCHITECTURE], "main_num_hidden_layers": shape.num_layers, "model_type": "llama",
        **shape.to_config(), "num_hidden_layers": 1, "draft_vocab_size": draft_vocab_size,
    }  # fmt: skip


def build(config: dict[str, Any], embedding: Any) -> Eagle3:
    """A head with fresh weights, as its config.json says. embedding: the main model's, [vocab, h]."""
    if (name := (config.get("architectures") or ["none"])[0]) != _ARCHITECTURE:
        raise ExportError(f"config.json has architectures [{name!r}]: {nearest(name, (_ARCHITECTURE,))}")
    for size, has in zip(("vocab_size", "hidden_size"), embedding.shape, strict=True):
        if config[size] != has:
            raise ExportError(
                f"The head is for {size} {config[size]}, the main model has {has}: give the main model that the head "
                "was trained for."
            )
    return Eagle3(Shape.of(config), embedding, config["draft_vocab_size"])


def save(head: Any, config: dict[str, Any], folder: Path, training: dict[str, Any]) -> None:
    """Write a head's folder, whole or not at all: weights in float16, integers as they are."""
    from safetensors.torch import save_file

    tensors = {
        name: (tensor.to(torch.float16) if tensor.is_floating_point() else tensor).contiguous().clone()
        for name, tensor in head.state_dict().items()
    }
    with written_whole(folder) as new:
        new.mkdir()
        save_file(tensors, new / "model.safetensors", metadata={"format": "pt"})
        (new / "config.json").write_text(json.dumps(config | {"dtype": "float16"}, indent=2) + "\n", encoding="utf-8")
        (new / "training.json").write_text(json.dumps(training, indent=2) + "\n", encoding="utf-8")


@contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """The path of a new folder, which takes the place of `folder` when the block ends without error."""
    new = folder.with_name(folder.name + ".new")
    shutil.rmtree(new, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    yield new
    shutil.rmtree(folder, ignore_errors=True)
    new.rename(folder)


def load(folder: Path, main_embedding: Any) -> Any:
    """A head as a torch module, in float32. main_embedding: the main model's, [vocab, h].

    The module's `forward` is documented at its class; the names of its tensors are those of the file.
    """
    from safetensors.torch import load_file

    for name in ("config.json", "model.safetensors"):
        if not (folder / name).is_file():
            raise ExportError(f"{folder / name} is missing: give the folder of a trained head.")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    only = "Only heads in the layout that this package writes can be read."
    with configuring(folder / "config.json"):
        head = build(config, main_embedding.float())
    tensors = load_file(folder / "model.safetensors")
    has, needed = ({name: each.shape for name, each in all_of.items()} for all_of in (tensors, head.state_dict()))
    if wrong := sorted(name for name in has.keys() | needed.keys() if has.get(name) != needed.get(name)):
        raise ExportError(
            f"{folder / 'model.safetensors'} does not fit its config.json: {', '.join(wrong[:3])} are missing, unknown "
            f"or of another shape. {only}"
        )
    head.load_state_dict(tensors)
    return head.eval()
