"""The vision half of a checkpoint that reads images, as its configurations say it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from outrider.bundle.vision import AnyVisionEntry, ImageLayout
from outrider.errors import ExportError
from outrider.system.files import shown
from outrider_export.describe import image_layouts
from outrider_export.describe.image_layouts import Checks, Config, Described
from outrider_export.direct.qwen_encoder import OF_VISION
from outrider_export.direct.tower_encoders import tower_name
from outrider_export.sources.safetensors import tensors_of
from outrider_export.sources.source import DIRECT_ENCODERS, IMAGE_MODELS, architectures_of, read_json
from outrider_export.tokenizers.vocabulary import Vocabulary

FOLDER = "vision"
ENTRIES: dict[str, Callable[..., AnyVisionEntry]] = {
    str(each.__struct_config__.tag): each for each in get_args(AnyVisionEntry)
}
_LAYOUTS: dict[ImageLayout, Callable[[Config, Config, Config], Described]] = {
    "gemma3": image_layouts.gemma3_of,
    "gemma4": image_layouts.gemma4_of,
    "idefics3": image_layouts.idefics3_of,
    "internvl": image_layouts.internvl_of,
    "lfm2": image_layouts.lfm2_of,
    "llava_next": image_layouts.llava_next_of,
    "minicpm": image_layouts.minicpm_of,
    "minicpm4_6": image_layouts.minicpm4_6_of,
    "pixtral": image_layouts.pixtral_of,
    "qwen": image_layouts.qwen_of,
}


def vision_of(folder: Path, weights: str, vocabulary: Vocabulary, *, whole_only: bool = False) -> AnyVisionEntry | None:
    """The vision encoder of a checkpoint, and how images are laid out for it; None for a model of text.

    weights: the option; the encoder is in 8 bits where the main model is in 4. whole_only: leave out models whose text
    part can be run alone.

    Raises:
        ExportError: when images are laid out or prepared in a way that Outrider does not know.
    """
    config = read_json(folder / "config.json")
    known = IMAGE_MODELS if whole_only else IMAGE_MODELS | DIRECT_ENCODERS
    layout = next((known[each] for each in architectures_of(config) if each in known), None)
    if layout is None:
        return None
    whole = read_json(folder / "processor_config.json")
    images = read_json(folder / "preprocessor_config.json") or whole.get("image_processor") or {}
    if layout not in IMAGE_MODELS.values():
        if not images or not any(map(_is_of_vision, tensors_of(folder))):
            return None  # a text part that was saved or trained alone
    elif not images:
        raise ExportError(f"{folder} has no preprocessor_config.json. Download it with the checkpoint.")
    tokens = read_json(folder / "tokenizer_config.json")
    extra = tokens.get("extra_special_tokens")
    whole = whole | {"tokens": tokens | (extra if isinstance(extra, dict) else {})}
    fields, checks, encoder = _LAYOUTS[layout](config, images, whole)
    _check_prepared(folder, images, checks, encoder)
    key = "image_token_index" if "image_token_index" in config else "image_token_id"
    token = fields.get("soft_token") or fields["image_token"]
    return ENTRIES[layout](
        folder=FOLDER,
        weights="int8" if weights == "int4" else weights,
        image_token_id=_image_token_id_of(folder, config, token, vocabulary, key),
        rescale_factor=images.get("rescale_factor", 1 / 255),
        **fields,
    )


def _is_of_vision(name: str) -> bool:
    """Whether a tensor of this name is an encoder's."""
    return name.startswith(OF_VISION) or tower_name(name).startswith(("vision_tower.", "vision_embedder."))


def _check_prepared(folder: Path, images: dict[str, Any], checks: Checks, encoder: str) -> None:
    """Raise ExportError if a checkpoint prepares images in a way that is not known. encoder: what it reads."""
    usual = [(name, images.get(name, True), True) for name in ("do_resize", "do_rescale", "do_normalize")]
    named = {what for what, *_ in checks}
    for what, found, known in (*(each for each in usual if each[0] not in named), *checks):
        if found != known:
            raise ExportError(
                f"{folder} prepares images with {what}={shown(found)}, and Outrider knows {what}={known} only for its "
                f"encoder of {encoder}."
            )


def _image_token_id_of(folder: Path, config: dict[str, Any], token: str, vocabulary: Vocabulary, key: str) -> int:
    """The id of an image's token. Raises ExportError if the configuration and the tokenizer differ."""
    token_id = vocabulary.find(token)
    if token_id is None or token_id != config.get(key, token_id):
        raise ExportError(
            f"{folder}/config.json has {key}={config.get(key)}, and {token} is {token_id} in its tokenizer: they do "
            "not belong together."
        )
    return token_id
