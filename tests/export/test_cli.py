"""`outrider export` and `outrider inspect`, as they are typed, and the demo's checkpoint."""

import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from outrider.bundle import read_bundle
from outrider.cli import run
from outrider.cli.demo import demo_bundle
from outrider_export import Silent
from outrider_export.bundles import demo_model


@pytest.fixture(scope="module")
def bundle(gguf_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("cli") / "bundle"
    assert run(["export", str(gguf_file), "--weights", "int4", "-o", str(output)]) == 0
    return output


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    """What was printed: nothing on standard output, one line on standard error."""
    printed = capsys.readouterr()
    assert printed.out == ""
    line: str = printed.err.rstrip("\n")
    assert "\n" not in line
    return line


def test_export_speaks_json(gguf_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = ["--weights", "int4", "--draft-weights", "int4"]
    assert run(["export", str(gguf_file), "--draft", str(gguf_file), "-o", str(tmp_path / "b"), *kept, "--json"]) == 0
    printed = capsys.readouterr()
    answer = json.loads(printed.out)
    assert answer["bundle"] == str(tmp_path / "b")
    assert answer["weights"] == {"main": "int4", "draft": "int4"}
    assert answer["bytes"] > 100_000
    assert printed.err == ""


def test_inspect_prints_what_is_inside(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(bundle), "--check"]) == 0
    text = capsys.readouterr().out
    for part in (
        "plain.gguf", "qwen2", "Q8_0", "404 tokens, padded to 448", "token 400 or 402", "tokenizer/tokenizer.json",
    ):  # fmt: skip
        assert part in text
    assert "All 8 files have the sha256 of the manifest." in text


def test_inspect_reads_the_header_of_a_gguf_file(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "outrider_export.bundles.export.export_bundle", lambda *_, **__: pytest.fail("it was converted")
    )
    assert run(["inspect", str(gguf_file)]) == 0
    printed = capsys.readouterr().out
    for text in (
        "nothing was converted", "qwen2, ", "Q8_0 (", "gpt2 qwen2", "chat template", "without PyTorch",
    ):  # fmt: skip
        assert text in printed
    assert run(["inspect", str(gguf_file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["architecture"], found["quantization"], found["chat_template"]) == ("qwen2", "Q8_0", True)
    assert (found["becomes"], found["needs_pytorch_for"], found["ends_with"]) == (
        "int8",
        None,
        ["<|endoftext|>", "<|im_end|>"],
    )
    strange = tmp_path / "strange.gguf"
    strange.write_bytes(gguf_file.read_bytes().replace(b"qwen2.", b"rwkv7.").replace(b"qwen2", b"rwkv7", 1))
    assert run(["inspect", str(tmp_path)]) == 0  # its folder, too
    assert "nothing: " in capsys.readouterr().out
    assert run(["inspect", str(gguf_file), "--check"]) == 2
    assert "--check is for bundles" in one_line(capsys)


def test_inspect_finds_a_changed_byte(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = shutil.copytree(bundle, tmp_path / "b")
    weights = folder / "main" / "openvino_model.bin"
    content = bytearray(weights.read_bytes())
    content[1000] ^= 1
    weights.write_bytes(content)
    assert run(["inspect", str(folder), "--json"]) == 0
    capsys.readouterr()
    assert run(["inspect", str(folder), "--check"]) == 1
    assert "openvino_model.bin is not the file that was exported" in one_line(capsys)


@pytest.mark.parametrize(("arguments", "code", "message"), [
    (["export", "nowhere.gguf"], 1, "There is no nowhere.gguf"),
    (["export", "FILE", "--weights", "int9"], 2, "weights='int9' is not a weight format. Did you mean 'int8'"),
    (["export", "FILE", "--draft", "./nowhere"], 1, "There is no ./nowhere"),
    (["export", "FILE", "--revision", "main"], 2, "is for hub ids"),
    (["export", "FILE", "-o", "FILE/bundle"], 1, "cannot be written"),
    (["export", "FILE", "-o", "FOLDER"], 1, "exists. Choose another name"),
    (["export", "FILE", "-o", "FOLDER", "--overwrite"], 1, "is not a bundle"),
    (["export", "FILE", "bundle"], 2, "The folder to make is an option: outrider export FILE -o bundle"),
    (["export", "FILE", "--wieghts", "int8"], 2, "No such option"),
    (["inspect", "nowhere"], 1, "There is no folder nowhere"),
    (["inspect", "FOLDER"], 1, "is not a bundle"),
])  # fmt: skip
def test_bad_input_takes_one_line(
    gguf_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_bytes(b"mine")
    places = {"FILE": str(gguf_file), "FOLDER": "folder"}
    assert run([re.sub("FILE|FOLDER", lambda found: places[found[0]], word) for word in arguments]) == code
    assert message.replace("FILE", str(gguf_file)) in one_line(capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_without_the_export_half_the_way_out_is_named(
    gguf_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "outrider_export", None)
    assert run(["export", str(gguf_file)]) == 1
    assert '[export]"' in one_line(capsys)


def test_the_demo_takes_no_package_of_the_extra(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider_export.extras.is_installed", lambda package: False)
    monkeypatch.setattr("outrider_export.bundles.demo_model.fetch_demo_model", lambda folder, progress: gguf_file)
    bundle = read_bundle(demo_bundle(tmp_path, quiet=True, drafter=False))
    assert bundle.manifest.main.weights == "int8"
    assert not {"torch", "transformers", "nncf"} & {*bundle.manifest.main.source.recipe}


def test_the_official_file_is_used_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = b"official"
    monkeypatch.setattr(demo_model, "SIZE", len(content))
    monkeypatch.setattr(demo_model, "SHA256", "6896191a14f6c66534bac457f50996b9330cd702cb6dbaae4c08d1d213e93d98")
    path = tmp_path / demo_model.FILE
    path.write_bytes(content)
    assert demo_model.fetch_demo_model(tmp_path, Silent()) == path


@pytest.mark.needs("POSIX")
def test_a_polite_kill_leaves_nothing(make_checkpoint: Any, tmp_path: Path) -> None:
    program = "import sys; from outrider.cli import main; main(sys.argv[1:])"
    arguments = ["export", str(make_checkpoint("plain")), "-o", str(tmp_path / "bundle")]
    running = subprocess.Popen([sys.executable, "-c", program, *arguments], stderr=subprocess.PIPE, text=True)
    while not (parts := list(tmp_path.glob(".bundle.partial-*/bundle/*"))) and running.poll() is None:
        time.sleep(0.02)
    assert parts
    running.terminate()
    _, errors = running.communicate(timeout=300)
    assert running.returncode == 130
    assert errors == "outrider: Cancelled.\n"
    assert list(tmp_path.iterdir()) == []
