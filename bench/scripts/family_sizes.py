"""Calculates what published models take: weights, disk, and cache for a token and a text.

    python bench/scripts/family_sizes.py FOLDER TOKENIZER [MODEL …]

The shapes are those of `published_shapes.toml`; the tokenizer is that of a checkpoint's folder. It prints for each
the weights, and the bytes on disk and in the cache, as the conversion lays them out. Nothing is written but a
checkpoint without content, and FOLDER/figures.json, of which `docs/generate.py` makes a table as `family_figures.json`
beside this file. Needs PyTorch and Transformers, which know the names of the tensors.
"""

import json
import math
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import numpy as np

with (Path(__file__).parent / "published_shapes.toml").open("rb") as opened:
    SHAPES: dict[str, dict[str, Any]] = tomllib.load(opened)
FORMATS = ("int8", "int4")


def config_of(shape: dict[str, Any]) -> Any:
    """Transformers' configuration of a shape."""
    import transformers

    fields = {key: value for key, value in shape.items() if key not in ("kind", "full", "pattern", "without")}
    count, full = shape["num_hidden_layers"], shape.get("full", ())
    if full:
        kinds = ("attention", "mamba") if shape["kind"].startswith("granite") else ("full_attention", "conv")
        fields["layer_types"] = [kinds[0] if i in full else kinds[1] for i in range(count)]
    if step := shape.get("pattern"):
        fields["layer_types"] = (["sliding_attention"] * (step - 1) + ["full_attention"]) * (count // step)
    fields |= dict.fromkeys(shape.get("without", ()))
    fields["sliding_window"] = shape.get("sliding_window") or None
    made = transformers.AutoConfig.for_model(
        shape["kind"], **fields, max_position_embeddings=32_768, bos_token_id=1, eos_token_id=2, pad_token_id=2
    )
    made.dtype = "bfloat16"
    return made


def shapes_of(config: Any) -> dict[str, tuple[int, ...]]:
    """The shapes of a model's tensors, by its publisher's names."""
    import torch
    import transformers
    from transformers.core_model_loading import revert_weight_conversion

    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    config.architectures = [type(model).__name__]
    found = revert_weight_conversion(model, model.state_dict())
    tied = config.tie_word_embeddings
    return {name: tuple(each.shape) for name, each in found.items() if name != "lm_head.weight" or not tied}


def write_checkpoint(folder: Path, tokenizer: Path, shape: dict[str, Any]) -> int:
    """A checkpoint in bf16 whose weights are zero, and take no room where files may have holes; how many they are."""
    config = config_of(shape)
    shapes = shapes_of(config)
    folder.mkdir()
    config.save_pretrained(folder)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, each in shapes.items():
        begin, end = end, end + 2 * math.prod(each)
        header[name] = {"dtype": "BF16", "shape": each, "data_offsets": [begin, end]}
    head = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        file.truncate(8 + len(head) + end)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder)
    return end // 2


def calculate(place: Path, tokenizer: Path, name: str) -> dict[str, Any]:
    """Weights in billions, GB in each format, kB of a token's keys and values in f32, MB of a text's states in f32."""
    from outrider_export.describe.geometry import geometry_of_config
    from outrider_export.direct import pack
    from outrider_export.direct.convert import describe_layers, open_weights
    from outrider_export.sources.source import read_config

    def room(_: Path, layouts: Iterable[tuple[Any, tuple[int, ...]]], __: Any) -> list[Any]:
        return [Mock(numbers=np.broadcast_to(np.zeros((), dtype), shape)) for dtype, shape in layouts]

    with tempfile.TemporaryDirectory(dir=place) as made:
        folder = Path(made) / "empty"
        count = write_checkpoint(folder, tokenizer, SHAPES[name])
        weights = open_weights(folder, is_gguf=False)
        found: dict[str, Any] = {"weights": count / 1e9}
        with patch.object(pack, "allocate", room), patch.object(pack, "read_all"):
            for form in FORMATS:
                packed = pack.pack(weights, form, folder, lambda _: None).values()
                parts = [array for each in packed for array in (each.codes, each.zero_points, each.scales)]
                found[form] = sum(array.numbers.nbytes for array in parts) / 1e9
        import msgspec

        geometry = geometry_of_config(read_config(folder), folder)
        geometry = msgspec.structs.replace(geometry, **describe_layers(weights.decoder))
        states = [layer.state for layer in weights.decoder.layers if layer.state is not None]
        numbers = sum(map(_numbers_of, states))
        return found | {"token": 4 * geometry.numbers_per_token / 1e3, "states": 4 * numbers / 1e6}


def _numbers_of(state: Any) -> int:
    """Numbers that a layer keeps of a text instead of keys and values: see `outrider_export.direct.states`."""
    if state.kind == "short_convolution":
        return int(state.width * state.kernel)
    inner = state.key_size if state.kind == "gated_delta_net" else state.state_size
    return int(state.conv_width * state.kernel + state.num_heads * state.head_size * inner)


def main(folder: str, tokenizer: str, *names: str) -> None:
    """Calculate, and add to what was calculated before."""
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    kept = place / "figures.json"
    for name in names or SHAPES:
        found = {key: float(f"{value:.4g}") for key, value in calculate(place, Path(tokenizer), name).items()}
        known: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
        known[name] = {"kind": SHAPES[name]["kind"]} | found
        rows = (f"{json.dumps(model)}: {json.dumps(figures)}" for model, figures in known.items())
        kept.write_text("{\n" + ",\n".join(rows) + "\n}\n")
        print(name, json.dumps(found), flush=True)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
