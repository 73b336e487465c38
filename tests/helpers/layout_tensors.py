"""The weights of the layouts' checkpoints, by the names that their publishers give them; see `layouts`."""

from typing import Any

import numpy as np

from newcomers import published_name

HIDDEN, WIDE = 64, 96


def tensors_of(config: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """The weights that a Llama-like `config.json` has, float32."""
    kind = config["model_type"].replace("exaone4_5_text", "exaone4")
    hidden, widths = config["hidden_size"], config.get("intermediate_size", WIDE)
    wide: int = config.get("intermediate_size_mlp") or (widths[0] if isinstance(widths, list) else widths)
    heads, kv = config["num_attention_heads"], config.get("num_key_value_heads", config["num_attention_heads"])
    head = config.get("head_dim") or hidden // heads
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for i in range(config.get("num_hidden_layers") or config["num_layers"]):
        at = f"model.layers.{i}."
        sizes = {"q_proj": heads * head, "k_proj": kv * head, "v_proj": kv * head}
        if kind == "phi3":
            shapes[f"{at}self_attn.qkv_proj.weight"] = (sum(sizes.values()), hidden)
        else:
            shapes |= {f"{at}self_attn.{name}.weight": (size, hidden) for name, size in sizes.items()}
        if kind in ("phi3", "glm", "glm4"):
            shapes[f"{at}mlp.gate_up_proj.weight"] = (2 * wide, hidden)
        else:
            shapes |= {f"{at}mlp.{name}.weight": (wide, hidden) for name in ("gate_proj", "up_proj")}
            if kind == "lfm2":
                shapes |= {f"{at}self_attn.{name}_layernorm.weight": (head,) for name in "qk"}
        if kind in ("qwen2", "glm", "glm4") or config.get("use_qkv_bias"):
            shapes |= {f"{at}self_attn.{name}.bias": (size,) for name, size in sizes.items()}
        shapes[f"{at}self_attn.o_proj.weight"] = (hidden, heads * head)
        shapes[f"{at}mlp.down_proj.weight"] = (hidden, wide)
        if kind in ("qwen3", "qwen3_moe", "qwen3_vl_moe_text", "gemma3_text", "gemma3n_text", "gemma4_text", "exaone4"):
            shapes |= {f"{at}self_attn.{name}_norm.weight": (head,) for name in "qk"}
        if kind == "hunyuan_v1_dense":
            shapes |= {f"{at}self_attn.{name}_layernorm.weight": (head,) for name in ("query", "key")}
        if kind == "muse_glimmer_text":
            shapes[f"{at}self_attn.gate_proj.weight"] = (heads * head, hidden)
        if kind in ("olmo2", "olmo3"):
            shapes |= {f"{at}self_attn.q_norm.weight": (heads * head,), f"{at}self_attn.k_norm.weight": (kv * head,)}
        shapes |= {f"{at}{name}.weight": (hidden,) for name in _NORMS.get(kind, _NORMS["llama"])}
        if kind == "stablelm":
            shapes |= {f"{at}{name}.bias": (hidden,) for name in _NORMS["llama"]}
    if kind != "olmo":
        shapes["model.norm.weight"] = (hidden,)
    if kind == "stablelm":
        shapes["model.norm.bias"] = (hidden,)
    shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    if kind == "lfm2":
        shapes = _of_lfm2(shapes, config)
    if kind == "mixtral":
        shapes = _of_mixtral(shapes, config["num_local_experts"])
    if kind == "gemma4_text":
        shapes = _of_gemma4(shapes, config)
    if kind == "gemma3n_text":
        shapes = _of_gemma3n(shapes, config)
    if kind == "llama4_text":
        shapes = _of_llama4(shapes, config)
    if kind in ("qwen3_moe", "qwen3_vl_moe_text"):
        shapes = _of_qwen_moe(shapes, config)
    if kind in _UNGATED:
        shapes = _of_ungated(shapes, _UNGATED[kind])
    if kind == "exaone":
        shapes = {published_name("exaone", name): shape for name, shape in shapes.items()}
    if "kv_lora_rank" in config:
        shapes = _of_latent(shapes, config)
    plain = kind in ("gemma3n_text", "gemma4_text")
    offset = 0.0 if kind.startswith(("gemma", "muse")) and not plain else 1.0

    def draw(name: str, shape: tuple[int, ...]) -> Any:
        drawn = rng.normal(0, 0.15 if len(shape) > 1 else 0.1, shape)
        added = 1.0 if name == "model.norm.weight" and kind.startswith("muse") else offset
        return (drawn + added * (("norm" in name and name.endswith("weight")) or "scalar" in name)).astype(np.float32)

    made = {name: draw(name, shape) for name, shape in shapes.items()}
    untold = ("cohere", "cohere2", "starcoder2")  # whose files leave it to Transformers that they are tied
    if config.get("tie_word_embeddings") or config.get("tie_embedding") or kind in untold:
        made["lm_head.weight"] = made["model.embed_tokens.weight"]
    return _by_columns(made) if kind == "qwen3_vl_moe_text" else made


_Shapes = dict[str, tuple[int, ...]]
_PROJECTIONS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


# Published names where feed-forward parts have no gate.
_UNGATED = {
    "starcoder2": {"up_proj": "c_fc", "down_proj": "c_proj"},
    "phi": {"up_proj": "fc1", "down_proj": "fc2", "o_proj": "dense", "model.norm": "model.final_layernorm"},
}


def _of_ungated(shapes: _Shapes, names: dict[str, str]) -> _Shapes:
    """Those of feed-forward parts without a gate, with biases everywhere."""
    made: _Shapes = {}
    for name, shape in shapes.items():
        target = name
        for ours, theirs in names.items():
            target = target.replace(ours, theirs)
        if "gate_proj" in name:
            continue
        made[target] = shape
        if "layers." in name or name == "model.norm.weight" or (name == "lm_head.weight" and "o_proj" in names):
            made[target.replace(".weight", ".bias")] = shape[:1]
    return made


def _of_lfm2(shapes: _Shapes, config: dict[str, Any]) -> _Shapes:
    """Those with LFM2's names, and convolutions where there is no attention; its feed-forward part is 64 wide."""
    made: _Shapes = {}
    for name, shape in shapes.items():
        at, _, part = name.partition(".mlp." if ".mlp." in name else ".self_attn.")
        if part.split(".")[0] in _PROJECTIONS:
            made[f"{at}.feed_forward.{_PROJECTIONS[part.split('.')[0]]}.weight"] = tuple(min(n, HIDDEN) for n in shape)
        elif not part or int(at.rsplit(".", 1)[-1]) in config["full_attn_idxs"]:
            made[name.replace("o_proj", "out_proj").replace("model.norm", "model.embedding_norm")] = shape
        elif part == "q_proj.weight":
            conv = {"conv.weight": (HIDDEN, 1, 3), "in_proj.weight": (3 * HIDDEN, HIDDEN), "out_proj.weight": shape}
            made |= {f"{at}.conv.{each}": size for each, size in conv.items()}
    return made


def _of_mixtral(shapes: _Shapes, num_experts: int) -> _Shapes:
    """Those with experts in place of each feed-forward part."""
    made: _Shapes = {}
    for name, shape in shapes.items():
        at, is_fed, part = name.partition(".mlp.")
        if not is_fed:
            made[name] = shape
            continue
        made[f"{at}.block_sparse_moe.gate.weight"] = (num_experts, HIDDEN)
        each = _PROJECTIONS[part.removesuffix(".weight")]
        made |= {f"{at}.block_sparse_moe.experts.{i}.{each}.weight": shape for i in range(num_experts)}
    return made


def _of_gemma4(shapes: _Shapes, config: dict[str, Any]) -> _Shapes:
    """Those of layers with other sizes, without keys where they are shared, and with inputs by layer."""
    count = config["num_hidden_layers"]
    made: _Shapes = {}
    for name, shape in shapes.items():
        i = int(name.split(".")[2]) if ".layers." in name else 0
        times = 2 if i >= count - config["num_kv_shared_layers"] else 1
        if times > 1 and any(f".{part}." in name for part in ("k_proj", "v_proj", "k_norm")):
            continue
        if ".self_attn." in name and config["layer_types"][i] == "full_attention":
            larger = config["global_head_dim"] // config["head_dim"]
            shape = (shape[0], larger * shape[1]) if "o_proj" in name else (larger * shape[0], *shape[1:])
        if ".mlp." in name:
            shape = (shape[0], times * shape[1]) if "down_proj" in name else (times * shape[0], shape[1])
        made[name] = shape
    made |= {f"model.layers.{i}.layer_scalar": (1,) for i in range(count)}
    return made | _inputs_by_layer(config)


def _inputs_by_layer(config: dict[str, Any]) -> _Shapes:
    """Those of embeddings that each layer has of its own."""
    count, width, hidden = config["num_hidden_layers"], config["hidden_size_per_layer_input"], config["hidden_size"]
    made: _Shapes = {}
    for i in range(count):
        at = f"model.layers.{i}."
        made |= {
            f"{at}per_layer_input_gate.weight": (width, hidden),
            f"{at}per_layer_projection.weight": (hidden, width),
            f"{at}post_per_layer_input_norm.weight": (hidden,),
        }
    return made | {
        "model.embed_tokens_per_layer.weight": (config["vocab_size_per_layer_input"], count * width),
        "model.per_layer_model_projection.weight": (count * width, hidden),
        "model.per_layer_projection_norm.weight": (width,),
    }


def _of_gemma3n(shapes: _Shapes, config: dict[str, Any]) -> _Shapes:
    """Those with several streams, and with inputs by layer; layers that share keys have matrices for them, too."""
    count, hidden = config["num_hidden_layers"], config["hidden_size"]
    streams, rank = config["altup_num_inputs"], config["laurel_rank"]
    for i in range(count):
        of_layer: _Shapes = {
            "altup.correct_output_scale": (hidden,), "altup.correction_coefs.weight": (streams, streams),
            "altup.modality_router.weight": (streams, hidden), "altup.router_norm.weight": (hidden,),
            "altup.prediction_coefs.weight": (streams**2, streams), "laurel.linear_left.weight": (rank, hidden),
            "laurel.linear_right.weight": (hidden, rank), "laurel.post_laurel_norm.weight": (hidden,),
        }  # fmt: skip
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in of_layer.items()}
    for i in range(streams - 1):
        shapes |= {
            f"model.altup_{name}.{i}.weight": (hidden, hidden) for name in ("projections", "unembed_projections")
        }
    return shapes | _inputs_by_layer(config)


def _of_llama4(shapes: _Shapes, config: dict[str, Any]) -> _Shapes:
    """Those with the matrices of all experts in one tensor, by columns, beside a shared expert."""
    count, size, hidden = config["num_local_experts"], config["intermediate_size"], config["hidden_size"]
    made: _Shapes = {}
    for name, shape in shapes.items():
        at, is_fed, part = name.partition(".mlp.")
        if not is_fed:
            made[name] = shape
            continue
        made[f"{at}.feed_forward.shared_expert.{part}"] = (hidden, size) if part.startswith("down") else (size, hidden)
        made[f"{at}.feed_forward.router.weight"] = (count, hidden)
        made[f"{at}.feed_forward.experts.gate_up_proj"] = (count, hidden, 2 * size)
        made[f"{at}.feed_forward.experts.down_proj"] = (count, size, hidden)
    return made


def _of_qwen_moe(shapes: _Shapes, config: dict[str, Any]) -> _Shapes:
    """Those with experts in place of each feed-forward part."""
    count, size, hidden = config["num_experts"], config["moe_intermediate_size"], config["hidden_size"]
    made: _Shapes = {}
    for name, shape in shapes.items():
        at, is_fed, part = name.partition(".mlp.")
        if not is_fed:
            made[name] = shape
            continue
        made[f"{at}.mlp.gate.weight"] = (count, hidden)
        of_each = (hidden, size) if part.startswith("down") else (size, hidden)
        made |= {f"{at}.mlp.experts.{i}.{part}": of_each for i in range(count)}
    return made


def _by_columns(tensors: dict[str, Any]) -> dict[str, Any]:
    """The same with the matrices of all experts in one tensor, as Qwen3-VL's: [experts, columns, rows]."""
    made: dict[str, Any] = {}
    experts: dict[str, dict[str, list[Any]]] = {}
    for name, values in tensors.items():
        at, is_expert, part = name.partition(".experts.")
        if is_expert:
            experts.setdefault(at, {}).setdefault(part.split(".")[1], []).append(values.T)
        else:
            made[name] = values
    for at, parts in experts.items():
        gate_up = [np.concatenate(both, axis=1) for both in zip(parts["gate_proj"], parts["up_proj"], strict=True)]
        made[f"{at}.experts.gate_up_proj"] = np.stack(gate_up)
        made[f"{at}.experts.down_proj"] = np.stack(parts["down_proj"])
    return made


def _of_latent(shapes: _Shapes, config: dict[str, Any]) -> _Shapes:
    """Those of latent attention, with experts after the first layer, and the layer of a drafter after the last."""
    heads, rank, hidden = config["num_attention_heads"], config["kv_lora_rank"], config["hidden_size"]
    plain, rotated, values = (config[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    queries, short, size = heads * (plain + rotated), config["q_lora_rank"], config["moe_intermediate_size"]
    made: _Shapes = {}
    for name, shape in shapes.items():
        at, is_fed, part = name.partition(".mlp.")
        if ".self_attn." in name:
            continue
        if not is_fed or at.endswith("layers.0"):
            made[name] = shape
            continue
        for of, width in (
            ("shared_experts", config["n_shared_experts"] * size),
            *((f"experts.{i}", size) for i in range(4)),
        ):
            made[f"{at}.mlp.{of}.{part}"] = (hidden, width) if part.startswith("down") else (width, hidden)
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        of_queries: _Shapes = {"q_proj": (queries, hidden)}
        if short:
            of_queries = {"q_a_proj": (short, hidden), "q_a_layernorm": (short,), "q_b_proj": (queries, short)}
        attention: _Shapes = of_queries | {
            "kv_a_proj_with_mqa": (rank + rotated, hidden), "kv_a_layernorm": (rank,),
            "kv_b_proj": (heads * (plain + values), rank), "o_proj": (hidden, heads * values),
        }  # fmt: skip
        made |= {f"{at}self_attn.{name}.weight": shape for name, shape in attention.items()}
        if i:
            made[f"{at}mlp.gate.weight"] = (4, hidden)
            made |= {f"{at}mlp.gate.e_score_correction_bias": (4,)} if config["topk_method"] == "noaux_tc" else {}
    if config.get("num_nextn_predict_layers"):
        made[f"model.layers.{config['num_hidden_layers']}.eh_proj.weight"] = (hidden, 2 * hidden)
    return made


_AFTER = ("post_attention_layernorm", "post_feedforward_layernorm")
_NORMS: dict[str, tuple[str, ...]] = {
    "llama": ("input_layernorm", "post_attention_layernorm"),
    "lfm2": ("operator_norm", "ffn_norm"),
    "olmo": (),
    "cohere": ("input_layernorm",),
    "cohere2": ("input_layernorm",),
    "phi": ("input_layernorm",),
    "olmo2": _AFTER,
    "olmo3": _AFTER,
    "exaone4": _AFTER,
    "glm4": ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
    "muse_glimmer_text": ("input_layernorm", "pre_feedforward_layernorm", *_AFTER),
    "gemma2": ("input_layernorm", "pre_feedforward_layernorm", *_AFTER),
    "gemma3n_text": ("input_layernorm", "pre_feedforward_layernorm", *_AFTER),
    "gemma4_text": ("input_layernorm", "pre_feedforward_layernorm", *_AFTER),
    "gemma3_text": ("input_layernorm", "pre_feedforward_layernorm", *_AFTER),
}
