"""`outrider verify --against`: logits beside those of the checkpoint."""

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.bundle import Bundle
from outrider.cli import run
from outrider_export.with_torch.compare import PIECE
from shapes import make_model, save_model

F32 = ("--precision", "f32", "--max-new-tokens", "8", "--cache-size", "0.02")


@pytest.fixture(scope="module")
def checkpoints(make_checkpoint: Any) -> tuple[Path, Path]:
    return make_checkpoint("tied", vocab_size=448, seed=1), make_checkpoint("other", vocab_size=448, seed=9)


@pytest.fixture(scope="module")
def pair(checkpoints: tuple[Path, Path], convert: Any) -> Bundle:
    """A main model that is the checkpoint, and a draft model in 4 bits."""
    made: Bundle = convert(*checkpoints, weights="fp32", draft_weights="int4")[0]
    return made


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    texts = ["Sort 3, 1 and 2.", "The quick brown fox jumps over the lazy dog. " * 12]
    path.write_text("\n".join(json.dumps({"prompt": text}) for text in texts), encoding="utf-8")
    return path


def verify(capsys: pytest.CaptureFixture[str], bundle: Bundle, *arguments: object) -> tuple[int, list[dict[str, Any]]]:
    """The exit code and the checks."""
    code = run(["verify", str(bundle.folder), "--json", *F32, *map(str, arguments)])
    return code, json.loads(capsys.readouterr().out)["checks"]


def test_an_exact_model_is_told_from_a_compressed_one(
    pair: Bundle, checkpoints: tuple[Path, Path], prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main, draft = checkpoints
    both = ("--checks", "fidelity", "--prompts", prompts, "--against", main, "--draft-against", draft)
    code, (exact, compressed) = verify(capsys, pair, *both)
    assert code == 0
    assert (exact["passed"], compressed["passed"]) == (None, None)
    assert exact["figures"]["num_rows"] == compressed["figures"]["num_rows"] > 2 * PIECE
    assert exact["figures"]["minimum"] > 0.999999
    assert exact["figures"]["top1_agreement"] == 1
    assert exact["figures"]["setting"].startswith("CPU f32")
    assert exact["figures"]["checkpoint"] == "tied"
    assert 0.9 < compressed["figures"]["median"] < 0.9999
    code, (exact, compressed) = verify(capsys, pair, *both, "--min-cosine", 0.9999)
    assert code == 1
    assert (exact["passed"], compressed["passed"]) == (True, False)


def test_states_are_compared_beyond_a_piece(
    convert: Any, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Transformers reads such a text at once: it forgets the states between pieces."""
    checkpoint = save_model(make_model("lfm2"), tmp_path / "lfm2")
    bundle, _ = convert(checkpoint, weights="fp32")
    _, (found,) = verify(capsys, bundle, "--checks", "fidelity", "--prompts", prompts, "--against", checkpoint)
    assert found["figures"]["num_rows"] > 2 * PIECE
    assert found["figures"]["minimum"] > 0.99999


def test_a_gguf_file_and_a_cut_output_matrix(
    checkpoints: tuple[Path, Path],
    make_gguf: Any,
    convert: Any,
    prompts: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    main, draft = checkpoints
    path = make_gguf("fidelity", main, quantisation="Q4_1")
    weights: dict[str, Any] = {"weights": "int4", "draft_weights": "fp32"}
    bundle, _ = convert(path, draft, draft_vocab=200, **weights)
    assert bundle.manifest.drafters[0].num_proposed_tokens == 200
    both = ("--checks", "fidelity", "--prompts", prompts, "--against", path, "--draft-against", draft)
    code, (kept, cut) = verify(capsys, bundle, *both)
    assert code == 0
    assert kept["figures"]["median"] > 0.999
    assert cut["figures"]["minimum"] > 0.999999


@pytest.mark.parametrize(("arguments", "code", "message"), [
    (["--checks", "fidelity"], 2, "The check 'fidelity' needs the checkpoint to compare with: add --against"),
    (["--checks", "batching", "--against", "x"], 2, "--checks leaves it out. Add it there."),
    (["--min-cosine", "0.9"], 2, "are for the check 'fidelity': add --against."),
    (["--checks", "fidelity", "--against", "./nowhere"], 1, "There is no ./nowhere. Name a .gguf file"),
])  # fmt: skip
def test_what_cannot_be_compared_is_said(
    pair: Bundle, arguments: list[str], code: int, message: str, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["verify", str(pair.folder), *F32, "--prompts", str(prompts), *arguments]) == code
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--against", "--draft-against"])
def test_a_checkpoint_that_is_not_there_is_said_before_models_are_loaded(
    pair: Bundle, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("outrider.engine.engine.load", lambda *_, **__: pytest.fail("models are loaded"))
    for place, message in (
        (tmp_path / "nowhere", "nowhere. Name a .gguf file, a checkpoint folder or a hub id"),
        (tmp_path, "is not a checkpoint: it has no config.json"),
    ):
        assert run(["verify", str(pair.folder), option, str(place)]) == 1
        assert message in capsys.readouterr().err


def test_models_that_cannot_be_compared_are_named(
    checkpoints: tuple[Path, Path],
    make_checkpoint: Any,
    convert: Any,
    prompts: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bundle, _ = convert(checkpoints[0], weights="fp32")
    options = ["--checks", "fidelity", *F32, "--prompts", str(prompts)]
    assert run(["verify", str(bundle.folder), *options, "--draft-against", str(checkpoints[1])]) == 2
    assert "has no model 'draft'" in capsys.readouterr().err
    narrow = make_checkpoint("narrower", vocab_size=403)
    assert run(["verify", str(bundle.folder), *options, "--against", str(narrow)]) == 1
    said = capsys.readouterr().err
    assert "cannot be compared with narrower: It gives 403 logits and the bundle's model has 404" in said
