"""MiniCPM-V: exported without PyTorch, and compared with a judge in PyTorch and with what its publishers' code made."""

import json
import re
import shutil
import zlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

import outrider
from minicpm import (
    KINDS,
    MiniCpm,
    image_token_of,
    learned_places,
    minicpm_tokenizer,
    parts_of,
    write_minicpm_checkpoint,
)
from outrider.inputs.vision import Tiles, VisionEncoder, cut_into_tiles, image_text, read_image
from outrider.inputs.vision.tiles import PROCESSORS
from outrider_export.describe.direct_vision import direct_vision_of
from outrider_export.describe.encoder_decoder import vocabulary_of
from outrider_export.direct.vision_encoder import write_encoder
from outrider_export.sources.source import read_config, text_part
from tiny_vision import NUM_TOKENS, asking, picture

pytest.importorskip("PIL.Image", reason="the extra [vision]")
VERSIONS = ("2.6", "4.5", "4.6")
# What `MiniCPMVImageProcessor` of MiniCPM-V 2.6, and `MiniCPMV4_6ImageProcessorPil` and `MiniCPMV4_6Processor` of
# Transformers 5.24, make of `noise` by height and width: rows and columns of the patches of each part, the CRC of the
# pixels, and the text, with brackets for the tokens around slices and the number of tokens for each run.
RECORDED: dict[tuple[int, int], list[tuple[list[tuple[int, int]], int, str]]] = {
    (40, 31): [
        ([(9, 7), *[(6, 10)] * 2], 2_247_508_496, "<image>6</image>[6]\n[6]"),
        ([(8, 8), *[(8, 8)] * 2], 628_191_262, "<image>4</image>[4]\n[4]"),
    ],
    (20, 75): [
        ([(4, 15), *[(7, 9)] * 3], 1_626_945_443, "<image>6</image>[6][6][6]"),
        ([(4, 16), *[(8, 8)] * 3], 3_408_683_912, "<image>4</image>[4][4][4]"),
    ],
    (8, 8): [
        ([(8, 8)], 1_541_035_333, "<image>6</image>"),
        ([(8, 8)], 1_541_035_333, "<image>4</image>"),
    ],
    (90, 120): [
        ([(7, 9), *[(7, 9)] * 4], 1_283_957_139, "<image>6</image>[6][6]\n[6][6]"),
        ([(8, 8), *[(8, 8)] * 4], 3_930_945_721, "<image>4</image>[4][4]\n[4][4]"),
    ],
    (64, 17): [
        ([(16, 4), *[(9, 7)] * 3], 2_590_493_282, "<image>6</image>[6]\n[6]\n[6]"),
        ([(16, 4), *[(8, 8)] * 3], 2_857_355_845, "<image>4</image>[4]\n[4]\n[4]"),
    ],
    (200, 20): [
        ([(25, 2), *[(12, 5)] * 4], 2_700_514_027, "<image>6</image>[6]\n[6]\n[6]\n[6]"),
        ([(24, 4), *[(12, 4)] * 4], 3_142_651_294, "<image>6</image>[3]\n[3]\n[3]\n[3]"),
    ],
    (33, 33): [
        ([(8, 8), *[(6, 11)] * 2], 1_010_828_617, "<image>6</image>[6]\n[6]"),
        ([(8, 8), *[(4, 12)] * 2], 4_147_258_323, "<image>4</image>[3]\n[3]"),
    ],
    (32, 32): [
        ([(8, 8)], 316_006_065, "<image>6</image>"),
        ([(8, 8)], 316_006_065, "<image>4</image>"),
    ],
    (45, 46): [
        ([(8, 8), *[(8, 8)] * 4], 47_411_390, "<image>6</image>[6][6]\n[6][6]"),
        ([(8, 8), *[(8, 8)] * 4], 47_411_390, "<image>4</image>[4][4]\n[4][4]"),
    ],
    (64, 64): [
        ([(8, 8), *[(8, 8)] * 4], 1_481_834_102, "<image>6</image>[6][6]\n[6][6]"),
        ([(8, 8), *[(8, 8)] * 4], 1_481_834_102, "<image>4</image>[4][4]\n[4][4]"),
    ],
    (100, 31): [
        ([(14, 4), *[(8, 8)] * 3], 2_253_613_260, "<image>6</image>[6]\n[6]\n[6]"),
        ([(16, 4), *[(8, 8)] * 3], 212_367_876, "<image>4</image>[4]\n[4]\n[4]"),
    ],
    (31, 100): [
        ([(4, 14), *[(8, 8)] * 3], 3_001_609_690, "<image>6</image>[6][6][6]"),
        ([(4, 12), *[(8, 8)] * 3], 795_711_992, "<image>3</image>[4][4][4]"),
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, MiniCpm]]:
    root = tmp_path_factory.mktemp("minicpm")
    return {version: (root / version, write_minicpm_checkpoint(root / version, version)) for version in VERSIONS}


def entry_of(folder: Path) -> Any:
    entry = direct_vision_of(folder, "fp32", vocabulary_of(folder, read_config(folder)))
    assert entry is not None
    return entry


def noise(number: int, height: int, width: int) -> NDArray[np.uint8]:
    return np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)


def natural(tiles: Tiles, version: str, sizes: Any) -> NDArray[np.float32]:
    """The patches of an image's parts, each row by row."""
    parts = [
        each.reshape(3, each.shape[1] // 4, 4, -1, 4).transpose(1, 3, 0, 2, 4).reshape(-1, 48)
        for each in parts_of(tiles.pixels, version, sizes)
    ]
    return np.concatenate(parts)


@pytest.mark.parametrize("version", ["4.5", "4.6"])
def test_pixels_and_tokens_are_those_of_the_publishers_code(
    checkpoints: dict[str, tuple[Path, MiniCpm]], version: str
) -> None:
    entry = entry_of(checkpoints[version][0])
    for number, ((height, width), recorded) in enumerate(RECORDED.items()):
        sizes, checksum, text = recorded[version == "4.6"]
        tiles = cut_into_tiles(read_image(noise(number, height, width)), entry)
        assert zlib.crc32(natural(tiles, version, sizes).tobytes()) == checksum
        runs = f"(?:{re.escape(entry.image_token)})+"
        found = re.sub(runs, lambda run: str(len(run[0]) // len(entry.image_token)), image_text(tiles, entry))
        assert found.replace("<slice>", "[").replace("</slice>", "]") == text
        assert image_text(tiles, entry).count(entry.image_token) == sum(tiles.lengths)


@pytest.mark.parametrize("version", ["4.5", "4.6"])
def test_patches_have_the_learned_positions_of_pytorch(
    checkpoints: dict[str, tuple[Path, MiniCpm]], version: str
) -> None:
    entry, is_new = msgspec.structs.replace(entry_of(checkpoints[version][0]), num_places=70), version == "4.6"
    layout: Any = PROCESSORS[entry.layout]
    for count in range(2, 200, 2 if is_new else 1):
        places = layout.others([(count, 2)], entry)["learned_places"]
        rows = learned_places(count * entry.patches, 70, is_new=is_new).numpy()
        assert (np.sort(places // 70) == np.repeat(rows, 2 * entry.patches)).all()


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_greedy_answers_are_those_of_the_judge(
    checkpoints: dict[str, tuple[Path, MiniCpm]], convert: Any, make_checkpoint: Any, tmp_path: Path, version: str
) -> None:
    folder, model = checkpoints[version]
    draft = make_checkpoint(f"draft-of-{version}", tokenizer=minicpm_tokenizer(version), vocab_size=NUM_TOKENS, seed=4)
    bundle, _ = convert(folder, draft, weights="fp32", draft_weights="fp32")
    engine = outrider.load(bundle.folder, precision="f32", cache_size=0.05, keep_records=False)
    vision: Any = engine.vision
    answers = set[tuple[int, ...]]()
    names = list(RECORDED)
    for given in ([0], [3], [4, 1], []):
        images = [noise(number, *names[number]) for number in given]
        prompt = vision.prompt(asking(*images), engine.tokenizer)
        embeds = []
        for number, image in zip(given, images, strict=True):
            sizes = RECORDED[names[number]][version == "4.6"][0]
            tiles = cut_into_tiles(read_image(image), vision.entry)
            embeds.append(model.image_embeds(parts_of(tiles.pixels, version, sizes)))
        if given:
            expected = np.concatenate([each.numpy() for each in embeds])
            found = np.concatenate([span.embeds for span in prompt.embeds])
            assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()
        answer = model.greedy(list(prompt.token_ids), vision.entry.image_token_id, embeds, 40)
        for drafter in (None, "draft", "suffix"):
            result = engine.generate(asking(*images), drafter=drafter, max_new_tokens=40, ignore_eos=True)
            assert result.token_ids == answer
        answers.add(tuple(answer))
    assert len(answers) == 4  # the images are seen
    chat = engine.chat()  # an image has its number in the conversation, not in its message
    for number in (0, 1):
        chat.send(asking(noise(number, 40, 31))[0], max_new_tokens=4)
    text = minicpm_tokenizer(version).decode(chat.turns[-1].token_ids, skip_special_tokens=False)
    assert [f"<image_id>{number}</image_id><image>" in text for number in range(3)] == [True, True, False]
    assert ("</slice>\nWhat is this?" in text) == (version != "4.6")  # whose template has parts in its own way
    engine.close()
    whole = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    write_encoder(folder, whole, vision.entry.layout, tmp_path / "int8", "int8")
    tiles = cut_into_tiles(read_image(noise(3, 90, 120)), vision.entry)
    exact, _ = vision.encoder.encode(tiles)
    rounded, _ = VisionEncoder(tmp_path / "int8" / "openvino_model.xml").encode(tiles)
    assert np.abs(np.concatenate(rounded) - np.concatenate(exact)).max() < 0.1 * np.abs(np.concatenate(exact)).max()


def test_images_that_are_prepared_in_another_way_are_refused(
    checkpoints: dict[str, tuple[Path, MiniCpm]], tmp_path: Path
) -> None:
    changes: dict[str, tuple[dict[str, Any], str]] = {
        "4.5": ({"slice_start": "<part>"}, "slice_start=<part>"),
        "4.6": ({"downsample_mode": "4x"}, "downsample_mode="),
    }
    for version, (change, message) in changes.items():
        folder = shutil.copytree(checkpoints[version][0], tmp_path / version)
        images = json.loads((folder / "preprocessor_config.json").read_text(encoding="utf-8"))
        (folder / "preprocessor_config.json").unlink()
        assert direct_vision_of(folder, "int4", vocabulary_of(folder, read_config(folder))) is None  # a text part alone
        (folder / "preprocessor_config.json").write_text(json.dumps(images | change), encoding="utf-8")
        with pytest.raises(outrider.ExportError, match=f"prepares images with {message}"):
            entry_of(folder)
    whole = json.loads((checkpoints["4.5"][0] / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(whole | {"version": 2.5}), encoding="utf-8")
    with pytest.raises(outrider.ExportError, match="a MiniCPMV, whose images are laid out in a way"):
        read_config(folder)


_SIGLIP = {
    "hidden_size": 1152, "image_size": 980, "intermediate_size": 4304, "num_attention_heads": 16,
    "num_hidden_layers": 27, "patch_size": 14,
}  # fmt: skip
# As published: config.json without its text part, preprocessor_config.json, and what becomes of them.
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "4.5": (
        {
            "architectures": ["MiniCPMV"], "auto_map": {"AutoConfig": "configuration_minicpm.MiniCPMVConfig"},
            "batch_3d_resampler": True, "batch_vision_input": True, "drop_vision_last_layer": False,
            "image_size": 448, "model_type": "minicpmv", "patch_size": 14, "query_num": 64,
            "slice_config": {"max_slice_nums": 9, "model_type": "minicpmv", "patch_size": 14}, "slice_mode": True,
            "version": 4.5, "vision_config": _SIGLIP | {"model_type": "siglip"},
        },
        {
            "auto_map": {"AutoProcessor": "processing_minicpmv.MiniCPMVProcessor"}, "im_end": "</image>",
            "im_id_end": "</image_id>", "im_id_start": "<image_id>", "im_start": "<image>", "image_feature_size": 64,
            "image_processor_type": "MiniCPMVImageProcessor", "max_slice_nums": 9, "norm_mean": [0.5, 0.5, 0.5],
            "norm_std": [0.5, 0.5, 0.5], "patch_size": 14, "processor_class": "MiniCPMVProcessor",
            "scale_resolution": 448, "slice_end": "</slice>", "slice_mode": True, "slice_start": "<slice>",
            "unk": "<unk>", "use_image_id": True, "version": 4.5,
        },
        {"layout": "minicpm", "tile_size": 14, "tokens_per_tile": 64, "longest_edge": 448, "num_tiles": (1, 9)},
    ),
    "4.6": (
        {
            "architectures": ["MiniCPMV4_6ForConditionalGeneration"], "drop_vision_last_layer": False,
            "image_size": 1120, "insert_layer_id": 6, "model_type": "minicpmv4_6", "tie_word_embeddings": True,
            "vision_config": _SIGLIP | {
                "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-06, "model_type": "minicpmv4_6_vision",
                "num_channels": 3,
            },
        },
        {
            "do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True,
            "downsample_mode": "16x", "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
            "image_processor_type": "MiniCPMV4_6ImageProcessor", "max_slice_nums": 9, "patch_size": 14,
            "resample": 3, "scale_resolution": 448, "slice_mode": True, "use_image_id": True,
        },
        {"layout": "minicpm4_6", "tile_size": 28, "tokens_per_tile": 64, "longest_edge": 448, "patches": 2},
    ),
}  # fmt: skip


@pytest.mark.parametrize("version", PUBLISHED)
def test_published_files_are_read(checkpoints: dict[str, tuple[Path, MiniCpm]], tmp_path: Path, version: str) -> None:
    config, images, expected = PUBLISHED[version]
    tokenizer = minicpm_tokenizer(version)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    tiny = json.loads((checkpoints[version][0] / "config.json").read_text(encoding="utf-8"))
    if version == "4.6":
        config |= {key: tiny[key] for key in ("text_config", "image_token_id", "video_token_id")}
    else:
        config = tiny | config
    for file, content in (("config", config), ("preprocessor_config", images)):
        (tmp_path / f"{file}.json").write_text(json.dumps(content), encoding="utf-8")
    name = "model.vision_tower.post_layernorm.weight" if version == "4.6" else "vpm.post_layernorm.weight"
    save_file({name: np.ones(4, np.float32)}, tmp_path / "model.safetensors")
    assert read_config(tmp_path)["model_type"] == KINDS[version]
    entry = entry_of(tmp_path)
    assert entry.image_token == image_token_of(version)
    assert entry.numbered
    assert entry.num_places == 70
    assert {key: getattr(entry, key) for key in expected} == expected
    for size in ((1200, 1600), (300, 400), (64, 2000)):
        tiles = cut_into_tiles(read_image(picture(0, *size)), entry)
        assert image_text(tiles, entry).count(entry.image_token) == sum(tiles.lengths) <= 10 * 72


def test_text_parts_are_those_of_their_version() -> None:
    config = {"architectures": ["MiniCPMV"], "model_type": "minicpmv", "hidden_size": 8, "vision_config": {}}
    found = {
        version: text_part(config | {"version": float(version)})["model_type"] for version in ("2.6", "4.0", "4.5")
    }
    assert found == {version: KINDS[version] for version in found}
