"""A bundle that is not whole is refused, and the part that is wrong is named."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest

import outrider
from outrider.bundle import read_bundle
from outrider.errors import BundleError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from outrider.bundle import Bundle


@pytest.fixture
def copy(openvino_bundle: Bundle, tmp_path: Path) -> Path:
    return shutil.copytree(openvino_bundle.folder, tmp_path / "copy")


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "outrider.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def test_a_whole_bundle_is_read_and_checked(copy: Path) -> None:
    bundle = read_bundle(copy)
    read: list[int] = []
    bundle.check_hashes(read.append)
    assert sum(read) == sum(entry.size for entry in bundle.manifest.files)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(surprise=1), "unknown field `surprise`"),
        (lambda m: m.pop("tokenizer"), "missing required field `tokenizer`"),
        (lambda m: m["main"].update(vocab_size="forty"), r"Expected `int`, got `str`.*main.vocab_size"),
        (lambda m: m["main"]["geometry"].update(num_layers=0), r"num_layers"),
        (lambda m: m["main"].update(folder="../main"), r"main.folder"),
        (lambda m: m["files"][0].update(path="../../etc/passwd"), "not inside"),
        (lambda m: m["files"][0].update(path="/etc/passwd"), "not inside"),
        (lambda m: m["files"][0].update(path="C:/boot.ini"), "not inside"),
        (lambda m: m["files"][0].update(size=1), "bytes instead of 1"),
        (lambda m: m["files"].pop(), r"lists no main/openvino_model"),
        (lambda m: m["main"].update(vocab_size=49), "gives 48 logits for 49 tokens"),
        (lambda m: m["drafters"][0]["model"].update(vocab_sha256="0" * 64), "vocabulary of drafter 'draft' is not"),
        (lambda m: m["drafters"].append(m["drafters"][0]), "names must differ"),
        (lambda m: m["drafters"][0].update(name="ngram"), "names must differ"),
        (lambda m: m["drafters"][0].update(kind="medusa"), "Invalid enum value 'medusa'"),
        (lambda m: m.update(minimum_runtime="2026.x"), "minimum_runtime"),
        (lambda m: m["tokenizer"].update(eos_token_ids=[40]), "eos_token_id 40 is outside the vocabulary of 40"),
        (lambda m: m["main"].update(format="pickle"), "Invalid enum value 'pickle'"),
        (lambda m: m.update(schema_version=99, surprise=1), "was written for outrider .* Upgrade"),
        (lambda m: m.update(minimum_runtime="99.0"), "was written for outrider 99.0 or later"),
    ],
)
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


def test_truncated_weights_are_found_without_reading_them(copy: Path) -> None:
    path = copy / "draft" / "openvino_model.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(BundleError, match=r"openvino_model.bin has [\d,]+ bytes instead of"):
        read_bundle(copy)


def test_a_flipped_bit_is_found_by_the_hashes(copy: Path) -> None:
    path = copy / "main" / "openvino_model.bin"
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    bundle = read_bundle(copy)
    with pytest.raises(BundleError, match=r"main.openvino_model.bin is not the file that was exported"):
        bundle.check_hashes()


def test_garbage_is_no_manifest(copy: Path) -> None:
    (copy / "outrider.json").write_bytes(b"\xff\x00 not json")
    with pytest.raises(BundleError, match="cannot be read"):
        read_bundle(copy)
