"""docs/new-architecture.md, walked: from a configuration that nobody knows to the logits of its model."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from exports import error_of, logits_of_ir
from outrider.cli import run
from outrider.cli.console import out
from outrider.errors import ExportError
from outrider_export.describe.parts import report_of
from outrider_export.direct import archs
from outrider_export.direct.convert import convert
from outrider_export.progress import Silent
from shapes import logits_of, make_model

PAGE = (Path(__file__).parents[2] / "docs" / "new-architecture.md").read_text(encoding="utf-8")
TOKENS = np.random.default_rng(3).integers(0, 400, size=48).tolist()
CONFIG = json.loads(re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)[0])
SHOWN, ENTRY = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def acorn(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """An EXAONE 4 by other names, and its checkpoint."""
    model, folder = make_model("exaone4"), tmp_path_factory.mktemp("acorn")
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    save_file({name.replace("o_proj", "out_proj"): values for name, values in load_file(path).items()}, path)
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return model, folder


def lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


@pytest.mark.parametrize("of_folder", [True, False])
def test_inspect_says_what_the_page_says(
    of_folder: bool, acorn: tuple[Any, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(out, "width", 160)
    monkeypatch.setattr("outrider_export.extras.missing", lambda _: ["torch"])
    assert run(["inspect", str(acorn[1] if of_folder else acorn[1] / "config.json")]) == 0
    assert lines(capsys.readouterr().out) == lines(SHOWN)


def test_the_entry_gives_the_model(
    acorn: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, folder = acorn
    monkeypatch.setitem(archs.ARCHS, "acorn", eval(ENTRY, vars(archs)))  # noqa: S307 - the page's own
    job = {"model": str(folder), "gguf": False, "weights": "fp32", "format": "openvino", "output": str(tmp_path / "ir")}
    convert(job, Silent())
    assert error_of(logits_of_ir(tmp_path / "ir" / "openvino_model.xml", TOKENS), logits_of(model, TOKENS)) < 5e-6
    assert run(["inspect", str(folder / "config.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "It has an entry."


@pytest.mark.parametrize(("change", "missing"), [
    ({"index_topk": 512}, "sparse attention with an indexer"),
    ({"hidden_act": "relu2"}, "activation"),
    ({"layer_types": ["chunked_attention"] * 4}, "layers"),
    ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, "rotation"),
    ({"num_experts": 8, "scoring_func": "sinkhorn"}, "experts"),
    ({"hidden_size": None}, "sizes"),
])  # fmt: skip
def test_what_is_missing_is_named(change: dict[str, Any], missing: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG | change), encoding="utf-8")
    report = report_of(path)
    assert [part.name for part in report.missing] == [missing]
    assert missing in report.verdict


def test_a_key_that_nothing_reads_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG | {"layer_rope_theta": [1e4] * 4, "hash_layers": 2}), encoding="utf-8")
    report = report_of(path)
    assert report.elsewhere["layer_rope_theta"] == "granite_swa"
    assert report.unread == ("hash_layers",)


def test_of_a_model_that_reads_images_the_text_part_is_looked_at(tmp_path: Path) -> None:
    whole = {"architectures": ["OakForConditionalGeneration"], "model_type": "oak", "vision_config": {}}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(whole | {"text_config": CONFIG}), encoding="utf-8")
    report = report_of(path)
    assert (report.architecture, report.like, report.missing) == ("acorn", "llama", [])
    path.write_text(json.dumps(whole | {"text_config": CONFIG | {"model_type": "llama"}}), encoding="utf-8")
    assert report_of(path).verdict.startswith("Its text part has an entry; its images are laid out in a way that")


@pytest.mark.parametrize("content", [None, "{}", "[1]"])
def test_what_is_no_configuration_is_refused(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content, encoding="utf-8")
    with pytest.raises(ExportError, match=r"config\.json"):
        report_of(tmp_path)


def test_options_of_bundles_are_refused(acorn: tuple[Any, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(acorn[1] / "config.json"), "--check"]) == 2
    assert "--check is for models that can be exported" in capsys.readouterr().err
