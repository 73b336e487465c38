"""The vision half of Qwen's models: an image keeps its form, and its tokens have positions in rows and columns.

Source: Wang et al. 2024, "Qwen2-VL"; Bai et al. 2025, "Qwen2.5-VL" and "Qwen3-VL".
"""

from __future__ import annotations

from math import isqrt
from pathlib import Path

from outrider.bundle.manifest import VisionEntry
from outrider_export.describe.vision import CLIP, FOLDER, check_prepared, image_token_id_of
from outrider_export.direct.qwen_encoder import OF_VISION
from outrider_export.sources.safetensors import tensors_of
from outrider_export.sources.source import DIRECT_ENCODERS, architectures_of, read_json
from outrider_export.tokenizers.vocabulary import Vocabulary

_PLACE = "<|image_pad|>"
MOST_TOKENS = 4_096  # of an image, though files may say more: its encoder's time grows with their square
_BICUBIC = 3
_SIZES = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}  # pixels of an image, if files say nothing


def qwen_vision_of(folder: Path, weights: str, vocabulary: Vocabulary) -> VisionEntry | None:
    """The vision encoder of one of Qwen's checkpoints, and how images are laid out for it; None if it has none.

    weights: the option; the encoder is in 8 bits where the main model is in 4.

    Raises:
        ExportError: when images are prepared in a way that is not known.
    """
    config = read_json(folder / "config.json")
    if "qwen" not in {DIRECT_ENCODERS.get(name) for name in architectures_of(config)}:
        return None
    images = read_json(folder / "preprocessor_config.json")
    images = images or read_json(folder / "processor_config.json").get("image_processor", {})
    # A text part that was saved or trained alone has no images.
    if not images or not any(name.startswith(OF_VISION) for name in tensors_of(folder)):
        return None
    encoder = config["vision_config"]
    patch, merge = int(encoder.get("patch_size", 14)), int(encoder.get("spatial_merge_size", 2))
    checks = [
        ("patch_size", images.get("patch_size", 14), patch),
        ("merge_size", images.get("merge_size", 2), merge),
        ("temporal_patch_size", images.get("temporal_patch_size", 2), 2),
    ]
    check_prepared(folder, images, checks, f"patches of {patch} pixels")
    token_id = image_token_id_of(folder, config, _PLACE, vocabulary)
    size = patch * merge
    sizes = _SIZES | (images.get("size") or {})
    fewest = int(images.get("min_pixels") or sizes["shortest_edge"])
    most = min(int(images.get("max_pixels") or sizes["longest_edge"]), MOST_TOKENS * size**2)
    window = int(encoder.get("window_size", 112)) // size * merge if "fullatt_block_indexes" in encoder else 0
    mean, std = images.get("image_mean") or CLIP[0], images.get("image_std") or CLIP[1]
    return VisionEntry(
        folder=FOLDER,
        weights="int8" if weights == "int4" else weights,
        layout="qwen",
        tile_size=size,
        tokens_per_tile=1,
        longest_edge=isqrt(most),
        splits=True,
        image_token_id=token_id,
        image_token=_PLACE,
        around_token="",
        global_token="",
        mean=tuple(mean),
        std=tuple(std),
        rescale_factor=images.get("rescale_factor", 1 / 255),
        resample=images.get("resample", _BICUBIC),
        num_pixels=(fewest, most),
        patches=merge,
        window=window,
        num_places=isqrt(int(encoder.get("num_position_embeddings", 0))),
        num_parts=1 + len(encoder.get("deepstack_visual_indexes") or ()),
    )
