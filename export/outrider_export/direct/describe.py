"""What a decoder computes, from its configuration: `describe` reads what config.json says, with Transformers' defaults.

Source: Transformers 5.5, configuration_*.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from outrider.bundle.fields import MOST_LAYERS, MOST_WIDTH
from outrider_export.direct.arch import Arch, NotDirect
from outrider_export.direct.archs import ARCHS
from outrider_export.direct.decoder import ContextLimits, Decoder, Layer, LayerEmbedding, QueryGrowth, Scales
from outrider_export.direct.experts import experts_of
from outrider_export.direct.latent import Latent, dense_layers, latent_of, scale_of
from outrider_export.direct.rope import Rope, rope_of
from outrider_export.direct.sizes import FULL, MLP, MOE, Blocks, LayerSizes, block_kinds, varied_sizes
from outrider_export.direct.states import STATES, State
from outrider_export.direct.streams import cutoffs_of, streams_of

SLIDING = "sliding_attention"
_ATTENTION = (SLIDING, FULL, "attention")
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
_BY_BASE = ("layer_rope_theta", "bases")  # how layers that each name a base of their rotation are told
_UNGATED = {"relu2": "relu2"}  # activations of feed-forward parts without a gate, too
# Switches that change what is computed, in a way that the graph does not have.
_SWITCHES = ("clip_qkv", "qk_layernorm", "use_parallel_residual", "use_bidirectional_attention", "use_cla", "norm_head")


def describe(config: Mapping[str, Any]) -> Decoder:
    """The decoder that a config.json describes.

    Raises:
        NotDirect: when it computes something that `graph` does not have.
    """
    name = config.get("model_type")
    arch = ARCHS.get(str(name))
    if arch is None:
        raise NotDirect(f"the architecture {name!r}")
    return describe_as(arch, settled(arch, config))


def settled(arch: Arch, config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json with Transformers' defaults, and by the names of keys here."""
    config = {key: value for key, value in {**arch.defaults, **config}.items() if value is not None}
    config |= {ours: config[theirs] for ours, theirs in arch.keys.items() if theirs in config}
    if "full_attn_idxs" in config and "layer_types" not in config:  # LFM2
        every = range(int(config["num_hidden_layers"]))
        config["layer_types"] = [FULL if i in config["full_attn_idxs"] else "conv" for i in every]
    if "full_attention_interval" in config and "layer_types" not in config:  # Qwen3-Next, Qwen3.5
        step, every = int(config["full_attention_interval"]), range(int(config["num_hidden_layers"]))
        config["layer_types"] = ["linear_attention" if (i + 1) % step else FULL for i in every]
    if "mamba_n_heads" in config and "layer_types" in config:  # which later Transformers name as other states
        config["layer_types"] = ["mamba" if each == "linear_attention" else each for each in config["layer_types"]]
    if config.get("use_bidirectional_attention") == "vision":  # among the tokens of an image
        config["use_bidirectional_attention"] = False
    for key in ("num_experts", "num_experts_per_tok"):  # which Hunyuan's say by layer
        if isinstance(each := config.get(key), list) and len({*each}) == 1:
            config[key] = each[0]
    if arch.adjust is not None:
        arch.adjust(config)
    if isinstance(sizes := config.get("intermediate_size"), list) and arch.varied and sizes:
        config |= {"intermediate_size": max(sizes), "intermediate_sizes": sizes}
    return config


def describe_as(arch: Arch, config: dict[str, Any]) -> Decoder:
    """The decoder of an architecture, as `describe`. config: as `settled` makes it."""
    activations = ACTIVATIONS | _UNGATED if arch.ungated else ACTIVATIONS
    for switch in (*_SWITCHES, *arch.switches):
        if config.get(switch):
            raise NotDirect(f"{switch}={config[switch]!r}")
    if config.get("num_local_experts") and not arch.experts.router:
        raise NotDirect(f"num_local_experts={config['num_local_experts']!r}")
    given = config.get("hidden_activation") or config.get("hidden_act") or "silu"
    for each in (given, config.get("mamba_hidden_act", "silu")):
        if each not in activations:
            raise NotDirect(f"the activation {each!r}")
    try:
        return _decoder(arch, config, activations[given])
    except KeyError as error:
        raise NotDirect(f"no {error.args[0]!r} in its configuration") from error
    except (TypeError, ValueError) as error:
        raise NotDirect(str(error)) from error


def _decoder(arch: Arch, config: dict[str, Any], activation: str) -> Decoder:
    blocks = None
    if arch.layers == "blocks":
        blocks = Blocks.of(block_kinds(config))
        config = config | _as_layers(blocks, config)
    arch, config = _as_configured(arch, config)
    latent = latent_of(config) if arch.attention.latent else None
    sizes = _sizes(config, latent)
    full_size = int(config.get("global_head_dim") or sizes.head_size) if arch.varied else sizes.head_size
    if (largest := max(sizes.head_size, full_size)) > MOST_WIDTH or int(config["num_hidden_layers"]) > MOST_LAYERS:
        raise ValueError(f"{config['num_hidden_layers']} layers with heads of {largest} numbers")
    layers = _layers(arch, config, sizes, blocks)
    rotated = full_size if latent is None else latent.rotated
    ropes, limit = _ropes(arch, config, {FULL: rotated, SLIDING: sizes.head_size})
    has_long = ropes[FULL].long is not None
    chunk = int(config.get("attention_chunk_size", 0)) if arch.attention.chunked else 0
    if chunk < int(config["max_position_embeddings"]):
        limit = chunk or limit
    if latent is not None:
        scale = scale_of(latent, config)
    else:
        scale = config.get("attention_multiplier") or config.get("query_pre_attn_scalar", sizes.head_size) ** -0.5
    hidden = int(config["hidden_size"])
    eps = float(config.get("rms_norm_eps", 1e-6) if arch.norms.kind == "rms" else config["layer_norm_eps"])
    embedding_scale = config.get("embedding_multiplier", hidden**0.5 if arch.embedding == "scaled" else 1.0)
    inputs = int(config.get("hidden_size_per_layer_input", 0))
    with_inputs = int(config.get("vocab_size_per_layer_input", 0)) if arch.layers == "streams" else 0
    return Decoder(
        arch=arch,
        hidden_size=hidden,
        num_heads=int(config["num_attention_heads"]),
        sizes=sizes,
        eps=eps,
        after_eps=float(config.get("post_norm_eps", eps)),
        activation=activation,
        ropes=ropes,
        layers=layers,
        scales=Scales(
            attention=float(scale) * float(config.get("qk_scale_factor", 1.0)),
            embedding=float(embedding_scale),
            residual=float(config.get("residual_multiplier", 1.0)),
            logits=float(config.get("output_multiplier", 1.0)) / float(config.get("logits_scaling", 1.0)),
            logit_cap=float(config.get("final_logit_softcapping", 0.0)),
        ),
        query_growth=_query_growth(arch, config),
        tied=bool(config.get("tie_word_embeddings", False)),
        limits=ContextLimits(None if has_long else limit, chunk, limit if has_long and limit else 0),
        layer_embedding=LayerEmbedding(inputs, with_inputs) if inputs else None,
        blocks=blocks,
        streams=streams_of(config) if arch.layers == "streams" else None,
    )


def _as_layers(blocks: Blocks, config: Mapping[str, Any]) -> dict[str, Any]:
    """What a configuration that lists blocks says of layers."""
    kinds = block_kinds(config)
    if unknown := [kind for kind in kinds if kind not in (*STATES, *_ATTENTION, MLP, MOE)]:
        raise ValueError(f"layers of the kind {unknown[0]!r}")
    mixing = [kinds[number] for number in blocks.mixing]
    size = config.get("head_dim", config.get("attention_head_dim"))
    return {"layer_types": mixing, "num_hidden_layers": len(mixing), "head_dim": size}


def _as_configured(arch: Arch, config: dict[str, Any]) -> tuple[Arch, dict[str, Any]]:
    """An entry without the parts that a configuration turns off, and the configuration that says which layers have the
    others.
    """
    if arch.attention.chunked and not config.get("use_qk_norm", True):
        arch = replace(arch, attention=replace(arch.attention, normed_after_rope=False, normed_heads=False))
    if not config.get("use_sandwich_norm", True):
        arch = replace(arch, norms=replace(arch.norms, after_attention="", after_mlp=""))
    if not config.get("use_attention_gate", True):
        arch = replace(arch, attention=replace(arch.attention, gate=""))
    if arch.layers == "parallel" and arch.experts.router:
        arch = replace(arch, norms=replace(arch.norms, kind="rms" if "rms_norm_eps" in config else "layer"))
        router = "top_softmax" if config["scoring_func"] == "softmax" else arch.experts.router
        how = {"average": "averaged", "sum": "added"}[config["shared_expert_combination_strategy"]]
        shared = how if config["n_shared_experts"] else ""
        arch = replace(arch, experts=replace(arch.experts, router=router, shared=shared))
    if arch.experts.shared == "added" and config.get("shared_intermediate_size") == 0:
        arch = replace(arch, experts=replace(arch.experts, shared=""))
        config = config | {"intermediate_size": config["moe_intermediate_size"]}
    return arch, config | dense_layers(config) if arch.experts.router else config


def _sizes(config: Mapping[str, Any], latent: Latent | None) -> LayerSizes:
    """Those of a layer with a sliding window, where layers differ."""
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    if latent is not None:
        return LayerSizes(heads, latent.head_size, _mlp_size(config), latent=latent)
    head_size, kv_heads = int(config.get("head_dim") or hidden // heads), config.get("num_key_value_heads") or heads
    return LayerSizes(int(kv_heads), head_size, _mlp_size(config))


def _layers(arch: Arch, config: Mapping[str, Any], sizes: LayerSizes, blocks: Blocks | None) -> tuple[Layer, ...]:
    states = _states(config)
    if "moe_latent_size" in config:
        raise ValueError(f"experts that read a shorter row (moe_latent_size={config['moe_latent_size']})")
    fed = [MOE] * len(states)  # the kinds of feed-forward parts; "" for none
    if blocks is not None:
        kinds = block_kinds(config)
        fed = ["" if number is None else kinds[number] for number in blocks.feeding]
    experts = [
        experts_of(arch.experts, config, i, gated=not arch.ungated) if kind == MOE else None
        for i, kind in enumerate(fed)
    ]
    if arch.experts.shared and any(experts) and not all(experts) and not arch.experts.grouped:
        raise ValueError("layers with and without experts beside a shared one")
    of_layers = varied_sizes(config, sizes) if arch.varied else [sizes] * len(states)
    if arch.experts.grouped and any(experts):
        size = int(config["moe_intermediate_size"]) * int(config["n_shared_experts"])
        size = int(config["moe_shared_expert_intermediate_size"]) if blocks is not None else size
        shared = replace(sizes, mlp_size=size)
        of_layers = [sizes if mixture is None else shared for mixture in experts]
    windows = _windows(arch, config)
    rotations = _rotations(arch, config, windows)
    if config.get("prefix_dense_sliding_window_pattern") == 1:  # the first layers, which are dense, rotate, too
        rotations = [rope if mixture else FULL for rope, mixture in zip(rotations, experts, strict=True)]
    cutoffs = cutoffs_of(config, len(states)) if arch.layers == "streams" else [None] * len(states)
    return tuple(
        Layer(window, rope, None, mixture, each, bool(kind), cutoff)
        if state is None
        else Layer(0, None, state, mixture, each, bool(kind), cutoff)
        for window, rope, state, mixture, each, kind, cutoff in zip(
            windows, rotations, states, experts, of_layers, fed, cutoffs, strict=True
        )
    )


def _mlp_size(config: Mapping[str, Any]) -> int:
    size = int(config["intermediate_size"])
    if config.get("block_auto_adjust_ff_dim"):
        multiple = int(config["block_multiple_of"])
        size = int(config["block_ffn_dim_multiplier"] * int(2 * size / 3))
        size = -(-size // multiple) * multiple
    return size


def _query_growth(arch: Arch, config: Mapping[str, Any]) -> QueryGrowth | None:
    """How queries grow with their position, as Llama 4 and Ministral 3."""
    if arch.attention.chunked:
        growth, step = float(config["attn_scale"]), int(config["floor_scale"])
        if growth < 0 or step < 1:
            raise ValueError(f"attn_scale={growth} with floor_scale={step}")
        return QueryGrowth(growth, step, 1) if growth and config["attn_temperature_tuning"] else None
    rope = config.get("rope_parameters") or {}
    growth = float(rope.get("llama_4_scaling_beta") or 0.0)
    step = int(rope["original_max_position_embeddings"]) if growth else 1
    if growth < 0 or step < 1:
        raise ValueError(f"llama_4_scaling_beta={growth} with original_max_position_embeddings={step}")
    return QueryGrowth(growth, step, 0) if growth else None


def _states(config: Mapping[str, Any]) -> list[State | None]:
    """The states of all layers; None for those with attention."""
    count = int(config["num_hidden_layers"])
    kinds = config.get("layer_types") or [FULL] * count
    if len(kinds) != count:
        raise ValueError(f"{len(kinds)} layer_types for {count} layers")
    if unknown := [kind for kind in kinds if kind not in (*STATES, *_ATTENTION)]:
        raise ValueError(f"layers of the kind {unknown[0]!r}")
    if all(kind in STATES for kind in kinds):
        raise ValueError("no layer with attention")
    return [STATES[kind](config) if kind in STATES else None for kind in kinds]


def _windows(arch: Arch, config: Mapping[str, Any]) -> list[int]:
    count, window = int(config["num_hidden_layers"]), int(config.get("sliding_window", 0))
    if arch.attention.windows == "late" and not config.get("use_sliding_window"):
        window = 0
    if kinds := config.get("layer_types"):
        return [window if kind == SLIDING else 0 for kind in kinds]
    if arch.attention.windows == "named":
        raise KeyError("layer_types")
    if arch.attention.windows == "late":
        return [window if i >= config["max_window_layers"] else 0 for i in range(count)]
    pattern = config.get("sliding_window_pattern", arch.attention.windows)
    if isinstance(arch.attention.windows, int):
        if isinstance(pattern, str) and {*pattern} and {*pattern} <= {"L", "G"}:  # EXAONE 4; the last layer is global
            letters = [pattern[i % len(pattern)] for i in range(count - 1)]
            return [window if letter == "L" else 0 for letter in letters] + [0]
        if not isinstance(pattern, int):
            raise ValueError(f"sliding_window_pattern={pattern!r}")
        first = count % -pattern if pattern < 0 else 0  # layers before the first whole group
        return [window if pattern and (i + 1 - first) % pattern else 0 for i in range(count)]
    return [window if arch.attention.windows == "all" else 0] * count


def _ropes(arch: Arch, config: Mapping[str, Any], sizes: Mapping[str, int]) -> tuple[dict[str, Rope], int | None]:
    """The rotations by kind of layer, and the length up to which they hold, if any. sizes: of heads, by kind."""
    context = int(config["max_position_embeddings"])
    given = {**(config.get("rope_parameters") or config.get("rope_scaling") or {})}
    whole = {"rope_theta": config.get("rope_theta", 10_000.0)}
    if "partial_rotary_factor" in config:
        whole["partial_rotary_factor"] = config["partial_rotary_factor"]
    if arch.attention.local_theta:
        by_kind = given if FULL in given else {FULL: given}
        base = config.get("rope_local_base_freq") or by_kind[FULL].get("rope_theta", whole["rope_theta"])
        local = {"rope_theta": base}
        every = {FULL: whole | by_kind[FULL], SLIDING: local | by_kind.get(SLIDING, {})}
        return {kind: rope_of(each, sizes[kind], context) for kind, each in every.items()}, None
    if FULL in given:
        raise ValueError("RoPE by kind of layer")
    settings = whole | {"original_max_position_embeddings": context} | given
    if "original_max_position_embeddings" in config:
        settings["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    kind = settings.get("rope_type") or settings.get("type")
    limit = int(settings["original_max_position_embeddings"]) if kind == "longrope" else None
    bases = _bases(arch, config) or [settings["rope_theta"]]
    every = {_of_base(i, base): settings | {"rope_theta": base} for i, base in enumerate(bases)}
    return {key: rope_of(each, sizes[FULL], context) for key, each in every.items()}, limit


def _bases(arch: Arch, config: Mapping[str, Any]) -> list[float]:
    """The bases of rotations that layers name, each once, but for 0, by which none rotates."""
    is_named = arch.attention.rotated in _BY_BASE
    return sorted({base for base in config.get("layer_rope_theta") or () if base}) if is_named else []


def _of_base(i: int, base: float) -> str:
    """The key in `Decoder.ropes` of the base that is the i-th of `_bases`."""
    return f"base {base:g}" if i else FULL


def _rotations(arch: Arch, config: Mapping[str, Any], windows: list[int]) -> list[str | None]:
    if arch.attention.local_theta:
        return [SLIDING if window else FULL for window in windows]
    if arch.attention.rotated in _BY_BASE and config.get("layer_rope_theta"):
        return _rotations_by_base(arch, config, windows)
    if arch.attention.rotated == "layer_rope_theta" or (arch.attention.rotated == "sliding" and any(windows)):
        return [FULL if window else None for window in windows]
    if arch.attention.rotated == "none":
        return [None] * len(windows)
    if arch.attention.rotated == "position_embedding_type":
        return [FULL if config.get(arch.attention.rotated) == "rope" else None] * len(windows)
    if arch.attention.rotated == "no_rope_layers":
        step = config["no_rope_layer_interval"]
        rotated = config.get("no_rope_layers") or [int((i + 1) % step != 0) for i in range(len(windows))]
        return [FULL if each else None for each in rotated]
    return [FULL] * len(windows)


def _rotations_by_base(arch: Arch, config: Mapping[str, Any], windows: list[int]) -> list[str | None]:
    """Those of layers that each name a base, 0 for no rotation."""
    bases, named = _bases(arch, config), config["layer_rope_theta"]
    if len(named) != len(windows):
        raise ValueError(f"layer_rope_theta={named}")
    return [_of_base(bases.index(each), each) if each else None for each in named]
