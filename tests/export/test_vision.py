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
import tiny_vision
from assistants import Assistant, config_of, write_assistant
from outrider.inputs.vision import VisionEncoder, cut_into_tiles, image_text, read_image
from outrider_export import export_bundle
from outrider_export.bundles.drafters import add_drafter
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
    return vision_of(folder, "int4", vocabulary)


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


# As published: parts of config.json, preprocessor_config.json and processor_config.json, and what becomes of them.
FILE = Path(tiny_vision.__file__).with_name("published_vision.json")
PUBLISHED = {row["family"]: row for row in json.loads(FILE.read_text(encoding="utf-8"))}


def published(folder: Path, source: Path, family: str) -> Path:
    """A tiny checkpoint with the configurations that its family is published with."""
    shutil.copytree(source, folder)
    row = PUBLISHED[family]
    change_json(folder / CONFIG, **row["config"])
    for name, content in ((IMAGES, row["images"]), (PROCESSOR, row["processor"])):
        (folder / name).unlink(missing_ok=True)
        if content:
            change_json(folder / name, **content)
    return folder


@pytest.mark.parametrize("family", PUBLISHED)
def test_published_files_are_read(family: str, checkpoint: Any, tmp_path: Path) -> None:
    entry, expected = entry_of(published(tmp_path / family, checkpoint(family), family)), PUBLISHED[family]["entry"]
    assert json.loads(json.dumps({key: getattr(entry, key) for key in expected})) == expected
    for size in ((1200, 1600), (300, 400), (64, 2000)):
        tiles = cut_into_tiles(read_image(picture(0, *size)), entry)
        assert num_places(image_text(tiles, entry), entry) == sum(tiles.lengths)
        assert 0 < sum(tiles.lengths) < 11_000


def test_what_gemma_3_leaves_out_is_transformers(checkpoint: Any, tmp_path: Path) -> None:
    folder = published(tmp_path / "gemma3", checkpoint("gemma3"), "gemma3")
    config = read_config(folder)
    assert (config["architectures"], config["model_type"]) == (["Gemma3ForCausalLM"], "gemma3_text")
    decoder = describe(config)
    assert (decoder.num_heads, decoder.sizes.head_size, decoder.windows[:6]) == (8, 256, [*[1024] * 5, 0])
    assert geometry_of_config(config, folder).logits_width == 262_208


def test_axes_have_sections_or_take_turns() -> None:
    assert axes_of({"mrope_section": [3, 2, 1]}, 6, interleaved=False) == (0, 0, 0, 1, 1, 2)
    assert axes_of({"mrope_section": [3, 2, 1]}, 6, interleaved=True) == (0, 1, 2, 0, 1, 0)
    with pytest.raises(ValueError, match=r"sections of RoPE \[3, 2, 1\] for 8 frequencies"):
        axes_of({"mrope_section": [3, 2, 1]}, 8, interleaved=False)
