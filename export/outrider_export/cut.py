"""A checkpoint of a model's first layers, to be exported and timed in place of the whole model.

    num_layers = count_layers(source)
    write_slice(source, 2, folder)    # a checkpoint folder: two layers, embedding, output matrix, tokenizer

Only times and sizes of such a model stand for the whole one's: its logits mean nothing.
"""

from __future__ import annotations

import json
import shutil
import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.errors import ExportError
from outrider_export.direct.convert import open_weights
from outrider_export.direct.describe import NotDirect
from outrider_export.direct.gguf_config import config_of
from outrider_export.direct.weights import EMBEDDING, FINAL_NORM, HEAD, Weights, layer_name, place_of
from outrider_export.gguf_file import read_header
from outrider_export.gguf_tokenizer import write_tokenizer
from outrider_export.sources import Located, read_config

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

_ARCHITECTURES = {"gemma3_text": "Gemma3ForCausalLM", "smollm3": "SmolLM3ForCausalLM"}
_WEIGHTS = (".safetensors", ".index.json", ".bin", ".gguf")


def count_layers(source: Located) -> int:
    """The number of layers of a model that is on this machine.

    Raises:
        ExportError: when it is not converted without PyTorch: its layers have no names that are known.
    """
    return len(_open(source).decoder.layers)


def write_slice(source: Located, num_layers: int, folder: Path) -> None:
    """Write a checkpoint of the first `num_layers` layers to a new folder, with the tokenizer.

    Raises:
        ExportError: as `count_layers`, or when the model is damaged.
        OSError: when the disk is full.
    """
    weights, path = _open(source), _path(source)
    folder.mkdir(parents=True)
    if source.kind == "gguf":
        header = read_header(path)
        config = config_of(header) | {"torch_dtype": "float16", "use_sliding_window": False}
        config["vocab_size"] = weights.matrix(EMBEDDING).shape[0]
        name = config["model_type"]
        config["architectures"] = [_ARCHITECTURES.get(name, f"{name.capitalize()}ForCausalLM")]
        write_tokenizer(header, folder)
    else:
        config = read_config(path)
        for file in path.iterdir():
            if file.is_file() and not file.name.endswith(_WEIGHTS):
                shutil.copyfile(file, folder / file.name)
    (folder / "config.json").write_text(json.dumps(_cut(config, num_layers)), encoding="utf-8")
    _save(_tensors(weights, num_layers), folder / "model.safetensors")


def _open(source: Located) -> Weights:
    try:
        weights = open_weights(_path(source), source.kind == "gguf")
        if weights.decoder.states:
            raise NotDirect("layers that keep a state")
        return weights
    except NotDirect as error:
        raise ExportError(
            f"{source.id} cannot be cut into slices: {error}. Export it in each form, and compare: outrider bench."
        ) from error


def _path(source: Located) -> Path:
    if source.path is None:
        raise AssertionError("a model on the hub is downloaded first")
    return source.path


def _cut(config: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """The configuration with fewer layers; lists of as many entries as there were layers are cut, too."""
    before = config["num_hidden_layers"]
    cut = {k: v[:num_layers] if isinstance(v, list) and len(v) == before else v for k, v in config.items()}
    return cut | {"num_hidden_layers": num_layers}


def _tensors(weights: Weights, num_layers: int) -> dict[str, NDArray[np.float16]]:
    """All tensors of some layers, and those around them, by the names of a checkpoint."""
    norms = weights.decoder.form.norms
    parts = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
    inside = [f"self_attn.{part}" for part in parts] + [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
    around = {norms.before_attention, norms.after_attention, norms.before_mlp, norms.after_mlp} - {""}
    layers = [layer_name(i, part) for i in range(num_layers) for part in (*inside, *sorted(around))]
    made = {}
    for name in (EMBEDDING, *layers, FINAL_NORM, HEAD):
        module, _ = place_of(name, weights.decoder)
        for kind in ("weight", "bias"):
            stored = weights.stored(f"{module}.{kind}")
            if stored is None or f"{module}.{kind}" in made or (name == HEAD and weights.decoder.tied):
                continue
            rows = weights.rows_of(name, stored.shape[0]) if module == name else None
            read = stored.read(slice(None) if rows is None else rows)
            made[f"{module}.{kind}"] = np.ascontiguousarray(read.astype(np.float16)).reshape(stored.shape)
    return made


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
