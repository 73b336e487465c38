"""Models that read images: exported, and compared with Transformers' own processors, features and generation."""

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import outrider
from assistants import Assistant, config_of, write_assistant
from outrider.inputs.vision import VisionEncoder, cut_into_tiles, image_text, read_image
from outrider_export import export_bundle
from outrider_export.bundles.drafters import add_drafter
from outrider_export.describe.direct_vision import direct_vision_of
from outrider_export.describe.encoder_decoder import vocabulary_of
from outrider_export.describe.geometry import geometry_of_config
from outrider_export.describe.vision import vision_of
from outrider_export.direct.describe import describe
from outrider_export.direct.rope import axes_of
from outrider_export.direct.vision_encoder import write_encoder
from outrider_export.sources.source import read_config
from tiny_vision import FAMILIES, NUM_TOKENS, asking, picture

pytest.importorskip("PIL.Image", reason="the extra [vision]")
from vision_judges import have_pillow_resize, judge_of, tokenizer_of

PICTURES = [picture(0, 40, 31), picture(1, 20, 75), picture(2, 8, 8), picture(3, 90, 120), picture(4, 64, 17)]
MINICPM = ("minicpm 2.6", "minicpm 4.5", "minicpm 4.6")
TORCH = ("smolvlm", "internvl")  # whose encoders are converted with PyTorch


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`checkpoint("smolvlm")`: a folder, to be read only."""
    root = tmp_path_factory.mktemp("vision")

    @functools.cache
    def make(family: str) -> Path:
        found: Path = judge_of(root / family, family).folder
        return found

    return make


def entry_of(folder: Path) -> Any:
    config = read_config(folder)
    vocabulary = vocabulary_of(folder, config)
    return vision_of(folder, config, "int4", vocabulary) or direct_vision_of(folder, "int4", vocabulary)


def num_places(text: str, entry: Any) -> int:
    """How many tokens of images a text has."""
    return text.count(getattr(entry, "soft_token", "") or entry.image_token)


def change_json(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file. None takes one out."""
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    content = {key: value for key, value in (content | changes).items() if value is not None}
    path.write_text(json.dumps(content), encoding="utf-8")


@pytest.mark.fast_cases(5)
@pytest.mark.parametrize(
    "family", ["smolvlm", "internvl", "gemma3_crops", "gemma4", "qwen3_vl", "mistral3", "llava_next", "lfm2_vl"]
)
def test_pixels_and_tokens_are_those_of_transformers(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    have_pillow_resize(monkeypatch)
    judge, rng = judge_of(tmp_path / family, family), np.random.default_rng(0)
    entry, images = entry_of(judge.folder), [*PICTURES]
    images += [picture(seed, *rng.integers(40, 200, 2)) for seed in range(10)]
    counts = set()
    for image in images:
        seen = judge.seen([image], entry)
        tiles = cut_into_tiles(read_image(image), entry)
        assert tiles.pixels.shape == seen.pixels[0].shape
        assert (tiles.pixels == seen.pixels[0]).all()
        if seen.texts:
            assert image_text(tiles, entry) == seen.texts[0]
        assert num_places(image_text(tiles, entry), entry) == sum(tiles.lengths)
        counts.add(sum(tiles.lengths))
    assert len(counts) > 2


@pytest.mark.slow
@pytest.mark.parametrize("family", [*FAMILIES, "gemma4_unified", *MINICPM])
def test_greedy_answers_are_those_of_transformers(
    family: str, convert: Any, make_checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With embeddings that are theirs, and each drafter; images are read once, and encoders in 8 bits are near."""
    have_pillow_resize(monkeypatch)
    judge = judge_of(tmp_path / "tiny", family).load()
    names = ["draft"]
    if family.startswith("qwen3_5"):  # which has a drafter of its own, that is taken along where none is named
        bundle, names = convert(judge.folder, weights="fp32", draft_weights="fp32")[0], ["mtp"]
    else:
        draft = make_checkpoint(f"draft-of-{family}", tokenizer=tokenizer_of(family), vocab_size=NUM_TOKENS, seed=4)
        bundle, _ = convert(judge.folder, draft, weights="fp32", draft_weights="fp32")
    assert [each.name for each in bundle.manifest.drafters] == names
    if family.startswith("gemma4") and family in FAMILIES:
        assistant = Assistant(config_of(SimpleNamespace(config=judge.model.config.text_config), ordered=False))
        shutil.copytree(bundle.folder, tmp_path / "bundle")
        bundle = add_drafter(tmp_path / "bundle", write_assistant(tmp_path / "assistant", assistant), weights="fp32")
        names = [*names, "assistant"]
    engine = outrider.load(bundle.folder, precision="f32", cache_size=0.05, keep_records=False)
    vision: Any = engine.vision
    banned = [*range(NUM_TOKENS - 12, NUM_TOKENS)]  # of images, videos and sounds, in answers
    options: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True, "banned_token_ids": banned}
    answers = set[tuple[int, ...]]()
    for given in ([PICTURES[0]], [PICTURES[1]], PICTURES[:1:-2], []):
        prompt = vision.prompt(asking(*given), engine.tokenizer)
        seen = judge.seen(given, vision.entry) if given else None
        if seen is not None:
            assert judge.error_of(np.concatenate([span.embeds for span in prompt.embeds]), seen) < 1e-4
        answer = judge.answer(list(prompt.token_ids), seen, vision.entry.image_token_id, banned)
        for drafter in (None, *names, "suffix"):
            result = engine.generate(asking(*given), drafter=drafter, **options)
            assert result.token_ids == answer
        for text in ("And so?", "What else?"):  # states are stored where a second one parts from the first
            again = engine.generate(asking(*given, text=text), max_new_tokens=4, ignore_eos=True)
        if given and family not in TORCH:
            assert again.stats.num_cached_tokens >= prompt.embeds[-1].end // 32 * 32 - 32
        answers.add(tuple(answer))
    assert len(answers) == 4  # the images are seen
    engine.close()
    if family not in TORCH:
        config = json.loads((judge.folder / "config.json").read_text(encoding="utf-8"))
        write_encoder(judge.folder, config, vision.entry.layout, tmp_path / "int8", "int8")
        tiles = cut_into_tiles(read_image(PICTURES[0]), vision.entry)
        exact, _ = vision.encoder.encode(tiles)
        rounded, _ = VisionEncoder(tmp_path / "int8" / "openvino_model.xml").encode(tiles)
        assert np.abs(np.concatenate(rounded) - np.concatenate(exact)).max() < 0.15 * np.abs(exact[0]).max()


IMAGES, PROCESSOR, CONFIG = "preprocessor_config.json", "processor_config.json", "config.json"


@pytest.mark.fast_cases(7)
@pytest.mark.parametrize(("family", "file", "change", "message"), [
    ("smolvlm", CONFIG, {"architectures": ["LlavaForConditionalGeneration"]}, "holds a LlavaForConditionalGenerat"),
    ("smolvlm", IMAGES, {"max_image_size": {"longest_edge": 32}}, "prepares images with max_image_size=32, and Outr"),
    ("smolvlm", IMAGES, {"do_resize": False}, "prepares images with do_resize=False"),
    ("smolvlm", PROCESSOR, {"image_seq_len": 9}, "prepares images with image_seq_len=9"),
    ("smolvlm", CONFIG, {"image_token_id": 7}, "has image_token_id=7, and <image> is 404 in its tokenizer"),
    ("qwen2_5_vl", IMAGES, {"patch_size": 16}, "prepares images with patch_size=16, and Outrider knows"),
    ("qwen2_5_vl", CONFIG, {"image_token_id": 7}, "has image_token_id=7, and "),
    ("gemma3", IMAGES, {"image_seq_length": 64}, "prepares images with image_seq_length=64, and Outrider knows"),
    ("mistral3", IMAGES, {"patch_size": 14}, "prepares images with patch_size=14"),
    ("llava_next", IMAGES, {"image_grid_pinpoints": [[18, 18]]}, "prepares images with image_grid_pinpoints=..18, 18"),
    ("lfm2_vl", IMAGES, {"encoder_patch_size": 14}, "prepares images with encoder_patch_size=14"),
    ("minicpm 4.5", IMAGES, {"slice_start": "<part>"}, "prepares images with slice_start=<part>"),
    ("minicpm 4.5", CONFIG, {"version": 2.5}, "a MiniCPMV, whose images are laid out in a way"),
    ("minicpm 4.6", IMAGES, {"downsample_mode": "4x"}, "prepares images with downsample_mode="),
])  # fmt: skip
def test_images_that_are_prepared_in_another_way_are_refused(
    family: str, file: str, change: dict[str, Any], message: str, checkpoint: Any, tmp_path: Path
) -> None:
    folder = shutil.copytree(checkpoint(family), tmp_path / family)
    change_json(folder / file, **change)
    with pytest.raises(outrider.ExportError, match=message) as caught:
        export_bundle(folder, output=tmp_path / "out")
    assert "\n" not in str(caught.value)


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize(
    "family", ["smolvlm", "qwen2_5_vl", "gemma3", "mistral3", "llava_next", "lfm2_vl", *MINICPM[1:]]
)
def test_without_a_processor_there_are_no_images(family: str, checkpoint: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint(family), tmp_path / family)
    for name in (IMAGES, PROCESSOR):
        (folder / name).unlink(missing_ok=True)
    if family == "smolvlm":
        with pytest.raises(outrider.ExportError, match="has no preprocessor_config.json"):
            entry_of(folder)
    else:
        assert entry_of(folder) is None


def test_what_reads_images_is_a_main_model_in_openvino(checkpoint: Any, make_checkpoint: Any, tmp_path: Path) -> None:
    draft = make_checkpoint("draft-of-smolvlm", tokenizer=tokenizer_of("smolvlm"), vocab_size=NUM_TOKENS, seed=4)
    with pytest.raises(outrider.ExportError, match="the draft model reads text only"):
        export_bundle(draft, checkpoint("smolvlm"), output=tmp_path / "out")
    with pytest.raises(outrider.ExportError, match="'SmolVLMForConditionalGeneration', which is not converted to ONNX"):
        export_bundle(checkpoint("smolvlm"), output=tmp_path / "out", format="onnx")


_COLOURS = {"do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True}
_PINPOINTS = [[384 * rows, 384 * columns] for rows in range(1, 11) for columns in range(1, 10 // rows + 1)][1:]
_SIGLIP = {
    "hidden_size": 1152, "image_size": 384, "intermediate_size": 4304, "model_type": "siglip_vision_model",
    "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14,
}  # fmt: skip
_WIDE = _SIGLIP | {"image_size": 980}
# As published: parts of config.json, preprocessor_config.json and processor_config.json, and what becomes of them.
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "qwen2_5_vl": (  # the older layout: the text's keys stand beside the others
        {
            "text_config": None, "hidden_size": 64, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
            "vision_config": {"patch_size": 14, "fullatt_block_indexes": [7], "window_size": 112},
        },
        {"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2},
        {},
        {
            "tile_size": 28, "window": 8, "num_places": 0, "num_parts": 1, "num_pixels": (3136, 4096 * 28**2),
            "weights": "int8",
        },
    ),
    "gemma3": (
        {
            "mm_tokens_per_image": 256, "eos_token_id": [1, 106],
            "text_config": {
                "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
            },
            "vision_config": {"hidden_size": 1152, "image_size": 896, "patch_size": 14},
        },
        {"do_pan_and_scan": None, "image_seq_length": 256, "size": {"height": 896, "width": 896}, "resample": 2},
        {},
        {"tile_size": 896, "tokens_per_tile": 256, "both_ways": "all", "weights": "int8"},
    ),
    "mistral3": (
        {
            "multimodal_projector_bias": False, "projector_hidden_act": "gelu", "spatial_merge_size": 2,
            "vision_feature_layer": -1,
            "vision_config": {
                "head_dim": 64, "hidden_act": "silu", "hidden_size": 1024, "image_size": 1540,
                "intermediate_size": 4096, "model_type": "pixtral", "num_attention_heads": 16, "num_channels": 3,
                "num_hidden_layers": 24, "patch_size": 14,
                "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
            },
        },
        {},
        {
            "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]", "image_token": "[IMG]",
            "patch_size": 14, "processor_class": "PixtralProcessor", "spatial_merge_size": 2,
            "image_processor": _COLOURS | {
                "data_format": "channels_first", "image_processor_type": "PixtralImageProcessorFast", "resample": 3,
                "patch_size": 14, "size": {"longest_edge": 1540},
            },
        },
        {"layout": "pixtral", "tile_size": 28, "longest_edge": 1540, "row_token": "[IMG_BREAK]", "patches": 2},
    ),
    "llava_next": (
        {
            "image_grid_pinpoints": _PINPOINTS, "projector_hidden_act": "gelu", "use_image_newline_parameter": True,
            "vision_feature_layer": [-24, -20, -12, -1], "vision_config": _SIGLIP,
        },
        _COLOURS | {
            "crop_size": {"height": 384, "width": 384}, "do_center_crop": True, "do_pad": True, "resample": 3,
            "image_grid_pinpoints": _PINPOINTS, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
            "image_processor_type": "LlavaNextImageProcessor", "size": {"height": 384, "width": 384},
        },
        {
            "image_token": "<image>", "patch_size": 14, "processor_class": "LlavaNextProcessor",
            "vision_feature_select_strategy": "full",
        },
        {"layout": "llava_next", "tile_size": 384, "tokens_per_tile": 729, "mean": (0.5, 0.5, 0.5)},
    ),
    "lfm2_vl": (
        {
            "downsample_factor": 2, "projector_bias": True, "projector_hidden_act": "gelu",
            "projector_hidden_size": 2560,
            "vision_config": _SIGLIP | {
                "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-06, "model_type": "siglip2_vision_model",
                "num_patches": 256, "patch_size": 16, "vision_use_head": False,
            },
        },
        _COLOURS | {
            "do_image_splitting": True, "downsample_factor": 2, "encoder_patch_size": 16, "max_image_tokens": 256,
            "image_processor_type": "Lfm2VlImageProcessorFast", "max_num_patches": 1024, "max_pixels_tolerance": 2.0,
            "max_tiles": 10, "min_image_tokens": 64, "min_tiles": 2, "resample": 2, "tile_size": 512,
            "use_thumbnail": True,
        },
        {},
        {
            "layout": "lfm2", "tile_size": 512, "tokens_per_tile": 256, "num_tiles": (2, 10), "num_places": 16,
            "num_pixels": (65_536, 262_144), "tolerance": 2.0,
        },
    ),
    "minicpm 4.5": (
        {
            "batch_3d_resampler": True, "batch_vision_input": True, "drop_vision_last_layer": False,
            "image_size": 448, "patch_size": 14, "query_num": 64, "version": 4.5, "slice_mode": True,
            "slice_config": {"max_slice_nums": 9, "model_type": "minicpmv", "patch_size": 14},
            "vision_config": _WIDE | {"model_type": "siglip"},
        },
        {
            "im_end": "</image>", "im_id_end": "</image_id>", "im_id_start": "<image_id>", "im_start": "<image>",
            "image_feature_size": 64, "image_processor_type": "MiniCPMVImageProcessor", "max_slice_nums": 9,
            "norm_mean": [0.5, 0.5, 0.5], "norm_std": [0.5, 0.5, 0.5], "patch_size": 14, "scale_resolution": 448,
            "slice_end": "</slice>", "slice_mode": True, "slice_start": "<slice>", "unk": "<unk>",
            "use_image_id": True, "version": 4.5,
        },
        {},
        {
            "layout": "minicpm", "tile_size": 14, "tokens_per_tile": 64, "longest_edge": 448, "num_tiles": (1, 9),
            "image_token": "<unk>", "numbered": True, "num_places": 70,
        },
    ),
    "minicpm 4.6": (
        {
            "drop_vision_last_layer": False, "image_size": 1120, "insert_layer_id": 6, "tie_word_embeddings": True,
            "vision_config": _WIDE | {
                "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-06, "model_type": "minicpmv4_6_vision",
                "num_channels": 3,
            },
        },
        _COLOURS | {
            "downsample_mode": "16x", "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
            "image_processor_type": "MiniCPMV4_6ImageProcessor", "max_slice_nums": 9, "patch_size": 14,
            "resample": 3, "scale_resolution": 448, "slice_mode": True, "use_image_id": True,
        },
        {},
        {
            "layout": "minicpm4_6", "tile_size": 28, "tokens_per_tile": 64, "longest_edge": 448, "patches": 2,
            "image_token": "<|image_pad|>", "numbered": True, "num_places": 70,
        },
    ),
}  # fmt: skip


def published(folder: Path, source: Path, family: str) -> Path:
    """A tiny checkpoint with the configurations that its family is published with."""
    shutil.copytree(source, folder)
    config, images, processor, _ = PUBLISHED[family]
    change_json(folder / CONFIG, **config)
    for name, content in ((IMAGES, images), (PROCESSOR, processor)):
        (folder / name).unlink(missing_ok=True)
        if content:
            change_json(folder / name, **content)
    return folder


@pytest.mark.parametrize("family", PUBLISHED)
def test_published_files_are_read(family: str, checkpoint: Any, tmp_path: Path) -> None:
    entry, expected = entry_of(published(tmp_path / family, checkpoint(family), family)), PUBLISHED[family][-1]
    assert {key: getattr(entry, key) for key in expected} == expected
    for size in ((1200, 1600), (300, 400), (64, 2000)):
        tiles = cut_into_tiles(read_image(picture(0, *size)), entry)
        assert num_places(image_text(tiles, entry), entry) == sum(tiles.lengths)
        assert 0 < sum(tiles.lengths) < 11_000


def test_what_gemma_3_leaves_out_is_transformers(checkpoint: Any, tmp_path: Path) -> None:
    folder = published(tmp_path / "gemma3", checkpoint("gemma3"), "gemma3")
    config = read_config(folder)
    assert (config["architectures"], config["model_type"]) == (["Gemma3ForCausalLM"], "gemma3_text")
    decoder = describe(config)
    assert (decoder.num_heads, decoder.head_size, decoder.windows[:6]) == (8, 256, [*[1024] * 5, 0])
    assert geometry_of_config(config, folder).logits_width == 262_208


def test_axes_have_sections_or_take_turns() -> None:
    assert axes_of({"mrope_section": [3, 2, 1]}, 6, interleaved=False) == (0, 0, 0, 1, 1, 2)
    assert axes_of({"mrope_section": [3, 2, 1]}, 6, interleaved=True) == (0, 1, 2, 0, 1, 0)
    with pytest.raises(ValueError, match=r"sections of RoPE \[3, 2, 1\] for 8 frequencies"):
        axes_of({"mrope_section": [3, 2, 1]}, 8, interleaved=False)
