"""How models lay out images, from their configurations: see `Described`.

- Idefics3's, which SmolVLM has, too: each tile has a name, its row and column (Laurençon et al. 2024, "Building and
  better understanding vision-language models: insights and future directions").
- InternVL's, in the files of Transformers (`-hf`): the tiles of an image stand in one row (Chen et al. 2024, "How far
  are we to GPT-4V?").
- Gemma 3 and 4: an image's tokens attend to later ones of the same image (Gemma Team 2025, "Gemma 3 Technical Report").
- Qwen's: an image keeps its form, and its tokens have positions in rows and columns (Wang et al. 2024, "Qwen2-VL"; Bai
  et al. 2025, "Qwen2.5-VL" and "Qwen3-VL").
- Mistral Small 3 and Ministral 3 (`mistral3`): an image keeps its form, and a token ends each of its rows (Agrawal et
  al. 2024, "Pixtral 12B").
- LLaVA-NeXT with SigLIP, as Granite Vision: the tiles of an image are put together without their padding (Liu et al.
  2024, "LLaVA-NeXT"; Karlinsky et al. 2025, "Granite Vision").
- LFM2-VL: an image keeps its form, or is cut into tiles and the whole.
- MiniCPM-V: the whole image, and slices in nearly its own form (Yao et al. 2024, "MiniCPM-V: A GPT-4V level MLLM on
  your phone").

Source of Gemma 4: Transformers 5.5, models/gemma4, and 5.24, models/gemma4_unified.
"""

from __future__ import annotations

from math import isqrt
from typing import Any

from outrider.system.files import shown

LANCZOS, BILINEAR, BICUBIC = 1, 2, 3  # Pillow's numbers
STANDARD = (0.5, 0.5, 0.5)
CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
Checks = list[tuple[str, Any, Any]]  # what the files say of images, and the one value that is known
Config = dict[str, Any]
# The fields of the manifest, what the files may say, and what the encoder reads, in words. A layout's function gets
# config.json, and what the files say of images and of the processor, its tokens among it.
Described = tuple[Config, Checks, str]


def colours_of(images: Config, mean: tuple[float, ...], std: tuple[float, ...], resample: int) -> Config:
    """How pixels are made of an image, with what is usual if the files do not say it."""
    return {
        "mean": tuple(images.get("image_mean") or mean),
        "std": tuple(images.get("image_std") or std),
        "resample": images.get("resample", resample),
    }


def idefics3_of(config: Config, images: Config, whole: Config) -> Described:
    """See `Described`."""
    size, patch = _square_tiles(config)
    count = (size // patch) ** 2 // config.get("scale_factor", 2) ** 2
    fields = {
        "tile_size": size,
        "tokens_per_tile": count,
        "longest_edge": images.get("size", {}).get("longest_edge", 4 * size),
        "splits": images.get("do_image_splitting", True),
        "image_token": _token(whole, "image_token", "<image>"),
        "around_token": _token(whole, "fake_image_token", "<fake_token_around_image>"),
        "global_token": _token(whole, "global_image_token", "<global-img>"),
    }
    checks = [
        ("max_image_size", images.get("max_image_size", {}).get("longest_edge", size), size),
        ("image_seq_len", whole.get("image_seq_len", count), count),
    ]
    return fields | colours_of(images, STANDARD, STANDARD, LANCZOS), checks, f"{size} pixels"


def internvl_of(config: Config, images: Config, whole: Config) -> Described:
    """See `Described`. Its processor always cuts images, whatever `crop_to_patches` says."""
    size, patch = _square_tiles(config)
    count = int((size // patch * config.get("downsample_ratio", 0.5)) ** 2)
    fields = {
        "tile_size": size,
        "tokens_per_tile": count,
        "num_tiles": (images.get("min_patches", 1), images.get("max_patches", 12)),
        "image_token": _token(whole, "context_image_token", "<IMG_CONTEXT>"),
        "around_token": _token(whole, "start_image_token", "<img>"),
        "end_token": _token(whole, "end_image_token", "</img>"),
    }
    square = {"height": size, "width": size}
    checks = [
        ("size", images.get("size", square), square),
        ("image_seq_length", whole.get("image_seq_length", count), count),
        ("vision_feature_layer", config.get("vision_feature_layer", -1), -1),
        ("vision_feature_select_strategy", config.get("vision_feature_select_strategy", "default"), "default"),
    ]
    return fields | colours_of(images, *CLIP, BICUBIC), checks, f"{size} pixels"


def _square_tiles(config: Config) -> tuple[int, int]:
    """The edges of a tile and of a patch, which may be given as lists."""
    edges = []
    for name in ("image_size", "patch_size"):
        given = config["vision_config"][name]
        width, height = given if isinstance(given, list) else (given, given)
        if width != height:
            raise ValueError(f"{name} {shown(given)}, where tiles are square")
        edges.append(int(width))
    return edges[0], edges[1]


def _token(whole: Config, name: str, usual: str) -> str:
    """A token around images, by the tokenizer's name for it."""
    token = whole["tokens"].get(name, usual)
    return str(token["content"] if isinstance(token, dict) else token)


_PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]


def pixtral_of(config: Config, images: Config, whole: Config) -> Described:
    """See `Described`."""
    vision = config["vision_config"]
    patch, merge = int(vision["patch_size"]), int(config.get("spatial_merge_size", 2))
    size, sizes, patches = patch * merge, images.get("size") or {"longest_edge": 1024}, images.get("patch_size", patch)
    longest = int(sizes.get("longest_edge") or min(sizes["height"], sizes["width"]))
    fields = {
        "tile_size": size,
        "tokens_per_tile": 1,
        "longest_edge": min(longest, int(vision["image_size"]), isqrt(MOST_TOKENS) * size),
        "image_token": whole.get("image_token", "[IMG]"),
        "row_token": whole.get("image_break_token", "[IMG_BREAK]"),
        "end_token": whole.get("image_end_token", "[IMG_END]"),
        "patches": merge,
    }
    checks = [
        ("patch_size", patches.get("height") if isinstance(patches, dict) else patches, patch),
        ("spatial_merge_size", whole.get("spatial_merge_size", merge), merge),
        ("vision_feature_layer", config.get("vision_feature_layer", -1), -1),
        ("model_type", vision.get("model_type", "pixtral"), "pixtral"),
    ]
    return fields | colours_of(images, *CLIP, BICUBIC), checks, f"patches of {patch} pixels"


def llava_next_of(config: Config, images: Config, whole: Config) -> Described:
    """See `Described`."""
    vision = config["vision_config"]
    size, patch = int(vision["image_size"]), int(vision["patch_size"])
    square, pinpoints = {"height": size, "width": size}, config.get("image_grid_pinpoints") or _PINPOINTS
    fields = {
        "tile_size": size,
        "tokens_per_tile": (size // patch) ** 2,
        "image_token": whole.get("image_token", "<image>"),
        "sizes": tuple((int(width), int(height)) for height, width in pinpoints),
    }
    given = images.get("size") or square
    checks = [
        ("size", square if given == {"shortest_edge": size} else given, square),
        ("crop_size", images.get("crop_size") or square, square),
        ("image_grid_pinpoints", images.get("image_grid_pinpoints") or _PINPOINTS, pinpoints),
        ("patch_size", whole.get("patch_size") or patch, patch),
        ("vision_feature_select_strategy", config.get("vision_feature_select_strategy", "default"), "full"),
        ("model_type", vision.get("model_type", "clip_vision_model"), "siglip_vision_model"),
    ]
    return fields | colours_of(images, *CLIP, BICUBIC), checks, f"patches of {patch} pixels"


def lfm2_of(config: Config, images: Config, _: Config) -> Described:
    """See `Described`."""
    vision = config["vision_config"]
    patch, merge = int(vision.get("patch_size", 16)), int(config.get("downsample_factor", 2))
    size, splits, token = int(images.get("tile_size", 512)), images.get("do_image_splitting", True), patch * merge
    fields = {
        "tile_size": size,
        "tokens_per_tile": (size // token) ** 2,
        "splits": splits,
        "image_token": "<image>",
        "around_token": "<|image_start|>",
        "global_token": "<|img_thumbnail|>" if images.get("use_thumbnail", True) else "",
        "end_token": "<|image_end|>",
        "num_tiles": (images.get("min_tiles", 2), images.get("max_tiles", 10)) if splits else (1, 1),
        "num_pixels": (images.get("min_image_tokens", 64) * token**2, images.get("max_image_tokens", 256) * token**2),
        "tolerance": float(images.get("max_pixels_tolerance", 2.0)),
        "patches": merge,
        "num_places": isqrt(int(vision.get("num_patches", 256))),
    }
    checks = [
        ("encoder_patch_size", images.get("encoder_patch_size", 16), patch),
        ("downsample_factor", images.get("downsample_factor", 2), merge),
        ("model_type", vision.get("model_type", "siglip2_vision_model"), "siglip2_vision_model"),
    ]
    return fields | colours_of(images, STANDARD, STANDARD, BILINEAR), checks, f"patches of {patch} pixels"


def minicpm_of(config: Config, images: Config, _: Config) -> Described:
    """See `Described`. Of 2.6 to 4.5."""
    patch, queries = int(config["vision_config"]["patch_size"]), int(config.get("query_num", 64))
    fields, checks = _slices_of(config, images)
    fields |= {
        "tile_size": patch,
        "tokens_per_tile": queries,
        "image_token": images.get("unk", "<unk>"),
        "around_token": images.get("im_start", "<image>"),
        "end_token": images.get("im_end", "</image>"),
        "mean": tuple(images.get("norm_mean") or STANDARD),
        "std": tuple(images.get("norm_std") or STANDARD),
        "resample": BICUBIC,
    }
    checks += [
        ("slice_mode", images.get("slice_mode", True), True),
        ("slice_start", images.get("slice_start", "<slice>"), "<slice>"),
        ("slice_end", images.get("slice_end", "</slice>"), "</slice>"),
        ("im_id_start", images.get("im_id_start", "<image_id>"), "<image_id>"),
        ("image_feature_size", images.get("image_feature_size", 64), queries),
        ("scale_emb", config.get("scale_emb", 1), 1),
    ]
    return fields, checks, f"patches of {patch} pixels"


def minicpm4_6_of(config: Config, images: Config, _: Config) -> Described:
    """See `Described`."""
    patch = int(config["vision_config"].get("patch_size", 16))
    fields, checks = _slices_of(config, images)
    fields |= {
        "tile_size": patch * 2,
        "tokens_per_tile": (fields["longest_edge"] // (patch * 4)) ** 2,
        "image_token": "<|image_pad|>",
        "around_token": "<image>",
        "end_token": "</image>",
        "patches": 2,
    }
    checks += [
        ("downsample_mode", {images.get("downsample_mode", "16x"), config.get("downsample_mode", "16x")}, {"16x"}),
        ("merge_kernel_size", list(config.get("merge_kernel_size", (2, 2))), [2, 2]),
        ("window_kernel_size", list(config["vision_config"].get("window_kernel_size", (2, 2))), [2, 2]),
        ("merger_times", config.get("merger_times", 1), 1),
    ]
    return fields | colours_of(images, STANDARD, STANDARD, BICUBIC), checks, f"patches of {patch} pixels"


def _slices_of(config: Config, images: Config) -> tuple[Config, Checks]:
    """What both have in common."""
    vision, most, splits = config["vision_config"], images.get("max_slice_nums", 9), images.get("slice_mode", True)
    patch = int(vision["patch_size"])
    fields = {
        "longest_edge": int(images.get("scale_resolution", 448)),
        "numbered": bool(images.get("use_image_id", True)),
        "num_tiles": (1, most if splits else 1),
        "num_places": int(vision["image_size"]) // patch,
    }
    return fields, [("patch_size", images.get("patch_size", 14), patch)]


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
