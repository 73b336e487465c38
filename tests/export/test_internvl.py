"""InternVL: exported, and compared with transformers' own generation, tiles and prompts."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import outrider
from outrider.inputs.vision import cut_into_tiles, image_text, read_image
from outrider_export.describe.encoder_decoder import vocabulary_of
from outrider_export.describe.vision import vision_of
from outrider_export.sources.source import read_config
from tiny_vision import NUM_TOKENS, asking, internvl_tokenizer, picture, write_internvl_checkpoint

Image: Any = pytest.importorskip("PIL.Image", reason="the extra [vision]")
SIZES = [(40, 31), (20, 50), (16, 16), (90, 4), (30, 30), (1, 1), (64, 32), (200, 301)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("internvl") / "tiny"
    write_internvl_checkpoint(folder)
    return folder


@pytest.fixture(scope="module")
def processor(checkpoint: Path) -> Any:
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    return GotOcr2ImageProcessorPil.from_pretrained(checkpoint, crop_to_patches=True)


@pytest.fixture(scope="module")
def entry(checkpoint: Path) -> Any:
    config = read_config(checkpoint)
    return vision_of(checkpoint, config, "fp32", vocabulary_of(checkpoint, config))


@pytest.mark.parametrize("size", SIZES)
def test_tiles_are_those_of_transformers(entry: Any, processor: Any, size: tuple[int, int]) -> None:
    image = picture(sum(size), *size)
    tiles, seen = cut_into_tiles(read_image(image), entry), processor([Image.fromarray(image)], return_tensors="np")
    assert (tiles.pixels == seen["pixel_values"]).all()
    places = "<IMG_CONTEXT>" * 4 * int(seen["num_patches"][0])  # as InternVLProcessor writes them
    assert image_text(tiles, entry) == f"<img>{places}</img>"


@pytest.mark.slow
def test_greedy_answers_are_those_of_transformers(
    convert: Any, make_checkpoint: Any, checkpoint: Path, processor: Any
) -> None:
    import torch
    from transformers import InternVLForConditionalGeneration

    draft = make_checkpoint("draft-of-internvl", tokenizer=internvl_tokenizer(), vocab_size=NUM_TOKENS, seed=4)
    bundle, _ = convert(checkpoint, draft, weights="fp32", draft_weights="fp32")
    engine = outrider.load(bundle.folder, precision="f32", cache_size=0.05, keep_records=False)
    model = InternVLForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32).eval()
    vision: Any = engine.vision
    answers = set()
    for size in SIZES[:3]:
        image = picture(sum(size), *size)
        prompt = vision.prompt(asking(image), engine.tokenizer)
        pixels = torch.from_numpy(processor([Image.fromarray(image)], return_tensors="np")["pixel_values"])
        embeds = model.model.get_image_features(pixels).pooler_output.detach().numpy()
        found = np.stack([span.embeds for span in prompt.embeds])
        assert np.abs(found - embeds).max() < 1e-4 * np.abs(embeds).max()
        ids = torch.tensor([prompt.token_ids])
        expected = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=pixels, do_sample=False, max_new_tokens=32,
            eos_token_id=-1,
        )[0, len(prompt.token_ids) :].tolist()  # fmt: skip
        for drafter in (None, "suffix", "draft"):
            result = engine.generate(asking(image), drafter=drafter, max_new_tokens=32, ignore_eos=True)
            assert result.token_ids == expected
        answers.add(tuple(expected))
    assert len(answers) == 3  # the images are seen
    engine.close()
