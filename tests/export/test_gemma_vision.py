"""Gemma 3 and Gemma 4 with images: exported without PyTorch, and compared with transformers' own generation."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import outrider
from assistants import Assistant, config_of, write_assistant
from calls import rows_of_call
from gemma4_unified import unify
from outrider.bundle.vision import VisionEntry
from outrider.drafters import AssistantModel
from outrider.inputs.vision import VisionEncoder, cut_into_tiles, image_text, read_image
from outrider.types import Chunk, Prompt
from outrider_export.bundles.drafters import add_drafter
from outrider_export.describe.direct_vision import direct_vision_of
from outrider_export.describe.encoder_decoder import vocabulary_of
from outrider_export.describe.geometry import geometry_of_config
from outrider_export.direct.describe import describe
from outrider_export.direct.vision_encoder import write_encoder
from outrider_export.sources.source import read_config
from tiny_vision import GEMMA_FAMILIES, NUM_TOKENS, asking, gemma_tokenizer, picture, write_gemma_checkpoint

Image: Any = pytest.importorskip("PIL.Image", reason="the extra [vision]")
PICTURES = [picture(0, 40, 31), picture(1, 20, 75), picture(2, 8, 8), picture(3, 90, 120)]


def processor_of(folder: Path, family: str) -> Any:
    if family.startswith("gemma3"):
        from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

        return Gemma3ImageProcessorPil.from_pretrained(folder)
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    options = json.loads((folder / "processor_config.json").read_text(encoding="utf-8"))["image_processor"]
    return Gemma4ImageProcessorPil(**options)


def pan_and_scan(folder: Path) -> None:
    """Have a checkpoint cut images."""
    file = folder / "preprocessor_config.json"
    crops = {"min_crop_size": 16, "max_num_crops": 3, "min_ratio_to_activate": 1.2}
    said = {f"pan_and_scan_{name}": value for name, value in crops.items()} | {"do_pan_and_scan": True}
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | said), encoding="utf-8")


class Seeing:
    """A Gemma 4 of Transformers as an assistant reads it, with its images."""

    def __init__(self, model: Any, seen: dict[str, Any], image_token_id: int) -> None:
        self.whole, self.seen, self.place = model, seen, image_token_id
        self.model, self.config = model.model.language_model, model.config.text_config

    def __call__(self, ids: Any, **options: Any) -> Any:
        return self.whole(ids, **self.seen, mm_token_type_ids=(ids == self.place).long(), **options)


def seen_by(processor: Any, image: Any) -> dict[str, Any]:
    """What Transformers' model reads of one image, without padding."""
    seen = dict(processor([Image.fromarray(image)], return_tensors="pt"))
    if "image_position_ids" not in seen:
        return {"pixel_values": seen["pixel_values"]}
    count = int((seen["image_position_ids"][0, :, 0] >= 0).sum())
    return {name: seen[name][:, :count] for name in ("pixel_values", "image_position_ids")}


@pytest.mark.slow
@pytest.mark.parametrize("family", [*GEMMA_FAMILIES, "gemma3_crops", "gemma4_unified"])
def test_greedy_answers_are_those_of_transformers(
    convert: Any, make_checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    made: list[tuple[list[int], list[int]]] = []
    propose = AssistantModel.propose

    def spy(self: AssistantModel, requests: Any) -> Any:
        drafts = propose(self, requests)
        made.extend(([*each.sequence.token_ids], [*d.token_ids]) for each, d in zip(requests, drafts, strict=True))
        return drafts

    monkeypatch.setattr(AssistantModel, "propose", spy)

    is_unified = family == "gemma4_unified"
    known = tmp_path / "known" if is_unified else tmp_path / "tiny"
    kind = family.removesuffix("_unified").removesuffix("_crops")
    write_gemma_checkpoint(known, kind)
    if kind != family and not is_unified:
        pan_and_scan(known)
    embedder: Any = unify(known, tmp_path / "tiny") if is_unified else None
    draft = make_checkpoint(f"draft-of-{family}", tokenizer=gemma_tokenizer(family), vocab_size=NUM_TOKENS, seed=4)
    bundle, _ = convert(tmp_path / "tiny", draft, weights="fp32", draft_weights="fp32")
    assistant: Assistant | None = None
    if kind != "gemma3":
        text = AutoConfig.from_pretrained(known).text_config
        assistant = Assistant(config_of(SimpleNamespace(config=text), ordered=False))
        bundle = add_drafter(bundle.folder, write_assistant(tmp_path / "assistant", assistant), weights="fp32")
    engine = outrider.load(bundle.folder, precision="f32", cache_size=0.05, keep_records=False)
    model = AutoModelForImageTextToText.from_pretrained(known, dtype=torch.float32).eval()
    if is_unified:
        embedder.judge(model)
    processor = processor_of(known, family)
    vision: Any = engine.vision
    types = "token_type_ids" if kind == "gemma3" else "mm_token_type_ids"
    answers = set[tuple[int, ...]]()
    spans = tuple[Any, ...]()
    for given in ([PICTURES[0]], [PICTURES[1]], PICTURES[:1:-1], []):
        messages = asking(*given)
        prompt = vision.prompt(messages, engine.tokenizer)
        ids = torch.tensor([prompt.token_ids])
        seen: dict[str, Any] = {}
        left = prompt.embeds
        for image in given:
            each = seen_by(processor, image)
            tiles = cut_into_tiles(read_image(image), vision.entry)
            own, left = left[: len(tiles.lengths)], left[len(tiles.lengths) :]
            theirs = each["pixel_values"][0].numpy()
            if kind == "gemma3":
                assert (tiles.pixels == each["pixel_values"].numpy()).all()
            elif is_unified:
                pixels, places = embedder.tiles(each["pixel_values"][0], each["image_position_ids"][0])
                assert (tiles.pixels == pixels.numpy()).all()
                assert (tiles.others["patch_positions"] == places.flip(1).numpy()).all()
            else:  # theirs row by row, not tile by tile
                at = tiles.others["patch_positions"]
                assert (tiles.pixels == theirs[at[:, 0] * (at[:, 1].max() + 1) + at[:, 1]]).all()
            embeds = model.model.get_image_features(*each.values()).pooler_output.detach().numpy()
            embeds = embeds.reshape(-1, embeds.shape[-1])
            found = np.concatenate([span.embeds for span in own])
            assert np.abs(found - embeds).max() < 1e-4 * np.abs(embeds).max()
        assert not left
        if given:
            seen = dict(processor([Image.fromarray(image) for image in given], return_tensors="pt"))
            seen = {name: seen[name] for name in ("pixel_values", "image_position_ids") if name in seen}
        expected = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), **seen,
            **{types: (ids == vision.entry.image_token_id).long()}, do_sample=False, max_new_tokens=40, eos_token_id=-1,
        )[0, ids.shape[1] :].tolist()  # fmt: skip
        for drafter in (None, "draft", "suffix"):
            result = engine.generate(messages, drafter=drafter, max_new_tokens=40, ignore_eos=True)
            assert result.token_ids == expected
        if assistant is not None:
            made.clear()
            result = engine.generate(
                messages, drafter="assistant", num_assistant_tokens=3, assistant_confidence_threshold=1e-9,
                max_new_tokens=40, ignore_eos=True,
            )  # fmt: skip
            assert result.token_ids == expected
            for token_ids, proposed in (made[0], made[-1]):
                whole = Seeing(model, seen, vision.entry.image_token_id)
                drafted, _ = assistant.draft(whole, token_ids, len(proposed), NUM_TOKENS)
                assert proposed == drafted
        answers.add(tuple(expected))
        spans = prompt.embeds or spans
        again = engine.generate(asking(*given, text="And so?"), max_new_tokens=4, ignore_eos=True)
        if given:
            assert again.stats.num_cached_tokens >= prompt.embeds[-1].end // 32 * 32 - 32
    assert len(answers) == 4  # the images are seen
    check_pieces(engine, vision.prompt(asking(*PICTURES[:1:-1]), engine.tokenizer))
    engine.close()
    whole = json.loads((tmp_path / "tiny" / "config.json").read_text(encoding="utf-8"))
    write_encoder(tmp_path / "tiny", whole, vision.entry.layout, tmp_path / "int8", "int8")
    rounded, _ = VisionEncoder(tmp_path / "int8" / "openvino_model.xml").encode(tiles)
    assert np.abs(rounded[-1] - spans[-1].embeds).max() < 0.15 * np.abs(spans[-1].embeds).max()


def check_pieces(engine: Any, prompt: Prompt) -> None:
    """However long the pieces are that a prompt is read in, its last row has the same bits, and so has a cached one."""
    main, length = engine.main, len(prompt.token_ids)
    sequence = outrider.types.TokenSequence.of(prompt)
    rows = []
    for most, is_cached in ((length, False), (7, False), (20, False), (33, False), (length, True)):
        if not is_cached:
            main.clear_prefixes()
        slot = main.open(length, prompt)
        assert slot is not None
        assert bool(slot.length) == is_cached
        while slot.length < length:
            token_ids, _ = sequence.next_piece(slot.length, most)
            (row,) = rows_of_call(main, Chunk(slot, token_ids, num_rows=1))
        rows.append(row)
        slot.publish(prompt.token_ids)
        slot.close()
    assert all((row == rows[0]).all() for row in rows)


@pytest.fixture
def untrained(tmp_path: Path) -> Path:
    """A Gemma 3 4B by its files alone, whose configuration leaves most to Transformers."""
    tokenizer = gemma_tokenizer("gemma3")
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "mm_tokens_per_image": 256,
        "image_token_index": tokenizer.token_to_id("<image_soft_token>"), "eos_token_id": [1, 106],
        "text_config": {
            "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
        },
        "vision_config": {"hidden_size": 1152, "image_size": 896, "patch_size": 14},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    images = {"do_pan_and_scan": None, "image_seq_length": 256, "size": {"height": 896, "width": 896}, "resample": 2}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(images), encoding="utf-8")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    save_file({"vision_tower.vision_model.post_layernorm.bias": np.ones(4, np.float32)}, tmp_path / "model.safetensors")
    return tmp_path


def entry_of(folder: Path) -> VisionEntry | None:
    return direct_vision_of(folder, "int4", vocabulary_of(folder, read_config(folder)))


def test_the_published_configuration_is_read(untrained: Path) -> None:
    config = read_config(untrained)
    assert (config["architectures"], config["model_type"]) == (["Gemma3ForCausalLM"], "gemma3_text")
    decoder = describe(config)
    assert (decoder.num_heads, decoder.head_size, decoder.windows[:6]) == (8, 256, [*[1024] * 5, 0])
    assert geometry_of_config(config, untrained).logits_width == 262_208
    entry = entry_of(untrained)
    assert entry is not None
    assert (entry.tile_size, entry.tokens_per_tile, entry.both_ways, entry.weights) == (896, 256, "all", "int8")


def test_images_that_are_prepared_in_another_way_are_refused(untrained: Path) -> None:
    images = untrained / "preprocessor_config.json"
    images.write_text(json.dumps({"image_seq_length": 64}), encoding="utf-8")
    with pytest.raises(outrider.ExportError, match="prepares images with image_seq_length=64, and Outrider knows"):
        entry_of(untrained)
    images.unlink()
    assert entry_of(untrained) is None


def test_crops_and_tokens_are_those_of_transformers(untrained: Path) -> None:
    from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

    file = untrained / "preprocessor_config.json"
    file.write_text(json.dumps({"size": {"height": 32, "width": 32}}), encoding="utf-8")
    config = json.loads((untrained / "config.json").read_text(encoding="utf-8"))
    config |= {"mm_tokens_per_image": 4, "vision_config": config["vision_config"] | {"image_size": 32}}
    (untrained / "config.json").write_text(json.dumps(config), encoding="utf-8")
    pan_and_scan(untrained)
    entry, processor = entry_of(untrained), processor_of(untrained, "gemma3")
    assert entry is not None
    counts = set()
    for number, size in enumerate(((40, 31), (20, 75), (8, 8), (90, 120), (31, 100), (100, 33), (15, 200), (47, 16))):
        image = picture(number, *size)
        tiles = cut_into_tiles(read_image(image), entry)
        seen = processor([Image.fromarray(image)], return_tensors="np")
        assert (tiles.pixels == seen["pixel_values"]).all()
        counts.add(len(tiles.lengths))
        whole: Any = SimpleNamespace(
            image_processor=lambda *_, seen=seen, **__: {"num_crops": seen["num_crops"].tolist()},
            tokenizer=lambda text, **_: {"text": text, "input_ids": []},
            full_image_sequence=entry.around_token + "<image_soft_token>" * 4 + entry.end_token,
        )
        whole.boi_token = entry.image_token
        whole.image_processor.fetch_images = lambda images: images
        whole.tokenizer.init_kwargs = {}
        whole._merge_kwargs = lambda *_, **__: {"images_kwargs": {}, "text_kwargs": {}}
        whole._check_special_mm_tokens = lambda *_, **__: None
        made = Gemma3Processor.__call__(whole, [[image]], ["<start_of_image>"])
        assert made["text"] == [image_text(tiles, entry)]
    assert counts == {1, 3, 4}
