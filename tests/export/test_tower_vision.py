"""Ministral 3, Granite Vision and LFM2-VL: exported without PyTorch, and compared with transformers' own generation."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import outrider
from outrider.inputs.vision import VisionEncoder, cut_into_tiles, image_text, read_image
from outrider.inputs.vision.grids import patches_of
from outrider_export.describe.direct_vision import direct_vision_of
from outrider_export.describe.encoder_decoder import vocabulary_of
from outrider_export.direct.vision_encoder import write_encoder
from outrider_export.sources.source import read_config
from tiny_vision import NUM_TOKENS, TOWERS, asking, assert_answers, picture, tower_tokenizer, write_tower_checkpoint

Image: Any = pytest.importorskip("PIL.Image", reason="the extra [vision]")
PICTURES = [picture(0, 40, 31), picture(1, 20, 75), picture(2, 8, 8), picture(3, 90, 120), picture(4, 64, 17)]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("towers")
    for family in TOWERS:
        write_tower_checkpoint(root / family, family)
    return {family: root / family for family in TOWERS}


def entry_of(folder: Path) -> Any:
    entry = direct_vision_of(folder, "fp32", vocabulary_of(folder, read_config(folder)))
    assert entry is not None
    return entry


@pytest.fixture
def pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have Transformers' processors that need torchvision resize with Pillow, and normalise as torchvision does."""
    import torch
    from transformers.image_processing_backends import TorchvisionBackend

    def resize(_: Any, images: Any, size: Any, resample: Any = None, **__: Any) -> Any:
        made = [Image.fromarray(each.permute(1, 2, 0).numpy()) for each in images]
        made = [np.asarray(each.resize((size.width, size.height), resample=2)) for each in made]
        return torch.from_numpy(np.stack(made)).permute(0, 3, 1, 2)

    def rescale_and_normalize(_: Any, images: Any, __: Any, factor: float, ___: Any, mean: Any, std: Any) -> Any:
        mean, std = (torch.tensor(each)[:, None, None] * (1.0 / factor) for each in (mean, std))
        return images.float().sub(mean).div(std)

    monkeypatch.setattr(TorchvisionBackend, "resize", resize)
    monkeypatch.setattr(TorchvisionBackend, "rescale_and_normalize", rescale_and_normalize)


def processed(family: str, folder: Path, images: list[Any]) -> tuple[dict[str, Any], list[Any], list[str]]:
    """What transformers' model is given of images; and of each the pixels and the tokens, as they are in `Tiles`."""
    if family == "lfm2_vl":
        return _processed_lfm2(folder, images)
    given = [Image.fromarray(image) for image in images]
    if family == "mistral3":
        from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

        seen = dict(PixtralImageProcessorPil.from_pretrained(folder)(given, patch_size=8, return_tensors="pt"))
        sizes = [tuple(map(int, size)) for size in seen["image_sizes"]]
        entry = entry_of(folder)
        pixels = [
            patches_of(each[:, :h, :w].numpy(), entry) for each, (h, w) in zip(seen["pixel_values"], sizes, strict=True)
        ]
        texts = [("[IMG_BREAK]".join(["[IMG]" * (w // 8)] * (h // 8)) + "[IMG_END]") for h, w in sizes]
        return seen, pixels, texts
    from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
    from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches
    from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor

    processor = LlavaNextImageProcessorPil.from_pretrained(folder)
    seen = dict(processor(given, return_tensors="pt"))
    counts = [image_size_to_num_patches(list(size.shape[:2]), processor.image_grid_pinpoints, 18) for size in images]
    whole: Any = SimpleNamespace(image_processor=processor, patch_size=4, num_additional_image_tokens=0)
    whole._get_unpadded_features = LlavaNextProcessor._get_unpadded_features.__get__(whole)
    texts = [
        "<image>" * LlavaNextProcessor._get_number_of_features(whole, *image.shape[:2], 18, 18) for image in images
    ]
    return seen, [each[:count].numpy() for each, count in zip(seen["pixel_values"], counts, strict=True)], texts


def _processed_lfm2(folder: Path, images: list[Any]) -> tuple[dict[str, Any], list[Any], list[str]]:
    from transformers.models.lfm2_vl.image_processing_lfm2_vl import Lfm2VlImageProcessor
    from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor

    processor = Lfm2VlImageProcessor.from_pretrained(folder)
    given = [np.ascontiguousarray(image.transpose(2, 0, 1)) for image in images]
    seen = dict(processor(given, do_convert_rgb=False, return_row_col_info=True, return_tensors="pt"))
    rows, columns, sizes = (seen.pop(f"image_{name}") for name in ("rows", "cols", "sizes"))
    parts = []
    for patches, (height, width) in zip(seen["pixel_values"].numpy(), seen["spatial_shapes"].tolist(), strict=True):
        grid = patches[: height * width].reshape(height // 2, 2, width // 2, 2, -1)
        parts.append(grid.transpose(0, 2, 1, 3, 4).reshape(height * width, -1))
    names = {
        "image": "<image>", "image_start": "<|image_start|>", "image_end": "<|image_end|>",
        "image_thumbnail": "<|img_thumbnail|>",
    }  # fmt: skip
    whole: Any = SimpleNamespace(**{f"{name}_token": each for name, each in names.items()})
    pixels, texts = [], []
    counts = np.stack([np.ravel(rows), np.ravel(columns)], axis=1).tolist()
    for (count, across), (height, width) in zip(counts, np.reshape(sizes, (-1, 2)).tolist(), strict=True):
        num_parts = count * across + (count * across > 1)
        pixels.append(np.concatenate(parts[:num_parts]))
        parts = parts[num_parts:]
        of_whole = height * width // 64
        texts.append(Lfm2VlProcessor._build_image_tokens(whole, count, across, 4, of_whole, True, True))
    assert not parts
    return seen, pixels, texts


@pytest.mark.parametrize("family", TOWERS)
def test_pixels_and_tokens_are_those_of_transformers(pillow: None, checkpoints: dict[str, Path], family: str) -> None:
    folder, rng = checkpoints[family], np.random.default_rng(0)
    entry, images = entry_of(folder), [*PICTURES]
    images += [picture(seed, *rng.integers(40, 200, 2)) for seed in range(20)]
    _, pixels, texts = processed(family, folder, images)
    for image, expected, text in zip(images, pixels, texts, strict=True):
        tiles = cut_into_tiles(read_image(image), entry)
        assert tiles.pixels.shape == expected.shape
        assert (tiles.pixels == expected).all()
        assert image_text(tiles, entry) == text
        assert text.count(entry.image_token) == sum(tiles.lengths)


@pytest.mark.slow
@pytest.mark.parametrize("family", TOWERS)
def test_greedy_answers_are_those_of_transformers(
    pillow: None, checkpoints: dict[str, Path], convert: Any, make_checkpoint: Any, tmp_path: Path, family: str
) -> None:
    import torch
    from transformers import AutoModelForImageTextToText

    folder = checkpoints[family]
    draft = make_checkpoint(f"draft-of-{family}", tokenizer=tower_tokenizer(family), vocab_size=NUM_TOKENS, seed=4)
    bundle, _ = convert(folder, draft, weights="fp32", draft_weights="fp32")
    engine = outrider.load(bundle.folder, precision="f32", cache_size=0.05, keep_records=False)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    vision: Any = engine.vision
    answers = set[tuple[int, ...]]()
    for given in ([PICTURES[0]], [PICTURES[1]], PICTURES[:1:-2], []):
        prompt = vision.prompt(asking(*given), engine.tokenizer)
        ids = torch.tensor([prompt.token_ids])
        seen: dict[str, Any] = {}
        if given:
            seen, _, _ = processed(family, folder, given)
            embeds = torch.cat(list(model.model.get_image_features(**seen).pooler_output)).detach().numpy()
            if family == "llava_next":
                embeds = embeds * 3  # as all that the language model reads
            error = np.abs(np.concatenate([span.embeds for span in prompt.embeds]) - embeds).max()
            assert error < 1e-4 * np.abs(embeds).max()
        expected = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), **seen, do_sample=False, max_new_tokens=40,
            eos_token_id=-1,
        )[0, ids.shape[1] :].tolist()  # fmt: skip
        assert_answers(engine, given, prompt.embeds, expected)
        answers.add(tuple(expected))
    assert len(answers) == 4  # the images are seen
    black = [vision.encode(np.zeros((*size, 3), np.uint8)) for size in ((18, 36), (18, 30), (8, 32), (16, 16))]
    assert all(image.text.count(vision.entry.image_token) == image.num_tokens for image in black)
    assert len({image.tiles[0][1] for image in black}) >= 3
    engine.close()
    whole, layout = json.loads((folder / "config.json").read_text(encoding="utf-8")), vision.entry.layout
    write_encoder(folder, whole, layout, tmp_path / "int8", "int8")
    tiles = cut_into_tiles(read_image(PICTURES[0]), vision.entry)
    exact, _ = vision.encoder.encode(tiles)
    rounded, _ = VisionEncoder(tmp_path / "int8" / "openvino_model.xml").encode(tiles)
    assert np.abs(np.concatenate(rounded) - np.concatenate(exact)).max() < 0.1 * np.abs(exact[0]).max()


def test_images_that_are_prepared_in_another_way_are_refused(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    changes: dict[str, tuple[dict[str, Any], str]] = {
        "mistral3": ({"patch_size": 14}, "patch_size=14"),
        "llava_next": ({"image_grid_pinpoints": [[18, 18]]}, "image_grid_pinpoints=..18, 18.., and "),
        "lfm2_vl": ({"encoder_patch_size": 14}, "encoder_patch_size=14"),
    }
    for family, (change, message) in changes.items():
        folder = shutil.copytree(checkpoints[family], tmp_path / family)
        images = json.loads((folder / "preprocessor_config.json").read_text(encoding="utf-8"))
        (folder / "preprocessor_config.json").unlink()
        (folder / "processor_config.json").unlink(missing_ok=True)
        assert direct_vision_of(folder, "int4", vocabulary_of(folder, read_config(folder))) is None  # a text part alone
        (folder / "preprocessor_config.json").write_text(json.dumps(images | change), encoding="utf-8")
        with pytest.raises(outrider.ExportError, match=f"prepares images with {message}"):
            entry_of(folder)


_COLOURS = {"do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True}
_PINPOINTS = [[384 * rows, 384 * columns] for rows in range(1, 11) for columns in range(1, 10 // rows + 1)][1:]
# As published: parts of config.json, preprocessor_config.json and processor_config.json, and what becomes of them.
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "mistral3": (
        {
            "architectures": ["Mistral3ForConditionalGeneration"], "multimodal_projector_bias": False,
            "projector_hidden_act": "gelu", "spatial_merge_size": 2, "vision_feature_layer": -1,
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
            "architectures": ["LlavaNextForConditionalGeneration"], "image_grid_pinpoints": _PINPOINTS,
            "projector_hidden_act": "gelu", "use_image_newline_parameter": True,
            "vision_feature_layer": [-24, -20, -12, -1], "vision_feature_select_strategy": "full",
            "vision_config": {
                "hidden_size": 1152, "image_size": 384, "intermediate_size": 4304,
                "model_type": "siglip_vision_model", "num_attention_heads": 16, "num_hidden_layers": 27,
                "patch_size": 14,
            },
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
            "architectures": ["Lfm2VlForConditionalGeneration"], "downsample_factor": 2, "projector_bias": True,
            "projector_hidden_act": "gelu", "projector_hidden_size": 2560,
            "vision_config": {
                "hidden_act": "gelu_pytorch_tanh", "hidden_size": 1152, "intermediate_size": 4304,
                "layer_norm_eps": 1e-06, "model_type": "siglip2_vision_model", "num_attention_heads": 16,
                "num_hidden_layers": 27, "num_patches": 256, "patch_size": 16, "vision_use_head": False,
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
}  # fmt: skip


@pytest.mark.parametrize("family", PUBLISHED)
def test_published_files_are_read(tmp_path: Path, family: str) -> None:
    config, images, processor, expected = PUBLISHED[family]
    tokenizer = tower_tokenizer(family)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    name = "image_token_id" if family == "lfm2_vl" else "image_token_index"
    text = TOWERS[family][2]["text_config"]
    config = config | {name: tokenizer.token_to_id(TOWERS[family][0][0]), "text_config": text}
    for file, content in (("config", config), ("preprocessor_config", images), ("processor_config", processor)):
        if content:
            (tmp_path / f"{file}.json").write_text(json.dumps(content), encoding="utf-8")
    save_file(
        {"vision_tower.vision_model.post_layernorm.weight": np.ones(4, np.float32)}, tmp_path / "model.safetensors"
    )
    entry = entry_of(tmp_path)
    assert {key: getattr(entry, key) for key in expected} == expected
    for size in ((1200, 1600), (300, 400), (64, 2000)):
        tiles = cut_into_tiles(read_image(picture(0, *size)), entry)
        assert image_text(tiles, entry).count(entry.image_token) == sum(tiles.lengths)
        assert 0 < sum(tiles.lengths) < 11_000
