"""Random drafters that are no models of their own, in their published formats, for `tiny`'s main model."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as ops

from outrider.bundle import Bundle
from outrider.models.backends.heads.weights import MainWeights

HIDDEN, WIDE, HEADS, KV_HEADS, HEAD_SIZE, VOCAB, TOKENS = 64, 96, 4, 2, 16, 448, 404
NUM_PLACES, MASK, RANK = 3, 17, 8
TOKEN_MAP = np.random.default_rng(7).permutation(TOKENS)[:150]  # in no order
TOP_K, GROUP, WINDOW = 4, 16, 9
KINDS = ("eagle3", "mtp", "dflash", "dspark", "mtp qwen", "mtp experts")
DSPARKS = (
    "dspark", "dspark gated", "dspark rnn", "dspark gemma", "dspark plain", "dspark without confidence", "dspark lfm2",
    "dflash2", "dflash2 scaled",
)  # fmt: skip
DECODER: dict[str, Any] = {
    "hidden_size": HIDDEN, "intermediate_size": WIDE, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_SIZE, "vocab_size": VOCAB, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0,
    "max_position_embeddings": 512, "num_hidden_layers": 1,
}  # fmt: skip
# config.json of each kind, with the sizes above. Qwen's modules are the text model's of a checkpoint that reads images,
# too; in "dspark lfm2", LiquidAI's, neighbours are rotated; "dflash2 scaled" has what published ones leave out.
_CONFIGS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))


def name_of(kind: str) -> str:
    """A kind as a drafter's name."""
    return kind.replace(" ", "-")


F32 = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}


def matrices_of_main(bundle: Bundle) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The main model's embedding and output matrix, both float32 [vocabulary, hidden], as its graph computes them."""
    core, main = ov.Core(), MainWeights(ov.Core(), bundle.model_path(bundle.manifest.main))
    token_ids, rows = ops.parameter([-1], np.int64), ops.parameter([-1, 1, HIDDEN], np.float32)
    embed = core.compile_model(ov.Model([ops.result(main.embed(token_ids))], [token_ids]), "CPU", F32)
    logits = core.compile_model(ov.Model([ops.result(main.logits(rows))], [rows]), "CPU", F32)
    matrix = logits([np.eye(HIDDEN, dtype=np.float32)[:, None]])[0][:, 0].T
    return embed([np.arange(VOCAB)])[0][:, 0], matrix


def config_of(kind: str) -> dict[str, Any]:
    """The content of config.json."""
    return copy.deepcopy(_CONFIGS[kind])


def tensors_of(kind: str, seed: int = 0, hidden: int = HIDDEN) -> dict[str, NDArray[Any]]:
    """Random weights, by their published names. Those of norms are not all 1."""
    shapes: dict[str, tuple[int, ...]] = {}
    if kind == "eagle3":
        shapes = {
            "fc.weight": (hidden, 3 * hidden),
            **_layer("midlayer", hidden, 2 * hidden),
            "midlayer.hidden_norm.weight": (hidden,),
            "norm.weight": (hidden,),
            "lm_head.weight": (len(TOKEN_MAP), hidden),
        }
    elif kind.startswith("mtp"):
        norms = {f"mtp.{name}.weight": (hidden,) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
        shapes = {"mtp.fc.weight": (hidden, 2 * hidden), **norms, **_layer("mtp.layers.0", hidden, hidden)}
        if kind != "mtp":
            shapes["mtp.layers.0.self_attn.q_proj.weight"] = (2 * HEADS * HEAD_SIZE, hidden)
            shapes |= {f"mtp.layers.0.self_attn.{name}_norm.weight": (HEAD_SIZE,) for name in "qk"}
        if kind == "mtp experts":
            text, mlp = _CONFIGS[kind]["text_config"], "mtp.layers.0.mlp"
            count, size, wide = text["num_experts"], text["moe_intermediate_size"], 48
            for part in ("gate", "up", "down"):
                del shapes[f"{mlp}.{part}_proj.weight"]
                shape = (hidden, wide) if part == "down" else (wide, hidden)
                shapes[f"{mlp}.shared_expert.{part}_proj.weight"] = shape
            shapes |= {
                f"{mlp}.gate.weight": (count, hidden), f"{mlp}.shared_expert_gate.weight": (1, hidden),
                f"{mlp}.experts.gate_up_proj": (count, 2 * size, hidden),
                f"{mlp}.experts.down_proj": (count, hidden, size),
            }  # fmt: skip
    elif kind == "dflash":
        norms = {f"{name}.weight": (hidden,) for name in ("hidden_norm", "norm")}
        shapes = {"fc.weight": (hidden, 2 * hidden), **norms}
        for i in range(2):
            shapes |= _layer(f"layers.{i}", hidden, hidden)
            shapes |= {f"layers.{i}.self_attn.{name}_norm.weight": (HEAD_SIZE,) for name in "qk"}
    else:
        shapes = _dspark_shapes(kind, hidden)
    rng = np.random.default_rng([seed, (*KINDS, *DSPARKS).index(kind)])
    tensors: dict[str, NDArray[Any]] = {name: _drawn(name, shape, rng) for name, shape in shapes.items()}
    if kind in ("mtp qwen", "mtp experts"):
        tensors = {name: each - np.float32("norm" in name) for name, each in tensors.items()}
    if kind == "eagle3":
        tensors["d2t"] = TOKEN_MAP - np.arange(len(TOKEN_MAP))
        tensors["t2d"] = np.isin(np.arange(VOCAB), TOKEN_MAP)
    return tensors


def write_head(folder: Path, kind: str, tensors: dict[str, NDArray[Any]] | None = None, **changes: Any) -> Path:
    """Write a checkpoint folder. changes: of config.json; None leaves a key out."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors_of(kind) if tensors is None else tensors, folder / "model.safetensors")
    config = {name: value for name, value in (config_of(kind) | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def _drawn(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[Any]:
    if "norm" in name or "scalar" in name:
        return rng.uniform(0.5, 1.5, shape).astype("f4")
    return rng.normal(0, 1 if "markov_w" in name or "codebook" in name else shape[-1] ** -0.5, shape).astype("f4")


def _dspark_shapes(kind: str, hidden: int) -> dict[str, tuple[int, ...]]:
    form, is_second = kind.removeprefix("dspark "), kind.startswith("dflash2")
    copies = () if form == "lfm2" or is_second else ("embed_tokens", "lm_head")
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (VOCAB, hidden) for name in copies}
    shapes |= {"fc.weight": (hidden, 2 * hidden), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    for i in range(2):
        name, size = f"layers.{i}", HEAD_SIZE
        shapes |= _layer(name, hidden, hidden)
        if form == "gemma":
            size = 2 * HEAD_SIZE
            shapes |= {f"{name}.{place}_feedforward_layernorm.weight": (hidden,) for place in ("pre", "post")} | {
                f"{name}.layer_scalar": (1,)
            }
            shapes[f"{name}.self_attn.q_proj.weight"] = (HEADS * size, hidden)
            shapes[f"{name}.self_attn.k_proj.weight"] = (size, hidden)
            shapes[f"{name}.self_attn.o_proj.weight"] = (hidden, HEADS * size)
            del shapes[f"{name}.self_attn.v_proj.weight"]
        shapes |= {f"{name}.self_attn.{part}_norm.weight": (size,) for part in "qk"}
    if is_second:
        taps = _CONFIGS[kind]["dflash_config"]["conv_kernel_size"]
        for name in [f"layers.{i}.{part}_conv" for i in range(2) for part in ("attention", "mlp")]:
            shapes[f"{name}.base_kernel"] = (2, taps, hidden)
            shapes[f"{name}.kernel_projection.weight"] = (2 * taps * hidden // GROUP, hidden)
        books = {f"candidate_selector.{name}_codebook": (VOCAB, RANK) for name in ("predecessor", "successor")}
        return shapes | books | {"candidate_selector.hidden_projection.weight": (RANK, hidden)}
    if form != "plain":
        shapes |= {f"markov_head.markov_w{i}.weight": (VOCAB, RANK) for i in (1, 2)}
    if form == "gated":
        shapes |= {"markov_head.gate_proj.weight": (RANK, hidden + RANK), "markov_head.gate_proj.bias": (RANK,)}
    if form == "rnn":
        joint = 3 * RANK, 2 * RANK + hidden
        shapes |= {"markov_head.joint_proj.weight": joint, "markov_head.joint_proj.bias": joint[:1]}
    if form != "without confidence":
        read = hidden + (0 if form == "plain" else RANK)
        shapes |= {"confidence_head.proj.weight": (1, read), "confidence_head.proj.bias": (1,)}
    return shapes


def _layer(name: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    """A Llama layer whose attention reads rows of `width` numbers."""
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (HEADS * HEAD_SIZE, width), "self_attn.k_proj": (KV_HEADS * HEAD_SIZE, width),
        "self_attn.v_proj": (KV_HEADS * HEAD_SIZE, width), "self_attn.o_proj": (hidden, HEADS * HEAD_SIZE),
        "mlp.gate_proj": (WIDE, hidden), "mlp.up_proj": (WIDE, hidden), "mlp.down_proj": (hidden, WIDE),
        "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
    }  # fmt: skip
    return {f"{name}.{part}.weight": shape for part, shape in shapes.items()}
