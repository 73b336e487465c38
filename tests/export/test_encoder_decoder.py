"""Tiny random T5, MarianMT and Whisper models: exported, and compared with Transformers and with plain decoding."""

import functools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import outrider
from encoder_decoders import (
    cut_decoder,
    shake_decoder,
    shake_encoder,
    tone,
    write_marian,
    write_t5,
    write_wav,
    write_whisper,
)
from outrider.bundle.fit import check_fit
from outrider.cli import run
from outrider.engine.engine import Engine
from outrider.errors import BundleError, ExportError, OutriderError
from outrider.inputs.audio import log_mel
from outrider_export import export_bundle

TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "It's 2024, isn't it? We'll see: 3.14 and 2,718. def quicksort(items):",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
)


# Of each pair: how a checkpoint is written, and what is changed in the main and the draft model.
PAIRS: dict[str, tuple[Callable[..., None], Any, Any]] = {
    "t5": (write_t5, None, shake_decoder),
    "marian": (write_marian, None, shake_decoder),
    "whisper": (write_whisper, None, cut_decoder),  # as Distil-Whisper
    "whisper, another encoder": (write_whisper, None, shake_encoder),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`checkpoint("t5", draft=True)`: a folder, to be read only."""
    root = tmp_path_factory.mktemp("checkpoints")

    @functools.cache
    def make(pair: str, *, draft: bool = False) -> Path:
        write, change, of_draft = PAIRS[pair]
        folder: Path = root / (f"{pair.replace(', another ', '-')}-draft" if draft else pair.split(",")[0])
        if not folder.exists():
            write(folder, change=of_draft if draft else change)
        return folder

    return make


@pytest.fixture(scope="module")
def engine_of(convert: Any, checkpoint: Any) -> Iterator[Callable[[str], Engine]]:
    """`engine_of("t5")`: with a draft model."""
    made: dict[str, Engine] = {}

    def load(pair: str) -> Engine:
        if pair not in made:
            both = checkpoint(pair), checkpoint(pair, draft=True)
            made[pair] = outrider.load(convert(*both, weights="fp32", draft_weights="fp32")[0].folder)
        return made[pair]

    yield load
    for engine in made.values():
        engine.close()


@pytest.fixture
def reader(engine_of: Any) -> Engine:
    """A T5."""
    found: Engine = engine_of("t5")
    return found


@pytest.fixture
def listener(engine_of: Any) -> Engine:
    """A Whisper."""
    found: Engine = engine_of("whisper")
    return found


@pytest.mark.parametrize(("pair", "count"), [("t5", 40), ("marian", 255)])
def test_greedy_is_transformers(engine_of: Any, checkpoint: Any, pair: str, count: int) -> None:
    """Up to the last of the decoder's positions; without beams, and without the end that is forced there."""
    import torch
    from transformers import AutoModelForSeq2SeqLM

    model = AutoModelForSeq2SeqLM.from_pretrained(checkpoint(pair), dtype=torch.float32).eval()
    engine, different = engine_of(pair), set()
    options: dict[str, Any] = {"num_beams": 1, "do_sample": False, "forced_eos_token_id": None}
    for text in TEXTS[:2] if pair == "marian" else TEXTS:
        source = torch.tensor([engine.tokenizer.encode_prompt(text)])
        expected = model.generate(source, max_new_tokens=count, **options)[0].tolist()[1:]
        found = engine.generate(text, max_new_tokens=count, drafter=None).token_ids
        assert found == expected
        different.add(tuple(found))
    assert len(different) > 1


@pytest.mark.parametrize("pair", PAIRS)
def test_one_encoder_is_stored_once_and_another_beside_it(checkpoint: Any, convert: Any, pair: str) -> None:
    bundle, told = convert(checkpoint(pair), checkpoint(pair, draft=True), weights="fp32", draft_weights="fp32")
    is_shared = "another" not in pair
    assert any("stored and run once" in note for note in told.notes) == is_shared
    assert (bundle.folder / "draft-encoder").exists() != is_shared


def test_copies_come_from_the_source(reader: Engine) -> None:
    """A request's source is among its references, and prompt lookup reads it before the decoder's tokens."""
    request = reader.prepare(TEXTS[0], drafter="suffix", max_new_tokens=4)
    source = reader.tokenizer.encode_prompt(TEXTS[0])
    assert request.sequence.context == [*source, *request.sequence.token_ids]
    (reference,) = request.sequence.references
    match = reference.find(source[:3])
    assert reference.followers(match).token_id == source[3]


def test_whisper_features_are_transformers() -> None:
    from transformers import WhisperFeatureExtractor

    for bins in (80, 128):
        extractor = WhisperFeatureExtractor(feature_size=bins)
        for seconds in (0.3, 7.77, 30):
            samples = tone(seconds)
            expected = extractor(samples, sampling_rate=16_000, return_tensors="np").input_features[0]
            found = log_mel(np.pad(samples, (0, 480_000 - len(samples))), num_mel_bins=bins)
            assert found.shape == expected.shape
            assert np.abs(found - expected).max() < 1e-4


@pytest.mark.parametrize("without_timestamps", [False, True])
def test_whisper_greedy_is_transformers(listener: Engine, checkpoint: Any, without_timestamps: bool) -> None:
    """Token by token, as Transformers' own loop begins again after a timestamp, which a random model says anyway."""
    import torch
    from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration
    from transformers.generation.logits_process import (
        SuppressTokensAtBeginLogitsProcessor,
        SuppressTokensLogitsProcessor,
        WhisperTimeStampLogitsProcessor,
    )

    model = WhisperForConditionalGeneration.from_pretrained(checkpoint("whisper")).eval()
    config, encoder = model.generation_config, listener.bundle.manifest.main.encoder
    assert encoder is not None
    assert encoder.audio is not None
    begin = [*encoder.begin_token_ids, encoder.audio.languages["de"], encoder.audio.tasks["translate"]]
    begin += [encoder.audio.no_timestamps_token_id] if without_timestamps else []
    processors = [
        SuppressTokensLogitsProcessor(config.suppress_tokens),
        SuppressTokensAtBeginLogitsProcessor(config.begin_suppress_tokens, begin_index=len(begin)),
        *([] if without_timestamps else [WhisperTimeStampLogitsProcessor(config, begin_index=len(begin))]),
    ]
    samples = tone(7.3)
    features = WhisperFeatureExtractor.from_pretrained(checkpoint("whisper"))(
        samples, sampling_rate=16_000, return_tensors="pt"
    )
    options: dict[str, Any] = {"language": "de", "task": "translate", "max_new_tokens": 60, "drafter": None}
    options |= {"without_timestamps": without_timestamps, "temperature": 0.0}
    found = listener.transcribe(samples, **options).windows[0].token_ids
    with torch.no_grad():
        logits = model(features.input_features, decoder_input_ids=torch.tensor([begin + found])).logits
    for i, token_id in enumerate(found):
        before, row = torch.tensor([begin + found[:i]]), logits[:, len(begin) + i - 1]
        for processor in processors:
            row = processor(before, row)
        assert int(row.argmax()) == token_id
    assert len(set(found)) > 10
    assert without_timestamps or sum(token_id >= encoder.audio.first_timestamp_token_id for token_id in found) > 2


def test_whisper_files_and_command(listener: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    samples = tone(2)
    frames = np.round(samples * 32_767).astype("<i2")
    write_wav(tmp_path / "talk.wav", frames.tobytes())
    common: dict[str, Any] = {"max_new_tokens": 9, "without_timestamps": True}
    expected = listener.transcribe(frames / np.float32(32_768), **common, temperature=0.0)
    assert expected.language in ("en", "de", "ja")
    found = listener.transcribe(tmp_path / "talk.wav", **common, temperature=(0.0, 0.5), logprob_threshold=None)
    assert found.text == expected.text
    arguments = [str(listener.bundle.folder), str(tmp_path / "talk.wav"), "--max-new-tokens", "9", "--json"]
    greedy = ["--without-timestamps", "--temperature-increment-on-fallback", "none"]
    assert run(["transcribe", *arguments, *greedy, "--no-speech-threshold", "none"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == expected.text
    sampled = ["--temperature", "0.4", "--temperature-increment-on-fallback", "0.3", "--logprob-threshold", "0"]
    assert run(["transcribe", *arguments, *sampled, "--without-timestamps", "--seed", "1"]) == 0
    (segment,) = json.loads(capsys.readouterr().out)["segments"]
    assert segment["temperature"] == 1.0
    (tmp_path / "bad.wav").write_bytes(b"RIFF    WAVE")
    assert run(["transcribe", arguments[0], str(tmp_path / "bad.wav")]) == 1
    said = capsys.readouterr().err
    assert "bad.wav" in said
    assert "ffmpeg" in said


@pytest.mark.parametrize("pair", ["t5", "marian", "whisper"])
def test_certificates_are_green(engine_of: Any, pair: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Drafted texts are plain decoding's, among others."""
    checks = ["--checks", "batching,greedy,coupled", "--modes", "draft:3,suffix:3,ngram:2", "--max-new-tokens", "8"]
    assert run(["verify", str(engine_of(pair).bundle.folder), *checks, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["passed"]


def test_inspect_says_which_encoder(reader: Engine, listener: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(reader.bundle.folder)]) == 0
    said = capsys.readouterr().out
    assert "the main model's" in said
    assert "512 tokens" in said
    assert run(["inspect", str(listener.bundle.folder)]) == 0
    assert "16,000 Hz" in " ".join(capsys.readouterr().out.split())


def test_what_cannot_be_exported_is_said(checkpoint: Any, tied: Path, tmp_path: Path) -> None:
    t5, whisper = checkpoint("t5"), checkpoint("whisper")
    for sources, options, message in (
        ((t5,), {"format": "onnx"}, "'T5ForConditionalGeneration', which is not converted to ONNX"),
        ((t5, tied), {}, "no encoder-decoder model"),
        ((tied, t5), {}, "of the same kind"),
        ((t5, whisper), {}, "another vocabulary"),
        ((t5, t5), {"draft_vocab": 50}, "not for encoder-decoder"),
    ):  # fmt: skip
        with pytest.raises(OutriderError, match=message):
            export_bundle(*sources, output=tmp_path / "out", **options)
    shutil.copytree(whisper, tmp_path / "bare", ignore=shutil.ignore_patterns("preprocessor_config.json"))
    with pytest.raises(ExportError, match=r"preprocessor_config\.json"):
        export_bundle(tmp_path / "bare", output=tmp_path / "out")
    write_whisper(tmp_path / "wide", num_mel_bins=128)
    with pytest.raises(ExportError, match="cannot draft for whisper: it reads other audio features"):
        export_bundle(whisper, tmp_path / "wide", output=tmp_path / "out")


def test_a_bundle_without_its_encoder_is_refused(reader: Engine) -> None:
    manifest = reader.bundle.manifest
    files = tuple(entry for entry in manifest.files if not entry.path.startswith("encoder/"))
    with pytest.raises(BundleError, match="lists no encoder/"):
        check_fit(msgspec.structs.replace(manifest, files=files))
    bare = msgspec.structs.replace(manifest.drafters[0].model, encoder=None)
    drafter = msgspec.structs.replace(manifest.drafters[0], model=bare)
    with pytest.raises(BundleError, match="of the same kind"):
        check_fit(msgspec.structs.replace(manifest, drafters=(drafter,)))
