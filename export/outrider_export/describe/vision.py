"""The vision half of a checkpoint that reads images: which layouts are known, and what its configurations say of it.

The layout is Idefics3's, which SmolVLM has, too: square tiles, a SigLIP encoder, a pixel shuffle and one matrix, and a
Llama with plain positions, where a tile's embeddings take the place of the image token's (Laurençon et al. 2024,
"Building and better understanding vision-language models: insights and future directions").
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outrider.bundle.manifest import VisionEntry
from outrider.errors import ExportError
from outrider.system.files import shown
from outrider_export.sources.source import IMAGE_MODELS, architectures_of, read_json
from outrider_export.tokenizers.vocabulary import Vocabulary

FOLDER = "vision"
_LANCZOS = 1
_STANDARD = (0.5, 0.5, 0.5)
_TOKENS = {
    "image_token": "<image>",
    "fake_image_token": "<fake_token_around_image>",
    "global_image_token": "<global-img>",
}


def vision_of(folder: Path, config: dict[str, Any], weights: str, vocabulary: Vocabulary) -> VisionEntry | None:
    """The vision encoder of a checkpoint, and how images are laid out for it; None for a model of text.

    config: its config.json. weights: the option; the encoder is in 8 bits where the main model is in 4.

    Raises:
        ExportError: when images are laid out in a way that Outrider does not know.
    """
    if not {*architectures_of(config)} & {*IMAGE_MODELS}:
        return None
    whole = read_json(folder / "processor_config.json")
    images = read_json(folder / "preprocessor_config.json") or whole.get("image_processor", {})
    if not images:
        raise ExportError(f"{folder} has no preprocessor_config.json. Download it with the checkpoint.")
    encoder, scale = config.get("vision_config", {}), config.get("scale_factor", 2)
    try:
        tile_size, patch = int(encoder["image_size"]), int(encoder["patch_size"])
    except (KeyError, TypeError, ValueError) as error:
        raise ExportError(f"{folder}/config.json has no vision_config with its {error}.") from error
    tokens_per_tile = (tile_size // patch) ** 2 // scale**2
    longest = images.get("size", {}).get("longest_edge", 4 * tile_size)
    for what, found, known in (
        ("do_resize", images.get("do_resize", True), True),
        ("do_rescale", images.get("do_rescale", True), True),
        ("do_normalize", images.get("do_normalize", True), True),
        ("max_image_size", images.get("max_image_size", {}).get("longest_edge", tile_size), tile_size),
        ("image_seq_len", whole.get("image_seq_len", tokens_per_tile), tokens_per_tile),
    ):
        if found != known:
            raise ExportError(
                f"{folder} prepares images with {what}={shown(found)}, and Outrider knows {what}={known} only for its "
                f"encoder of {tile_size} pixels."
            )
    tokens = _tokens(folder)
    image_token_id = vocabulary.find(tokens["image_token"])
    if image_token_id is None or image_token_id != config.get("image_token_id", image_token_id):
        raise ExportError(
            f"{folder}/config.json has image_token_id={config.get('image_token_id')}, and {tokens['image_token']} is "
            f"{image_token_id} in its tokenizer: they do not belong together."
        )
    mean, std = (tuple(images.get(name) or _STANDARD) for name in ("image_mean", "image_std"))
    return VisionEntry(
        folder=FOLDER,
        weights="int8" if weights == "int4" else weights,
        tile_size=tile_size,
        tokens_per_tile=tokens_per_tile,
        longest_edge=longest,
        splits=images.get("do_image_splitting", True),
        image_token_id=image_token_id,
        image_token=tokens["image_token"],
        around_token=tokens["fake_image_token"],
        global_token=tokens["global_image_token"],
        mean=mean,
        std=std,
        rescale_factor=images.get("rescale_factor", 1 / 255),
        resample=images.get("resample", _LANCZOS),
    )


def _tokens(folder: Path) -> dict[str, str]:
    """The tokens around images, by the tokenizer's names for them."""
    config = read_json(folder / "tokenizer_config.json")
    extra = config.get("extra_special_tokens")
    named = {**config, **(extra if isinstance(extra, dict) else {})}
    found = {}
    for name, usual in _TOKENS.items():
        token = named.get(name, usual)
        found[name] = token["content"] if isinstance(token, dict) else token
    return found
