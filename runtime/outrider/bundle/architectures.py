"""Architectures that do not run, and the rule against each; `docs/models.md` lists those that do.

A round appends draft tokens to the cache, and drops the rejected ones again. So a model has to keep its past in keys
and values, one pair for each token. A state that every token changes has nothing to drop.
"""

from __future__ import annotations

from collections.abc import Iterable

STATES = (
    "its layers keep a state that every token changes, and rejected draft tokens cannot be dropped from a state as "
    "they can from a cache"
)
_ALIBI = "OpenVINO's paged attention computes its position biases differently than in training"
_LOCAL = "OpenVINO's paged attention ignores the window of its local attention"
_CHUNKS = "its layers attend within chunks, and a paged cache supports only sliding windows"
_LATENT = "optimum-intel exports its latent attention only with Transformers before 4.54"
_ANOTHER = "Choose a model with attention in all layers, such as Llama 3, Qwen3 or Gemma 3; docs/models.md lists them."

# By model_type of config.json, and by GGUF's general.architecture where that is another name.
REFUSED: dict[str, str] = (
    dict.fromkeys(
        (
            "mamba", "mamba2", "falcon_mamba", "rwkv", "recurrent_gemma", "jamba", "zamba", "zamba2", "bamba",
            "falcon_h1", "nemotron_h", "xlstm", "minimax",
            "olmo_hybrid", "arwkv7", "falcon-h1", "kimi-linear", "nemotron_h_moe", "plamo2",
            "rwkv6", "rwkv6qwen2", "rwkv7",
        ),
        STATES,
    )
    | {"mpt": _ALIBI, "gpt_neo": _LOCAL, "llama4_text": _CHUNKS}
    | dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek2"), _LATENT)
)  # fmt: skip
_OF_LAYERS = {"chunked_attention": _CHUNKS}
# Kinds of layers that run: attention, and states that OpenVINO pages.
_RUN = ("full_attention", "sliding_attention", "attention", "conv", "linear_attention", "mamba")


def refusal_of(architecture: str, layer_types: Iterable[str] = ()) -> str | None:
    """Why a model of this architecture does not run, and what to do, in sentences; None if nothing is against it.

    layer_types: as in config.json. Some architectures run if all layers have attention.
    """
    rule = REFUSED.get(architecture)
    for kind in layer_types:
        if rule is None and kind not in _RUN:
            rule = _OF_LAYERS.get(kind, f"its layer_types have {kind!r}, and known are {', '.join(_RUN)}")
    return rule and f"The architecture '{architecture}' is not supported: {rule}. {_ANOTHER}"
