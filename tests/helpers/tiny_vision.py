"""A tiny random SmolVLM with a real tokenizer and its image processor's configuration, as a checkpoint folder."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

import outrider
from heads import tensors_of
from outrider.bundle import Bundle, list_files, read_bundle, write_manifest
from outrider.bundle.vision import Idefics3Entry
from outrider.types import Span
from tiny import SPECIAL, train_tokenizer

NUM_TOKENS = 416  # with those around images
SIDE = 16  # pixels of a tile
ROWS = 3  # of tiles at most
IMAGE_TOKENS = (
    "<fake_token_around_image>",
    "<image>",
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, ROWS + 1) for column in range(1, ROWS + 1)),
)
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


def write_vision_checkpoint(folder: Path, seed: int = 0) -> None:
    """A SmolVLM of two layers in each half, random, with weights that are large enough to tell images apart."""
    import torch
    from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration

    tokenizer = vision_tokenizer()
    shape = {"intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = SmolVLMConfig(
        text_config={
            "model_type": "llama", "vocab_size": NUM_TOKENS, "hidden_size": 64, "num_key_value_heads": 2,
            "max_position_embeddings": 2048, "pad_token_id": 400, "eos_token_id": 402, "bos_token_id": 400,
            "architectures": ["VLlama3ForCausalLM"], **shape,
        },
        vision_config={"hidden_size": 32, "image_size": SIDE, "patch_size": 4, **shape},
        image_token_id=tokenizer.token_to_id("<image>"), scale_factor=2, pad_token_id=400,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = SmolVLMForConditionalGeneration(config)
    _save(folder, model, tokenizer, "<image>", PROCESSOR, {"image_seq_len": 4})


def _save(
    folder: Path, model: Any, tokenizer: Any, place: str, images: dict[str, Any], processor: dict[str, Any]
) -> None:
    """Draw a model's weights, large enough to tell images apart, and write its files. place: what an image becomes."""
    import torch
    from transformers import PreTrainedTokenizerFast

    model.float().eval()
    for name, parameter in model.named_parameters():
        if not any(part in name for part in ("norm", "lambda", "ln_")):
            torch.nn.init.normal_(parameter, std=0.3 if "vis" in name else 0.15)
    model.generation_config.eos_token_id = [402, 400]
    model.save_pretrained(folder)
    template = PARTS_TEMPLATE.replace("<image>", place)
    special = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **special).save_pretrained(folder)
    for file, content in (("preprocessor_config.json", images), ("processor_config.json", processor)):
        if content:
            (folder / file).write_text(json.dumps(content), encoding="utf-8")


INTERNVL_TOKENS = ("<img>", "<IMG_CONTEXT>", "</img>", *(f"<extra_{i}>" for i in range(9)))
INTERNVL_PROCESSOR: dict[str, Any] = {
    "crop_to_patches": False, "do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True,
    "image_mean": [0.485, 0.456, 0.406], "image_processor_type": "GotOcr2ImageProcessorFast",
    "image_std": [0.229, 0.224, 0.225], "max_patches": 6, "min_patches": 1, "resample": 3,
    "rescale_factor": 0.00392156862745098, "size": {"height": SIDE, "width": SIDE},
}  # fmt: skip


def write_internvl_checkpoint(folder: Path, seed: int = 0) -> None:
    """An InternVL of two layers in each half, random, in the layout of OpenGVLab's `-hf` files."""
    import torch
    from transformers import InternVLConfig, InternVLForConditionalGeneration

    tokenizer = internvl_tokenizer()
    shape = {"intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = InternVLConfig(
        text_config={
            "model_type": "qwen2", "vocab_size": NUM_TOKENS, "hidden_size": 64, "num_key_value_heads": 2,
            "max_position_embeddings": 2048, "pad_token_id": 400, "eos_token_id": 402, "bos_token_id": 400,
            "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": False, **shape,
        },
        vision_config={"hidden_size": 32, "image_size": [SIDE, SIDE], "patch_size": [4, 4], **shape},
        image_token_id=tokenizer.token_to_id("<IMG_CONTEXT>"), image_seq_length=4, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = InternVLForConditionalGeneration(config)
    _save(folder, model, tokenizer, "<IMG_CONTEXT>\n", INTERNVL_PROCESSOR, {"image_seq_length": 4})


QWEN_TOKENS = (
    "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", *(f"<extra_{i}>" for i in range(8)),
)  # fmt: skip
QWEN_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")


def write_qwen_checkpoint(folder: Path, family: str, seed: int = 0) -> None:
    """A random Qwen-VL of two layers, in the layout of Qwen's files. family: one of `QWEN_FAMILIES`."""
    import torch
    from safetensors.numpy import load_file, save_file
    from transformers import AutoConfig, AutoModelForImageTextToText

    tokenizer = qwen_tokenizer()
    is_new, is_moe, patch = family.startswith("qwen3"), family.endswith("_moe"), 4
    ids = {
        f"{name}_token_id": tokenizer.token_to_id(token)
        for name, token in zip(("vision_start", "vision_end", "image", "video"), QWEN_TOKENS, strict=False)
    }
    text = {
        "vocab_size": NUM_TOKENS, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048, "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}, **ids,
        "pad_token_id": 400, "eos_token_id": 402, "bos_token_id": 400, "tie_word_embeddings": False,
    }  # fmt: skip
    if is_moe:
        text |= {
            "num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True, "shared_expert_intermediate_size": 48,
            "moe_intermediate_size": 24 if family == "qwen3_vl_moe" else 32,  # the former's matrices are not square
        }  # fmt: skip
    of_family: dict[str, dict[str, Any]] = {
        "qwen2_vl": {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
        "qwen2_5_vl": {"intermediate_size": 48, "fullatt_block_indexes": [1], "window_size": 16},
        "qwen3_vl": {"intermediate_size": 48, "num_position_embeddings": 25, "deepstack_visual_indexes": [0, 2]},
        "qwen3_5": {"intermediate_size": 48, "num_position_embeddings": 25},
    }
    vision: dict[str, Any] = {
        "depth": 3, "num_heads": 2, "patch_size": patch, "spatial_merge_size": 2, "temporal_patch_size": 2,
        "hidden_size": 32, "out_hidden_size": 64,
    } | of_family[family.removesuffix("_moe")]  # fmt: skip
    if family.startswith("qwen3_5"):
        text |= {
            "intermediate_size": 96, "num_hidden_layers": 4, "mtp_num_hidden_layers": 1,
            "linear_num_key_heads": 2, "linear_num_value_heads": 4,
            "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
            "full_attention_interval": 2,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5,
            },
        }  # fmt: skip
    whole = {"text_config": text, "vision_config": vision, "tie_word_embeddings": False, **ids}
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(family, **whole))
    pixels = {"shortest_edge": 256, "longest_edge": 4096}
    images = {
        **PROCESSOR, "resample": 3, "patch_size": patch, "merge_size": 2, "temporal_patch_size": 2,
        "image_processor_type": "Qwen2VLImageProcessor",
        **({"size": pixels} if is_new else {"min_pixels": 256, "max_pixels": 4096}),
    }  # fmt: skip
    images = {name: value for name, value in images.items() if name not in ("max_image_size", "do_image_splitting")}
    _save(folder, model, tokenizer, "<|vision_start|><|image_pad|><|vision_end|>", images, {})
    if family.startswith("qwen3_5"):  # Transformers 5.5 saves the encoder under another name than it is published with
        weights = load_file(folder / "model.safetensors")
        named = {name.replace("language_model.visual.", "visual."): each for name, each in weights.items()}
        module = tensors_of("mtp experts" if is_moe else "mtp qwen")
        save_file(named | module, folder / "model.safetensors")
    elif is_moe:  # and these by rows
        weights = load_file(folder / "model.safetensors")
        for name, each in weights.items():
            if ".experts." in name:
                weights[name] = np.ascontiguousarray(each.swapaxes(1, 2))
        save_file(weights, folder / "model.safetensors")


_VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2, "patch_size": 4,
}  # fmt: skip
_TEXT_PART: dict[str, Any] = {
    "vocab_size": NUM_TOKENS, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048, "pad_token_id": 400,
    "eos_token_id": 402, "bos_token_id": 400, "tie_word_embeddings": False,
}  # fmt: skip
_PINPOINTS = [[18, 36], [36, 18], [36, 36], [18, 54], [54, 18]]
# By family: the tokens of images, what an image becomes in the template, the parts of config.json, and the processors'.
TOWERS: dict[str, tuple[tuple[str, ...], str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "mistral3": (
        ("[IMG]", "[IMG_BREAK]", "[IMG_END]"), "[IMG]",
        {
            "text_config": _TEXT_PART | {"model_type": "ministral3", "head_dim": 16},
            "vision_config": _VISION | {"model_type": "pixtral", "image_size": 64, "hidden_act": "silu"},
            "tie_word_embeddings": False,
        },
        {"patch_size": 4, "size": {"longest_edge": 64}, "resample": 3},
        {"patch_size": 4, "spatial_merge_size": 2},
    ),
    "llava_next": (
        ("<image>",), "<image>",
        {
            "text_config": _TEXT_PART | {
                "model_type": "granite", "embedding_multiplier": 3.0, "logits_scaling": 2.0,
                "residual_multiplier": 0.5, "attention_multiplier": 0.3,
            },
            "vision_config": _VISION | {"model_type": "siglip_vision_model", "image_size": 18},
            "vision_feature_layer": [-3, -1], "vision_feature_select_strategy": "full",
            "image_grid_pinpoints": _PINPOINTS, "tie_word_embeddings": False,
        },
        {
            "size": {"height": 18, "width": 18}, "crop_size": {"height": 18, "width": 18}, "resample": 3,
            "image_grid_pinpoints": _PINPOINTS,
        },
        {"patch_size": 4, "vision_feature_select_strategy": "full"},
    ),
    "lfm2_vl": (
        (
            "<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>",
            *(f"<|img_row_1_col_{column}|>" for column in range(1, 5)),
            *(f"<|img_row_{row}_col_1|>" for row in range(2, 5)), "<|img_row_2_col_2|>",
        ),
        "<image>",
        {
            "text_config": _TEXT_PART | {
                "model_type": "lfm2", "num_hidden_layers": 4, "block_multiple_of": 16, "tie_word_embeddings": True,
                "layer_types": ["conv", "full_attention", "conv", "full_attention"],
            },
            "vision_config": _VISION | {"model_type": "siglip2_vision_model", "num_patches": 25},
            "projector_hidden_size": 48,
        },
        {
            "tile_size": 16, "encoder_patch_size": 4, "min_image_tokens": 4, "max_image_tokens": 9, "max_tiles": 4,
            "resample": 2,
        },
        {},
    ),
}  # fmt: skip


def write_tower_checkpoint(folder: Path, family: str, seed: int = 0) -> None:
    """A random model with a vision tower, in the layout of its publisher's files. family: one of `TOWERS`."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    tokens, place, config, images, processor = TOWERS[family]
    tokenizer = tower_tokenizer(family)
    name = "image_token_id" if family == "lfm2_vl" else "image_token_index"
    made = AutoConfig.for_model(family, **json.loads(json.dumps(config)), **{name: tokenizer.token_to_id(tokens[0])})
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(made)
    usual = {key: PROCESSOR[key] for key in PROCESSOR if key not in ("max_image_size", "image_processor_type", "size")}
    _save(folder, model, tokenizer, place, usual | images, processor)


def tower_tokenizer(family: str) -> Any:
    """The tests' tokenizer with a family's tokens around images."""
    tokens = TOWERS[family][0]
    return train_tokenizer(special=(*SPECIAL, *tokens, *(f"<extra_{i}>" for i in range(len(tokens), 12))))


GEMMA_TOKENS = {
    "gemma3": ("<start_of_image>", "<image_soft_token>", "<end_of_image>"),
    "gemma4": ("<|image>", "<|image|>", "<image|>"),
}
GEMMA_FAMILIES = ("gemma3", "gemma4", "gemma4_small")


def write_gemma_checkpoint(folder: Path, family: str, seed: int = 0) -> None:
    """A random Gemma of few layers, in the layout of Google's files. family: one of `GEMMA_FAMILIES`.

    Images have more tokens than the sliding window.
    """
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast

    is_new = family.startswith("gemma4")
    tokens = GEMMA_TOKENS["gemma4" if is_new else "gemma3"]
    tokenizer = gemma_tokenizer(family)
    begin, place, end = map(tokenizer.token_to_id, tokens)
    windowed, full = "sliding_attention", "full_attention"
    text: dict[str, Any] = {
        "vocab_size": NUM_TOKENS, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048, "head_dim": 32,
        "sliding_window": 12, "layer_types": [windowed, windowed, full], "query_pre_attn_scalar": 32,
        "pad_token_id": 5, "eos_token_id": 402, "bos_token_id": 400,
    }  # fmt: skip
    if is_new:
        text |= {
            "global_head_dim": 32, "num_global_key_value_heads": 2, "hidden_size_per_layer_input": 0,
            "use_bidirectional_attention": "vision", "layer_types": [windowed, full, full],
        }  # fmt: skip
    if family == "gemma4_small":
        text |= {
            "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": NUM_TOKENS, "num_kv_shared_layers": 1,
            "layer_types": [windowed, full, windowed, full], "num_hidden_layers": 4,
            "use_bidirectional_attention": None,
        }  # fmt: skip
    vision: dict[str, Any] = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4,
    }  # fmt: skip
    if is_new:
        vision |= {
            "num_key_value_heads": 2, "head_dim": 16, "pooling_kernel_size": 2, "position_embedding_size": 64,
            "standardize": family == "gemma4", "use_clipped_linears": family == "gemma4_small",
        }  # fmt: skip
        ids = {"boi_token_id": begin, "image_token_id": place, "eoi_token_id": end}
        rest = {"video_token_id": 414, "audio_token_id": 415, "audio_config": None}
    else:
        vision |= {"image_size": 32, "model_type": "siglip_vision_model", "vision_use_head": False}
        text["rope_parameters"] = {
            full: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            windowed: {"rope_type": "default", "rope_theta": 1e4},
        }
        ids = {"boi_token_index": begin, "image_token_index": place, "eoi_token_index": end}
        rest = {"mm_tokens_per_image": 16}
    kind = "gemma4" if is_new else "gemma3"
    tied = {"tie_word_embeddings": family == "gemma4_small"}  # otherwise such small ones repeat a token
    config = AutoConfig.for_model(kind, text_config=text | tied, vision_config=vision, **tied, **ids, **rest)
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config).float().eval()
    for name, parameter in model.named_parameters():
        if "norm" not in name and "layer_scalar" not in name:
            is_seen = "vision" in name or "projector" in name
            torch.nn.init.normal_(parameter, std=0.3 if is_seen else 0.15)
    for name, buffer in model.named_buffers():
        of_name = {"std_bias": 0.1, "std_scale": 0.9, "_min": -1.5, "_max": 1.5}
        value = next((of_name[end] for end in of_name if name.endswith(end)), None)
        if value is not None:
            buffer.fill_(value)
    model.generation_config.eos_token_id = [402, 400]
    model.save_pretrained(folder)
    template = PARTS_TEMPLATE.replace("<image>", tokens[1] if is_new else tokens[0])
    special = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **special).save_pretrained(folder)
    if is_new:
        images = {
            "do_convert_rgb": True, "do_normalize": False, "do_rescale": True, "do_resize": True, "resample": 3,
            "image_processor_type": "Gemma4ImageProcessor", "max_soft_tokens": 70, "patch_size": 4,
            "pooling_kernel_size": 2, "rescale_factor": 1 / 255,
        }  # fmt: skip
        (folder / "processor_config.json").write_text(json.dumps({"image_processor": images}), encoding="utf-8")
        return
    images = {
        **PROCESSOR, "image_processor_type": "Gemma3ImageProcessor", "resample": 2, "image_seq_length": 16,
        "size": {"height": 32, "width": 32}, "do_pan_and_scan": None,
    }  # fmt: skip
    del images["max_image_size"], images["do_image_splitting"], images["do_pad"]
    (folder / "preprocessor_config.json").write_text(json.dumps(images), encoding="utf-8")


def gemma_tokenizer(family: str) -> Any:
    """The tests' tokenizer with Gemma's tokens around images."""
    tokens = GEMMA_TOKENS["gemma3" if family == "gemma3" else "gemma4"]
    return train_tokenizer(special=(*SPECIAL, *tokens, *(f"<extra_{i}>" for i in range(9))))


def qwen_tokenizer() -> Any:
    """The tests' tokenizer with Qwen's tokens around images."""
    return train_tokenizer(special=(*SPECIAL, *QWEN_TOKENS))


def internvl_tokenizer() -> Any:
    """The tests' tokenizer with InternVL's tokens around images."""
    return train_tokenizer(special=(*SPECIAL, *INTERNVL_TOKENS))


def vision_tokenizer() -> Any:
    """The tests' tokenizer with the tokens around images."""
    return train_tokenizer(special=(*SPECIAL, *IMAGE_TOKENS))


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


def assert_answers(
    engine: outrider.Engine,
    images: Sequence[Any],
    spans: Sequence[Span],
    expected: list[int],
    *,
    drafters: Sequence[str] = ("draft",),
    num_questions: int = 2,
) -> None:
    """A question about images is answered by these 40 tokens with each drafter, and the images are read once.

    spans: of the images in the prompt. num_questions: that follow; states are stored where a second one parts from the
    first.
    """
    for drafter in (None, *drafters, "suffix"):
        result = engine.generate(asking(*images), drafter=drafter, max_new_tokens=40, ignore_eos=True)
        assert result.token_ids == expected
    for text in ("And so?", "What else?")[:num_questions]:
        again = engine.generate(asking(*images, text=text), max_new_tokens=4, ignore_eos=True)
    if images:
        last = spans[-1]
        assert again.stats.num_cached_tokens >= (last.begin + len(last.embeds)) // 32 * 32
