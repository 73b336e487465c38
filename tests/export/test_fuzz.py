"""What exports read from checkpoints: damaged, it is refused by an error of ours, and nothing worse."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from adapters import write_adapter
from encoder_decoders import write_marian
from fuzzing import damaged, damaged_json, few_or_many, fuzz
from gguf_drafters import write_drafter
from heads import HEAD_SIZE, HEADS, HIDDEN, KINDS, KV_HEADS, VOCAB, write_head
from outrider.bundle.manifest import Geometry
from outrider_export.bundles.drafters import add_drafter
from outrider_export.describe.plan import make_plan
from outrider_export.describe.special_tokens import eos_of
from outrider_export.heads.formats import read_head
from outrider_export.heads.own import find_own
from outrider_export.progress import Silent
from outrider_export.sources.peft_adapter import read_adapter
from outrider_export.sources.source import locate
from qwen_module import write_qwen
from tiny import SHAPE
from tiny_vision import write_vision_checkpoint

pytestmark = few_or_many


def damaged_safetensors(whole: bytes) -> st.SearchStrategy[bytes]:
    """Damaged bytes, and damaged headers whose length is right."""
    (size,) = struct.unpack_from("<Q", whole)
    header, rest = json.loads(whole[8 : 8 + size]), whole[8 + size :]
    return damaged(whole) | damaged_json(header).map(lambda text: struct.pack("<Q", len(text)) + text + rest)


def fuzz_file(path: Path, read: Callable[[], object], num_examples: int) -> None:
    """Damage one file of a folder, which is read as a whole."""
    whole = path.read_bytes()
    if path.suffix == ".safetensors":
        contents = damaged_safetensors(whole)
    else:
        contents = damaged(whole) | damaged_json(json.loads(whole)) if path.suffix == ".json" else damaged(whole)

    def read_content(content: bytes) -> None:
        path.write_bytes(content)
        read()

    try:
        fuzz(read_content, whole, contents, num_examples)
    finally:
        path.write_bytes(whole)


def plan(folder: Path) -> None:
    eos_of(make_plan("main", locate(folder), "openvino", "int8"))


@pytest.fixture(scope="module")
def checkpoint(make_checkpoint: Any) -> Path:
    """One in two files of weights, with an index."""
    from safetensors.numpy import load_file, save_file

    folder: Path = make_checkpoint("fuzzed", seed=3)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for name, its in parts.items():
        save_file({each: weights[each][:2] for each in its}, folder / name)
    index = {"weight_map": {each: name for name, its in parts.items() for each in its}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("name", [
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors.index.json",
    "a.safetensors",
])  # fmt: skip
def test_checkpoint(checkpoint: Path, name: str, num_examples: int) -> None:
    fuzz_file(checkpoint / name, lambda: plan(checkpoint), num_examples)


OTHERS: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "hybrid": (write_qwen, ("config.json", "model.safetensors")),
    "marian": (write_marian, ("config.json", "vocab.json", "source.spm", "model.safetensors")),
    "vision": (write_vision_checkpoint, ("config.json", "preprocessor_config.json", "processor_config.json")),
}


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """With states and a module of its own, of a translator, and of one that reads images."""
    root = tmp_path_factory.mktemp("fuzz")
    for kind, (write, _) in OTHERS.items():
        write(root / kind)
    return {kind: root / kind for kind in OTHERS}


@pytest.mark.fast_cases(5)
@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, (_, names) in OTHERS.items() for name in names])
def test_other_checkpoints(others: dict[str, Path], kind: str, name: str, num_examples: int) -> None:
    def read() -> None:
        plan(others[kind])
        made = make_plan("main", locate(others[kind]), "openvino", "int8")
        if (module := find_own(made, Silent())) is not None:
            module.read(made.geometry)

    fuzz_file(others[kind] / name, read, num_examples)


# Of the main model that `write_head` writes drafters for.
MAIN = Geometry("qwen2", 2, HEADS, KV_HEADS, HEAD_SIZE, HIDDEN, context_length=8192, logits_width=VOCAB)


@pytest.mark.fast_cases(6)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("kind", KINDS)
def test_drafter(tmp_path: Path, kind: str, name: str, num_examples: int) -> None:
    folder = write_head(tmp_path / kind, kind)
    fuzz_file(folder / name, lambda: read_head(folder, MAIN), num_examples)


@pytest.mark.parametrize("kind", ["eagle3", "dflash2", "dspark"])
def test_drafter_in_a_gguf_file(tmp_path: Path, kind: str, num_examples: int) -> None:
    path = write_drafter(tmp_path / "drafter.gguf", kind)
    fuzz_file(path, lambda: read_head(path, MAIN), num_examples)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_adapter(tmp_path: Path, name: str, num_examples: int) -> None:
    folder = write_adapter(tmp_path / "adapter", SHAPE, rank_pattern={"q_proj": 4}, targets=["q_proj", "v_proj"])
    fuzz_file(folder / name, lambda: read_adapter(folder), num_examples)


@pytest.mark.fast_cases(6)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("kind", KINDS)
def test_added_drafter(tiny: Path, tmp_path: Path, kind: str, name: str, num_examples: int) -> None:
    """Its graphs are made, too."""
    folder = write_head(tmp_path / kind, kind)

    def read() -> None:
        shutil.rmtree(tmp_path / "bundle", ignore_errors=True)
        shutil.copytree(tiny, tmp_path / "bundle")
        add_drafter(tmp_path / "bundle", folder, weights="fp32")

    fuzz_file(folder / name, read, num_examples // 10)
