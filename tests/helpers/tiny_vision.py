"""Tiny random models that read images, with a tokenizer and their image processors, as checkpoint folders; a toy."""

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
PROCESSOR: dict[str, Any] = {
    "do_convert_rgb": True, "do_image_splitting": True, "do_normalize": True, "do_pad": True, "do_rescale": True,
    "do_resize": True, "image_mean": [0.5, 0.5, 0.5], "image_processor_type": "SmolVLMImageProcessor",
    "image_std": [0.5, 0.5, 0.5], "max_image_size": {"longest_edge": SIDE}, "resample": 1,
    "rescale_factor": 1 / 255, "size": {"longest_edge": ROWS * SIDE},
}  # fmt: skip


_SHAPE: dict[str, Any] = {"intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
_VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2, "patch_size": 4,
}  # fmt: skip
_TEXT: dict[str, Any] = {
    "vocab_size": NUM_TOKENS, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048, "pad_token_id": 400,
    "eos_token_id": 402, "bos_token_id": 400, "tie_word_embeddings": False,
}  # fmt: skip
_PINPOINTS = [[18, 36], [36, 18], [36, 36], [18, 54], [54, 18]]
_SLIDE, _FULL = "sliding_attention", "full_attention"
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
_QWEN = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_GEMMA3 = ("<start_of_image>", "<image_soft_token>", "<end_of_image>")
_GEMMA4 = ("<|image>", "<|image|>", "<image|>")
_WITHOUT = ("max_image_size", "do_image_splitting")  # of `PROCESSOR`, what is SmolVLM's


@dataclass(frozen=True)
class Family:
    """tokens: those around images. place: what an image becomes in the chat template. ids: names of ids of tokens.

    config: config.json's parts. images, processor: the content of preprocessor_config.json and processor_config.json.
    """

    tokens: tuple[str, ...]
    place: str
    ids: dict[str, str]
    config: dict[str, Any]
    images: dict[str, Any]
    processor: dict[str, Any] = field(default_factory=dict)
    kind: str = ""  # of the configuration, if it is not the family's name


def _qwen(vision: dict[str, Any], text: dict[str, Any], **pixels: Any) -> Family:
    common = {
        "depth": 3, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2,
        "hidden_size": 32, "out_hidden_size": 64,
    }  # fmt: skip
    own = {"intermediate_size": 128, "head_dim": 16, "rope_parameters": _MROPE} | text
    images = PROCESSOR | {
        "resample": 3, "patch_size": 4, "merge_size": 2, "temporal_patch_size": 2,
        "image_processor_type": "Qwen2VLImageProcessor", "size": None, **pixels,
    }  # fmt: skip
    images = {key: value for key, value in images.items() if key not in _WITHOUT and value is not None}
    names = ("vision_start", "vision_end", "image", "video")
    config = {"text_config": _TEXT | own, "vision_config": common | vision, "tie_word_embeddings": False}
    ids = {f"{name}_token_id": token for name, token in zip(names, _QWEN, strict=True)}
    return Family(_QWEN, "<|vision_start|><|image_pad|><|vision_end|>", ids, config, images)


_OLD, _NEW = {"min_pixels": 256, "max_pixels": 4096}, {"size": {"shortest_edge": 256, "longest_edge": 4096}}
_LEARNED = {"intermediate_size": 48, "num_position_embeddings": 25}
_EXPERTS = {
    "num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True, "shared_expert_intermediate_size": 48,
    "moe_intermediate_size": 32,
}  # fmt: skip
_DELTA_NET = {
    "intermediate_size": 96, "num_hidden_layers": 4, "mtp_num_hidden_layers": 1, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "rope_parameters": _MROPE | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5},
}  # fmt: skip


def _gemma4(text: dict[str, Any], vision: dict[str, Any], *, tied: bool) -> Family:
    own = {
        "head_dim": 32, "sliding_window": 12, "query_pre_attn_scalar": 32, "pad_token_id": 5, "global_head_dim": 32,
        "num_global_key_value_heads": 2, "tie_word_embeddings": tied,
    }  # fmt: skip
    encoder = _VISION | {
        "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 16, "pooling_kernel_size": 2,
        "position_embedding_size": 64, **vision,
    }  # fmt: skip
    rest = {"video_token_id": 414, "audio_token_id": 415, "audio_config": None, "tie_word_embeddings": tied}
    images = {
        "do_convert_rgb": True, "do_normalize": False, "do_rescale": True, "do_resize": True, "resample": 3,
        "image_processor_type": "Gemma4ImageProcessor", "max_soft_tokens": 70, "patch_size": 4,
        "pooling_kernel_size": 2, "rescale_factor": 1 / 255,
    }  # fmt: skip
    ids = dict(zip(("boi_token_id", "image_token_id", "eoi_token_id"), _GEMMA4, strict=True))
    config = {"text_config": _TEXT | own | text, "vision_config": encoder, **rest}
    return Family(_GEMMA4, "<|image|>", ids, config, {}, {"image_processor": images}, kind="gemma4")


def _gemma3(**images: Any) -> Family:
    """Images have more tokens than the sliding window."""
    text = _TEXT | {
        "head_dim": 32, "sliding_window": 12, "layer_types": [_SLIDE, _SLIDE, _FULL], "query_pre_attn_scalar": 32,
        "pad_token_id": 5, "rope_parameters": {
            _FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            _SLIDE: {"rope_type": "default", "rope_theta": 1e4},
        },
    }  # fmt: skip
    vision = _VISION | {
        "num_hidden_layers": 2, "image_size": 32, "model_type": "siglip_vision_model", "vision_use_head": False,
    }  # fmt: skip
    own = {
        "image_processor_type": "Gemma3ImageProcessor", "resample": 2, "image_seq_length": 16,
        "size": {"height": 32, "width": 32}, "do_pan_and_scan": None, **images,
    }  # fmt: skip
    usual = {key: value for key, value in PROCESSOR.items() if key not in (*_WITHOUT, "do_pad")}
    ids = dict(zip(("boi_token_index", "image_token_index", "eoi_token_index"), _GEMMA3, strict=True))
    config = {"text_config": text, "vision_config": vision, "mm_tokens_per_image": 16, "tie_word_embeddings": False}
    return Family(_GEMMA3, _GEMMA3[0], ids, config, usual | own, kind="gemma3")


_USUAL = {key: PROCESSOR[key] for key in PROCESSOR if key not in ("max_image_size", "image_processor_type", "size")}
FAMILIES: dict[str, Family] = {
    "smolvlm": Family(
        (
            "<fake_token_around_image>", "<image>", "<global-img>",
            *(f"<row_{row}_col_{column}>" for row in range(1, ROWS + 1) for column in range(1, ROWS + 1)),
        ),
        "<image>", {"image_token_id": "<image>"},
        {
            "text_config": _TEXT | _SHAPE | {"model_type": "llama", "architectures": ["VLlama3ForCausalLM"]},
            "vision_config": {"hidden_size": 32, "image_size": SIDE, "patch_size": 4, **_SHAPE}, "scale_factor": 2,
            "pad_token_id": 400,
        },
        PROCESSOR, {"image_seq_len": 4},
    ),
    "internvl": Family(
        ("<img>", "<IMG_CONTEXT>", "</img>"), "<IMG_CONTEXT>\n", {"image_token_id": "<IMG_CONTEXT>"},
        {
            "text_config": _TEXT | _SHAPE | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
            "vision_config": {"hidden_size": 32, "image_size": [SIDE] * 2, "patch_size": [4, 4], **_SHAPE},
            "image_seq_length": 4, "tie_word_embeddings": False,
        },
        {
            "crop_to_patches": False, "do_convert_rgb": True, "do_normalize": True, "do_rescale": True,
            "do_resize": True, "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225],
            "image_processor_type": "GotOcr2ImageProcessorFast", "max_patches": 6, "min_patches": 1, "resample": 3,
            "rescale_factor": 0.00392156862745098, "size": {"height": SIDE, "width": SIDE},
        },
        {"image_seq_length": 4},
    ),
    "mistral3": Family(
        ("[IMG]", "[IMG_BREAK]", "[IMG_END]"), "[IMG]", {"image_token_index": "[IMG]"},
        {
            "text_config": _TEXT | {"model_type": "ministral3", "head_dim": 16},
            "vision_config": _VISION | {"model_type": "pixtral", "image_size": 64, "hidden_act": "silu"},
            "tie_word_embeddings": False,
        },
        _USUAL | {"patch_size": 4, "size": {"longest_edge": 64}, "resample": 3},
        {"patch_size": 4, "spatial_merge_size": 2},
    ),
    "llava_next": Family(
        ("<image>",), "<image>", {"image_token_index": "<image>"},
        {
            "text_config": _TEXT | {
                "model_type": "granite", "embedding_multiplier": 3.0, "logits_scaling": 2.0,
                "residual_multiplier": 0.5, "attention_multiplier": 0.3,
            },
            "vision_config": _VISION | {"model_type": "siglip_vision_model", "image_size": 18},
            "vision_feature_layer": [-3, -1], "vision_feature_select_strategy": "full",
            "image_grid_pinpoints": _PINPOINTS, "tie_word_embeddings": False,
        },
        _USUAL | {
            "size": {"height": 18, "width": 18}, "crop_size": {"height": 18, "width": 18}, "resample": 3,
            "image_grid_pinpoints": _PINPOINTS,
        },
        {"patch_size": 4, "vision_feature_select_strategy": "full"},
    ),
    "lfm2_vl": Family(
        (
            "<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>",
            *(f"<|img_row_1_col_{column}|>" for column in range(1, 5)),
            *(f"<|img_row_{row}_col_1|>" for row in range(2, 5)), "<|img_row_2_col_2|>",
        ),
        "<image>", {"image_token_id": "<image>"},
        {
            "text_config": _TEXT | {
                "model_type": "lfm2", "num_hidden_layers": 4, "block_multiple_of": 16, "tie_word_embeddings": True,
                "layer_types": ["conv", "full_attention", "conv", "full_attention"],
            },
            "vision_config": _VISION | {"model_type": "siglip2_vision_model", "num_patches": 25},
            "projector_hidden_size": 48,
        },
        _USUAL | {
            "tile_size": 16, "encoder_patch_size": 4, "min_image_tokens": 4, "max_image_tokens": 9, "max_tiles": 4,
            "resample": 2,
        },
    ),
    "qwen2_vl": _qwen({"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}, {}, **_OLD),
    "qwen2_5_vl": _qwen({"intermediate_size": 48, "fullatt_block_indexes": [1], "window_size": 16}, {}, **_OLD),
    "qwen3_vl": _qwen(_LEARNED | {"deepstack_visual_indexes": [0, 2]}, {}, **_NEW),
    "qwen3_vl_moe": _qwen(  # whose matrices of experts are not square
        _LEARNED | {"deepstack_visual_indexes": [0, 2]}, _EXPERTS | {"moe_intermediate_size": 24}, **_NEW
    ),
    "qwen3_5": _qwen(_LEARNED, _DELTA_NET, **_NEW),
    "qwen3_5_moe": _qwen(_LEARNED, _EXPERTS | _DELTA_NET, **_NEW),
    "gemma3": _gemma3(),
    "gemma3_crops": _gemma3(
        do_pan_and_scan=True, pan_and_scan_min_crop_size=16, pan_and_scan_max_num_crops=3,
        pan_and_scan_min_ratio_to_activate=1.2,
    ),
    "gemma4": _gemma4(
        {
            "layer_types": [_SLIDE, _FULL, _FULL], "hidden_size_per_layer_input": 0,
            "use_bidirectional_attention": "vision",
        },
        {"standardize": True}, tied=False,
    ),
    "gemma4_small": _gemma4(
        {
            "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": NUM_TOKENS, "num_kv_shared_layers": 1,
            "layer_types": [_SLIDE, _FULL] * 2, "num_hidden_layers": 4, "use_bidirectional_attention": None,
        },
        {"use_clipped_linears": True}, tied=True,  # otherwise such small ones repeat a token
    ),
}  # fmt: skip


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
