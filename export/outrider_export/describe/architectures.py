"""The architectures that are tried, and what Transformers' configurations say of their layers.

Each is exported from random weights and compared with Transformers in slow tests.

`docs/models.md` is made of this list. Others are exported, too, if optimum-intel knows them, and are compared with
Transformers then; see `outrider_export.with_torch.comparison`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

LAST_TRANSFORMERS = "5.5.99"  # the newest that optimum-intel 2.2 installs with, and that this list was tried with


@dataclass(frozen=True)
class Architecture:
    """An architecture by its `model_type` in config.json.

    models: some that have it. attention: "full", "sliding" in all layers, or "mixed". states: what layers without
    attention have; "" if there are none. experts: whether layers are mixtures of experts. onnx: whether `--format onnx`
    is tried, too. features: whether its hidden states are found, so that heads can read them. real: published
    checkpoints that were run, too. like: the architecture whose export optimum-intel is to use, which has none for this
    one. lifted: optimum-intel allows older versions of Transformers only, and the tests show that newer ones do.
    """

    name: str
    models: str
    attention: str = "full"
    states: str = ""
    experts: bool = False
    onnx: bool = False
    features: bool = True
    real: str = ""
    like: str = ""
    lifted: bool = False


_ALL = (
    Architecture("afmoe", "Trinity Nano and Mini", "mixed", experts=True),
    Architecture("apertus", "Apertus", like="llama"),
    Architecture("arcee", "AFM 4.5B"),
    Architecture("bailing_moe_v2", "Ling and Ring 2.0: mini, flash, 1T", experts=True),
    Architecture("bloom", "BLOOM"),
    Architecture("cohere", "Command R, Aya 23", features=False),
    Architecture("cohere2", "Command R7B, Command A, Tiny Aya", "mixed", features=False),
    Architecture("cohere2_moe", "North Mini Code 30B-A3B", "mixed", experts=True, features=False),
    Architecture("deepseek_v2", "DeepSeek V2, V2-Lite", experts=True),
    Architecture("deepseek_v3", "DeepSeek V3, Kimi K2, Moonlight 16B-A3B", experts=True),
    Architecture("dots1", "dots.llm1", experts=True),
    Architecture("ernie4_5", "ERNIE 4.5 0.3B", onnx=True, like="llama"),
    Architecture("ernie4_5_moe", "ERNIE 4.5 21B-A3B, 300B-A47B", experts=True),
    Architecture("exaone", "EXAONE 3.0, 3.5, Deep"),
    Architecture("exaone4", "EXAONE 4.0, EXAONE 4.5 without images", "mixed", onnx=True, lifted=True),
    Architecture("exaone_moe", "K-EXAONE 236B-A23B", "mixed", experts=True),
    Architecture("falcon", "Falcon 7B", features=False),
    Architecture("gemma", "Gemma 1", onnx=True, lifted=True),
    Architecture("gemma2", "Gemma 2", "mixed", lifted=True),
    Architecture("gemma3_text", "Gemma 3", "mixed", lifted=True),
    Architecture("gemma3n_text", "Gemma 3n, without images and sounds", "mixed", features=False),
    Architecture("gemma4_text", "Gemma 4, without sounds", "mixed"),
    Architecture("glm", "GLM-4 9B", onnx=True, lifted=True),
    Architecture("glm4", "GLM-4-0414, GLM-Z1", onnx=True),
    Architecture("glm4_moe", "GLM-4.5, GLM-4.5-Air, GLM-4.6, GLM-4.7", experts=True),
    Architecture("glm4_moe_lite", "GLM-4.7-Flash", experts=True),
    Architecture("gpt2", "GPT-2", features=False),
    Architecture("gpt_bigcode", "StarCoder, SantaCoder", features=False),
    Architecture("gpt_neox", "Pythia, GPT-NeoX", features=False),
    Architecture("gpt_oss", "gpt-oss", "mixed", experts=True),
    Architecture("gptj", "GPT-J", features=False),
    Architecture("granite", "Granite 3, Granite 4.1", onnx=True),
    Architecture("granitemoe", "Granite 3 MoE", experts=True),
    Architecture("granitemoehybrid", "Granite 4.0-H", states="Mamba-2", experts=True),
    Architecture("granite_swa", "Granite Swash 2B", "mixed"),
    Architecture("granitemoe_swa", "Granite Swash 3B-A600M", "mixed", experts=True),
    Architecture("helium", "Helium 1 2B"),
    Architecture("hunyuan_v1_dense", "Hunyuan 0.5B to 7B"),
    Architecture("hunyuan_v1_moe", "Hunyuan A13B", experts=True),
    Architecture("hy_v3", "Hunyuan Hy3", experts=True),
    Architecture("hyperclovax", "HyperCLOVA X SEED Think 14B"),
    Architecture("internlm3", "InternLM3 8B"),
    Architecture("iquestcoder", "IQuest-Coder V1"),
    Architecture("lfm2", "LFM2, LFM2.5", states="short convolution"),
    Architecture("lfm2_moe", "LFM2 8B-A1B, LFM2.5 24B-A2B", experts=True, states="short convolution"),
    Architecture("lfm3", "LFM3 1.7B", "mixed", "short convolution"),
    Architecture("llama", "Llama, SmolLM2, TinyLlama", onnx=True, real="SmolLM2-135M-Instruct"),
    Architecture("llama4_text", "Llama 4 Scout and Maverick, without images", experts=True),
    Architecture("mellum", "Mellum 2 12B-A2.5B", "mixed", experts=True),
    Architecture("minimax_m2", "MiniMax M2, M2.1", experts=True),
    Architecture("ministral", "Ministral 8B", "sliding", like="mistral"),
    Architecture("ministral3", "Ministral 3"),
    Architecture("mistral", "Mistral 7B, Nemo, Small 3", "sliding", onnx=True),
    Architecture("mixtral", "Mixtral", "sliding", experts=True),
    Architecture("muse_glimmer_text", "Muse Glimmer, without images", "mixed"),
    Architecture("nemotron", "Nemotron 4, Minitron"),
    Architecture(
        "nemotron_h", "Nemotron-H, Nemotron Nano 2, Nemotron 3 Nano", states="Mamba-2", experts=True, features=False
    ),
    Architecture("olmo", "OLMo 1", onnx=True),
    Architecture("olmo2", "OLMo 2", onnx=True),
    Architecture("olmo3", "OLMo 3", "mixed"),
    Architecture("olmoe", "OLMoE", experts=True),
    Architecture("opt", "OPT", features=False),
    Architecture("persimmon", "Persimmon"),
    Architecture("phi", "Phi 1, 1.5, 2", features=False),
    Architecture("phi3", "Phi 3, Phi 3.5, Phi 4", "sliding", onnx=True),
    Architecture("phimoe", "Phi 3.5 MoE", experts=True),
    Architecture("qwen2", "Qwen2, Qwen2.5", "mixed", onnx=True, real="Qwen2.5-Coder-0.5B and 1.5B"),
    Architecture("qwen2_moe", "Qwen1.5 MoE, Qwen2 57B-A14B", experts=True),
    Architecture("qwen3", "Qwen3", onnx=True),
    Architecture("qwen3_5_moe_text", "Qwen3.5 35B-A3B", states="gated delta net", experts=True),
    Architecture("qwen3_5_text", "Qwen3.5", states="gated delta net"),
    Architecture("qwen3_moe", "Qwen3 30B-A3B, Qwen3-VL 30B-A3B", experts=True),
    Architecture("qwen3_next", "Qwen3-Next", states="gated delta net", experts=True),
    Architecture("sarvam_moe", "Sarvam 30B", experts=True),
    Architecture("seed_oss", "Seed-OSS", onnx=True, like="llama"),
    Architecture("smollm3", "SmolLM3", onnx=True),
    Architecture("solar_open", "Solar Open 100B", experts=True),
    Architecture("stablelm", "StableLM 2", onnx=True),
    Architecture("starcoder2", "StarCoder2", "sliding"),
    Architecture("youtu", "Youtu-LLM 2B"),
)
ARCHITECTURES: dict[str, Architecture] = {each.name: each for each in _ALL}
# Whose sliding window, if one is set, is that of all layers. Others say it by layer, in layer_types.
_ALL_LAYERS = ("ministral", "mistral", "mixtral", "phi3", "phimoe", "qwen2_moe", "qwen3_moe", "starcoder2")


def describe_layers(config: Any) -> dict[str, Any]:
    """The fields of `Geometry` that a loaded model's configuration tells: those of its layers."""
    experts = ("num_experts", "num_local_experts", "n_routed_experts")
    num_experts = next((getattr(config, name) for name in experts if getattr(config, name, None)), 0)
    return {
        "sliding_windows": windows_of_config(config),
        "num_experts": num_experts,
        "num_active_experts": (getattr(config, "num_experts_per_tok", None) or 0) if num_experts else 0,
    }


def windows_of_config(config: Any) -> list[int]:
    """The sliding window of each layer, in tokens; 0 where a layer attends to all tokens before it."""
    window = getattr(config, "sliding_window", None) or 0
    if kinds := getattr(config, "layer_types", None):
        return [window if kind == "sliding_attention" else 0 for kind in kinds]
    is_used = config.model_type in _ALL_LAYERS and getattr(config, "use_sliding_window", True)
    return [window if is_used else 0] * config.num_hidden_layers


def settle_positions(config: Any) -> dict[str, int]:
    """Have a loaded model rotate by one set of frequencies; the fields of `Geometry` that this changes.

    LongRoPE (Phi 3 and later) has two, and takes the second as soon as any position of a call is above a limit. Then a
    draft that passes the limit would change the rows before it, and so would another sequence in the same call. The
    first set is taken for all, and the context ends at the limit: there, Transformers' own text is the same.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return {}
    for name in ("factor", "mscale"):
        if f"short_{name}" in rope:
            rope[f"long_{name}"] = rope[f"short_{name}"]
    return {"context_length": int(rope["original_max_position_embeddings"])}
