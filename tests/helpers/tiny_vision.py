"""Tiny random models that read images, with a tokenizer and their image processors, as checkpoint folders; a toy."""

import functools
import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from heads import tensors_of
from outrider.bundle import Bundle, list_files, read_bundle, write_manifest
from outrider.bundle.vision import Idefics3Entry
from tiny import SPECIAL, train_tokenizer

NUM_TOKENS = 416  # with those around images
SIDE = 16  # pixels of a tile
ROWS = 3  # of tiles at most
# SmolVLM's own, with this tokenizer's end of a turn.
PARTS_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}{% if message['content'][0]['type'] == "
    "'image' %}{{':'}}{% else %}{{': '}}{% endif %}{% for line in message['content'] %}{% if line['type'] == 'text' %}"
    "{{line['text']}}{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)


@dataclass(frozen=True)
class Family:
    """tokens: those around images. place: what an image becomes in the chat template. ids: names of ids of tokens.

    config: config.json's parts. images, processor: the content of preprocessor_config.json and processor_config.json.
    """

    tokens: tuple[str, ...]
    place: str
    ids: dict[str, str]
    config: dict[str, Any]
    images: dict[str, Any] = field(default_factory=dict)
    processor: dict[str, Any] = field(default_factory=dict)
    kind: str = ""  # of the configuration, if it is not the family's name


def _merged(old: Any, new: Any) -> Any:
    """An object of JSON with the changes of another, at any depth."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    return old | {key: _merged(old.get(key), each) for key, each in new.items()}


def _families() -> dict[str, Family]:
    """The entries of `tiny_vision.json`; like: the entry that one begins with, without what stands at some places."""
    rows: dict[str, dict[str, Any]] = {}
    for row in json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8")):
        name, begun = row.pop("name"), json.loads(json.dumps(rows.get(row.pop("like", ""), {})))
        for place in row.pop("without", ()):
            *outer, last = place.split(".")
            del functools.reduce(dict.__getitem__, outer, begun)[last]
        rows[name] = _merged(begun, row)
    return {name: Family(**row) for name, row in rows.items()}


# Gemma 3's images have more tokens than its sliding window; the matrices of Qwen3-VL's experts are not square; the
# small Gemma 4 has tied embeddings, as such small ones repeat a token otherwise.
FAMILIES = _families()


def vision_tokenizer(family: str) -> Any:
    """The tests' tokenizer with a family's tokens around images."""
    tokens = FAMILIES[family].tokens
    return train_tokenizer(special=(*SPECIAL, *tokens, *(f"<extra_{i}>" for i in range(len(tokens), 12))))


def write_vision_checkpoint(folder: Path, family: str = "smolvlm") -> None:
    """A random model in the layout of its publisher's files, whose weights are large enough to tell images apart."""
    import torch
    from safetensors.numpy import load_file, save_file
    from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast

    own, tokenizer = FAMILIES[family], vision_tokenizer(family)
    ids = {name: tokenizer.token_to_id(token) for name, token in own.ids.items()}
    config = json.loads(json.dumps(own.config)) | ids
    if family.startswith("qwen"):
        config["text_config"] |= ids
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(own.kind or family, **config)).float().eval()
    for name, parameter in model.named_parameters():
        if not any(part in name for part in ("norm", "lambda", "ln_", "layer_scalar")):
            is_seen = "vis" in name or (own.kind and "projector" in name)
            torch.nn.init.normal_(parameter, std=0.3 if is_seen else 0.15)
    for name, buffer in model.named_buffers():
        filled = {"std_bias": 0.1, "std_scale": 0.9, "_min": -1.5, "_max": 1.5}
        for value in (value for end, value in filled.items() if own.kind and name.endswith(end)):
            buffer.fill_(value)
    model.generation_config.eos_token_id = [402, 400]
    model.save_pretrained(folder)
    template = PARTS_TEMPLATE.replace("<image>", own.place)
    special = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **special).save_pretrained(folder)
    for file, content in (("preprocessor_config.json", own.images), ("processor_config.json", own.processor)):
        if content:
            (folder / file).write_text(json.dumps(content), encoding="utf-8")
    weights = load_file(folder / "model.safetensors")
    if family.startswith("qwen3_5"):  # Transformers 5.5 saves the encoder under another name than it is published with
        module = tensors_of("mtp experts" if family.endswith("_moe") else "mtp qwen")
        named = {name.replace("language_model.visual.", "visual."): each for name, each in weights.items()}
        save_file(named | module, folder / "model.safetensors")
    elif family.endswith("_moe"):  # and these by rows
        turned = {
            name: np.ascontiguousarray(each.swapaxes(1, 2)) for name, each in weights.items() if ".experts." in name
        }
        save_file(weights | turned, folder / "model.safetensors")


def picture(seed: int, height: int = 40, width: int = 31) -> NDArray[np.uint8]:
    """A random smooth picture, uint8 [height, width, 3]."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width] / max(height, width)
    waves = [np.sin(rng.uniform(2, 12) * x + rng.uniform(2, 12) * y + rng.uniform(0, 6)) for _ in range(3)]
    return (np.stack(waves, axis=-1) * 100 + 128).astype(np.uint8)


TOY_PLACE = "<tool_call>"  # stands where the toy's embeddings are read


def add_toy_encoder(source: Path, folder: Path, *, splits: bool = True) -> Bundle:
    """A copy of the bundle `tiny` whose main model sees images, through one random matrix, without torch."""
    import openvino as ov
    from openvino import opset13 as ops

    shutil.copytree(source, folder)
    bundle = read_bundle(folder)
    main = bundle.manifest.main
    matrix = np.random.default_rng(5).normal(0, 0.012, (SIDE * SIDE * 3 // 4, main.geometry.hidden_size))
    pixels = ops.parameter([-1, 3, SIDE, SIDE], np.float32, name="pixel_values")
    pixels.output(0).set_names({"pixel_values"})
    parts = ops.reshape(pixels, ops.constant(np.array([0, 4, -1], dtype=np.int64)), special_zero=True)
    embeds = ops.matmul(parts, ops.constant(matrix.astype(np.float32)), False, False)
    embeds.output(0).set_names({"image_embeds"})
    (folder / "vision").mkdir()
    model = ov.Model([ops.result(embeds)], [pixels], "vision")
    ov.save_model(model, folder / "vision" / "openvino_model.xml", compress_to_fp16=False)
    tokenizer = json.loads((folder / "tokenizer" / "tokenizer.json").read_text(encoding="utf-8"))
    around: Any = {"image_token": TOY_PLACE, "around_token": "|", "global_token": "#"}
    vision = Idefics3Entry(
        folder="vision", weights="fp32", tile_size=SIDE, tokens_per_tile=4, longest_edge=ROWS * SIDE, splits=splits,
        image_token_id=next(each["id"] for each in tokenizer["added_tokens"] if each["content"] == TOY_PLACE),
        **around, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5),
        rescale_factor=1 / 255, resample=1,
    )  # fmt: skip
    changed = msgspec.structs.replace(main, vision=vision)
    files = list_files(folder)
    write_manifest(folder, msgspec.structs.replace(bundle.manifest, main=changed, files=files))
    return read_bundle(folder)


def asking(*images: Any, text: str = "What is this? It is a fox. What is this?") -> list[dict[str, Any]]:
    """A question about images, as messages."""
    seen = [{"type": "image", "image": image} for image in images]
    return [{"role": "user", "content": [*seen, {"type": "text", "text": text}]}]
