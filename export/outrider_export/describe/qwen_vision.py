"""The vision half of Qwen's models: an image keeps its form, and its tokens have positions in rows and columns.

Source: Wang et al. 2024, "Qwen2-VL"; Bai et al. 2025, "Qwen2.5-VL" and "Qwen3-VL".
"""

from __future__ import annotations

from math import isqrt

from outrider_export.describe.vision import BICUBIC, CLIP, Config, Described, colours_of

MOST_TOKENS = 4_096  # of an image, though files may say more: its encoder's time grows with their square
_SIZES = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}  # pixels of an image, if files say nothing


def qwen_of(config: Config, images: Config, _: Config) -> Described:
    """See `Described`."""
    encoder = config["vision_config"]
    patch, merge = int(encoder.get("patch_size", 14)), int(encoder.get("spatial_merge_size", 2))
    checks = [
        ("patch_size", images.get("patch_size", 14), patch),
        ("merge_size", images.get("merge_size", 2), merge),
        ("temporal_patch_size", images.get("temporal_patch_size", 2), 2),
    ]
    size = patch * merge
    sizes = _SIZES | (images.get("size") or {})
    fewest = int(images.get("min_pixels") or sizes["shortest_edge"])
    most = min(int(images.get("max_pixels") or sizes["longest_edge"]), MOST_TOKENS * size**2)
    fields = {
        "tile_size": size,
        "tokens_per_tile": 1,
        "image_token": "<|image_pad|>",
        "num_pixels": (fewest, most),
        "patches": merge,
        "window": int(encoder.get("window_size", 112)) // size * merge if "fullatt_block_indexes" in encoder else 0,
        "num_places": isqrt(int(encoder.get("num_position_embeddings", 0))),
        "num_parts": 1 + len(encoder.get("deepstack_visual_indexes") or ()),
    }
    return fields | colours_of(images, *CLIP, BICUBIC), checks, f"patches of {patch} pixels"
