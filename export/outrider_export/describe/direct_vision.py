"""The vision half of checkpoints whose encoder is written without PyTorch, by the layout of their images."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from outrider.bundle.vision import AnyVisionEntry, ImageLayout
from outrider_export.describe.image_layouts import (
    gemma3_of,
    gemma4_of,
    lfm2_of,
    llava_next_of,
    minicpm4_6_of,
    minicpm_of,
    pixtral_of,
    qwen_of,
)
from outrider_export.describe.vision import ENTRIES, FOLDER, Config, Described, check_prepared, image_token_id_of
from outrider_export.direct.qwen_encoder import OF_VISION
from outrider_export.direct.tower_encoders import tower_name
from outrider_export.sources.safetensors import tensors_of
from outrider_export.sources.source import DIRECT_ENCODERS, architectures_of, read_json
from outrider_export.tokenizers.vocabulary import Vocabulary

_LAYOUTS: dict[ImageLayout, Callable[[Config, Config, Config], Described]] = {
    "gemma3": gemma3_of,
    "gemma4": gemma4_of,
    "lfm2": lfm2_of,
    "llava_next": llava_next_of,
    "minicpm": minicpm_of,
    "minicpm4_6": minicpm4_6_of,
    "pixtral": pixtral_of,
    "qwen": qwen_of,
}


def direct_vision_of(folder: Path, weights: str, vocabulary: Vocabulary) -> AnyVisionEntry | None:
    """The vision encoder of such a checkpoint, and how images are laid out for it; None if it has none.

    weights: the option; the encoder is in 8 bits where the main model is in 4.

    Raises:
        ExportError: when images are prepared in a way that is not known.
    """
    config = read_json(folder / "config.json")
    layout = next((DIRECT_ENCODERS[each] for each in architectures_of(config) if each in DIRECT_ENCODERS), None)
    if layout is None:
        return None
    whole = read_json(folder / "processor_config.json")
    images = read_json(folder / "preprocessor_config.json") or whole.get("image_processor") or {}
    # A text part that was saved or trained alone has no images.
    if not images or not any(map(_is_of_vision, tensors_of(folder))):
        return None
    fields, checks, encoder = _LAYOUTS[layout](config, images, whole)
    check_prepared(folder, images, checks, encoder)
    key = "image_token_index" if "image_token_index" in config else "image_token_id"
    token = fields.get("soft_token") or fields["image_token"]
    return ENTRIES[layout](
        folder=FOLDER,
        weights="int8" if weights == "int4" else weights,
        image_token_id=image_token_id_of(folder, config, token, vocabulary, key),
        rescale_factor=images.get("rescale_factor", 1 / 255),
        **fields,
    )


def _is_of_vision(name: str) -> bool:
    """Whether a tensor of this name is an encoder's."""
    return name.startswith(OF_VISION) or tower_name(name).startswith(("vision_tower.", "vision_embedder."))
