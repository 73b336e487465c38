"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: exported without PyTorch, and compared with transformers' own generation."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import outrider
from outrider.inputs.vision import VisionEncoder, cut_into_tiles, read_image
from outrider.models.backends.embeds import grid_offsets
from outrider_export.describe.direct_vision import direct_vision_of
from outrider_export.describe.encoder_decoder import vocabulary_of
from outrider_export.direct.rope import axes_of
from outrider_export.direct.vision_encoder import write_encoder
from outrider_export.sources.source import read_config
from tiny_vision import (
    NUM_TOKENS,
    QWEN_FAMILIES,
    asking,
    assert_answers,
    picture,
    qwen_tokenizer,
    write_qwen_checkpoint,
)

Image: Any = pytest.importorskip("PIL.Image", reason="the extra [vision]")
PICTURES = [picture(0, 40, 31), picture(1, 20, 75), picture(2, 8, 8), picture(3, 90, 120)]


@pytest.fixture(scope="module")
def draft(make_checkpoint: Any) -> Path:
    """A model of text with the same vocabulary."""
    folder: Path = make_checkpoint("draft-of-qwen", tokenizer=qwen_tokenizer(), vocab_size=NUM_TOKENS, seed=4)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("family", QWEN_FAMILIES)
def test_greedy_answers_are_those_of_transformers(convert: Any, draft: Path, tmp_path: Path, family: str) -> None:
    import torch
    from transformers import AutoModelForImageTextToText
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    write_qwen_checkpoint(tmp_path / "tiny", family)
    has_mtp = family.startswith("qwen3_5")  # which is taken along where no draft model is named
    others = [] if has_mtp else [draft]
    bundle, _ = convert(tmp_path / "tiny", *others, weights="fp32", draft_weights="fp32")
    engine = outrider.load(bundle.folder, precision="f32", cache_size=0.05, keep_records=False)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "tiny", dtype=torch.float32).eval()
    processor = Qwen2VLImageProcessorPil.from_pretrained(tmp_path / "tiny")
    vision: Any = engine.vision
    drafters = [each.name for each in bundle.manifest.drafters]
    assert drafters == (["mtp"] if has_mtp else ["draft"])
    answers, spans = set[tuple[int, ...]](), tuple[Any, ...]()
    for given in ([PICTURES[0]], [PICTURES[1]], PICTURES[:1:-1], []):
        prompt = vision.prompt(asking(*given), engine.tokenizer)
        ids = torch.tensor([prompt.token_ids])
        seen: dict[str, Any] = {}
        if given:
            seen = dict(processor([Image.fromarray(image) for image in given], return_tensors="pt"))
            tiles = [cut_into_tiles(read_image(image), vision.entry) for image in given]
            assert (np.concatenate([each.pixels for each in tiles]) == seen["pixel_values"].numpy()).all()
            found = model.model.get_image_features(seen["pixel_values"], seen["image_grid_thw"])
            parts = [torch.cat(list(found.pooler_output)), *(found.get("deepstack_features") or [])]
            embeds = torch.cat(parts, dim=1).detach().numpy()
            error = np.abs(np.concatenate([span.embeds for span in prompt.embeds]) - embeds).max()
            assert error < 1e-4 * np.abs(embeds).max()
            seen["mm_token_type_ids"] = (ids == vision.entry.image_token_id).int()
            positions, _ = model.model.get_rope_index(
                ids, seen["mm_token_type_ids"], image_grid_thw=seen["image_grid_thw"]
            )
            places = np.arange(ids.shape[1])[:, None] + grid_offsets(prompt.embeds, 0, ids.shape[1])
            assert (positions[:, 0].numpy() == places.T).all()
        expected = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), **seen, do_sample=False, max_new_tokens=40,
            eos_token_id=-1,
        )[0, ids.shape[1] :].tolist()  # fmt: skip
        assert_answers(engine, given, prompt.embeds, expected, drafters=drafters, num_questions=1 + has_mtp)
        answers.add(tuple(expected))
        spans = prompt.embeds or spans
    assert len(answers) == 4  # the images are seen
    engine.close()
    whole = json.loads((tmp_path / "tiny" / "config.json").read_text(encoding="utf-8"))
    write_encoder(tmp_path / "tiny", whole, "qwen", tmp_path / "int8", "int8")
    rounded, _ = VisionEncoder(tmp_path / "int8" / "openvino_model.xml").encode(tiles[-1])
    assert np.abs(rounded[0] - spans[-1].embeds).max() < 0.1 * np.abs(spans[-1].embeds).max()


@pytest.fixture
def untrained(tmp_path: Path) -> Path:
    """A Qwen2.5-VL by its files alone, in the older layout: the text's keys stand beside the others."""
    config = {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "hidden_size": 64,
        "image_token_id": qwen_tokenizer().token_to_id("<|image_pad|>"),
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "vision_config": {"patch_size": 14, "fullatt_block_indexes": [7], "window_size": 112},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    images = {"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(images), encoding="utf-8")
    qwen_tokenizer().save(str(tmp_path / "tokenizer.json"))
    save_file({"visual.merger.ln_q.weight": np.ones(4, np.float32)}, tmp_path / "model.safetensors")
    return tmp_path


def entry_of(folder: Path) -> Any:
    return direct_vision_of(folder, "int4", vocabulary_of(folder, read_config(folder)))


def test_the_older_layout_is_read(untrained: Path) -> None:
    config = read_config(untrained)
    assert (config["architectures"], config["model_type"]) == (["Qwen2ForCausalLM"], "qwen2")
    entry = entry_of(untrained)
    assert entry is not None
    assert (entry.tile_size, entry.window, entry.num_places, entry.num_parts) == (28, 8, 0, 1)
    assert (entry.num_pixels, entry.weights) == ((3136, 4096 * 28**2), "int8")


def test_a_text_part_alone_has_no_images(untrained: Path) -> None:
    (untrained / "preprocessor_config.json").unlink()
    assert entry_of(untrained) is None


def test_images_that_are_prepared_in_another_way_are_refused(untrained: Path) -> None:
    images = untrained / "preprocessor_config.json"
    images.write_text(json.dumps({"patch_size": 16}), encoding="utf-8")
    with pytest.raises(outrider.ExportError, match="prepares images with patch_size=16, and Outrider knows"):
        entry_of(untrained)
    images.write_text(json.dumps({"patch_size": 14}), encoding="utf-8")
    config = json.loads((untrained / "config.json").read_text(encoding="utf-8"))
    (untrained / "config.json").write_text(json.dumps(config | {"image_token_id": 7}), encoding="utf-8")
    with pytest.raises(outrider.ExportError, match="has image_token_id=7, and "):
        entry_of(untrained)


def test_axes_have_sections_or_take_turns() -> None:
    assert axes_of({"mrope_section": [3, 2, 1]}, 6, interleaved=False) == (0, 0, 0, 1, 1, 2)
    assert axes_of({"mrope_section": [3, 2, 1]}, 6, interleaved=True) == (0, 1, 2, 0, 1, 0)
    with pytest.raises(ValueError, match=r"sections of RoPE \[3, 2, 1\] for 8 frequencies"):
        axes_of({"mrope_section": [3, 2, 1]}, 8, interleaved=False)
