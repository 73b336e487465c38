"""A checkpoint of a model's first layers, to be exported and timed in place of the whole model.

    num_layers, is_tied = describe_whole(source)
    write_slice(source, 2, folder, token_ids)    # a checkpoint folder: two layers, embedding, output matrix

Only times and sizes of such a model stand for the whole one's: its logits mean nothing. It has no tokenizer.
"""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.errors import ExportError
from outrider_export.direct.arch import NotDirect
from outrider_export.direct.blocks import MLP
from outrider_export.direct.convert import open_weights
from outrider_export.direct.experts import CHOICE, ROUTER, SHARED_GATE
from outrider_export.direct.gguf_config import config_of
from outrider_export.direct.pack import matrices_of
from outrider_export.direct.sizes import FULL
from outrider_export.direct.states import STATE_KINDS
from outrider_export.direct.weights import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    Weights,
    layer_name,
    place_of,
)
from outrider_export.sources.gguf_reader import read_header
from outrider_export.sources.source import Located, read_config

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from outrider_export.direct.decoder import Decoder, Layer
    from outrider_export.direct.weights import Indices, StoredMatrix

_ARCHITECTURES = {"gemma3_text": "Gemma3ForCausalLM", "smollm3": "SmolLM3ForCausalLM"}


def describe_whole(source: Located) -> tuple[int, bool]:
    """The number of layers of a model that is on this machine, and whether its embedding is its output matrix.

    Raises:
        ExportError: when it is not converted without PyTorch: its layers have no names that are known.
    """
    weights = _open(source)
    return len(weights.decoder.layers), HEAD not in matrices_of(weights)


def write_slice(source: Located, num_layers: int, folder: Path, token_ids: Indices | None = None) -> None:
    """Write a checkpoint of `num_layers` layers to a new folder.

    They are the first ones; of a model with states the first layer with attention, and those from the first on.
    token_ids: int64 [n], the tokens that embedding and output matrix have, by their new ids; None for all.

    Raises:
        ExportError: as `describe_whole`, or when the model is damaged.
        OSError: when the disk is full.
    """
    weights, path = _open(source), _path(source)
    chosen = _chosen(weights.decoder, num_layers)
    folder.mkdir(parents=True)
    if source.kind == "gguf":
        header = read_header(path)
        config = config_of(header) | {"torch_dtype": "float16", "use_sliding_window": False}
        config["vocab_size"] = weights.matrix(EMBEDDING).shape[0]
        name = config["model_type"]
        config["architectures"] = [_ARCHITECTURES.get(name, f"{name.capitalize()}ForCausalLM")]
    else:
        config = read_config(path)
    cut = _cut(config, weights.decoder, chosen)
    if token_ids is not None:
        cut["vocab_size"] = len(token_ids)
    (folder / "config.json").write_text(json.dumps(cut), encoding="utf-8")
    _save(_tensors(weights, chosen, token_ids), folder / "model.safetensors")


def _open(source: Located) -> Weights:
    try:
        weights = open_weights(_path(source), source.kind == "gguf")
        decoder = weights.decoder
        grouped = decoder.experts is not None and decoder.arch.experts.grouped
        if decoder.arch.varied or grouped or decoder.latent is not None:
            raise NotDirect("its layers differ in their sizes")
        return weights
    except NotDirect as error:
        raise ExportError(
            f"{source.id} cannot be cut into slices: {error}. Export it in each form, and compare: outrider bench."
        ) from error


def _path(source: Located) -> Path:
    if source.path is None:
        raise AssertionError("a model on the hub is downloaded first")
    return source.path


def _chosen(decoder: Decoder, num_layers: int) -> list[int]:
    """The layers of a slice. More of them have kinds in about the proportion that they have in the model."""
    if not decoder.states:
        return [*range(num_layers)]
    return [decoder.states.index(""), *range(num_layers - 1)]


def _cut(config: dict[str, Any], decoder: Decoder, chosen: list[int]) -> dict[str, Any]:
    """The configuration with fewer layers; lists of as many entries as there were layers are cut, too."""
    before = len(decoder.layers)
    cut = {k: [v[i] for i in chosen] if isinstance(v, list) and len(v) == before else v for k, v in config.items()}
    if decoder.states:
        cut["layer_types"] = [STATE_KINDS.get(decoder.states[i], FULL) for i in chosen]
    if decoder.experts:
        dense = [number for number, i in enumerate(chosen) if decoder.layers[i].experts is None]
        cut |= {"num_dense_layers": 0, "decoder_sparse_step": 1, "mlp_only_layers": dense}
    if decoder.blocks is not None:
        kinds = (([STATE_KINDS.get(decoder.states[i], "attention")], decoder.layers[i].feeds) for i in chosen)
        cut["layers_block_type"] = [kind for mixing, feeds in kinds for kind in [*mixing, *([MLP] if feeds else [])]]
        cut.pop("layer_types")
    key = "num_hidden_layers"
    return cut | dict.fromkeys((key, decoder.arch.keys.get(key, key)), len(chosen))


def _tensors(weights: Weights, chosen: list[int], token_ids: Indices | None) -> dict[str, NDArray[np.float16]]:
    """All tensors of some layers, and those around them for some tokens, by the names of Llama's checkpoints."""
    made: dict[str, NDArray[np.float16]] = {}

    def add(name: str, stored: StoredMatrix | None, rows: Indices | None = None) -> None:
        if stored is not None and name not in made:
            read = stored.read(slice(None) if rows is None else rows)
            shape = stored.shape if rows is None else (len(rows), *stored.shape[1:])
            made[name] = np.ascontiguousarray(read.astype(np.float16)).reshape(shape)

    def add_module(name: str, new: str) -> None:
        module, _ = place_of(name, weights.decoder)
        for kind in ("weight", "bias"):
            stored = weights.stored(f"{module}.{kind}")
            whole = stored is None or module != name
            rows = None if whole or stored is None else weights.rows_of(name, stored.shape[0])
            rows = token_ids if name in (EMBEDDING, HEAD) else rows
            add(f"{place_of(new, weights.decoder)[0]}.{kind}", stored, rows)

    for name in (EMBEDDING, FINAL_NORM, *([] if weights.decoder.tied else [HEAD])):
        add_module(name, name)
    for number, i in enumerate(chosen):
        layer = weights.decoder.layers[i]
        for part in _modules_of(layer, weights.decoder):
            add_module(layer_name(i, part), layer_name(number, part))
        for part in () if layer.state is None else layer.state.others:
            add(layer_name(number, part), weights.stored(layer_name(i, part)))
        for part in () if layer.experts is None else layer.experts.shapes:
            name, new = layer_name(i, part), layer_name(number, part)
            add(f"{new}.weight", weights.matrix(name))
            if layer.experts is not None and layer.experts.clamped:
                bias = weights.bias_of_experts(name, layer.experts)
                made[f"{new}.bias"] = bias.reshape(-1).astype(np.float16)
    return made


def _modules_of(layer: Layer, decoder: Decoder) -> list[str]:
    """Modules of a layer with a weight, a bias or both, but experts."""
    parts = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm", "sinks")
    mixing = [f"self_attn.{part}" for part in parts] if layer.state is None else [*layer.state.matrices]
    norms = decoder.arch.norms
    around = {norms.before_attention, norms.after_attention, norms.before_mlp, norms.after_mlp} - {""}
    experts = layer.experts
    fed = [*decoder.feed_forward_of(layer), *((ROUTER, CHOICE, SHARED_GATE) if experts else ())]
    return [*mixing, *fed, *sorted(around)]


def _save(tensors: dict[str, NDArray[np.float16]], path: Path) -> None:
    """Write a safetensors file. The package of that name is not in the plain installation."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": "F16", "shape": tensor.shape, "data_offsets": (end, end + tensor.nbytes)}
        end += tensor.nbytes
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for tensor in tensors.values():
            file.write(tensor.tobytes())
