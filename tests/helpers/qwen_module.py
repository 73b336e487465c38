"""Qwen3.5 with an MTP module, tiny and random: its checkpoint, and what Transformers' layers compute of it."""

from pathlib import Path
from typing import Any

import torch
from safetensors.numpy import load_file, save_file
from transformers import Qwen3_5MoeTextConfig, Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5DecoderLayer,
    Qwen3_5ForCausalLM,
    Qwen3_5RMSNorm,
    Qwen3_5TextRotaryEmbedding,
)
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeDecoderLayer

from heads import config_of, tensors_of
from tiny import train_tokenizer

_STATES: dict[str, Any] = {
    "linear_key_head_dim": 16, "linear_value_head_dim": 24, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "tie_word_embeddings": True, "bos_token_id": 400, "eos_token_id": 402,
}  # fmt: skip


def write_qwen(folder: Path, num_layers: int = 4) -> Any:
    """Write a checkpoint, three of four layers of which are gated delta nets. Returns the main model."""
    torch.manual_seed(0)
    text = config_of("mtp qwen")["text_config"]
    rope = {**text["rope_parameters"], "mrope_interleaved": True, "mrope_section": [2, 1, 1]}
    fields = text | _STATES | {"rope_parameters": rope, "num_hidden_layers": num_layers}
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**fields)).eval()
    model.save_pretrained(folder)
    save_file(load_file(folder / "model.safetensors") | tensors_of("mtp qwen"), folder / "model.safetensors")
    train_tokenizer().save(str(folder / "tokenizer.json"))
    return model


def qwen_module(token_ids: Any, hidden: Any, shared: tuple[Any, Any], kind: str = "mtp qwen") -> tuple[Any, Any]:
    """Logits float32 [n, vocabulary] and the next hidden states [n, hidden] of the module, position by position.

    token_ids: int64 [n], after the main model's hidden states float32 [n, hidden], which are behind its last norm.
    shared: its embedding and output matrix. kind: "mtp qwen" or "mtp experts".
    """
    weights, (embedding, matrix) = {name: torch.tensor(each) for name, each in tensors_of(kind).items()}, shared
    config_class, layer_class = Qwen3_5TextConfig, Qwen3_5DecoderLayer
    if kind == "mtp experts":
        config_class, layer_class = Qwen3_5MoeTextConfig, Qwen3_5MoeDecoderLayer
    config = config_class(**config_of(kind)["text_config"], layer_types=["full_attention"])
    config._attn_implementation = "eager"
    size, eps, positions = config.hidden_size, config.rms_norm_eps, torch.arange(len(token_ids))[None]

    def load(module: Any, prefix: str) -> Any:
        of_module = {name.removeprefix(prefix): each for name, each in weights.items() if name.startswith(prefix)}
        module.load_state_dict(of_module)
        return module.eval()

    with torch.no_grad():
        first = load(Qwen3_5RMSNorm(size, eps), "mtp.pre_fc_norm_embedding.")(embedding[token_ids])
        second = load(Qwen3_5RMSNorm(size, eps), "mtp.pre_fc_norm_hidden.")(hidden)
        rows = (torch.cat([first, second], 1) @ weights["mtp.fc.weight"].T)[None]
        mask = torch.full((len(token_ids), len(token_ids)), -torch.inf).triu(1)[None, None]
        layer, turned = load(layer_class(config, 0), "mtp.layers.0."), Qwen3_5TextRotaryEmbedding(config)
        rows = layer(rows, position_embeddings=turned(rows, positions), attention_mask=mask, position_ids=positions)
        out = load(Qwen3_5RMSNorm(size, eps), "mtp.norm.")(rows[0])
        return out @ matrix.T, out
