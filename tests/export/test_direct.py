"""Conversion without PyTorch, judged by Transformers on the same weights."""

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import openvino as ov
import pytest
import safetensors.torch
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

import heads
import outrider
import tiny
from exports import Recorder, error_of, logits_of_ir
from fuzzing import damaged, few_or_many, fuzz
from gguf_hybrids import add_module, add_tokenizer
from llamacpp_orders import add_grouped_experts, add_latent_sizes, add_sizes, add_varied_sizes, latent_rows, rewritten
from outrider.bundle.manifest import Geometry
from outrider.errors import BundleError, ExportError
from outrider.models.backends.attention import windows_of
from outrider.models.backends.paged_graph import to_paged_attention
from outrider.models.backends.projections import ATTENTION, projections_of
from outrider.models.backends.taps import hidden_states_of
from outrider_export import export_bundle
from outrider_export.describe.describe_file import describe_gguf
from outrider_export.describe.geometry import check_ir, geometry_of_gguf
from outrider_export.describe.plan import make_plan
from outrider_export.direct import fp8
from outrider_export.direct.arch import NotDirect
from outrider_export.direct.archs import ARCHS
from outrider_export.direct.codes import rounded
from outrider_export.direct.convert import describe_layers, open_weights
from outrider_export.direct.describe import describe
from outrider_export.direct.gguf_config import decoder_of
from outrider_export.direct.graph import build
from outrider_export.direct.pack import matrices_of, pack
from outrider_export.direct.rope import rope_of
from outrider_export.direct.save import save
from outrider_export.direct.sizes import MLP, MOE, Blocks, block_kinds
from outrider_export.direct.weights import Weights, layer_name
from outrider_export.heads.own import find_own
from outrider_export.sources.gguf_reader import read_header
from outrider_export.sources.peft_adapter import Change, LoraAdapter
from outrider_export.sources.source import locate
from qwen_module import write_qwen
from recorded import TOKENS, Recorded
from shapes import (
    CONFIGS,
    GEMMA4_DENSE,
    GEMMA4_EXPERTS,
    IN_GGUF,
    NEMOTRON_EXPERTS,
    VARIANTS,
    do_not_scale_windows,
    logits_of,
    make_model,
)
from toys import in_threads

PIECES = (30, 18)  # of TOKENS, each a call: the second reads keys of the first
# Of Gemma 4, whose queries are not scaled, single precision is ten times as far from double: Transformers' own, too.
MOST = {"gemma4_text": 5e-5, "qwen3_5_text": 1e-5}  # the latter 7.5e-6 on a Xeon with AMX


def saved(name: str, folder: Path, **changes: Any) -> tuple[Any, Path]:
    """A random torch model, and its checkpoint."""
    model = make_model(name, **changes)
    model.save_pretrained(folder)
    return model, folder


def graph_of(path: Path, weights: str, scratch: Path) -> ov.Model:
    """The converted model, written and read again."""
    return graph_with(open_weights(path, path.suffix == ".gguf"), weights, scratch)


def graph_with(found: Weights, weights: str, scratch: Path) -> ov.Model:
    scratch.mkdir()
    packed = pack(found, weights, scratch / "model.bin", lambda _: None)
    save(*build(found.decoder, found, packed), scratch / "model.xml")
    return ov.Core().read_model(scratch / "model.xml")


def logits(model: ov.Model) -> Any:
    """Logits float32 [tokens, vocabulary] of TOKENS, read in two calls."""
    return logits_of_ir(model, TOKENS, PIECES)


def error_beside(model: Any, graph: ov.Model) -> float:
    """The largest difference of a graph's logits from its judge's, as a share of the largest."""
    found = logits(graph)
    return model.error_of(found) if isinstance(model, Recorded) else error_of(found, logits_of(model, TOKENS))


def compiled_kinds(model: ov.Model) -> list[str]:
    """The kinds of operations that the CPU plugin makes of a graph."""
    made = ov.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"}).get_runtime_model()
    return [str(node.get_rt_info()["layerType"].astype(str)) for node in made.get_ops()]


def divergence(found: Any, expected: Any) -> float:
    """The mean Kullback-Leibler divergence of rows of logits."""
    first, second = (x - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)) - x.max(-1, keepdims=True)
                     for x in (expected.astype(np.float64), found.astype(np.float64)))  # fmt: skip
    return float((np.exp(first) * (first - second)).sum(-1).mean())


@pytest.fixture
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices are read some rows at a time, as large ones are: pieces begin within heads, experts and joined ones."""
    monkeypatch.setattr("outrider_export.direct.pack._CHUNK", 500)


@pytest.mark.fast_cases(10)
@pytest.mark.usefixtures("in_pieces")
@pytest.mark.parametrize("name", ARCHS)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model, folder = saved(name, tmp_path / name)
    graph = graph_of(folder, "fp32", tmp_path / "scratch")
    assert error_beside(model, graph) < MOST.get(name, 5e-6)


@pytest.mark.fast_cases(6)
@pytest.mark.parametrize("name", ARCHS)
def test_the_graph_has_the_form_that_the_runtime_expects(name: str, tmp_path: Path) -> None:
    _, folder = saved(name, tmp_path / name)
    graph = graph_of(folder, "int8", tmp_path / "scratch")
    weights = open_weights(folder, is_gguf=False)
    decoder = weights.decoder
    to_paged_attention(graph)  # which refuses a state that is left
    assert list(windows_of(graph)) == decoder.windows
    count = len(decoder.layers)
    kinds = [node.get_type_name() for node in graph.get_ops()]
    assert kinds.count("PagedCausalConv1D") == len([kind for kind in decoder.states if kind])
    assert kinds.count("PagedGatedDeltaNet") == decoder.states.count("gated_delta_net")
    assert kinds.count("PagedSelectiveSSM") == decoder.states.count("selective_ssm")
    is_other = decoder.blocks or decoder.streams or decoder.arch.layers == "parallel"
    assert len(hidden_states_of(graph, count)) == (0 if is_other else count + 2)
    products = sum(len(layer.experts.shapes) for layer in decoder.layers if layer.experts)
    if products:  # the chosen experts alone are computed
        assert compiled_kinds(graph).count("GatherMatmul") == products
    if decoder.latent is not None and not products:
        with pytest.raises(BundleError, match="makes queries, keys or values of a shorter row"):
            projections_of(graph, count, attended=64)
        return
    if decoder.states or products or decoder.arch.varied or decoder.arch.ungated or decoder.arch.layers == "parallel":
        return
    for i, layer in enumerate(projections_of(graph, count, attended=decoder.num_heads * decoder.sizes.head_size)):
        queries, keys, values = (layer[name] for name in ATTENTION[:3])  # one product, if they have one form
        assert queries.node == keys.node == values.node
        shapes = [weights.matrix(layer_name(i, name)).shape for name in ATTENTION[:3]]
        assert [(each.num_out, each.num_in) for each in (queries, keys, values)] == shapes
        assert (queries.begin, keys.begin, values.begin) == (0, shapes[0][0], shapes[0][0] + shapes[1][0])


@pytest.mark.fast_cases(5)
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(variant: str, tmp_path: Path) -> None:
    name, changes = VARIANTS[variant]
    model, folder = saved(name, tmp_path / name, **changes)
    if name == "olmo3":
        do_not_scale_windows(model)
    assert error_beside(model, graph_of(folder, "fp32", tmp_path / "scratch")) < MOST.get(name, 5e-6)


@pytest.mark.parametrize(("weights", "most"), [("fp16", 1e-5), ("int8", 5e-3), ("int4", 0.5)])
def test_logits_are_close_with_fewer_bits(weights: str, most: float, tmp_path: Path) -> None:
    model, folder = saved("llama", tmp_path / "llama", hidden_size=128, intermediate_size=256)
    found = logits(graph_of(folder, weights, tmp_path / "scratch"))
    assert divergence(found, logits_of(model, TOKENS)) < most


def test_decays_have_8_bits_where_others_have_4(tmp_path: Path) -> None:
    """Errors of these few numbers grow in an exponent."""
    _, folder = saved("qwen3_5_text", tmp_path / "model")
    packed = pack(open_weights(folder, is_gguf=False), "int4", tmp_path / "model.bin", lambda _: None)
    kinds = {part: {each.kind for name, each in packed.items() if name.endswith(part)} for part in ("_a", "_b", "_qkv")}
    assert kinds == {"_a": {"int8"}, "_b": {"int8"}, "_qkv": {"int4"}}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_and_several_files(dtype: str, tmp_path: Path) -> None:
    """Weights in half precision are widened exactly."""
    folder = tmp_path / "qwen2"
    make_model("qwen2").to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    model = type(make_model("qwen2")).from_pretrained(folder, dtype=torch.float32).eval()
    assert error_of(logits(graph_of(folder, "fp32", tmp_path / "scratch")), logits_of(model, TOKENS)) < 5e-6


def test_later_names_of_states_mean_the_same() -> None:
    """As Transformers writes them from 5.17 on."""
    config = {"model_type": "granitemoehybrid", **CONFIGS["granitemoehybrid"]}
    later = [{"mamba": "linear_attention", "attention": "full_attention"}[kind] for kind in config["layer_types"]]
    states = [layer.state for layer in describe(config).layers]
    assert [layer.state for layer in describe(config | {"layer_types": later}).layers] == states
    assert states.count(None) == 1
    assert block_kinds({"layers_block_type": later}) == ["mamba", "mamba", "full_attention", "mamba"]


def test_numbers_that_configurations_say_otherwise() -> None:
    """MiniMax M2 says how many numbers of a head rotate, Hunyuan's experts are said by layer, Gemma 4 ends in full."""
    minimax = {"model_type": "minimax_m2", **CONFIGS["minimax_m2"]}
    assert describe(minimax | {"rotary_dim": 16}).rotary_size == 16
    hunyuan = {"model_type": "hunyuan_v1_moe", **CONFIGS["hunyuan_v1_moe"]}
    assert describe(hunyuan | {"num_experts": [4, 4]}).experts == describe(hunyuan).experts
    with pytest.raises(NotDirect, match="int"):
        describe(hunyuan | {"moe_topk": [1, 2]})
    gemma = {"model_type": "gemma4_text", **CONFIGS["gemma4_text"]}
    kinds = ["full_attention", *["sliding_attention"] * (gemma["num_hidden_layers"] - 1)]
    assert describe(gemma | {"layer_types": kinds}).windows[-1] == 0


@pytest.mark.parametrize(("name", "change", "says"), [
    ("llama", {"model_type": "bloom"}, "the architecture 'bloom'"),
    ("llama", {"hidden_act": "relu2"}, "the activation 'relu2'"),
    ("llama", {"rope_parameters": {"rope_type": "dynamic"}}, "RoPE of the kind 'dynamic'"),
    ("llama", {"rope_parameters": {"rope_type": "linear"}}, "no 'factor' in its configuration"),
    ("llama", {"partial_rotary_factor": 2.0**30}, r"RoPE of 1.07374e\+09 of a head"),
    ("llama", {"clip_qkv": 8.0}, "clip_qkv=8.0"),
    ("llama", {"layer_types": ["full_attention"]}, "1 layer_types for 2 layers"),
    ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, "RoPE by kind of layer"),
    ("llama", {"hidden_size": "wide"}, "invalid literal"),
    ("gemma4_text", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all'"),
    ("gemma4_text", {"num_kv_shared_layers": 7}, "num_kv_shared_layers=7"),
    ("gemma4_text", {"num_kv_shared_layers": 5}, "no layer of the kind 'full_attention' with keys and values of"),
    ("gemma4_text", {"attention_k_eq_v": True}, "no 'num_global_key_value_heads' in its configuration"),
    ("gemma4_text", {"global_head_dim": 1 << 21}, "with heads of 2097152 numbers"),
    ("llama4_text", {"num_experts_per_tok": 2}, "=2, and what an expert reads can be scaled for one only"),
    ("gemma4_text", {"per_layer_config": {"00": {"head_dim": 32}}}, "per_layer_config="),
])  # fmt: skip
def test_what_has_to_go_through_pytorch(name: str, change: dict[str, Any], says: str) -> None:
    with pytest.raises(NotDirect, match=says):
        describe({"model_type": name, **CONFIGS[name], **change})


@settings(max_examples=60)
@given(st.sampled_from(["default", "linear", "llama3", "yarn", "longrope"]), st.integers(0, 2**32 - 1))
def test_frequencies_are_those_of_transformers(kind: str, seed: int) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rng = np.random.default_rng(seed)
    size = int(rng.choice([16, 64, 96, 128]))
    parameters = {
        "rope_type": kind, "rope_theta": float(rng.choice([1e4, 5e5, 1e6])), "factor": float(rng.uniform(1, 40)),
        "low_freq_factor": 1.0, "high_freq_factor": float(rng.uniform(2, 8)),
        "original_max_position_embeddings": int(rng.choice([2048, 4096, 8192])),
        "short_factor": rng.uniform(1, 3, size // 2).tolist(), "long_factor": rng.uniform(1, 9, size // 2).tolist(),
    }  # fmt: skip
    found = rope_of(parameters, size, 131_072)
    if kind == "default":
        expected, scale = 1 / parameters["rope_theta"] ** (np.arange(0, size, 2) / size), 1.0
    else:
        config = LlamaConfig(head_dim=size, max_position_embeddings=131_072, rope_parameters=parameters)
        frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
        expected = frequencies.double().numpy()
    if kind == "longrope":
        length = parameters["original_max_position_embeddings"] + 1
        long = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=length)[0].double().numpy()
        assert found.long is not None
        np.testing.assert_allclose(found.long, long, rtol=1e-6)
    assert np.allclose(found.frequencies, expected, rtol=2e-6)
    assert math.isclose(found.scale, scale, rel_tol=1e-6)


@settings(max_examples=200)
@given(
    st.sampled_from([15, 255]), st.sampled_from([32, 64]), st.integers(0, 2**32 - 1), st.sampled_from([1e-4, 0.1, 30])
)
def test_rounding_is_within_half_a_step(largest: int, group: int, seed: int, spread: float) -> None:
    """No weight is off by more than half a step of its group, also where all have one sign, and zero is exact."""
    rng = np.random.default_rng(seed)
    values = (rng.normal(rng.choice([-3, 0, 3]), 1, (5, 2 * group)) * spread).astype(np.float32)
    values[rng.random(values.shape) < 0.1] = 0
    codes, zero_points, scales = rounded(values, group, largest)
    assert codes.dtype == zero_points.dtype == np.uint8
    assert scales.dtype == np.float16
    assert codes.max() <= largest
    steps = np.repeat(scales.astype(np.float32), group, axis=1)
    back = (codes.astype(np.float32) - np.repeat(zero_points, group, axis=1)) * steps
    assert np.all(np.abs(back - values) <= steps * 0.501 + 1e-7)
    assert np.all(back[values == 0] == 0)


_OF_LFM2 = {f"w{i}.weight": f"{name}_proj.weight" for i, name in ((1, "gate"), (2, "down"), (3, "up"))}


def merged_experts(folder: Path) -> dict[str, Any]:
    """The tensors of a checkpoint; those of experts as one [experts, rows, columns], gate and up apart."""
    made: dict[str, Any] = {}
    for name, values in sorted(load_file(folder / "model.safetensors").items()):
        if found := re.fullmatch(r"(.*\.experts)\.\d+\.(.*)", name):
            target = f"{found[1]}.{_OF_LFM2.get(found[2], found[2]) if '.feed_forward.' in name else found[2]}"
            made[target] = np.concatenate([made.get(target, values[:0][None]).reshape(-1, *values.shape), values[None]])
        elif found := re.fullmatch(r"(model\.layers.*\.mlp\.experts\.)(gate_up|down)_proj(_bias)?", name):  # gpt-oss
            values = values if found[3] else values.swapaxes(1, 2)
            halves = {"gate": values[:, ::2], "up": values[:, 1::2]} if found[2] == "gate_up" else {"down": values}
            for part, half in halves.items():
                made[f"{found[1]}{part}_proj.{'bias' if found[3] else 'weight'}"] = np.ascontiguousarray(half)
        elif found := re.fullmatch(r"(.*\.feed_forward\.experts\.)(gate_up|down)_proj", name):  # Llama 4
            pieces = np.split(values, 2, axis=2) if found[2] == "gate_up" else [values]
            for part, half in zip(("gate", "up") if len(pieces) > 1 else ("down",), pieces, strict=True):
                made[f"{found[1]}{part}_proj.weight"] = np.ascontiguousarray(half.swapaxes(1, 2))
        elif name.endswith(".sinks"):
            made[f"{name}.weight"] = values
        elif found := re.fullmatch(r"(model\..*altup_.*projections)\.\d\.weight", name):  # of all streams in one
            target = f"{found[1]}.weight"
            made[target] = np.concatenate([made.get(target, values[:0][None]).reshape(-1, *values.shape), values[None]])
        elif name.endswith("block_sparse_moe.input_linear.weight"):
            for part, half in zip(("gate", "up"), np.split(values, 2, axis=1), strict=True):
                made[f"{name.partition('block')[0]}mlp.experts.{part}_proj.weight"] = half
        else:
            made[name] = values
    return made


def write_gguf(
    folder: Path, path: Path, name: str, kind: Kind = Kind.F32, *, old: bool = False, pre: str = "", **keys: Any
) -> None:
    """Write a checkpoint as GGUF, with llama.cpp's names, orders of rows and keys. Norms and biases stay in float32.

    old: latent attention as llama.cpp had it first. pre: the name of its tokenizer's expression, which comes along with
    an MTP module, if the checkpoint has one. keys: of the tokenizer's metadata.
    """
    found = open_weights(folder, is_gguf=False)  # what it computes was judged above; its files are read here anew
    decoder, form = found.decoder, ARCHS[name]
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    in_gguf = form.gguf or {"granitemoe_swa": "granite_swa"}.get(name, "llama")  # Mixtral's
    in_gguf += "_moe" if decoder.blocks and decoder.experts else ""
    known = _LIKEIN_GGUF.get(in_gguf, in_gguf)
    architecture = gguf.MODEL_ARCH(next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == known))
    kinds: list[str] = block_kinds(config) or [layer.state.kind if layer.state else "" for layer in decoder.layers]
    names = gguf.get_tensor_name_map(architecture, len(kinds))
    writer = gguf.GGUFWriter(path, in_gguf)
    tensors = merged_experts(folder)
    module = {weight: tensors.pop(weight).astype(np.float32) for weight in [*tensors] if weight.startswith("mtp.")}
    writer.add_block_count(len(kinds) + bool(module))
    if module:
        add_module(writer, module, len(kinds))
    if pre:
        add_tokenizer(writer, folder, pre, **keys)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(decoder.hidden_size)
    is_hybrid_granite = name == "granitemoehybrid"  # whose shared expert's size is another key
    if "shared_intermediate_size" in config and not is_hybrid_granite:
        writer.add_expert_shared_feed_forward_length(decoder.sizes.mlp_size)
    wide = decoder.experts.size if decoder.experts else 0
    widths = [decoder.sizes.mlp_size * (kind == MLP) + wide * (kind == MOE) for kind in kinds]
    width = config["intermediate_size"] if "shared_intermediate_size" in config else decoder.sizes.mlp_size
    if not form.varied:
        writer.add_feed_forward_length(widths if decoder.blocks else width)
    writer.add_head_count(decoder.num_heads)
    kv_heads = [decoder.sizes.num_kv_heads if kind in ("", "attention") else 0 for kind in kinds]
    if form.varied:
        add_varied_sizes(writer, decoder, config)
    elif form.attention.latent:
        add_latent_sizes(writer, decoder, config, old=old)
    else:
        writer.add_head_count_kv(
            kv_heads if decoder.states and form.attention.gate != "queries" else decoder.sizes.num_kv_heads
        )
        writer.add_key_length(decoder.sizes.head_size)
    add_sizes(writer, decoder, config)
    if "conv_L_cache" in config:
        writer.add_shortconv_l_cache(config["conv_L_cache"])
    (writer.add_layer_norm_eps if form.norms.kind == "layer" else writer.add_layer_norm_rms_eps)(decoder.eps)
    writer.add_rope_dimension_count(decoder.rotary_size)
    if experts := decoder.experts:
        writer.add_expert_count(experts.count)
        writer.add_expert_used_count(experts.active)
        if "moe_intermediate_size" in config or form.attention.chunked:
            writer.add_expert_feed_forward_length(experts.size)
        if form.attention.chunked:
            writer.add_interleave_moe_layer_step(config["interleave_moe_layer_step"])
        elif form.experts.grouped:
            add_grouped_experts(writer, decoder, config, old=old)
        else:
            writer.add_leading_dense_block_count(config.get("num_dense_layers", 0))
    rope = config.get("rope_parameters", {"rope_theta": 1e4})
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    scaled = rope.get("full_attention", rope)
    if scaled.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaled["factor"])
        writer.add_rope_scaling_orig_ctx_len(scaled["original_max_position_embeddings"])
        if "attention_factor" in scaled:
            writer.add_rope_scaling_yarn_attn_factor(scaled["attention_factor"])
    if any(decoder.windows):
        writer.add_sliding_window(config["sliding_window"])
        if name in _WITH_PATTERN:
            writer.add_sliding_window_pattern([window > 0 for window in decoder.windows])
    if growth := rope.get("llama_4_scaling_beta"):
        writer.add_attn_temperature_scale(growth)
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
    if decoder.scales.logit_cap:
        writer.add_final_logit_softcapping(decoder.scales.logit_cap)
    if form.name.startswith("granite"):
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if "logit_scale" in config:
        writer.add_logit_scale(config["logit_scale"])
    if "layer_rope_theta" in config:
        writer.add_array("granite_swa.attention.rope_pattern", [base > 0 for base in config["layer_rope_theta"]])
    if name == "mellum":
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    if name == "muse_glimmer_text":
        writer.add_logit_scale(config["output_multiplier"])
        for i in range(len(decoder.layers)):
            for part, weight in (("q", config["qk_scale_factor"]), ("k", 1)):
                scale = np.full(decoder.sizes.head_size, weight, np.float32)
                writer.add_tensor(f"blk.{i}.attn_{part}_norm.weight", scale)
    for weight, array in tensors.items():
        values = array.astype(np.float32)
        if (
            (form.gguf.startswith(("gemma", "nemotron")) and form.norms.offset) or form.gguf == "muse-glimmer"
        ) and weight.endswith("norm.weight"):
            values = values + (weight != "model.norm.weight" or form.gguf != "muse-glimmer")
        if (
            form.matrices.gguf_interleaved
            and not form.matrices.interleaved
            and ".self_attn." in weight
            and weight.split(".")[-2] in "q_proj k_proj"
        ):
            heads = decoder.num_heads if ".q_proj." in weight else decoder.sizes.num_kv_heads
            halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
            values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
        if ".conv.conv." in weight:
            values = values.reshape(values.shape[0], -1)
        if weight.endswith("expert_bias"):
            weight += ".bias"
        if weight.endswith("score_correction_bias"):
            weight, values = weight.replace("correction_bias", "correction.bias"), values.reshape(-1)
        parts = (
            rewritten(weight, values, decoder)
            if old or not form.attention.latent
            else latent_rows(weight, values, decoder)
        )
        for part, numbers in parts:
            target = part if part.startswith("blk.") else names.get_name(part, try_suffixes=(".weight", ".bias"))
            if other := next((theirs for ours, theirs in _NOTIN_GGUF.items() if ours in part), ""):
                target = f"blk.{part.split('.')[2]}.{other}.weight"
            if weight == "lm_head.weight":
                target = "output.weight"  # the package gguf has none for lfm2moe
            assert target is not None, part
            if numbers.ndim > 1 and kind is not Kind.F32 and numbers.shape[-1] % 32 == 0:  # convolutions stay
                writer.add_tensor(target, gguf.quantize(numbers, kind), raw_dtype=kind)
            else:
                writer.add_tensor(target, numbers)
    tiny.finish_gguf(writer)


# Whose files say which layers have windows.
_WITH_PATTERN = (
    "cohere2_moe", "exaone4", "exaone_moe", "granite_swa", "granitemoe_swa", "mellum", "muse_glimmer_text", "olmo3",
)  # fmt: skip
# Those that the package gguf does not have, or only from 0.20 on, and others with such tensors.
_LIKEIN_GGUF = {"cohere2moe": "glm4moe", "granite_swa": "granite", "mellum": "qwen3moe", "muse-glimmer": "afmoe"}
_NOTIN_GGUF = {
    "self_attn.sinks": "attn_sinks", "shared_mlp.input_linear": "ffn_up_shexp", "shared_mlp.output_": "ffn_down_shexp",
    "moe.experts.gate_up_proj": "ffn_gate_up_exps", "moe.experts.down_proj": "ffn_down_exps",
    "block_sparse_moe.router.weight": "ffn_gate_inp", "mixer.experts.up_proj": "ffn_up_exps",
    "mixer.experts.down_proj": "ffn_down_exps",
}  # fmt: skip


@pytest.mark.fast_cases(8)
@pytest.mark.usefixtures("in_pieces")
@pytest.mark.parametrize("name", [*(form.name for form in ARCHS.values() if form.gguf), "mixtral", "granitemoe_swa"])
def test_gguf_files_give_the_same(name: str, tmp_path: Path) -> None:
    model, folder = saved(name, tmp_path / name, **IN_GGUF.get(name, {}))
    write_gguf(folder, tmp_path / "model.gguf", name)
    graph = graph_of(tmp_path / "model.gguf", "fp32", tmp_path / "scratch")
    assert error_beside(model, graph) < MOST.get(name, 5e-6)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("name", "old"), [("deepseek_v2", True), ("glm4_moe_lite", True), ("youtu", False)])
def test_old_and_new_files_of_latent_attention_give_the_same(name: str, old: bool, tmp_path: Path) -> None:
    """In older ones, keys and values are of one matrix, and how experts are scored is told by their biases alone."""
    model, folder = saved(name, tmp_path / name)
    write_gguf(folder, tmp_path / "model.gguf", name, old=old)
    found = logits(graph_of(tmp_path / "model.gguf", "fp32", tmp_path / "scratch"))
    assert error_of(found, logits_of(model, TOKENS)) < 5e-6
    header = read_header(tmp_path / "model.gguf")
    found = msgspec.to_builtins(geometry_of_gguf(header)) | describe_layers(decoder_of(header))
    geometry = msgspec.convert(found, Geometry)
    assert (geometry.num_kv_heads, geometry.head_size, geometry.value_size) == (4, 24, 16)
    assert geometry.numbers_per_token == len(decoder_of(header).layers) * 4 * (24 + 16)
    check_ir(tmp_path / "scratch" / "model.xml", geometry)


@pytest.mark.slow
def test_experts_without_a_gate_are_read_from_gguf_files_and_gathered(tmp_path: Path) -> None:
    """OpenVINO knows the form with a gate alone: see `STEEPNESS`."""
    model, folder = saved("nemotron_h", tmp_path / "model", **NEMOTRON_EXPERTS)
    write_gguf(folder, tmp_path / "model.gguf", "nemotron_h")
    graph = graph_of(tmp_path / "model.gguf", "fp32", tmp_path / "scratch")
    expected = logits_of(model, TOKENS)
    assert error_of(logits(graph), expected) < 5e-6
    for weights, most in (("int8", 5e-3), ("int4", 0.5)):
        graph = graph_of(tmp_path / "model.gguf", weights, tmp_path / weights)
        assert divergence(logits(graph), expected) < most
        assert compiled_kinds(graph).count("GatherMatmul") == 3 * 3


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("changes", [GEMMA4_DENSE, GEMMA4_EXPERTS], ids=["dense", "experts"])
def test_gguf_files_of_gemma_4_s_larger_models_give_the_same(changes: dict[str, Any], tmp_path: Path) -> None:
    model, folder = saved("gemma4_text", tmp_path / "model", **changes)
    write_gguf(folder, tmp_path / "model.gguf", "gemma4_text")
    header = read_header(tmp_path / "model.gguf")
    assert (geometry_of_gguf(header).num_kv_heads, geometry_of_gguf(header).head_size) == (2, 16)
    found = logits(graph_of(header.path, "fp32", tmp_path / "scratch"))
    assert error_of(found, logits_of(model, TOKENS)) < MOST["gemma4_text"]


def test_sizes_by_layer_are_read_as_newer_transformers_saves_them() -> None:
    config = {"model_type": "gemma4_text", **CONFIGS["gemma4_text"], **GEMMA4_DENSE}
    sizes = {"head_dim": config["global_head_dim"], "num_key_value_heads": config["num_global_key_value_heads"]}
    newer = {key: each for key, each in config.items() if "global" not in key}
    found = describe(newer | {"per_layer_config": {f"{i:02}": sizes for i in (1, 3, 5)}})
    assert [layer.sizes for layer in found.layers] == [layer.sizes for layer in describe(config).layers]


def test_layers_whose_sizes_a_config_could_not_say_are_refused(tmp_path: Path) -> None:
    _, folder = saved("gemma4_text", tmp_path / "model")
    write_gguf(folder, tmp_path / "model.gguf", "gemma4_text")
    header = read_header(tmp_path / "model.gguf")
    for key, numbers, says in (
        ("feed_forward_length", [96, 96, 64, 96, 96, 96], "feed_forward_length that differs"),
        ("attention.head_count_kv", [2, 1, 2, 1, 2, 1], "attention.head_count_kv that differs"),
        ("attention.head_count_kv", [2, 1, 1, 1, 2, 1], "attention.head_count_kv that differs"),
        ("attention.sliding_window_pattern", [True], "sliding_window_pattern of 1 layers for 6"),
        ("rope.scaling.type", "yarn", "RoPE of the kind 'yarn'"),
    ):
        changed = dataclasses.replace(header, metadata=header.metadata | {f"gemma4.{key}": numbers})
        with pytest.raises(NotDirect, match=says):
            decoder_of(changed)


MODULES = {"qwen3_5_text": "mtp qwen", "qwen3_5_moe_text": "mtp experts", "qwen3_next": "mtp experts"}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
def test_a_module_in_a_gguf_file_is_the_default_drafter(name: str, tmp_path: Path) -> None:
    """llama.cpp counts its layer among the model's."""
    sizes: dict[str, Any] = {"head_dim": heads.HEAD_SIZE}
    sizes["rope_parameters"] = CONFIGS[name]["rope_parameters"] | {"partial_rotary_factor": 0.5}
    if MODULES[name] == "mtp experts":
        sizes |= {"num_experts": 6, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48}
    _, folder = saved(name, tmp_path / "model", **sizes)
    weights = load_file(folder / "model.safetensors")
    save_file(weights | heads.tensors_of(MODULES[name]), folder / "model.safetensors")
    tiny.train_tokenizer().save(str(folder / "tokenizer.json"))
    path, told = tmp_path / "nextn.gguf", Recorder()
    write_gguf(folder, path, name, pre="qwen2")
    assert (described := describe_gguf(path))["mtp_layers"] == 1
    assert described["layers"] == geometry_of_gguf(read_header(path)).num_layers == 4
    made = export_bundle(path, output=tmp_path / "bundle", weights="fp32", draft_vocab="all", progress=told)
    assert [(each.name, each.kind) for each in made.manifest.drafters] == [("mtp", "mtp")]
    assert "Its own MTP module comes along as drafter 'mtp'. --draft none leaves it out." in told.notes
    options: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True, "num_assistant_tokens": 3}
    prompts = "The quick brown fox", "def quicksort(items)"
    with outrider.load(made.folder, cache_size=0.02) as engine:
        expected = {each: engine.generate(each, drafter=None, **options).token_ids for each in prompts}
        found: dict[str, outrider.Result] = {}
        in_threads(lambda each: found.update({each: engine.generate(each, drafter="mtp", **options)}), prompts)
    assert {each: result.token_ids for each, result in found.items()} == expected
    assert all(result.stats.num_draft_tokens for result in found.values())


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(("name", "targets", "is_gguf"), [
    ("glm", ("self_attn.q_proj", "self_attn.k_proj"), False),
    ("glm", ("self_attn.q_proj", "self_attn.k_proj"), True),
    ("deepseek_v2", ("self_attn.q_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.kv_b_proj"), False),
    ("youtu", ("self_attn.q_b_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.o_proj"), True),
    ("granitemoehybrid", ("mamba.in_proj", "mamba.out_proj", "shared_mlp.input_linear"), False),
    ("lfm2_moe", ("conv.in_proj", "feed_forward.w2"), False),
    ("qwen3_5_text", ("linear_attn.in_proj_qkv", "linear_attn.in_proj_b", "linear_attn.out_proj"), True),
    ("qwen3_next", ("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba", "linear_attn.out_proj"), False),
    ("nemotron_h", ("mixer.in_proj", "mixer.out_proj"), True),
])  # fmt: skip
def test_adapters_change_rows_in_another_order(
    name: str, targets: tuple[str, ...], is_gguf: bool, tmp_path: Path
) -> None:
    """Where a file has matrices in one, or rows in another order, an adapter's are in the checkpoint's."""
    model, path = saved(name, tmp_path / name)
    if is_gguf:
        write_gguf(path, tmp_path / "model.gguf", name)
        path = tmp_path / "model.gguf"
    rng, changes = np.random.default_rng(0), {}
    for target in targets:
        weight = model.get_submodule(f"model.layers.0.{target}").weight.data
        down, up = (rng.normal(0, 0.3, shape).astype(np.float32) for shape in ((2, weight.shape[1]), (len(weight), 2)))
        weight += 0.5 * torch.from_numpy(up @ down)
        changes[f"model.language_model.layers.0.{target}"] = Change(down, up, 0.5)
    weights = open_weights(path, is_gguf)
    weights.merge(LoraAdapter("adapter", "", changes, None))
    graph = graph_with(weights, "fp32", tmp_path / "scratch")
    assert error_of(logits(graph), logits_of(model, TOKENS)) < 1e-5


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(("name", "module", "shape", "says"), [
    ("lfm2", "layers.0.conv.conv", (64, 3), "which is no linear layer. Only linear layers"),
    ("qwen3_5_text", "layers.0.linear_attn.conv1d", (160, 4), "which is no linear layer"),
    ("nemotron_h", "layers.0.mixer.conv1d", (176, 4), "which is no linear layer"),
    ("qwen3_next", "layers.0.mlp.shared_expert_gate", (1, 64), ""),
])  # fmt: skip
def test_no_adapter_is_without_effect(
    name: str, module: str, shape: tuple[int, int], says: str, tmp_path: Path
) -> None:
    """Filters of convolutions have the shape of matrices, too, and a matrix of one row is not rounded."""
    model, path = saved(name, tmp_path / name)
    rows, columns = shape
    change = Change(np.full((2, columns), 0.5, np.float32), np.full((rows, 2), 0.3, np.float32), 1.0)
    weights = open_weights(path, is_gguf=False)
    adapter = LoraAdapter("adapter", "", {f"model.{module}": change}, None)
    if says:
        with pytest.raises(ExportError, match=says):
            weights.merge(adapter)
        return
    weights.merge(adapter)
    model.get_submodule(f"model.{module}").weight.data += torch.from_numpy(change.up @ change.down)
    graph = graph_with(weights, "fp32", tmp_path / "scratch")
    assert error_of(logits(graph), logits_of(model, TOKENS)) < 1e-5


def test_blocks_become_layers_of_two_parts() -> None:
    blocks = Blocks.of(["mamba", "mlp", "mamba", "attention", "mlp"])
    assert blocks == Blocks((0, 2, 3), (1, None, 4))
    assert [blocks.layer(number) for number in range(6)] == [0, 0, 1, 2, 2, None]
    for kinds, says in ((["mlp"], "block 0 of the kind 'mlp'"), (["mamba", "mlp", "mlp"], "block 2 of the kind 'mlp'")):
        with pytest.raises(ValueError, match=says):
            Blocks.of(kinds)


def test_a_size_that_a_gguf_file_lacks_is_named(tmp_path: Path) -> None:
    _, folder = saved("granitemoehybrid", tmp_path / "model")
    write_gguf(folder, tmp_path / "model.gguf", "granitemoehybrid")
    damaged = (
        (tmp_path / "model.gguf").read_bytes().replace(b"granitehybrid.ssm.state_size", b"granitehybrid.ssm.state_sizf")
    )
    (tmp_path / "model.gguf").write_bytes(damaged)
    with pytest.raises(ExportError, match=r"model\.gguf has no granitehybrid\.ssm\.state_size in its metadata"):
        open_weights(tmp_path / "model.gguf", is_gguf=True)


@pytest.fixture(scope="module")
def qwen_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole GGUF file of Qwen3.5, with its MTP module and its tokenizer."""
    folder = tmp_path_factory.mktemp("qwen")
    write_qwen(folder / "checkpoint")
    write_gguf(folder / "checkpoint", folder / "qwen.gguf", "qwen3_5_text", pre="qwen2")
    return folder / "qwen.gguf"


@few_or_many
def test_damaged_files_with_states_are_refused_in_a_line(qwen_file: Path, tmp_path: Path, num_examples: int) -> None:
    whole, path = qwen_file.read_bytes(), tmp_path / "damaged.gguf"
    end = min(each.begin for each in read_header(qwen_file).tensors.values())

    def read(content: bytes) -> None:
        path.write_bytes(content)
        plan = make_plan("main", locate(path), "openvino", "int8")
        open_weights(path, is_gguf=True)
        module = find_own(plan, Recorder())
        assert module is None or module.read(plan.geometry)

    fuzz(read, whole, damaged(whole) | damaged(whole[:end]).map(lambda header: header + whole[end:]), num_examples)


def test_the_weights_of_a_model_in_several_files_are_those_of_one(tmp_path: Path) -> None:
    tiny.write_checkpoint(tmp_path / "checkpoint")
    for per_file in (0, 5):
        tiny.write_gguf(tmp_path / "model.gguf", tmp_path / "checkpoint", "Q8_0", "qwen2", {}, per_file)
    whole, divided = (
        open_weights(tmp_path / name, is_gguf=True)
        for name in ("model.gguf", sorted(path.name for path in tmp_path.glob("model-*.gguf"))[1])
    )
    for name in matrices_of(whole):
        one, other = (weights.matrix(name).read(slice(None)) for weights in (whole, divided))
        assert np.array_equal(one, other)


QUANTISED = sorted(set(gguf.quants._type_traits) | {Kind.F16}, key=lambda kind: kind.name)


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
def test_every_quantisation_is_read(kind: Kind, tmp_path: Path) -> None:
    """Numbers are those that the package gguf reads, whole matrix by whole matrix."""
    rng = np.random.default_rng(1)
    block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    columns, rows = max(block, 64) * 2, 96
    blocks = rng.integers(0, 256, (rows, columns // block * num_bytes)).astype(np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    keys = {"block_count": 1, "context_length": 64, "embedding_length": columns, "feed_forward_length": rows}
    keys |= {"attention.head_count": 2, "attention.head_count_kv": 2, "attention.key_length": rows // 2}
    for key, value in keys.items():
        writer.add_uint32(f"llama.{key}", value)
    for name in ("token_embd", "blk.0.attn_q"):
        writer.add_tensor(f"{name}.weight", blocks, raw_dtype=kind)
    tiny.finish_gguf(writer)
    with np.errstate(all="ignore"):
        whole = gguf.dequantize(blocks, kind)
        weights = open_weights(tmp_path / "model.gguf", is_gguf=True)
        embedding = weights.matrix("model.embed_tokens")
        queries = weights.matrix("model.layers.0.self_attn.q_proj")
        assert embedding.shape == whole.shape
        pieces = [embedding.read(slice(first, first + 7)) for first in range(0, rows, 7)]
        assert np.array_equal(np.concatenate(pieces), whole, equal_nan=True)
        order = np.arange(rows).reshape(2, -1, 2).swapaxes(1, 2).reshape(-1)  # even rows of each head first
        assert np.array_equal(queries.read(slice(10, 20)), whole[order[10:20]], equal_nan=True)


def say_quantised(folder: Path, **how: Any) -> None:
    """Have a checkpoint's config.json say that its weights are quantised."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": how}), encoding="utf-8")


MXFP4 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]  # by code


def test_mxfp4_is_read_and_kept_exactly_in_8_bits(tmp_path: Path) -> None:
    """gpt-oss as it is published: experts in blocks of 32 numbers, two a byte, with a power of two each."""
    model, folder = saved("gpt_oss", tmp_path / "gpt_oss")
    rng, tensors = np.random.default_rng(1), load_file(folder / "model.safetensors")
    for i, layer in enumerate(model.model.layers):
        for part in ("gate_up_proj", "down_proj"):
            name = f"model.layers.{i}.mlp.experts.{part}"
            count, columns, rows = tensors.pop(name).shape
            codes = rng.integers(0, 16, (count, rows, columns // 32, 16, 2)).astype(np.uint8)
            powers = rng.integers(121, 125, (count, rows, columns // 32)).astype(np.uint8)
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = codes[..., 0] | codes[..., 1] << 4, powers
            numbers = np.array(MXFP4)[codes] * 2.0 ** (powers[..., None, None].astype(int) - 127)
            numbers = numbers.reshape(count, rows, columns).swapaxes(1, 2)
            getattr(layer.mlp.experts, part).data = torch.tensor(numbers, dtype=torch.float32).contiguous()
    save_file(tensors, folder / "model.safetensors")
    say_quantised(folder, quant_method="mxfp4", modules_to_not_convert=["model.layers.*.self_attn"])
    graph = graph_of(folder, "fp32", tmp_path / "scratch")
    assert error_of(logits(graph), logits_of(model, TOKENS)) < 5e-6
    weights = open_weights(folder, is_gguf=False)
    packed = pack(weights, "int8", tmp_path / "int8", lambda _: None)
    for name, matrix in packed.items():
        if ".experts." in name:
            codes, zeros, scales = (part.numbers for part in (matrix.codes, matrix.zero_points, matrix.scales))
            kept = (codes.astype(np.float32).reshape(*scales.shape, 32) - zeros[..., None]) * scales[..., None]
            assert np.array_equal(kept.reshape(matrix.shape), weights.matrix(name).read(slice(None)))
    found = logits(graph_of(folder, "int8", tmp_path / "again"))
    assert divergence(found, logits_of(model, TOKENS)) < 0.05


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("block", [None, [32, 48]])
def test_fp8_is_read_with_its_scales(block: list[int] | None, tmp_path: Path) -> None:
    """Ministral 3 as it is published, with a scale for each matrix, and Qwen3, with one for each block."""
    model, folder = saved("ministral3", tmp_path / "ministral3")
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    for name, parameter in model.named_parameters():
        if name.endswith("_proj.weight"):
            rows, columns = block or parameter.shape
            counts = -(-parameter.shape[0] // rows), -(-parameter.shape[1] // columns)
            scales = torch.rand(counts) + 0.5
            each = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
            each = each[: parameter.shape[0], : parameter.shape[1]]
            tensors[name] = (parameter / each).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = scales if block else scales.reshape(()).bfloat16()
            each = each if block else tensors[f"{name}_scale_inv"].float()
            parameter.data = tensors[name].float() * each
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    say_quantised(folder, quant_method="fp8", activation_scheme="static", weight_block_size=block)
    assert error_of(logits(graph_of(folder, "fp32", tmp_path / "scratch")), logits_of(model, TOKENS)) < 5e-6
    tensors["model.layers.1.mlp.up_proj.weight_scale_inv"] = torch.ones(7)
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ExportError, match=r"7 scales for . blocks of model\.layers\.1\.mlp\.up_proj\.weight"):
        graph_of(folder, "int8", tmp_path / "again")


def test_every_code_of_fp8_is_pytorch_s() -> None:
    codes = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(fp8.unpacked(codes), expected, equal_nan=True)


@pytest.fixture(scope="module")
def llama_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_gguf(saved("llama", folder / "llama")[1], folder / "plain.gguf", "llama")
    return folder / "plain.gguf"


def changed_gguf(plain: Path, path: Path, metadata: dict[str, Any], tensors: dict[str, Any]) -> Path:
    """A GGUF file of a Llama, without weights but an embedding, with other metadata and tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    known = {key: value for key, value in read_header(plain).metadata.items() if "llama." in key}
    for key, value in (known | metadata).items():
        add = writer.add_string if isinstance(value, str) else writer.add_uint32
        (writer.add_float32 if isinstance(value, float) else add)(key, value)
    for name, values in ({"token_embd.weight": np.zeros((8, 64), np.float32)} | tensors).items():
        writer.add_tensor(name, values)
    tiny.finish_gguf(writer)
    return path


@pytest.mark.parametrize("parts", [("short", "long"), ("short",)])
def test_files_with_factors_of_long_texts(parts: tuple[str, ...], llama_file: Path, tmp_path: Path) -> None:
    """rope_factors_*.weight, as in GGUF files of Phi 3.5 and Phi 4 mini; without the second, the context ends."""
    factors = {f"rope_factors_{part}.weight": np.linspace(1, 2 + len(part), 8, dtype=np.float32) for part in parts}
    metadata = {"llama.rope.scaling.original_context_length": 128}
    found = open_weights(changed_gguf(llama_file, tmp_path / "long.gguf", metadata, factors), is_gguf=True).decoder
    assert (found.limits.long_from, found.limits.length) == ((128, None) if "long" in parts else (0, 128))


DIVISORS = np.linspace(1, 8, 8, dtype=np.float32)


@pytest.mark.parametrize(("metadata", "tensors", "divisor"), [
    ({"llama.rope.scale_linear": 4.0}, {}, 4),
    ({"llama.rope.scaling.factor": 4.0}, {}, 4),
    ({"llama.rope.scaling.factor": 4.0, "llama.rope.scaling.type": "none"}, {}, 1),
    ({"llama.rope.scaling.factor": 4.0, "llama.rope.scaling.type": "linear"}, {}, 4),
    ({"llama.rope.scaling.factor": 0.0}, {}, 1),
    ({}, {"rope_freqs.weight": DIVISORS}, DIVISORS),  # as in GGUF files of Llama 3.1 and later
])  # fmt: skip
def test_frequencies_are_divided_as_llamacpp_does(
    metadata: dict[str, Any], tensors: dict[str, Any], divisor: Any, llama_file: Path, tmp_path: Path
) -> None:
    found = open_weights(changed_gguf(llama_file, tmp_path / "scaled.gguf", metadata, tensors), is_gguf=True).decoder
    plain = open_weights(llama_file, is_gguf=True).decoder
    frequencies, expected = (each.ropes["full_attention"].frequencies for each in (found, plain))
    assert np.allclose(frequencies, expected / divisor)


def test_a_gguf_file_says_how_many_numbers_of_a_head_rotate(llama_file: Path, tmp_path: Path) -> None:
    path = changed_gguf(llama_file, tmp_path / "half.gguf", {"llama.rope.dimension_count": 8}, {})
    assert open_weights(path, is_gguf=True).decoder.rotary_size == 8


@pytest.mark.parametrize(("metadata", "tensors", "says"), [
    ({"llama.expert_count": 8}, {}, "no 'num_experts_per_tok' in its configuration"),
    ({"llama.rope.scaling.type": "dynamic"}, {}, "RoPE of the kind 'dynamic'"),
    ({}, {"rope_freqs.weight": np.ones(3, np.float32)}, "rope_freqs.weight with 3 numbers for 8 frequencies"),
    ({}, {"rope_freqs.weight": np.ones(8, np.float16)}, "rope_freqs.weight as F16"),
])  # fmt: skip
def test_gguf_files_that_compute_something_else_are_refused(
    metadata: dict[str, Any], tensors: dict[str, Any], says: str, llama_file: Path, tmp_path: Path
) -> None:
    path = changed_gguf(llama_file, tmp_path / "other.gguf", metadata, tensors)
    with pytest.raises(NotDirect, match=says):
        open_weights(path, is_gguf=True)


@pytest.mark.parametrize(("name", "weight", "change", "says"), [
    ("phi3", "layers.0.self_attn.qkv_proj", lambda values: [np.concatenate([values] * 2)],
     r"qkv_proj\.weight is \[256, 64\] and has to be \[128, 64\]"),
    ("llama", "layers.1.mlp.up_proj", lambda _: [], r"no matrix model\.layers\.1\.mlp\.up_proj\.weight"),
])  # fmt: skip
def test_matrices_of_another_shape_and_missing_ones_are_named(
    name: str, weight: str, change: Any, says: str, tmp_path: Path
) -> None:
    _, folder = saved(name, tmp_path / name)
    tensors = load_file(folder / "model.safetensors")
    made = change(tensors.pop(f"model.{weight}.weight"))
    save_file(tensors | {f"model.{weight}.weight": each for each in made}, folder / "model.safetensors")
    weights = open_weights(folder, is_gguf=False)
    with pytest.raises(ExportError, match=says):
        [weights.matrix(each).read(slice(None)) for each in matrices_of(weights)]
