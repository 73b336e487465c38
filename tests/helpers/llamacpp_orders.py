"""Recurrent layers as llama.cpp's converter writes them to GGUF: names, orders and signs of a checkpoint's tensors.

Facts from its conversion/qwen.py, granite.py, mamba.py and nemotron.py. Layers of Gemma 3n and 4, too, by
conversion/gemma.py.
"""

import math
from collections.abc import Iterator
from typing import Any

import gguf
import numpy as np

from outrider_export.direct.decoder import Decoder
from outrider_export.direct.states import GatedDeltaNet, SelectiveSSM


def add_sizes(writer: gguf.GGUFWriter, decoder: Decoder, config: dict[str, Any]) -> None:
    """The metadata of a decoder's recurrences, if it has any."""
    state = next((layer.state for layer in decoder.layers if layer.state is not None), None)
    if isinstance(state, GatedDeltaNet):
        writer.add_ssm_state_size(state.key_size)
        writer.add_ssm_group_count(state.num_key_heads)
        writer.add_full_attention_interval(config.get("full_attention_interval", 4))
        if decoder.experts:
            writer.add_expert_shared_feed_forward_length(decoder.sizes.mlp_size)
    elif isinstance(state, SelectiveSSM):
        writer.add_ssm_state_size(state.state_size)
        writer.add_ssm_group_count(state.num_groups)
        of_experts = next((layer.sizes.mlp_size for layer in decoder.layers if layer.experts), decoder.sizes.mlp_size)
        writer.add_expert_shared_feed_forward_length(of_experts)
        writer.add_rope_scaling_finetuned(False)
    else:
        return
    writer.add_ssm_conv_kernel(state.kernel)
    writer.add_ssm_time_step_rank(state.num_heads)
    writer.add_ssm_inner_size(state.num_heads * state.head_size)


def add_varied_sizes(writer: gguf.GGUFWriter, decoder: Decoder, config: dict[str, Any]) -> None:
    """The metadata of the layers of Gemma 3n and 4."""
    sliding = [bool(layer.window) for layer in decoder.layers]
    sizes = dict(zip(sliding, (layer.sizes for layer in decoder.layers), strict=True))
    writer.add_sliding_window_pattern(sliding)
    writer.add_feed_forward_length([layer.sizes.mlp_size for layer in decoder.layers])
    heads = [sizes[each].num_kv_heads for each in sliding]
    writer.add_head_count_kv(heads if len({*heads}) > 1 else heads[0])
    writer.add_key_length(sizes[False].head_size)
    writer.add_shared_kv_layers(config["num_kv_shared_layers"])
    writer.add_embedding_length_per_layer_input(decoder.layer_embedding.width if decoder.layer_embedding else 0)
    if decoder.streams:
        writer.add_altup_num_inputs(decoder.streams.count)
        writer.add_altup_active_idx(decoder.streams.active)
        cutoffs = [layer.cutoff for layer in decoder.layers]
        writer.add_activation_sparsity_scale([-math.inf if each is None else each for each in cutoffs])
        return
    writer.add_key_length_swa(sizes[True].head_size)
    writer.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])
    rope = config["rope_parameters"]["full_attention"]
    turned = int(rope["partial_rotary_factor"] * sizes[False].head_size / 2)
    divisors = np.full(sizes[False].head_size // 2, 1e30, np.float32)
    divisors[:turned] = 1
    writer.add_tensor("rope_freqs.weight", divisors)


def add_latent_sizes(writer: gguf.GGUFWriter, decoder: Decoder, config: dict[str, Any], *, old: bool = False) -> None:
    """The metadata of latent attention and its experts. old: as before llama.cpp computed with the short rows."""
    latent = decoder.latent
    assert latent is not None
    writer.add_head_count_kv(decoder.num_heads if old else 1)
    writer.add_kv_lora_rank(latent.rank)
    if latent.query_rank:
        writer.add_q_lora_rank(latent.query_rank)
    if old:
        writer.add_key_length(latent.head_size)
        writer.add_value_length(latent.value_size)
    else:
        writer.add_key_length(latent.rank + latent.rotated)
        writer.add_value_length(latent.rank)
        writer.add_key_length_mla(latent.head_size)
        writer.add_value_length_mla(latent.value_size)
    rope = config["rope_parameters"]
    if weight := rope.get("mscale_all_dim"):
        writer.add_rope_scaling_yarn_log_mul(0.1 * weight)


def add_grouped_experts(
    writer: gguf.GGUFWriter, decoder: Decoder, config: dict[str, Any], *, old: bool = False
) -> None:
    """The metadata of experts as DeepSeek's, if there are any. old: as above."""
    experts = decoder.experts
    if experts is None:
        return
    if decoder.arch.name == "minimax_m2":
        return
    if decoder.blocks is None:
        writer.add_leading_dense_block_count([layer.experts is None for layer in decoder.layers].count(True))
    if decoder.arch.name == "cohere2_moe":
        writer.add_expert_weights_norm(config.get("norm_topk_prob", True))
        return
    shared = ("n_shared_experts", "moe_num_shared_experts", "num_shared_experts")
    writer.add_expert_shared_count(next(config[key] for key in shared if config.get(key)))
    if decoder.arch.name == "ernie4_5_moe":  # of which its converter writes no more
        return
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    if config["norm_topk_prob"]:
        writer.add_expert_weights_norm(True)
    if experts.router == "sigmoid" and not old:
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if config.get("n_group") and not old:
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])


def latent_rows(name: str, values: Any, decoder: Decoder) -> Iterator[tuple[str, Any]]:
    """The matrix of keys and values as two, of which the keys' is transposed by head; other tensors as they are."""
    latent = decoder.latent
    if latent is None or not name.endswith("kv_b_proj.weight"):
        yield name, values
        return
    both = values.reshape(decoder.num_heads, -1, latent.rank)
    yield name.replace("kv_b", "k_b"), np.ascontiguousarray(both[:, : latent.plain].swapaxes(1, 2))
    yield name.replace("kv_b", "v_b"), np.ascontiguousarray(both[:, latent.plain :])


def rewritten(name: str, values: Any, decoder: Decoder) -> Iterator[tuple[str, Any]]:
    """A tensor of a checkpoint as llama.cpp names and stores it; names are still the checkpoint's."""
    name = name.replace("model.language_model.", "model.")
    if name.endswith("correct_output_scale"):
        name += ".weight"
    if name.endswith("layer_scalar"):
        name += ".weight"
    if decoder.arch.varied and name.endswith((".router.scale", ".router.per_expert_scale")):
        part = "ffn_gate_inp.scale" if name.endswith(".router.scale") else "ffn_down_exps.scale"
        yield f"blk.{name.split('.')[2]}.{part}", values
        return
    state = next((layer.state for layer in decoder.layers if layer.state is not None), None)
    if isinstance(state, GatedDeltaNet):
        if name.endswith("in_proj_qkvz.weight"):  # by heads of keys
            sizes = np.cumsum([state.key_size, state.key_size, state.value_width // state.num_key_heads])
            parts = np.split(values.reshape(state.num_key_heads, -1, state.width), sizes, axis=1)
            q, k, v, z = (part.reshape(-1, state.width) for part in parts)
            yield name.replace("in_proj_qkvz", "in_proj_qkv"), np.concatenate([q, k, v])
            yield name.replace("in_proj_qkvz", "in_proj_z"), z
            return
        if decoder.arch.name != "qwen3_next":
            values = _tiled(name, values, state)
        if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            values = values + 1
    if name.endswith("A_log"):
        values = -np.exp(values)
    if "conv1d.weight" in name:
        values = values.reshape(values.shape[0], -1)
    if name.endswith(("experts.gate_up_proj", "experts.down_proj")):  # one tensor of all experts
        name += ".weight"
    feed_forward = "mlp.shared_expert" if decoder.experts else "mlp"
    if name.endswith("shared_expert_gate.weight"):
        values = values[0]
    if isinstance(state, SelectiveSSM):
        if name.endswith((".A_log", ".D")):
            values = values[:, None]
        elif name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
            values = values.reshape(state.num_groups, -1)
        elif name.endswith("shared_mlp.input_linear.weight"):
            gate, up = np.split(values, 2)
            yield name.replace("shared_mlp.input_linear", f"{feed_forward}.gate_proj"), gate
            yield name.replace("shared_mlp.input_linear", f"{feed_forward}.up_proj"), up
            return
        name = name.replace("shared_mlp.output_linear", f"{feed_forward}.down_proj")
    yield name.replace(".dt_bias", ".dt_proj.bias"), np.ascontiguousarray(values)


def _tiled(name: str, values: Any, state: GatedDeltaNet) -> Any:
    """Heads of values in another order: the first of each head of keys, then the second of each, and so on."""

    def reorder(part: Any, size: int) -> Any:
        shape = (state.num_key_heads, state.num_heads // state.num_key_heads, size, *part.shape[1:])
        return part.reshape(shape).swapaxes(0, 1).reshape(part.shape)

    if "linear_attn.in_proj_qkv" in name or "linear_attn.conv1d" in name:
        before = 2 * state.key_width
        return np.concatenate([values[:before], reorder(values[before:], state.head_size)])
    if "linear_attn.in_proj_z" in name:
        return reorder(values, state.head_size)
    if "linear_attn.out_proj" in name:
        return reorder(values.T, state.head_size).T
    return reorder(values, 1) if name.endswith(("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias")) else values
