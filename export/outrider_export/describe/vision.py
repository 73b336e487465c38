"""The vision half of a checkpoint that reads images: which layouts are known, and what its configurations say of it.

In all of them an encoder reads square tiles, and a tile's embeddings take the place of the image token's in a model of
text with plain positions:

- Idefics3's layout, which SmolVLM has, too: each tile has a name, its row and column (Laurençon et al. 2024, "Building
  and better understanding vision-language models: insights and future directions").
- InternVL's, in the files of Transformers (`-hf`): the tiles of an image stand in one row (Chen et al. 2024, "How far
  are we to GPT-4V?").
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from outrider.bundle.vision import AnyVisionEntry, ImageLayout
from outrider.errors import ExportError
from outrider.system.files import shown
from outrider_export.sources.source import IMAGE_MODELS, architectures_of, read_json
from outrider_export.tokenizers.vocabulary import Vocabulary

FOLDER = "vision"
ENTRIES: dict[str, Callable[..., AnyVisionEntry]] = {
    str(each.__struct_config__.tag): each for each in get_args(AnyVisionEntry)
}
LANCZOS, BILINEAR, BICUBIC = 1, 2, 3  # Pillow's numbers
STANDARD = (0.5, 0.5, 0.5)
CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
# By the manifest's name, the tokenizer's name for the token, and the usual token.
_TOKENS: dict[ImageLayout, dict[str, tuple[str, str]]] = {
    "idefics3": {
        "image_token": ("image_token", "<image>"),
        "around_token": ("fake_image_token", "<fake_token_around_image>"),
        "global_token": ("global_image_token", "<global-img>"),
    },
    "internvl": {
        "image_token": ("context_image_token", "<IMG_CONTEXT>"),
        "around_token": ("start_image_token", "<img>"),
        "end_token": ("end_image_token", "</img>"),
    },
}


def vision_of(folder: Path, config: dict[str, Any], weights: str, vocabulary: Vocabulary) -> AnyVisionEntry | None:
    """The vision encoder of a checkpoint, and how images are laid out for it; None for a model of text.

    config: its config.json. weights: the option; the encoder is in 8 bits where the main model is in 4.

    Raises:
        ExportError: when images are laid out in a way that Outrider does not know.
    """
    layout = next((IMAGE_MODELS[name] for name in architectures_of(config) if name in IMAGE_MODELS), None)
    if layout is None:
        return None
    whole = read_json(folder / "processor_config.json")
    images = read_json(folder / "preprocessor_config.json") or whole.get("image_processor", {})
    if not images:
        raise ExportError(f"{folder} has no preprocessor_config.json. Download it with the checkpoint.")
    encoder = config.get("vision_config", {})
    try:
        tile_size, patch = _edge(encoder["image_size"]), _edge(encoder["patch_size"])
    except (KeyError, TypeError, ValueError) as error:
        raise ExportError(f"{folder}/config.json has no vision_config with its {error}.") from error
    sizes, checks = (_of_internvl if layout == "internvl" else _of_idefics3)(config, images, whole, tile_size, patch)
    check_prepared(folder, images, checks, f"{tile_size} pixels")
    tokens = _tokens(folder, layout)
    image_token_id = image_token_id_of(folder, config, tokens["image_token"], vocabulary)
    is_internvl = layout == "internvl"
    usual_mean, usual_std = CLIP if is_internvl else (STANDARD, STANDARD)
    fields = {
        "folder": FOLDER,
        "weights": "int8" if weights == "int4" else weights,
        "tile_size": tile_size,
        "image_token_id": image_token_id,
        "rescale_factor": images.get("rescale_factor", 1 / 255),
    }
    fields |= colours_of(images, usual_mean, usual_std, BICUBIC if is_internvl else LANCZOS)
    return ENTRIES[layout](**(fields | sizes | tokens))


Checks = list[tuple[str, Any, Any]]  # what the files say of images, and the one value that is known
Config = dict[str, Any]
# Of a layout whose encoder is written without PyTorch: the fields of the manifest, what its files may say, and what its
# encoder reads, in words. Functions for it get config.json, and what the files say of images and of the processor.
Described = tuple[Config, Checks, str]


def colours_of(images: Config, mean: tuple[float, ...], std: tuple[float, ...], resample: int) -> Config:
    """How pixels are made of an image, with what is usual if the files do not say it."""
    return {
        "mean": tuple(images.get("image_mean") or mean),
        "std": tuple(images.get("image_std") or std),
        "resample": images.get("resample", resample),
    }


def check_prepared(folder: Path, images: dict[str, Any], checks: Checks, encoder: str) -> None:
    """Raise ExportError if a checkpoint prepares images in a way that is not known. encoder: what it reads."""
    usual = [(name, images.get(name, True), True) for name in ("do_resize", "do_rescale", "do_normalize")]
    named = {what for what, *_ in checks}
    for what, found, known in (*(each for each in usual if each[0] not in named), *checks):
        if found != known:
            raise ExportError(
                f"{folder} prepares images with {what}={shown(found)}, and Outrider knows {what}={known} only for its "
                f"encoder of {encoder}."
            )


def image_token_id_of(
    folder: Path, config: dict[str, Any], token: str, vocabulary: Vocabulary, key: str = "image_token_id"
) -> int:
    """The id of an image's token. Raises ExportError if the configuration and the tokenizer differ."""
    token_id = vocabulary.find(token)
    if token_id is None or token_id != config.get(key, token_id):
        raise ExportError(
            f"{folder}/config.json has {key}={config.get(key)}, and {token} is {token_id} in its tokenizer: they do "
            "not belong together."
        )
    return token_id


def _of_idefics3(
    config: dict[str, Any], images: dict[str, Any], whole: dict[str, Any], tile_size: int, patch: int
) -> tuple[dict[str, Any], Checks]:
    """The fields of the manifest that the layout needs, and what its files may say."""
    count = (tile_size // patch) ** 2 // config.get("scale_factor", 2) ** 2
    longest = images.get("size", {}).get("longest_edge", 4 * tile_size)
    sizes = {"tokens_per_tile": count, "longest_edge": longest, "splits": images.get("do_image_splitting", True)}
    return sizes, [
        ("max_image_size", images.get("max_image_size", {}).get("longest_edge", tile_size), tile_size),
        ("image_seq_len", whole.get("image_seq_len", count), count),
    ]


def _of_internvl(
    config: dict[str, Any], images: dict[str, Any], whole: dict[str, Any], tile_size: int, patch: int
) -> tuple[dict[str, Any], Checks]:
    """As `_of_idefics3`. Its processor always cuts images, whatever `crop_to_patches` says."""
    count = int((tile_size // patch * config.get("downsample_ratio", 0.5)) ** 2)
    fewest, most = images.get("min_patches", 1), images.get("max_patches", 12)
    sizes = {
        "tokens_per_tile": count, "num_tiles": (fewest, most),
    }  # fmt: skip
    square = {"height": tile_size, "width": tile_size}
    return sizes, [
        ("size", images.get("size", square), square),
        ("image_seq_length", whole.get("image_seq_length", count), count),
        ("vision_feature_layer", config.get("vision_feature_layer", -1), -1),
        ("vision_feature_select_strategy", config.get("vision_feature_select_strategy", "default"), "default"),
    ]


def _edge(size: Any) -> int:
    """Of a square, whose size may be given as a list."""
    width, height = size if isinstance(size, list) else (size, size)
    if width != height:
        raise ValueError(f"square tiles (it has {shown(size)})")
    return int(width)


def _tokens(folder: Path, layout: ImageLayout) -> dict[str, str]:
    """The tokens around images, by the manifest's names for them."""
    config = read_json(folder / "tokenizer_config.json")
    extra = config.get("extra_special_tokens")
    named = {**config, **(extra if isinstance(extra, dict) else {})}
    found = {}
    for name, (theirs, usual) in _TOKENS[layout].items():
        token = named.get(theirs, usual)
        found[name] = token["content"] if isinstance(token, dict) else token
    return found
