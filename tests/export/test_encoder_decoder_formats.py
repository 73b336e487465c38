"""Whisper, T5 and MarianMT in every format of weights, from folders with the files that the hub's have."""

import shutil
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import pytest

import outrider
from encoder_decoders import tone, write_marian, write_t5, write_whisper
from outrider.bundle.manifest import CROSS_NAME
from outrider.engine.engine import Engine
from outrider.errors import ExportError
from outrider.inputs.audio import log_mel
from outrider.types import EncoderSource, Prompt
from outrider_export.describe.encoder_decoder import describe_encoder, vocabulary_of
from outrider_export.encoder_decoder import convert as conversion
from outrider_export.sources.source import read_config
from outrider_export.with_torch import convert as torch_convert
from published import edit

KINDS: dict[str, Callable[[Path], None]] = {"whisper": write_whisper, "t5": write_t5, "marian": write_marian}
# How far a token's log-probability may be from float32's, in the mean. These models are random and tiny: the figures
# say that it is the same model.
FORMATS = {"fp16": 0.2, "int8": 4.0, "int4": 12.0}
TYPES = {"fp16": "f16", "int8": "u8", "int4": "u4", "fp32": "f32"}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root: Path = tmp_path_factory.mktemp("published")
    for kind, write in KINDS.items():
        write(root / kind)
    return {kind: root / kind for kind in KINDS}


@pytest.fixture(scope="module", autouse=True)
def traced_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A model is traced for the first format, and the same graphs are taken for the others. Tracing takes longest."""
    root, load, trace = tmp_path_factory.mktemp("traced"), conversion._load_model, torch_convert.export_ir

    def export_ir(model: Any, folder: Path, task: str) -> None:
        traced = root / model.config.model_type
        if not traced.exists():
            trace(model, traced, task)
        shutil.copytree(traced, folder)

    models: dict[str, Any] = {}

    def load_model(job: dict[str, Any]) -> Any:
        return models.setdefault(job["kind"], models.get(job["kind"]) or load(job))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conversion, "export_ir", export_ir)
        patch.setattr(conversion, "_load_model", load_model)
        yield


def answer(engine: Engine, **options: Any) -> tuple[Prompt | str, list[int]]:
    """A prompt, and what the model says."""
    encoder = engine.bundle.manifest.main.encoder
    assert encoder is not None
    if encoder.audio is None:
        prompt: Prompt | str = "The quick brown fox jumps over the lazy dog. It's 2024, isn't it?"
    else:
        begin = [*encoder.begin_token_ids, encoder.audio.languages["de"], encoder.audio.tasks["transcribe"]]
        features = log_mel(tone(5), padding=480_000)[:, :3000]
        prompt = Prompt(begin, source=EncoderSource.of_audio(features))
    return prompt, engine.generate(prompt, max_new_tokens=30, **options).token_ids


def types_of(path: Path) -> set[str]:
    """Those of a graph's matrices."""
    import openvino as ov

    nodes = [node for node in ov.Core().read_model(path).get_ops() if node.get_type_name() == "Constant"]
    return {node.get_element_type().get_type_name() for node in nodes if prod(node.get_output_shape(0)) >= 4096}


@pytest.mark.parametrize("kind", KINDS)
def test_every_format(convert: Any, checkpoints: dict[str, Path], kind: str) -> None:
    """In this order: half precision is traced first, as a model that is loaded in it cannot be."""
    bundles = {weights: convert(checkpoints[kind], weights=weights)[0] for weights in (*FORMATS, "fp32")}
    with outrider.load(bundles["fp32"].folder) as engine:
        prompt, expected = answer(engine, drafter=None)
        assert len(set(expected)) > 4
        exact = engine.score(prompt, expected)
    far: list[float] = []
    for weights, most in FORMATS.items():
        folder = bundles[weights].folder
        for path in (folder / "main" / "openvino_model.xml", folder / "encoder" / "openvino_model.xml"):
            assert TYPES[weights] in types_of(path)
        assert TYPES[weights] in types_of(folder / "main" / CROSS_NAME)
        with outrider.load(folder) as engine:
            _, plain = answer(engine, drafter=None)
            _, drafted = answer(engine, drafter="suffix", num_assistant_tokens=3)
            assert drafted == plain or not engine.main.capabilities.bit_exact_batching
            found = engine.score(prompt, expected)
        far.append(sum(abs(a - b) for a, b in zip(found, exact, strict=True)) / len(exact))
        assert far[-1] < most
    assert far == sorted(far)


def described(folder: Path) -> Any:
    config = read_config(folder)
    return describe_encoder(folder, config, vocabulary_of(folder, config))


@pytest.fixture
def whisper(checkpoints: dict[str, Path], tmp_path: Path) -> Path:
    return shutil.copytree(checkpoints["whisper"], tmp_path / "whisper")


def test_what_a_published_whisper_says_of_itself(whisper: Path) -> None:
    """Its forced_decoder_ids, in the form of config.json or with null, say nothing that is not asked for."""
    vocabulary = vocabulary_of(whisper, read_config(whisper))
    entry = described(whisper)
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    assert entry.begin_token_ids == (ids["<|startoftranscript|>"],)
    assert entry.audio.languages == {"en": ids["<|en|>"], "de": ids["<|de|>"], "ja": ids["<|ja|>"]}
    assert entry.audio.tasks == {"transcribe": ids["<|transcribe|>"], "translate": ids["<|translate|>"]}
    assert entry.audio.no_speech_token_id == ids["<|nocaptions|>"]
    assert entry.audio.previous_token_id == ids["<|startofprev|>"]
    assert entry.audio.first_timestamp_token_id == ids["<|0.00|>"]
    assert ids["<|nocaptions|>"] in entry.suppress_token_ids
    assert 220 in entry.begin_suppress_token_ids
    edit(whisper / "generation_config.json", forced_decoder_ids=None, prev_sot_token_id=..., lang_to_id=...)
    edit(whisper / "generation_config.json", is_multilingual=False, task_to_id=...)
    entry = described(whisper)  # as of the English models
    assert (entry.audio.languages, entry.audio.tasks) == ({}, {})
    assert entry.audio.previous_token_id == ids["<|startofprev|>"]


def test_a_whisper_without_its_generation_config_is_refused(whisper: Path) -> None:
    edit(whisper / "generation_config.json", lang_to_id=..., is_multilingual=...)
    with pytest.raises(ExportError, match="no lang_to_id.*Copy the file"):
        described(whisper)
    (whisper / "generation_config.json").unlink()
    with pytest.raises(ExportError, match=r"no generation_config\.json.*Copy the file") as error:
        described(whisper)
    assert "\n" not in str(error.value)


def test_a_missing_generation_config_is_said(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    from exports import Recorder
    from outrider_export.describe.plan import make_plan
    from outrider_export.encoder_decoder.job import place_encoder
    from outrider_export.sources.source import locate

    for kind in ("t5", "marian"):
        folder = shutil.copytree(checkpoints[kind], tmp_path / kind)
        for expected in (0, 1):
            told = Recorder()
            plan = make_plan("main", locate(folder), "openvino", "int8")
            place_encoder(plan, plan, told)
            assert ["no generation_config.json" in note for note in told.notes] == [True] * expected
            (folder / "generation_config.json").unlink(missing_ok=True)
