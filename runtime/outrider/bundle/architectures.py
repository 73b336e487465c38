"""Architectures that do not run, the rule against each, and what runs it; `docs/models.md` lists those that do.

A round appends draft tokens to the cache, and drops the rejected ones again. So a model has to keep its past in keys
and values, one pair for each token, or in a state that OpenVINO stores after each token.
"""

from __future__ import annotations

from collections.abc import Iterable

STATES = (
    "its layers keep a state that every token changes, and rejected draft tokens cannot be dropped from a state as "
    "they can from a cache"
)
_MAMBA = f"{STATES}; OpenVINO stores Mamba-2's after each token, not Mamba's"
_ALONE = f"{STATES}; OpenVINO stores Mamba-2's after each token only in models that have attention, too"
_UNWRITTEN = (
    f"{STATES}; OpenVINO stores Mamba-2's after each token, but the conversion does not know how such a model mixes it "
    "with attention"
)
_RULE = f"{STATES}; OpenVINO stores none that is computed by this rule"
_ALIBI = "OpenVINO's paged attention computes its position biases differently than in training"
_LOCAL = "OpenVINO's paged attention ignores the window of its local attention"
_CHUNKS = "its layers attend within chunks, and a paged cache supports only sliding windows"
_INDEXED = (
    "each of its tokens attends to those that an indexer has chosen, and OpenVINO's paged attention to all, or to a "
    "window of them"
)
_LOOPED = "its layers are run several times for a token, and a paged cache has one pair of keys and values a layer"
_BIASED = "OpenVINO's paged attention knows no biases that are learned for each distance"
_CONVOLVED = "its queries and keys go through convolutions, whose states the conversion does not know beside attention"
_TWICE = "each of its layers attends twice, with experts beside both, some of which return what they read"
_ANOTHER = "choose a model of the table in docs/models.md, such as Llama 3, Qwen3 or Gemma 3"

# By model_type of config.json, and by GGUF's general.architecture where that is another name.
REFUSED: dict[str, str] = (
    dict.fromkeys(("mamba", "falcon_mamba", "jamba", "zamba", "plamo2"), _MAMBA)
    | {"mamba2": _ALONE}
    | dict.fromkeys(("bamba", "falcon_h1", "falcon-h1", "zamba2"), _UNWRITTEN)
    | dict.fromkeys(
        (
            "arwkv7", "bailing_hybrid", "bailingmoe3", "kimi-k3", "kimi-linear", "kimi_k3", "kimi_linear", "minimax",
            "minimax-01", "olmo_hybrid", "recurrent_gemma", "rwkv", "rwkv6",
            "rwkv6qwen2", "rwkv7", "xlstm",
        ),
        _RULE,
    )
    | dict.fromkeys(
        (
            "axk2", "deepseek32", "deepseek4", "deepseek_v32", "deepseek_v4", "dots3_note", "dots3_note_text",
            "dots3note", "glm-dsa", "glm5-next", "glm5_next", "glm_moe_dsa", "hy_v4", "minimax-m3",
            "minimax_m3_vl_text", "mistral_large4", "qwen4_exp", "qwen4_exp_text", "qwen4exp",
        ),
        _INDEXED,
    )
    | dict.fromkeys(("dory", "hrm_text"), _LOOPED)
    | dict.fromkeys(("inkling2_text", "inkling_text"), _BIASED)
    | {"zaya": _CONVOLVED}
    | {"mpt": _ALIBI, "gpt_neo": _LOCAL, "longcat_flash": _TWICE}
)  # fmt: skip
_ONE_CHUNK = (
    "llama4_text",
)  # architectures whose context ends with the first chunk, so that layers attend to all of it
_OF_LAYERS = {"chunked_attention": _CHUNKS}
# Programs that run them. Sources: llama.cpp's gguf-py/gguf/constants.py and conversion/, vLLM's
# vllm/model_executor/models/registry.py, Transformers 5.24.
PEERS: dict[str, str] = {
    **dict.fromkeys(REFUSED, "llama.cpp"),
    **dict.fromkeys(("longcat_flash", "zamba2"), "vLLM"),
    **dict.fromkeys(("axk2", "dory", "inkling2_text", "inkling_text", "mistral_large4", "zaya"), "Transformers"),
    **dict.fromkeys(("gpt_neo", "olmo_hybrid", "recurrent_gemma", "rwkv", "xlstm", "zamba"), "Transformers"),
}
_BY_RULE = {_CHUNKS: "llama.cpp"}  # for layers of architectures that run otherwise
# Kinds of layers that run: attention, states that OpenVINO pages, and feed-forward parts that are counted as layers.
_RUN = ("full_attention", "sliding_attention", "attention", "conv", "linear_attention", "mamba", "mlp", "moe")


def refusal_of(architecture: str, layer_types: Iterable[str] = ()) -> str | None:
    """Why a model of this architecture does not run, and what to do, in sentences; None if nothing is against it.

    layer_types: as in config.json. Some architectures run if all layers have attention.
    """
    rule = REFUSED.get(architecture)
    for kind in layer_types:
        if kind == "chunked_attention" and architecture in _ONE_CHUNK:
            continue
        if rule is None and kind not in _RUN:
            rule = _OF_LAYERS.get(kind, f"its layer_types have {kind!r}, and known are {', '.join(_RUN)}")
    if rule is None:
        return None
    peer = PEERS.get(architecture, _BY_RULE.get(rule))
    instead = f"Run it with {peer}, or {_ANOTHER}" if peer else _ANOTHER[0].upper() + _ANOTHER[1:]
    return f"The architecture '{architecture}' is not supported: {rule}. {instead}."
