"""The architectures that are tried: each is exported from random weights and compared with Transformers in slow tests.

`docs/models.md` is made of this list. Others are exported, too, if optimum-intel knows them, and are compared with
Transformers then; see `outrider_export.comparison`.
"""

from __future__ import annotations

from dataclasses import dataclass

RANDOM = "random weights"
LAST_TRANSFORMERS = "5.5.99"  # the newest that optimum-intel 2.2 installs with, and that this list was tried with


@dataclass(frozen=True)
class Architecture:
    """An architecture by its `model_type` in config.json.

    models: some that have it. attention: "full", "sliding" in all layers, or "mixed". experts: whether layers are
    mixtures of experts. onnx: whether `--format onnx` is tried, too. features: whether its hidden states are found, so
    that heads can read them. tried: "random weights", and real checkpoints that were run. like: the architecture whose
    export optimum-intel is to use, which has none for this one. lifted: optimum-intel allows older versions of
    Transformers only, and the tests show that newer ones do.
    """

    name: str
    models: str
    attention: str = "full"
    experts: bool = False
    onnx: bool = False
    features: bool = True
    tried: str = RANDOM
    like: str = ""
    lifted: bool = False


_ALL = (
    Architecture("apertus", "Apertus", like="llama"),
    Architecture("arcee", "AFM 4.5B"),
    Architecture("bloom", "BLOOM"),
    Architecture("cohere", "Command R", features=False),
    Architecture("cohere2", "Command R7B, Command A", "mixed", features=False),
    Architecture("ernie4_5", "ERNIE 4.5 0.3B", onnx=True, like="llama"),
    Architecture("exaone4", "EXAONE 4.0", "mixed", lifted=True),
    Architecture("falcon", "Falcon 7B", features=False),
    Architecture("gemma", "Gemma 1", onnx=True, lifted=True),
    Architecture("gemma2", "Gemma 2", "mixed", lifted=True),
    Architecture("gemma3_text", "Gemma 3 270M and 1B", "mixed", lifted=True),
    Architecture("glm", "GLM-4 9B", lifted=True),
    Architecture("glm4", "GLM-4-0414"),
    Architecture("gpt2", "GPT-2", features=False),
    Architecture("gpt_bigcode", "StarCoder, SantaCoder", features=False),
    Architecture("gpt_neox", "Pythia, GPT-NeoX", features=False),
    Architecture("gpt_oss", "gpt-oss", "mixed", experts=True),
    Architecture("gptj", "GPT-J", features=False),
    Architecture("granite", "Granite 3", onnx=True),
    Architecture("granitemoe", "Granite 3 MoE", experts=True),
    Architecture("hunyuan_v1_dense", "Hunyuan 0.5B to 7B", onnx=True),
    Architecture("llama", "Llama, SmolLM2, TinyLlama", onnx=True, tried=f"SmolLM2-135M-Instruct, {RANDOM}"),
    Architecture("ministral", "Ministral 8B", "sliding", like="mistral"),
    Architecture("mistral", "Mistral 7B, Nemo", "sliding"),
    Architecture("mixtral", "Mixtral", "sliding", experts=True),
    Architecture("olmo", "OLMo 1"),
    Architecture("olmo2", "OLMo 2"),
    Architecture("opt", "OPT", features=False),
    Architecture("persimmon", "Persimmon"),
    Architecture("phi3", "Phi 3, Phi 3.5, Phi 4", "sliding"),
    Architecture("phimoe", "Phi 3.5 MoE", experts=True),
    Architecture("qwen2", "Qwen2, Qwen2.5", "mixed", onnx=True, tried=f"Qwen2.5-Coder-0.5B and 1.5B, {RANDOM}"),
    Architecture("qwen2_moe", "Qwen1.5 MoE, Qwen2 57B-A14B", experts=True),
    Architecture("qwen3", "Qwen3", onnx=True),
    Architecture("qwen3_moe", "Qwen3 30B-A3B", experts=True),
    Architecture("seed_oss", "Seed-OSS", like="llama"),
    Architecture("smollm3", "SmolLM3"),
    Architecture("stablelm", "StableLM 2"),
    Architecture("starcoder2", "StarCoder2", "sliding"),
)
ARCHITECTURES: dict[str, Architecture] = {each.name: each for each in _ALL}
