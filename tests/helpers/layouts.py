"""Checkpoints in the file layouts that were published from 2019 to 2026, small and with random weights.

    layout = LAYOUTS["llama-2-7b-chat"]
    write(layout, folder)

The keys of config.json, tokenizer.json and its companions, how special tokens and templates are given,
generation_config.json, shards and number types follow the publishers' files, rewritten by hand. Sizes do not.
"""

import json
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from layout_configs import CONFIGS
from layout_mixtures import LATER, NAMES, saved_tensors
from layout_tensors import tensors_of
from layout_tokenizers import text_of
from outrider_export.sources.source import text_part

HEADS, KV_HEADS, HEAD = 4, 2, 16
CONTEXT = 512
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
_SLOTS = "bos", "eos", "pad", "unk"


@dataclass(frozen=True)
class Layout:
    """A published model.

    family: of `layout_tokenizers.FAMILIES`. bos, eos, pad, unk: special tokens; "" for none. form: how
    tokenizer_config.json gives them: "texts", "objects" (`AddedToken`), or "none". decoder: whether it lists
    `added_tokens_decoder`. template: "", "text", "list" (named ones), "file" (chat_template.jinja), or "both".
    files: "json" (tokenizer.json), "vocab" (vocab.json and merges.txt), or "model" (tokenizer.model). generation:
    generation_config.json is "absent", or it and config.json have "one" eos id or a "list" with more_eos. dtype: of the
    weights.
    tied_head: whether the weights have an output matrix though it is tied; inv_freq: buffers of rotary embeddings.
    whole: the class of a model that reads images, of which this is the text part; text_at: where its tensors are there.
    mended: what Transformers 5.5 does not read in the published keys, by its own. refused: what an export without
    PyTorch says.
    """

    name: str
    year: int
    family: str
    config: str = "llama"
    changes: dict[str, Any] = field(default_factory=dict)
    bos: str = ""
    eos: str = ""
    pad: str = ""
    unk: str = ""
    form: str = "texts"
    decoder: bool = True
    map: bool = True
    template: str = ""
    files: str = "json"
    generation: str = "one"
    more_eos: tuple[str, ...] = ()
    dtype: str = "bfloat16"
    shards: int = 1
    tied_head: bool = False
    inv_freq: bool = False
    whole: str = ""
    text_at: str = ""
    mended: dict[str, Any] = field(default_factory=dict)
    refused: str = ""


_BOS_EOS: dict[str, Any] = {"bos": "<s>", "eos": "</s>", "unk": "<unk>"}
_GPT2: dict[str, Any] = {"bos": "<|endoftext|>", "eos": "<|endoftext|>", "unk": "<|endoftext|>"}
_QWEN: dict[str, Any] = {"eos": "<|im_end|>", "pad": "<|endoftext|>", "template": "text"}
_LLAMA3: dict[str, Any] = {"bos": "<|begin_of_text|>", "eos": "<|eot_id|>", "template": "text"}
_DEEPSEEK: dict[str, Any] = {
    "bos": "<｜begin▁of▁sentence｜>",
    "eos": "<｜end▁of▁sentence｜>",
    "pad": "<｜end▁of▁sentence｜>",
}
_LLAMA3_ROPE = {
    "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 128,
    "rope_type": "llama3",
}  # fmt: skip
_CODE = {"AutoConfig": "configuration_x.XConfig", "AutoModelForCausalLM": "modeling_x.XForCausalLM"}
_LONG = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "type": "longrope"}


def _needs(architecture: str) -> str:
    return rf"which has the architecture '{architecture}', needs .*, which is not installed.*\. Run: pip install"


def _layouts() -> list[Layout]:
    make: Any = Layout
    return [
        make("gpt2", 2019, "gpt2-old", "gpt2", form="none", decoder=False, map=False, dtype="float32",
             refused=_needs("GPT2LMHeadModel")),
        make("distilgpt2", 2019, "gpt2-old", "gpt2", {"_num_labels": 1}, form="none", decoder=False, map=False,
             generation="absent", dtype="float32", refused=_needs("GPT2LMHeadModel")),
        make("gpt-neo-125m", 2021, "gpt2", "gpt_neo", **_GPT2, form="objects", dtype="float32",
             refused="cannot be exported.*ignores the window of its local attention"),
        make("gpt-j-6b", 2021, "codegen", "gptj", **_GPT2, form="objects", dtype="float16",
             refused=_needs("gptj")),
        make("bloom-560m", 2022, "bloom", "bloom", bos="<s>", eos="</s>", pad="<pad>", unk="<unk>", decoder=False,
             generation="absent", dtype="float16", refused=_needs("bloom")),
        make("opt-125m", 2022, "opt", "opt", bos="</s>", eos="</s>", pad="<pad>", unk="</s>", form="objects",
             files="vocab", dtype="float16", refused=_needs("opt")),
        make("pythia-160m", 2023, "neox-old", "gpt_neox", **_GPT2, decoder=False, generation="absent",
             dtype="float16", refused=_needs("gpt_neox")),
        make("falcon-7b", 2023, "falcon", "falcon", eos="<|endoftext|>", decoder=False, shards=2,
             refused=_needs("falcon")),
        make("stablelm-3b-4e1t", 2023, "neox", "stablelm", **_GPT2, decoder=False),
        make("stablelm-2-1_6b", 2024, "cl100k-nfc", "stablelm", {"use_qkv_bias": True}, **_GPT2, dtype="float16"),
        make("llama-2-7b-chat", 2023, "llama2", changes={"torch_dtype": "float16"}, **_BOS_EOS, form="objects",
             decoder=False, template="text", dtype="float16", shards=2, inv_freq=True),
        make("codellama-7b", 2023, "llama2", changes={"rope_theta": 1000000}, **_BOS_EOS, form="objects",
             decoder=False, shards=2, inv_freq=True),
        make("tinyllama-1.1b-chat", 2023, "llama2", **_BOS_EOS, pad="</s>", template="text"),
        make("yi-6b", 2023, "yi", changes={"rope_theta": 5000000.0}, bos="<s>", eos="</s>", unk="<unk>", shards=2),
        make("deepseek-coder-1.3b", 2023, "deepseek-coder",
             changes={"rope_scaling": {"factor": 4.0, "type": "linear"}, "rope_theta": 100000}, **_DEEPSEEK,
             form="objects", template="text"),
        make("stories15m", 2023, "llama2", **_BOS_EOS, generation="absent", map=False, dtype="float32"),
        make("llama-3.1-8b-instruct", 2024, "llama3",
             changes={"rope_scaling": _LLAMA3_ROPE, "rope_theta": 500000.0}, **_LLAMA3, generation="list",
             more_eos=("<|end_of_text|>",), shards=2),
        make("llama-3.2-1b-instruct", 2024, "llama3",
             changes={"rope_scaling": _LLAMA3_ROPE | {"factor": 32.0}, "rope_theta": 500000.0, "head_dim": HEAD,
                      "tie_word_embeddings": True}, **_LLAMA3, generation="list", more_eos=("<|end_of_text|>",)),
        make("smollm2-135m-instruct", 2024, "starcoder",
             changes={"is_llama_config": True, "rope_interleaved": False, "tie_word_embeddings": True,
                      "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}}, **_QWEN,
             bos="<|im_start|>", tied_head=True),
        make("falcon3-1b-instruct", 2024, "falcon3", changes={"head_dim": 32, "activation": "swiglu"},
             eos="<|endoftext|>", pad="<|endoftext|>", template="text"),
        make("minimind2", 2025, "starcoder", changes={"tie_word_embeddings": True, "head_dim": HEAD}, **_QWEN,
             bos="<|im_start|>", dtype="float16"),
        make("llama-saved-by-transformers-5", 2026, "llama-first", "llama-v5", **_BOS_EOS, template="file",
             map=False, decoder=False),
        make("mistral-7b-v0.1", 2023, "llama2", "mistral", {"sliding_window": 16}, **_BOS_EOS, shards=2),
        make("zephyr-7b-beta", 2023, "llama2", "mistral", {"sliding_window": 16}, **_BOS_EOS, pad="</s>",
             template="text"),
        make("mistral-7b-instruct-v0.3", 2024, "llama-first", "mistral", **_BOS_EOS, template="list"),
        make("mistral-nemo-instruct-2407", 2024, "tekken", "mistral", {"head_dim": 32}, bos="<s>", eos="</s>",
             unk="<unk>", template="text"),
        make("ministral-8b-instruct-2410", 2024, "tekken", "mistral", {"head_dim": HEAD, "sliding_window": 16},
             bos="<s>", eos="</s>", unk="<unk>", form="objects"),
        make("mixtral-8x7b", 2023, "llama2", "mixtral", **_BOS_EOS, form="objects", shards=2),
        make("lfm2-1.2b", 2025, "llama3", "lfm2", **_LLAMA3, tied_head=True),
        make("qwen1.5-0.5b-chat", 2024, "qwen", "qwen2", {"tie_word_embeddings": True}, **_QWEN),
        make("qwen2.5-0.5b-instruct", 2024, "qwen", "qwen2", {"tie_word_embeddings": True}, **_QWEN,
             generation="list", more_eos=("<|endoftext|>",)),
        make("qwq-32b", 2025, "qwen", "qwen2", **_QWEN, shards=2),
        make("deepseek-r1-distill-qwen-1.5b", 2025, "deepseek-v3", "qwen2", {"use_mrope": False}, **_DEEPSEEK,
             form="objects", decoder=False, map=False, template="text"),
        make("deepseek-r1-distill-llama-8b", 2025, "llama3",
             changes={"rope_scaling": _LLAMA3_ROPE, "rope_theta": 500000.0}, **_LLAMA3, form="objects",
             decoder=False, map=False),
        make("qwen3-0.6b", 2025, "qwen", "qwen3", {"tie_word_embeddings": True}, **_QWEN, generation="list",
             more_eos=("<|endoftext|>",), tied_head=True),
        make("qwen3-saved-by-transformers-5", 2026, "qwen", "qwen3-v5", **_QWEN | {"template": "file"}, map=False,
             decoder=False),
        make("phi-2", 2023, "codegen", "phi", **_GPT2, dtype="float16", shards=2),
        make("phi-3-mini-4k-instruct", 2024, "llama2-rstrip", "phi3", {"auto_map": _CODE}, bos="<s>", eos="</s>",
             pad="</s>", unk="<unk>", template="text", generation="list", more_eos=("<|user|>",), shards=2),
        make("phi-3.5-mini-instruct", 2024, "llama2-rstrip", "phi3",
             {"rope_scaling": _LONG, "original_max_position_embeddings": 256}, **_BOS_EOS, pad="</s>",
             template="text"),
        make("phi-4-mini-instruct", 2025, "cl100k", "phi3",
             {"rope_scaling": _LONG | {"short_factor": [1.0] * 6, "long_factor": [2.0] * 6},
              "original_max_position_embeddings": 256, "partial_rotary_factor": 0.75, "tie_word_embeddings": True,
              "sliding_window": 262144}, **_GPT2, pad="<|endoftext|>", template="text"),
        make("gemma-2b-it", 2024, "gemma", "gemma", **_BOS_EOS, template="text", shards=2),
        make("gemma-2-2b-it", 2024, "gemma", "gemma2", **_BOS_EOS, template="text", shards=2),
        make("gemma-3-1b-it", 2025, "gemma", "gemma3", **_BOS_EOS, form="texts", template="text",
             generation="list", more_eos=("<|user|>",)),
        make("gemma-3-270m-unsloth", 2025, "gemma", "gemma3-later", **_BOS_EOS, template="both"),
        make("gemma-4-e2b-it", 2026, "gemma", "gemma4", **_BOS_EOS, template="file", generation="list",
             more_eos=("<|user|>",), whole="Gemma4ForConditionalGeneration", text_at="model.language_model."),
        make("smollm3-3b", 2025, "llama3", "smollm3", **_LLAMA3 | {"template": "file"}, pad="<|end_of_text|>"),
        make("olmo-1b-hf", 2024, "neox", "olmo", eos="<|endoftext|>", pad="<|padding|>", dtype="float32"),
        make("olmo-2-0425-1b", 2025, "cl100k", "olmo2", **_GPT2, form="objects"),
        make("granite-3.1-2b-instruct", 2024, "starcoder", "granite", **_GPT2, pad="<|endoftext|>", template="text"),
        make("ernie-4.5-0.3b-pt", 2025, "llama-always", "ernie4_5", **_BOS_EOS, template="file"),
        make("exaone-3.5-2.4b-instruct", 2024, "cl100k", "exaone", {"auto_map": _CODE}, bos="<|im_start|>",
             eos="<|im_end|>"),
        make("internlm2_5-1_8b-chat", 2024, "llama2", "internlm2", {"auto_map": _CODE}, **_BOS_EOS,
             refused=_needs("internlm2")),
        make("internlm3-8b-instruct", 2025, "llama2", "internlm3", {"auto_map": _CODE}, **_BOS_EOS),
        make("minicpm-2b", 2024, "llama2", "minicpm", {"auto_map": _CODE}, **_BOS_EOS, refused=_needs("minicpm")),
        make("baichuan2-7b-chat", 2023, "llama2", "baichuan", {"auto_map": _CODE}, **_BOS_EOS, form="objects",
             files="model", refused=_needs("baichuan")),
        make("c4ai-command-r-v01", 2024, "cohere", "cohere", bos="<BOS_TOKEN>", eos="<|END_OF_TURN_TOKEN|>",
             template="list", dtype="float16"),
        make("starcoder2-3b", 2024, "starcoder", "starcoder2", **_GPT2, dtype="float32"),
        make("hunyuan-0.5b-instruct", 2025, "qwen", "hunyuan_v1_dense", **_QWEN | {"template": "file"}),
        make("olmo-3-7b-instruct", 2025, "cl100k", "olmo3", **_QWEN | {"template": "file"}),
        make("exaone-4.0-1.2b", 2025, "cl100k", "exaone4", **_QWEN | {"template": "file"}, bos="<|im_start|>"),
        make("exaone-4.0-32b", 2025, "cl100k", "exaone4",
             {"num_hidden_layers": 4, "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
              "sliding_window": 16, "sliding_window_pattern": "LLLG", "tie_word_embeddings": False},
             **_QWEN | {"template": "file"}, bos="<|im_start|>", shards=2),
        make("exaone-4.5-33b", 2026, "cl100k", "exaone4",
             {"model_type": "exaone4_5_text", "num_hidden_layers": 4, "sliding_window": 16,
              "layer_types": ["sliding_attention"] * 3 + ["full_attention"], "tie_word_embeddings": False},
             **_QWEN | {"template": "file"}, bos="<|im_start|>", shards=2,
             whole="Exaone4_5_ForConditionalGeneration", text_at="model.language_model."),
        make("granite-4.1-8b", 2026, "cl100k", "granite",
             {"attention_multiplier": 0.0078125, "logits_scaling": 16.0, "rope_theta": 10000000}, **_GPT2,
             template="file", shards=2),
        make("granite-4.2-3b", 2026, "cl100k", "granite",
             {"embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0}, **_GPT2,
             template="file"),
        make("ministral-3-3b-instruct-2512-bf16", 2025, "tekken", "ministral3", bos="<s>", eos="</s>", unk="<unk>",
             template="file", whole="Mistral3ForConditionalGeneration", text_at="language_model.model."),
        make("muse-glimmer-30b", 2026, "llama3", "muse_glimmer_text", **_LLAMA3 | {"template": "file"}, shards=2,
             whole="MuseGlimmerForConditionalGeneration", text_at="model.language_model."),
        make("glm-4-9b-chat-hf", 2024, "cl100k", "glm", eos="<|im_end|>", pad="<|endoftext|>", template="text",
             generation="list", more_eos=("<|endoftext|>",), shards=2),
        make("glm-4-9b-0414", 2025, "cl100k", "glm4", eos="<|im_end|>", pad="<|endoftext|>", template="text",
             generation="list", more_eos=("<|endoftext|>",), shards=2),
        make("deepseek-v2-lite-chat", 2024, "deepseek-llm", "deepseek_v2", {"auto_map": _CODE}, **_DEEPSEEK,
             form="objects", decoder=False, map=False, template="text", shards=2),
        make("glm-4.7-flash", 2026, "cl100k", "glm4_moe_lite", eos="<|im_end|>", pad="<|endoftext|>", template="file",
             generation="list", more_eos=("<|endoftext|>",), shards=2),
        make("llama-4-scout-17b-16e-instruct", 2025, "llama4", "llama4", bos="<|begin_of_text|>", eos="<|eot|>",
             template="file", generation="list", more_eos=("<|end_of_text|>", "<|eom|>"), shards=2,
             whole="Llama4ForConditionalGeneration", text_at="language_model.model."),
        make("gemma-3n-e4b-it", 2025, "gemma", "gemma3n", **_BOS_EOS, template="file", generation="list",
             more_eos=("<|user|>",), shards=2, whole="Gemma3nForConditionalGeneration",
             text_at="model.language_model."),
        make("qwen3-vl-30b-a3b-instruct", 2025, "qwen", "qwen3_moe",
             {"model_type": "qwen3_vl_moe_text", "rope_scaling": {
                 "mrope_interleaved": True, "mrope_section": [6, 5, 5], "rope_type": "default"}},
             **_QWEN | {"template": "file"}, generation="list", more_eos=("<|endoftext|>",), shards=2,
             whole="Qwen3VLMoeForConditionalGeneration", text_at="model.language_model."),
        make("lfm2-vl-1.6b", 2025, "llama3", "lfm2", **_LLAMA3 | {"template": "file"}, tied_head=True,
             whole="Lfm2VlForConditionalGeneration", text_at="model.language_model."),
        make("granite-vision-3.3-2b", 2025, "starcoder", "granite", {"logits_scaling": 8.0}, **_GPT2,
             pad="<|endoftext|>", template="file", shards=2, whole="LlavaNextForConditionalGeneration",
             text_at="language_model.model."),
        make("trinity-nano-preview", 2025, "cl100k", "afmoe", {"auto_map": _CODE}, **_QWEN | {"template": "file"},
             shards=2),
        make("afm-4.5b", 2025, "llama3", "arcee", **_LLAMA3 | {"template": "file"}, shards=2),
        make("deepseek-v3-0324-bf16", 2025, "deepseek-v3", "deepseek_v3", {"auto_map": _CODE}, **_DEEPSEEK,
             form="objects", decoder=False, map=False, template="text", shards=3),
        make("dots.llm1.inst", 2025, "qwen", "dots1", **_QWEN, shards=2),
        make("ernie-4.5-21b-a3b-pt", 2025, "llama-always", "ernie4_5_moe", **_BOS_EOS, template="file", shards=2),
        make("k-exaone-236b-a23b", 2026, "cl100k", "exaone_moe", **_QWEN | {"template": "file"}, shards=2),
        make("glm-4.5-air", 2025, "cl100k", "glm4_moe", eos="<|im_end|>", pad="<|endoftext|>", template="file",
             generation="list", more_eos=("<|endoftext|>",), shards=2),
        make("gpt-oss-20b-bf16", 2025, "llama4", "gpt_oss", bos="<|begin_of_text|>", eos="<|eot|>",
             pad="<|end_of_text|>", template="file", generation="list", more_eos=("<|end_of_text|>",), shards=2),
        make("granite-3.1-1b-a400m-instruct", 2024, "starcoder", "granitemoe", **_GPT2, pad="<|endoftext|>",
             template="text"),
        make("granite-4.0-h-tiny", 2025, "cl100k", "granitemoehybrid", **_GPT2, pad="<|endoftext|>", template="file",
             shards=2),
        make("helium-1-2b", 2025, "llama-first", "helium", **_BOS_EOS, generation="absent"),
        make("hunyuan-a13b-instruct", 2025, "qwen", "hunyuan_v1_moe", **_QWEN | {"template": "file"}, shards=2),
        make("lfm2-8b-a1b", 2025, "llama3", "lfm2_moe", **_LLAMA3 | {"template": "file"}, shards=2),
        make("lfm3-1.7b", 2026, "llama3", "lfm3", **_LLAMA3 | {"template": "file"}),
        make("minimax-m2-bf16", 2025, "qwen", "minimax_m2", {"auto_map": _CODE}, **_QWEN | {"template": "file"},
             shards=2, mended={"partial_rotary_factor": 0.5}),
        make("ministral-8b-saved-by-transformers-5", 2025, "tekken", "ministral", bos="<s>", eos="</s>", unk="<unk>",
             template="file", map=False, decoder=False),
        make("nemotron-mini-4b-instruct", 2024, "llama2", "nemotron", **_BOS_EOS, template="text", shards=2),
        make("nemotron-nano-9b-v2", 2025, "tekken", "nemotron_h", {"auto_map": _CODE}, bos="<s>", eos="</s>",
             unk="<unk>", template="text", dtype="float32", shards=2),
        make("olmoe-1b-7b-0924-instruct", 2024, "neox", "olmoe", eos="<|endoftext|>", pad="<|padding|>",
             template="text", shards=2),
        make("qwen1.5-moe-a2.7b-chat", 2024, "qwen", "qwen2_moe", **_QWEN, shards=2),
        make("qwen3.5-text", 2026, "qwen", "qwen3_5", **_QWEN | {"template": "file"}),
        make("qwen3.5-moe-text", 2026, "qwen", "qwen3_5_moe", **_QWEN | {"template": "file"}, shards=2),
        make("qwen3-next-80b-a3b-instruct", 2025, "qwen", "qwen3_next", **_QWEN, generation="list",
             more_eos=("<|endoftext|>",), shards=2),
        make("seed-oss-36b-instruct", 2025, "cl100k", "seed_oss", **_QWEN | {"template": "file"}, shards=2),
        make("solar-open-100b", 2026, "cl100k", "solar_open", **_QWEN | {"template": "file"}, shards=2),
        make("youtu-llm-2b", 2026, "qwen", "youtu", {"auto_map": _CODE}, eos="<|im_end|>", template="file"),
        make("apertus-8b-instruct-2509", 2025, "tekken", "apertus", bos="<s>", eos="</s>", unk="<unk>",
             template="file", refused=_needs("apertus")),
        make("c4ai-command-r7b-12-2024", 2024, "cohere", "cohere2", bos="<BOS_TOKEN>",
             eos="<|END_OF_TURN_TOKEN|>", template="list", dtype="float16"),
        make("starcoderbase-1b", 2023, "starcoder", "gpt_bigcode", **_GPT2, dtype="float32",
             refused=_needs("gpt_bigcode")),
        make("persimmon-8b-chat", 2023, "llama2", "persimmon", **_BOS_EOS, refused=_needs("persimmon")),
        make("phi-3.5-moe-instruct", 2024, "llama2-rstrip", "phimoe", {"auto_map": _CODE}, **_BOS_EOS, pad="</s>",
             template="text", refused=_needs("phimoe")),
        make("t5-small", 2019, "t5-old", "t5", eos="</s>", pad="<pad>", unk="<unk>", decoder=False,
             dtype="float32", refused=_needs("T5ForConditionalGeneration")),
        make("flan-t5-small", 2022, "t5", "t5", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
             eos="</s>", pad="<pad>", unk="<unk>", dtype="float32", refused=_needs("T5ForConditionalGeneration")),
        make("whisper-base", 2022, "whisper", "whisper", **_GPT2, form="objects", decoder=False, dtype="float32",
             refused=_needs("WhisperForConditionalGeneration")),
        make("opus-mt-en-de", 2020, "t5", "marian", eos="</s>", pad="<pad>", unk="<unk>", decoder=False,
             dtype="float32", refused=_needs("MarianMTModel")),
    ]  # fmt: skip


LAYOUTS: dict[str, Layout] = {each.name: each for each in _layouts()}
DIRECT = [name for name, each in LAYOUTS.items() if not each.refused]


def config_of(layout: Layout) -> dict[str, Any]:
    """Its config.json."""
    tokenizer = json.loads(text_of(layout.family))
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    size = 1 + max([*ids.values(), *_pieces(tokenizer).values()])
    config = (CONFIGS | LATER)[layout.config] | {"vocab_size": -(-size // 64) * 64} | layout.changes
    if "vocab_size_per_layer_input" in config:  # published files have fewer; Transformers' text classes read no others
        config["vocab_size_per_layer_input"] = config["vocab_size"]
    eos = [ids[token] for token in (layout.eos, *layout.more_eos) if token]
    config |= {f"{slot}_token_id": ids[getattr(layout, slot)] for slot in ("bos", "pad") if getattr(layout, slot)}
    if eos:
        config["eos_token_id"] = eos if layout.generation == "list" else eos[0]
    return config


def architecture_of(layout: Layout) -> str:
    """Its architecture, as in docs/models.md."""
    config = config_of(layout)
    return str(text_part(_around(layout, config) if layout.whole else config)["model_type"])


def _pieces(tokenizer: dict[str, Any]) -> dict[str, int]:
    pieces = tokenizer["model"]["vocab"]
    return pieces if isinstance(pieces, dict) else {piece: i for i, (piece, _) in enumerate(pieces)}


def write_configs(layout: Layout, folder: Path) -> Path:
    """All files but the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config = config_of(layout)
    _save(folder / "config.json", _around(layout, config) if layout.whole else config)
    if layout.generation != "absent":
        eos = {"eos_token_id": config["eos_token_id"]} if "eos_token_id" in config else {}
        _save(folder / "generation_config.json", {"_from_model_config": True, **eos})
    _write_tokenizer(layout, folder)
    return folder


def _around(layout: Layout, config: dict[str, Any]) -> dict[str, Any]:
    """The config.json of a model that reads images, with that of its text part."""
    vision = {"hidden_size": 32, "model_type": "vision", "num_hidden_layers": 1}
    return {"architectures": [layout.whole], "text_config": config, "vision_config": vision}


def _write_tokenizer(layout: Layout, folder: Path) -> None:
    text = text_of(layout.family)
    content = json.loads(text)
    if layout.files == "json":
        (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    elif layout.files == "vocab":
        added = {token["content"]: token["id"] for token in content["added_tokens"]}
        merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"]]
        _save(folder / "vocab.json", content["model"]["vocab"] | added)
        (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n", encoding="utf-8")
    else:
        (folder / "tokenizer.model").write_bytes(b"\n\x0c\n\x05<unk>")
    plain = {"lstrip": False, "normalized": layout.form == "objects", "rstrip": False, "single_word": False}
    named = {f"{slot}_token": getattr(layout, slot) for slot in _SLOTS if getattr(layout, slot)}
    objects = {key: {"__type": "AddedToken", "content": token, **plain} for key, token in named.items()}
    config: dict[str, Any] = {"model_max_length": CONTEXT, "tokenizer_class": _CLASSES.get(layout.family, _FAST)}
    config |= {"texts": named, "objects": objects, "none": {}}[layout.form]
    if layout.decoder:
        config["added_tokens_decoder"] = {
            str(token["id"]): {key: value for key, value in token.items() if key != "id"}
            for token in content["added_tokens"]
        }
    other = TEMPLATE.replace("assistant", "stale")
    if layout.template in ("text", "both"):
        config["chat_template"] = TEMPLATE if layout.template == "text" else other
    elif layout.template == "list":
        config["chat_template"] = [
            {"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": other},
        ]  # fmt: skip
    if layout.template in ("file", "both"):
        (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    _save(folder / "tokenizer_config.json", config)
    if layout.map:
        plainer = {
            key: {name: each for name, each in value.items() if name != "__type"} for key, value in objects.items()
        }
        _save(folder / "special_tokens_map.json", plainer if layout.form == "objects" else named)


_FAST = "PreTrainedTokenizerFast"
_CLASSES = {"llama2": "LlamaTokenizer", "gpt2-old": "GPT2Tokenizer", "opt": "GPT2Tokenizer", "qwen": "Qwen2Tokenizer"}


def _save(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def write(layout: Layout, folder: Path) -> Path:
    """All files, of a model that is converted without PyTorch."""
    write_configs(layout, folder)
    if layout.config in NAMES:
        made = saved_tensors(layout.config, folder, len(layout.name))
        lacking = [name for name in NAMES[layout.config] if not any(each.endswith(f".{name}") for each in made)]
        assert not lacking, lacking
    else:
        made = tensors_of(config_of(layout), np.random.default_rng(len(layout.name)))
    if not layout.tied_head and config_of(layout).get("tie_word_embeddings", "gemma" in layout.config):
        made.pop("lm_head.weight")
    if layout.inv_freq:
        made |= {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32) for i in range(2)}
    if layout.whole:
        head = "language_model." if layout.text_at.startswith("language_model.") else ""
        made = {
            name.replace("model.", layout.text_at, 1).replace("lm_head.", f"{head}lm_head."): values
            for name, values in made.items()
        }
        made |= {"model.vision_tower.patch.weight": np.ones((4, 4), np.float32)}
        made |= {"mtp.fc.weight": np.ones((4, 4), np.float32)} if "Exaone" in layout.whole else {}
    names = [*made]
    parts = [names[i :: layout.shards] for i in range(layout.shards)]
    files = ["model.safetensors"]
    if layout.shards > 1:
        files = [f"model-{i + 1:05}-of-{layout.shards:05}.safetensors" for i in range(layout.shards)]
        weight_map = {name: file for file, part in zip(files, parts, strict=True) for name in part}
        _save(folder / "model.safetensors.index.json", {"metadata": {"total_size": 1}, "weight_map": weight_map})
    for file, part in zip(files, parts, strict=True):
        _save_tensors(folder / file, {name: made[name] for name in part}, layout.dtype)
    return folder


def _save_tensors(path: Path, tensors: dict[str, Any], dtype: str) -> None:
    """A safetensors file; its own library writes bfloat16 with PyTorch only."""
    kind, stored = {"bfloat16": ("BF16", None), "float16": ("F16", "<f2"), "float32": ("F32", "<f4")}[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, each in tensors.items():
        values = np.ascontiguousarray(each, np.float32)
        made = values.astype(stored) if stored else (values.view(np.uint32) >> 16).astype("<u2")
        header[name] = {"dtype": kind, "shape": values.shape, "data_offsets": [len(data), len(data) + made.nbytes]}
        data += made.tobytes()
    head = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + data)
