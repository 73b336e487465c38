"""Tiny random T5 and Whisper models: exported, and compared with Transformers and with plain decoding."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import outrider
from encoder_decoders import SAMPLED, cut_decoder, shake_decoder, tone, write_t5, write_wav, write_whisper
from outrider.cli import run
from outrider.engine.engine import Engine
from outrider.errors import BundleError, ExportError, OptionError, OutriderError
from outrider.inputs.audio import log_mel
from outrider.types import EncoderSource, Prompt

TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "It's 2024, isn't it? We'll see: 3.14 and 2,718. def quicksort(items):",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
)


@pytest.fixture(scope="session")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("checkpoints") / "t5"
    write_t5(folder)
    return folder


@pytest.fixture(scope="session")
def t5_draft(t5: Path) -> Path:
    """The same encoder, and a decoder that is a little different."""
    write_t5(folder := t5.with_name("t5-draft"), change=shake_decoder)
    return folder


@pytest.fixture(scope="session")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("checkpoints") / "whisper"
    write_whisper(folder)
    return folder


@pytest.fixture(scope="module")
def reader(convert: Any, t5: Path, t5_draft: Path) -> Iterator[Engine]:
    """A T5 with a draft model that has its encoder."""
    bundle, _ = convert(t5, t5_draft, weights="fp32", draft_weights="fp32")
    with outrider.load(bundle.folder) as engine:
        yield engine


@pytest.fixture(scope="module")
def listener(convert: Any, whisper: Path) -> Iterator[Engine]:
    """A Whisper."""
    bundle, _ = convert(whisper, weights="fp32")
    with outrider.load(bundle.folder) as engine:
        yield engine


def drafters_of(engine: Engine) -> list[dict[str, Any]]:
    return [{"drafter": name, "num_assistant_tokens": n} for name in engine.drafters for n in (1, 3, 8)] + [{}]


def test_t5_greedy_is_transformers(reader: Engine, t5: Path) -> None:
    import torch
    from transformers import T5ForConditionalGeneration

    model = T5ForConditionalGeneration.from_pretrained(t5).eval()
    different = set()
    for text in TEXTS:
        source = reader.tokenizer.encode_prompt(text)
        expected = model.generate(torch.tensor([source]), max_new_tokens=40, do_sample=False)[0].tolist()[1:]
        found = reader.generate(text, max_new_tokens=40, drafter=None).token_ids
        assert found == expected
        different.add(tuple(found))
    assert len(different) == len(TEXTS)


@pytest.mark.parametrize("options", [{}, SAMPLED, SAMPLED | {"repetition_penalty": 1.3}], ids=str)
def test_t5_drafted_is_plain(reader: Engine, options: dict[str, Any]) -> None:
    assert reader.main.capabilities.bit_exact_batching
    accepted = dict.fromkeys(reader.drafters, 0)
    for text in TEXTS:
        plain = reader.generate(text, max_new_tokens=80, drafter=None, **options)
        for drafter in drafters_of(reader):
            found = reader.generate(text, max_new_tokens=80, **options, **drafter)
            assert found.token_ids == plain.token_ids
            assert found.exact
            if drafter:
                accepted[drafter["drafter"]] += found.stats.num_accepted_tokens
    # Random text repeats little: above temperature 0 there may be nothing to copy.
    assert all(count for name, count in accepted.items() if name != "ngram" or not options)


def test_one_encoder_is_stored_and_run_once(reader: Engine, convert: Any, t5: Path, t5_draft: Path) -> None:
    bundle, told = convert(t5, t5_draft, weights="fp32", draft_weights="fp32")
    assert any("stored and run once" in note for note in told.notes)
    assert not (bundle.folder / "draft-encoder").exists()
    main, draft = (reader.loaded[role].backend.encoder for role in ("main", "draft"))  # type: ignore[attr-defined]
    before = main.num_runs
    reader.generate(TEXTS[0], max_new_tokens=8, drafter="draft")
    assert (main.num_runs - before, draft.num_runs) == (1, 0)


def test_another_encoder_is_run_beside_the_main_models(convert: Any, t5: Path) -> None:
    """In int8, where the backend says what was measured."""
    write_t5(other := t5.with_name("t5-other"), seed=5, change=cut_decoder)
    bundle, told = convert(t5, other, weights="int8", draft_weights="int8")
    assert any("an encoder of its own" in note for note in told.notes)
    assert (bundle.folder / "draft-encoder" / "openvino_model.xml").is_file()
    with outrider.load(bundle.folder) as engine:
        main = engine.loaded["main"].backend
        assert main.exactness.differences
        assert main.exactness.holds == main.capabilities.bit_exact_batching
        plain = engine.generate(TEXTS[0], max_new_tokens=30, drafter=None)
        drafted = engine.generate(TEXTS[0], max_new_tokens=30, drafter="draft")
        assert drafted.token_ids == plain.token_ids or not plain.exact
        assert engine.loaded["draft"].backend.encoder.num_runs == 1  # type: ignore[attr-defined]


def test_copies_come_from_the_source(reader: Engine) -> None:
    """A request's source is among its references, and prompt lookup reads it before the decoder's tokens."""
    request = reader.prepare(TEXTS[0], drafter="suffix", max_new_tokens=4)
    source = reader.tokenizer.encode_prompt(TEXTS[0])
    assert request.sequence.context == [*source, *request.sequence.token_ids]
    (reference,) = request.sequence.references
    match = reference.find(source[:3])
    assert reference.followers(match).token_id == source[3]


@pytest.mark.parametrize(("prompt", "options", "message"), [
    ([{"role": "user", "content": "hello"}], {}, "no chat"),
    (np.zeros(16_000, dtype=np.float32), {}, "reads text"),
    (Prompt([0]), {}, "has a source"),
    (Prompt([0], source=EncoderSource.of_audio(np.zeros((80, 3000), dtype=np.float32))), {}, "reads text"),
    ("", {}, "empty"),
    ("hello", {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}, "chat template"),
], ids=["messages", "audio", "no source", "features", "empty", "tools"])  # fmt: skip
def test_t5_refuses(reader: Engine, prompt: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OutriderError, match=message) as error:
        reader.generate(prompt, **options)
    assert "\n" not in str(error.value)


def test_t5_has_no_chat_and_hears_nothing(reader: Engine) -> None:
    with pytest.raises(OptionError, match="template"):
        reader.chat()
    with pytest.raises(OptionError, match="reads text, not audio"):
        reader.transcribe(tone(1))


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
def test_whisper_greedy_is_transformers(listener: Engine, whisper: Path, without_timestamps: bool) -> None:
    """Token by token, as Transformers' own loop begins again after a timestamp, which a random model says anyway."""
    import torch
    from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration
    from transformers.generation.logits_process import (
        SuppressTokensAtBeginLogitsProcessor,
        SuppressTokensLogitsProcessor,
        WhisperTimeStampLogitsProcessor,
    )

    model = WhisperForConditionalGeneration.from_pretrained(whisper).eval()
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
    features = WhisperFeatureExtractor.from_pretrained(whisper)(samples, sampling_rate=16_000, return_tensors="pt")
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


@pytest.mark.parametrize(("audio", "options", "message"), [
    (None, {}, "Give float32 samples"),
    (np.zeros(0, dtype=np.float32), {}, "empty"),
    (np.full(100, np.nan, dtype=np.float32), {}, "Sample 0 of the audio is nan"),
    (np.zeros((2, 100), dtype=np.float32), {}, "one channel"),
    (np.zeros(100, dtype=np.int16), {}, "Divide 16-bit samples"),
    (np.zeros(100, dtype=np.float32), {"sampling_rate": 80}, "80 samples a second"),
    (np.zeros(100, dtype=np.float32), {"language": "xx"}, "language='xx' is not known"),
    (np.zeros(100, dtype=np.float32), {"task": "sing"}, "task='sing' is not known"),
    ("missing.wav", {}, "missing.wav"),
], ids=["none", "no samples", "nan", "stereo", "integers", "rate", "language", "task", "no file"])  # fmt: skip
def test_whisper_refuses(listener: Engine, audio: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OutriderError, match=message) as error:
        listener.transcribe(audio, **options)
    assert "\n" not in str(error.value)


def test_whisper_reads_no_text(listener: Engine) -> None:
    with pytest.raises(OptionError, match="Use engine.transcribe"):
        listener.generate("hello")


def test_certificates_are_green(reader: Engine, listener: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    checks = ["--checks", "batching,greedy,coupled", "--modes", "suffix:3,ngram:2", "--max-new-tokens", "8"]
    for engine in (reader, listener):
        assert run(["verify", str(engine.bundle.folder), *checks, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["passed"]


def test_inspect_says_which_encoder(reader: Engine, listener: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(reader.bundle.folder)]) == 0
    said = capsys.readouterr().out
    assert "the main model's" in said
    assert "512 tokens" in said
    assert run(["inspect", str(listener.bundle.folder)]) == 0
    assert "16,000 Hz" in " ".join(capsys.readouterr().out.split())


def test_what_cannot_be_exported_is_said(t5: Path, whisper: Path, tied: Path, tmp_path: Path) -> None:
    from outrider_export import export_bundle

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


def test_a_bundle_without_its_encoder_is_refused(reader: Engine) -> None:
    from outrider.bundle.fit import check_fit

    manifest = reader.bundle.manifest
    files = tuple(entry for entry in manifest.files if not entry.path.startswith("encoder/"))
    with pytest.raises(BundleError, match="lists no encoder/"):
        check_fit(msgspec.structs.replace(manifest, files=files))
    bare = msgspec.structs.replace(manifest.drafters[0].model, encoder=None)
    drafter = msgspec.structs.replace(manifest.drafters[0], model=bare)
    with pytest.raises(BundleError, match="of the same kind"):
        check_fit(msgspec.structs.replace(manifest, drafters=(drafter,)))
