"""An incomplete or damaged bundle is refused. The error names the wrong part."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import outrider
from outrider.bundle import Bundle, read_bundle
from outrider.cli import run
from outrider.errors import BundleError
from outrider.testing import save_toy_bundle

VISION: dict[str, Any] = {
    "layout": "idefics3", "folder": "vision", "weights": "fp32",
    "tile_size": 16, "tokens_per_tile": 4, "longest_edge": 48, "splits": True,
    "image_token_id": 1, "image_token": "<image>", "around_token": "|", "global_token": "#", "mean": [0, 0, 0],
    "std": [1, 1, 1], "rescale_factor": 1.0, "resample": 1,
}  # fmt: skip


@pytest.fixture
def copy(openvino_bundle: Bundle, tmp_path: Path) -> Path:
    return shutil.copytree(openvino_bundle.folder, tmp_path / "copy")


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "outrider.json"
    manifest = json.loads(path.read_text())
    manifest.pop("checksum", None)  # as of a bundle of an earlier version
    change(manifest)
    path.write_text(json.dumps(manifest))


def test_a_whole_bundle_is_read_and_checked(copy: Path) -> None:
    bundle = read_bundle(copy)
    read: list[int] = []
    bundle.check_hashes(read.append)
    assert sum(read) == sum(entry.size for entry in bundle.manifest.files)


@pytest.mark.parametrize(("change", "message"), [
    (lambda m: m.update(surprise=1), "unknown field `surprise`"),
    (lambda m: m.pop("tokenizer"), "missing required field `tokenizer`"),
    (lambda m: m["main"].update(vocab_size="forty"), r"Expected `int`, got `str`.*main.vocab_size"),
    (lambda m: m["main"]["geometry"].update(num_layers=0), r"num_layers"),
    (lambda m: m["main"]["geometry"].update(layer_states=["rwkv", ""]), "Invalid enum value 'rwkv'.*layer_states"),
    (lambda m: m["main"].update(folder="../main"), r"main.folder"),
    (lambda m: m["files"][0].update(path="../../etc/passwd"), "not inside"),
    (lambda m: m["files"][0].update(size=1), "bytes instead of 1"),
    (lambda m: m["files"][0].update(size=m["files"][0]["size"] + 1), "bytes instead of"),
    (lambda m: m["files"].pop(), r"lists no main/openvino_model"),
    (lambda m: m["main"].update(vocab_size=49), "gives 48 logits for 49 tokens"),
    (lambda m: m["drafters"][0]["model"].update(vocab_sha256="0" * 64), "vocabulary of drafter 'draft' is not"),
    (lambda m: m["drafters"].append(m["drafters"][0]), "names must differ"),
    (lambda m: m["drafters"][0].update(name="draft\n"), r"matching regex .*drafters\[0\]\.name"),
    (lambda m: m["drafters"].extend(m["drafters"][:1] * 64), r"length <= 64 - at .*drafters"),
    (lambda m: m["main"].update(vision=VISION | {"image_token": ""}), r"length >= 1 - at .*vision\.image_token"),
    (lambda m: m["drafters"][0].update(kind="oracle"), "there is no kind 'oracle' of drafters"),
    (lambda m: m["drafters"][0].update(kind="eagle3"), "drafter 'draft' of kind eagle3 has no features"),
    (lambda m: m["drafters"][0].update(mask_token_id=3), "draft_model has a value for mask_token_id"),
    (lambda m: m["tokenizer"].update(eos_token_ids=[40]), "eos_token_id 40 is outside the vocabulary of 40"),
    (lambda m: m["main"].update(format="pickle"), "Invalid enum value 'pickle'"),
    (lambda m: m.update(schema_version=99, surprise=1), "was written for outrider .* Upgrade"),
    (lambda m: m.update(minimum_runtime="99.0"), "was written for outrider 99.0 or later"),
    (lambda m: m["files"][1].update(sha256="0" * 64), "is not the file that was exported.*Restore it, or export"),
])  # fmt: skip
def test_a_tampered_manifest_is_refused(copy: Path, change: Callable[[dict[str, Any]], object], message: str) -> None:
    edit(copy, change)
    with pytest.raises(BundleError, match=message) as error:
        read_bundle(copy)
    assert "\n" not in str(error.value)


def test_missing_things_are_named(copy: Path, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"There is no folder .*nowhere. Make a bundle"):
        read_bundle(tmp_path / "nowhere")
    with pytest.raises(BundleError, match="is not a bundle"):
        read_bundle(copy / "main")
    (copy / "main" / "openvino_model.bin").unlink()
    with pytest.raises(BundleError, match=r"openvino_model.bin is missing"):
        read_bundle(copy)


@pytest.mark.parametrize("folder", [None, 5, b"bundle", "a\0b", "~nouser/bundle"])
def test_what_is_no_folders_name_is_refused(folder: Any) -> None:
    with pytest.raises(BundleError, match="^.* is not a folder's name: .*[.] (Name one that|Take it out)"):
        outrider.load(folder)


def test_a_flipped_bit_of_a_manifest_is_found_or_changes_nothing(copy: Path) -> None:
    path = copy / "outrider.json"
    whole, sound = path.read_bytes(), read_bundle(copy).manifest
    num_found, bits = 0, range(3, 8 * len(whole), 101)
    for bit in bits:
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        try:
            assert read_bundle(copy).manifest == sound, bit
        except BundleError:
            num_found += 1
    assert num_found > 0.6 * len(bits)  # the others are in white space


@pytest.mark.parametrize("command", [["inspect", "--check"], ["verify"]])
def test_a_flipped_bit_of_weights_is_found_by_commands(
    copy: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A load checks the sizes of weights only."""
    path = copy / "main" / "openvino_model.bin"
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 2] ^= 4
    path.write_bytes(whole)
    read_bundle(copy)
    assert run([*command, str(copy)]) == 1
    assert "openvino_model.bin is not the file that was exported" in capsys.readouterr().err


@pytest.mark.parametrize(("content", "message"), [
    (b"\xff\x00 not json", "JSON is malformed"),
    (b'{"created_by": "\xe9"}', "it is not in UTF-8"),
    (b'{"created_by": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "it is nested too deeply"),
    (b'{"schema_version": ' + b"9" * 5000 + b"}", ".*out of range"),
])  # fmt: skip
def test_garbage_is_no_manifest(copy: Path, content: bytes, message: str) -> None:
    (copy / "outrider.json").write_bytes(content)
    with pytest.raises(BundleError, match=rf"outrider\.json cannot be read: {message}.*Export the bundle again"):
        read_bundle(copy)


FILES = [f"openvino_{which}.{kind}" for which in ("tokenizer", "detokenizer") for kind in ("xml", "bin")]


@pytest.fixture
def with_tokenizer(tmp_path: Path) -> Path:
    """A bundle whose tokenizer files exist, with invalid content."""
    (tmp_path / "tokenizer").mkdir()
    for name in FILES:
        (tmp_path / "tokenizer" / name).write_bytes(bytes(1000))
    return save_toy_bundle(tmp_path / "bundle", tokenizer=tmp_path / "tokenizer").folder


@pytest.mark.parametrize("name", [*(f"tokenizer/{name}" for name in FILES), "main/openvino_model.xml"])
def test_other_bytes_in_what_a_parser_takes_as_it_is_are_found(with_tokenizer: Path, name: str) -> None:
    """Without the check, the parsers crash the process."""
    path = with_tokenizer / name
    content = bytearray(path.read_bytes())
    content[500] ^= 1
    path.write_bytes(content)
    with pytest.raises(BundleError, match=rf"{name} is not the file that was exported.*Restore it, or export"):
        read_bundle(with_tokenizer)


@pytest.mark.parametrize("name", FILES)
def test_a_tokenizer_that_is_not_there_is_named_at_once(with_tokenizer: Path, name: str) -> None:
    edit(with_tokenizer, lambda m: m["tokenizer"].update(folder="elsewhere"))
    with pytest.raises(BundleError, match="There is no folder .*elsewhere, where the tokenizer should be. Export"):
        outrider.load(with_tokenizer)
    edit(with_tokenizer, lambda m: m["tokenizer"].update(folder="tokenizer"))
    edit(with_tokenizer, lambda m: m.update(files=[f for f in m["files"] if not f["path"].endswith(f"/{name}")]))
    (with_tokenizer / "tokenizer" / name).unlink()
    with pytest.raises(BundleError, match=f"The tokenizer in .*tokenizer has no {name}. Export"):
        outrider.load(with_tokenizer)
