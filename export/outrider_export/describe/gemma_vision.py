"""The vision half of Gemma 3 and Gemma 4, whose images attend to later tokens of the same image.

Source: Gemma Team 2025, "Gemma 3 Technical Report"; of Gemma 4, Transformers 5.5, models/gemma4.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from outrider.bundle.manifest import ImageLayout, VisionEntry
from outrider_export.describe.vision import FOLDER, STANDARD, check_prepared, image_token_id_of
from outrider_export.direct.tower_encoders import tower_name
from outrider_export.sources.safetensors import tensors_of
from outrider_export.sources.source import DIRECT_ENCODERS, architectures_of, read_json
from outrider_export.tokenizers.vocabulary import Vocabulary

_BILINEAR, _BICUBIC = 2, 3
_MOST_TOKENS = 280  # of an image, if the files say nothing


def gemma_vision_of(folder: Path, weights: str, vocabulary: Vocabulary) -> VisionEntry | None:
    """The vision encoder of one of Gemma's checkpoints, and how images are laid out for it; None if it has none.

    weights: the option; the encoder is in 8 bits where the main model is in 4.

    Raises:
        ExportError: when images are prepared in a way that is not known.
    """
    config = read_json(folder / "config.json")
    layout = next((DIRECT_ENCODERS[name] for name in architectures_of(config) if name in DIRECT_ENCODERS), None)
    if layout is None or layout not in _LAYOUTS or not config.get("vision_config"):
        return None
    whole = read_json(folder / "processor_config.json")
    images = read_json(folder / "preprocessor_config.json") or whole.get("image_processor") or {}
    # A text part that was saved or trained alone has no images.
    if not images or not any(tower_name(name).startswith("vision_tower.") for name in tensors_of(folder)):
        return None
    fields = _LAYOUTS[layout](folder, config, images, vocabulary)
    return VisionEntry(
        folder=FOLDER,
        layout=layout,
        weights="int8" if weights == "int4" else weights,
        splits=False,
        global_token="",
        rescale_factor=images.get("rescale_factor", 1 / 255),
        **fields,
    )


def _of_gemma3(folder: Path, config: dict[str, Any], images: dict[str, Any], vocabulary: Vocabulary) -> dict[str, Any]:
    """The fields of the manifest that the layout has."""
    size = int(config["vision_config"]["image_size"])
    square = {"height": size, "width": size}
    count = int(config.get("mm_tokens_per_image", 256))
    checks = [
        ("size", images.get("size", square), square),
        ("do_pan_and_scan", bool(images.get("do_pan_and_scan")), False),
        ("image_seq_length", images.get("image_seq_length", count), count),
    ]
    check_prepared(folder, images, checks, f"{size} pixels")
    begin, soft, end = "<start_of_image>", "<image_soft_token>", "<end_of_image>"
    return {
        "tile_size": size,
        "tokens_per_tile": count,
        "longest_edge": size,
        "image_token_id": image_token_id_of(folder, config, soft, vocabulary, "image_token_index"),
        "image_token": begin,
        "soft_token": soft,
        "around_token": f"\n\n{begin}",
        "end_token": f"{end}\n\n",
        "mean": tuple(images.get("image_mean") or STANDARD),
        "std": tuple(images.get("image_std") or STANDARD),
        "resample": images.get("resample", _BILINEAR),
        "both_ways": "all",
    }


def _of_gemma4(folder: Path, config: dict[str, Any], images: dict[str, Any], vocabulary: Vocabulary) -> dict[str, Any]:
    """As `_of_gemma3`. An image keeps its form; the larger models' attend both ways where layers have a window."""
    encoder, text = config["vision_config"], config["text_config"]
    patch, pooled = int(encoder.get("patch_size", 16)), int(encoder.get("pooling_kernel_size", 3))
    checks = [
        ("do_normalize", images.get("do_normalize", False), False),
        ("patch_size", images.get("patch_size", 16), patch),
        ("pooling_kernel_size", images.get("pooling_kernel_size", 3), pooled),
    ]
    check_prepared(folder, images, checks, f"patches of {patch} pixels")
    size, most = patch * pooled, int(images.get("max_soft_tokens", _MOST_TOKENS))
    place = "<|image|>"
    has_own = bool(text.get("hidden_size_per_layer_input", 256))
    return {
        "tile_size": size,
        "tokens_per_tile": 1,
        "longest_edge": most * size,
        "image_token_id": image_token_id_of(folder, config, place, vocabulary),
        "image_token": place,
        "around_token": "<|image>",
        "end_token": "<image|>",
        "mean": (0.0, 0.0, 0.0),
        "std": (1.0, 1.0, 1.0),
        "resample": images.get("resample", _BICUBIC),
        "num_pixels": (0, most * size**2),
        "patches": pooled,
        "both_ways": "windowed" if text.get("use_bidirectional_attention") == "vision" else "none",
        "place_token_id": int(text.get("pad_token_id") or 0) if has_own else None,
    }


_LAYOUTS: dict[ImageLayout, Callable[..., dict[str, Any]]] = {"gemma3": _of_gemma3, "gemma4": _of_gemma4}
