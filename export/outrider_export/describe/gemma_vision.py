"""The vision half of Gemma 3 and Gemma 4, whose images attend to later tokens of the same image.

Source: Gemma Team 2025, "Gemma 3 Technical Report"; of Gemma 4, Transformers 5.5, models/gemma4, and 5.24,
models/gemma4_unified.
"""

from __future__ import annotations

from outrider_export.describe.vision import BICUBIC, BILINEAR, STANDARD, Config, Described, colours_of

_MOST_TOKENS = 280  # of an image, if the files say nothing


def gemma3_of(config: Config, images: Config, _: Config) -> Described:
    """See `Described`."""
    size = int(config["vision_config"]["image_size"])
    square = {"height": size, "width": size}
    count = int(config.get("mm_tokens_per_image", 256))
    checks = [
        ("size", images.get("size", square), square),
        ("image_seq_length", images.get("image_seq_length", count), count),
    ]
    splits = bool(images.get("do_pan_and_scan"))
    begin, soft, end = "<start_of_image>", "<image_soft_token>", "<end_of_image>"
    fields = {
        "tile_size": size,
        "tokens_per_tile": count,
        "splits": splits,
        "num_tiles": (2, images.get("pan_and_scan_max_num_crops") or 4) if splits else (1, 1),
        "least_edge": (images.get("pan_and_scan_min_crop_size") or 256) if splits else 0,
        "tolerance": float(images.get("pan_and_scan_min_ratio_to_activate") or 1.2),
        "image_token": begin,
        "soft_token": soft,
        "around_token": f"\n\n{begin}",
        "end_token": f"{end}\n\n",
    }
    return fields | colours_of(images, STANDARD, STANDARD, BILINEAR), checks, f"{size} pixels"


def gemma4_of(config: Config, images: Config, _: Config) -> Described:
    """See `Described`. An image keeps its form; the larger models' attend both ways where layers have a window."""
    encoder, text = config["vision_config"], config["text_config"]
    patch, pooled = int(encoder.get("patch_size", 16)), int(encoder.get("pooling_kernel_size", 3))
    checks = [
        ("do_normalize", images.get("do_normalize", False), False),
        ("patch_size", images.get("patch_size", 16), patch),
        ("pooling_kernel_size", images.get("pooling_kernel_size", 3), pooled),
    ]
    size, most = patch * pooled, int(images.get("max_soft_tokens", _MOST_TOKENS))
    place, is_unified = "<|image|>", "mm_embed_dim" in encoder
    has_own = bool(text.get("hidden_size_per_layer_input", 256))
    fields = {
        "tile_size": size,
        "tokens_per_tile": 1,
        "image_token": place,
        "around_token": "<|image>",
        "end_token": "<image|>",
        "mean": (0.0, 0.0, 0.0),
        "std": (1.0, 1.0, 1.0),
        "resample": images.get("resample", BICUBIC),
        "num_pixels": (0, most * size**2),
        "patches": 1 if is_unified else pooled,
        "both_ways": "windowed" if text.get("use_bidirectional_attention") == "vision" else "none",
        "place_token_id": int(text.get("pad_token_id") or 0) if has_own else None,
    }
    return fields, checks, f"patches of {patch} pixels"
