"""A tiny main model of six layers with a tokenizer, as a bundle and in PyTorch: its answers are training data."""

from pathlib import Path
from typing import Any

import numpy as np

from outrider.bundle import Bundle
from tiny import SHAPE, gguf_name_of, write_checkpoint, write_gguf

NUM_LAYERS, HIDDEN_SIZE = 6, SHAPE["hidden_size"]
_THINGS = ("fox", "dog", "pivot", "item", "deich", "quick sort", "boxer", "river", "lamp", "train")
_ASKED = ("Describe the", "Sort every", "Who jagt the", "Return one", "Where is my", "Count each", "Why has the")
PROMPTS = [f"{asked} {thing} number {i % 97}?" for i, (asked, thing) in enumerate(
    (asked, thing) for thing in _THINGS for asked in _ASKED for _ in range(3)
)]  # fmt: skip


def make_bundle(root: Path) -> tuple[Bundle, Any]:
    """The bundle, which is calculated in f32 as all small models are, and the same model in PyTorch."""
    from safetensors.numpy import load_file, save_file

    from outrider_export import export_bundle

    write_checkpoint(root / "checkpoint", num_layers=NUM_LAYERS)
    # With embeddings that outweigh the layers, and an output matrix of its own, so that texts have many tokens.
    file = root / "checkpoint" / "model.safetensors"
    matrix = np.random.default_rng(1).normal(0, 0.1, (SHAPE["vocab_size"], HIDDEN_SIZE)).astype(np.float32)
    weights = load_file(file) | {"lm_head.weight": matrix}
    weights["model.embed_tokens.weight"] *= 5
    save_file(weights, file)
    write_gguf(root / "answering.gguf", root / "checkpoint", "Q8_0", "qwen2", {})
    bundle = export_bundle(root / "answering.gguf", output=root / "bundle", weights="fp32")
    return bundle, torch_model_of(root / "answering.gguf", num_hidden_layers=NUM_LAYERS, tie_word_embeddings=False)


def torch_model_of(file: Path, **shape: Any) -> Any:
    """The model of a GGUF file that `write_gguf` has written, in PyTorch. shape: in place of `SHAPE`'s."""
    import gguf
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tensors = {each.name: gguf.dequantize(each.data, each.tensor_type) for each in gguf.GGUFReader(file).tensors}
    tensors.setdefault("output.weight", tensors["token_embd.weight"])
    model = Qwen2ForCausalLM(Qwen2Config(**SHAPE | shape)).eval()
    model.load_state_dict({name: torch.tensor(tensors[gguf_name_of(name) or ""]) for name in model.state_dict()})
    return model
