"""Models that read images: exported, and compared with transformers' own generation."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import outrider
from outrider.inputs.vision import cut_into_tiles, read_image
from outrider_export import export_bundle
from tiny_vision import NUM_TOKENS, asking, picture, vision_tokenizer, write_vision_checkpoint

Image: Any = pytest.importorskip("PIL.Image", reason="the extra [vision]")
PICTURES = {"tall": picture(0), "wide": picture(1, 20, 50), "square": picture(2, 16, 16), "thin": picture(3, 90, 4)}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smolvlm") / "tiny"
    write_vision_checkpoint(folder)
    return folder


@pytest.fixture(scope="module")
def draft(make_checkpoint: Any) -> Path:
    """A model of text with the same vocabulary."""
    folder: Path = make_checkpoint("draft-of-vision", tokenizer=vision_tokenizer(), vocab_size=NUM_TOKENS, seed=4)
    return folder


@pytest.fixture(scope="module")
def processor(checkpoint: Path) -> Any:
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    return SmolVLMImageProcessorPil.from_pretrained(checkpoint)


@pytest.fixture(scope="module")
def engine(convert: Any, checkpoint: Path, draft: Path) -> outrider.Engine:
    bundle, _ = convert(checkpoint, draft, weights="fp32", draft_weights="fp32")
    return outrider.load(bundle.folder, precision="f32", cache_size=0.05, keep_records=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", PICTURES)
def test_greedy_answers_are_those_of_transformers(
    engine: outrider.Engine, checkpoint: Path, processor: Any, name: str
) -> None:
    import torch
    from transformers import SmolVLMForConditionalGeneration

    model = SmolVLMForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32).eval()
    vision: Any = engine.vision
    prompt = vision.prompt(asking(PICTURES[name]), engine.tokenizer)
    seen = processor([Image.fromarray(PICTURES[name])], return_tensors="pt", return_row_col_info=True)
    tiles = cut_into_tiles(read_image(PICTURES[name]), vision.entry)
    assert [tiles.rows, tiles.columns] == [seen["rows"][0][0], seen["cols"][0][0]]
    assert (tiles.pixels == seen["pixel_values"][0].numpy()).all()
    embeds = model.model.get_image_features(seen["pixel_values"]).pooler_output.detach().numpy()
    assert np.abs(np.stack([span.embeds for span in prompt.embeds]) - embeds).max() < 1e-4 * np.abs(embeds).max()
    ids = torch.tensor([prompt.token_ids])
    expected = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=seen["pixel_values"],
        pixel_attention_mask=seen["pixel_attention_mask"], do_sample=False, max_new_tokens=20, eos_token_id=-1,
    )  # fmt: skip
    for drafter in (None, "suffix", "draft"):
        result = engine.generate(asking(PICTURES[name]), drafter=drafter, max_new_tokens=20, ignore_eos=True)
        assert result.token_ids == expected[0, len(prompt.token_ids) :].tolist()


@pytest.mark.slow
def test_prompts_are_those_of_transformers(engine: outrider.Engine, checkpoint: Path, processor: Any) -> None:
    """The chat template's text, with the tokens of images in place; SmolVLM's and Idefics3's processors alike."""
    from transformers import AutoTokenizer
    from transformers.models.idefics3.processing_idefics3 import get_image_prompt_string

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    vision: Any = engine.vision
    before = [{"role": "system", "content": [{"type": "text", "text": "Be brief."}]}]
    given = [*PICTURES.values()]
    text = tokenizer.apply_chat_template([*before, *asking(*given)], tokenize=False, add_generation_prompt=True)
    for image in given:
        seen = processor([Image.fromarray(image)], return_tensors="pt", return_row_col_info=True)
        names = ("<fake_token_around_image>", "<PLACE>", "<global-img>")
        tokens = get_image_prompt_string(seen["rows"][0][0], seen["cols"][0][0], 4, *names)
        text = text.replace("<image>", tokens, 1)
    expected = tokenizer(text.replace("<PLACE>", "<image>"), add_special_tokens=False)["input_ids"]
    found = vision.prompt([{"role": "system", "content": "Be brief."}, *asking(*given)], engine.tokenizer)
    assert list(found.token_ids) == expected


@pytest.mark.slow
def test_conversations_keep_their_answers_in_this_layout(engine: outrider.Engine) -> None:
    chat = engine.chat("Be brief.", max_new_tokens=12, ignore_eos=True)
    for message in (asking(PICTURES["tall"]), "Why?", asking(PICTURES["wide"], PICTURES["thin"]), "So?"):
        before, turns = chat.token_ids, chat.turns
        result = chat.send(message)
        assert list(chat.turns[-1].token_ids[: len(before)]) == before
        assert result.stats.num_cached_tokens >= len(before) - 1
        prompt = chat._layout.prompt(turns, chat.turns[-1].messages)
        assert engine.generate(prompt, drafter=None, max_new_tokens=12, ignore_eos=True).token_ids == result.token_ids
    first = engine.generate(chat.messages[:2], max_new_tokens=12, ignore_eos=True)
    assert first.token_ids == list(chat.turns[0].answer_token_ids)


def test_other_layouts_are_refused(checkpoint: Path, draft: Path, tmp_path: Path) -> None:
    def copy(name: str, file: str = "config.json", **changes: Any) -> Path:
        folder = tmp_path / name
        shutil.copytree(checkpoint, folder)
        config = json.loads((folder / file).read_text(encoding="utf-8"))
        (folder / file).write_text(json.dumps(config | changes), encoding="utf-8")
        return folder

    images = "preprocessor_config.json"
    for folder, message in (
        (
            copy("llava", architectures=["LlavaForConditionalGeneration"]),
            "holds a LlavaForConditionalGeneration, whos",
        ),
        (
            copy("tiles", images, max_image_size={"longest_edge": 32}),
            "prepares images with max_image_size=32, and Outrid",
        ),
        (copy("resize", images, do_resize=False), "prepares images with do_resize=False"),
        (copy("length", "processor_config.json", image_seq_len=9), "prepares images with image_seq_len=9"),
        (copy("token", image_token_id=7), "has image_token_id=7, and <image> is 404 in its tokenizer"),
    ):
        with pytest.raises(outrider.ExportError, match=message) as caught:
            export_bundle(folder, output=tmp_path / "out")
        assert "\n" not in str(caught.value)
    (copy("alone") / images).unlink()
    (tmp_path / "alone" / "processor_config.json").unlink()
    with pytest.raises(outrider.ExportError, match="has no preprocessor_config.json"):
        export_bundle(tmp_path / "alone", output=tmp_path / "out")
    with pytest.raises(outrider.ExportError, match="the draft model reads text only"):
        export_bundle(draft, checkpoint, output=tmp_path / "out")
    with pytest.raises(outrider.ExportError, match="'SmolVLMForConditionalGeneration', which is not converted to ONNX"):
        export_bundle(checkpoint, output=tmp_path / "out", format="onnx")
