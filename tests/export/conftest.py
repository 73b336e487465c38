"""Tiny random models with a real tokenizer, as checkpoint folders and as GGUF files."""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import outrider
import outrider_export
from outrider.bundle import Bundle, read_bundle
from tiny import TEMPLATE, gguf_name_of, train_tokenizer, write_gguf

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


# Without the packages of outrider[export] there is nothing here to run; the header of the report says so.
_MISSING = [name for name in ("torch", "transformers", "optimum", "nncf", "gguf", "tokenizers") if not find_spec(name)]
collect_ignore_glob = ["test_*.py"] if _MISSING else []


def pytest_report_header() -> str:
    return f"tests/export: {'left out, ' + _MISSING[0] + ' is not installed' if _MISSING else 'all packages are there'}"


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is marked
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test of what was converted is slow, whether it says so or not."""
    for item in items:
        if {"convert", "build_genai"} & {*getattr(item, "fixturenames", ())}:
            item.add_marker("slow")


# What was converted, between runs: git ignores it, and deleting it costs time only.
CACHE = Path(__file__).parents[1] / ".cache"


def sha256_of(paths: Iterable[Path], root: Path) -> str:
    """Of names below `root` and contents."""
    found = hashlib.sha256()
    for path in sorted(paths):
        content = path.read_bytes()
        found.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode())
        found.update(content)
    return found.hexdigest()


def sha256_of_source(path: Path) -> str:
    """Of a file or a folder, its own name included."""
    return sha256_of(filter(Path.is_file, path.rglob("*")) if path.is_dir() else [path], path.parent)


def ground() -> str:
    """All that a conversion depends on besides its recipe: our sources, every package, Python, the machine."""
    packages = {Path(module.__file__ or "").parent for module in (outrider, outrider_export)}
    sources = [sha256_of(package.rglob("*.py"), package) for package in sorted(packages)]
    versions = sorted(f"{found.name} {found.version}" for found in distributions())
    here = [platform.python_version(), platform.platform(), platform.machine()]
    return hashlib.sha256(json.dumps([sources, versions, here]).encode()).hexdigest()


@pytest.fixture(scope="session")
def cached(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`cached({"any": "recipe"}, make)`: a copy of the folder that `make(folder)` has filled, in this run or before.

    A folder is found again by all that it depends on (see `ground`) and its recipe, which names inputs by their sha256.
    Tests get a copy, so that what they do to it stays with them; one copy for all: it is to be read only.
    """
    below = CACHE / ground()[:32]
    if CACHE.exists():
        for other in CACHE.iterdir():
            if other != below:
                shutil.rmtree(other, ignore_errors=True)
    copies: dict[str, Path] = {}

    def find(recipe: dict[str, Any], make: Callable[[Path], object]) -> Path:
        key = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:32]
        if key not in copies:
            if not (below / key).exists():
                below.mkdir(parents=True, exist_ok=True)
                making = Path(tempfile.mkdtemp(prefix="part-", dir=below))
                make(making)
                making.rename(below / key)  # whole, or not there
            copies[key] = Path(shutil.copytree(below / key, tmp_path_factory.mktemp("cached") / key[:8]))
        return copies[key]

    return find


class Recorder:
    """A progress that remembers."""

    def __init__(self, phases: Iterable[str] = (), notes: Iterable[str] = (), num_bytes: int = 0) -> None:
        self.phases, self.notes, self.num_bytes = list(phases), list(notes), num_bytes

    def phase(self, name: str, total: int | None = None) -> None:
        self.phases.append(name)
        assert total is None or total > 0

    def advance(self, count: int) -> None:
        self.num_bytes += count

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture(scope="session")
def convert(cached: Any) -> Any:
    """`convert(main, draft, weights="fp32")`: the bundle of `export_bundle`, and its progress, with all that was told.

    Each recipe is converted once; the bundle is to be read only.
    """

    def make(*sources: Path, **options: Any) -> tuple[Bundle, Recorder]:
        def write(folder: Path) -> None:
            told = Recorder()
            outrider_export.export_bundle(*sources, output=folder / "new" / "pair", progress=told, **options)
            (folder / "progress.json").write_text(json.dumps(vars(told)), encoding="utf-8")

        folder = cached({"export": list(map(sha256_of_source, sources)), **options}, write)
        told = json.loads((folder / "progress.json").read_text(encoding="utf-8"))
        return read_bundle(folder / "new" / "pair"), Recorder(**told)

    return make


@pytest.fixture(scope="session")
def build_genai(cached: Any) -> Any:
    """`build_genai(checkpoint, "int8")`: what onnxruntime-genai's own builder makes of it; to be read only."""

    def make(checkpoint: Path, precision: str) -> Path:
        def write(folder: Path) -> None:
            builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(checkpoint)]
            with tempfile.TemporaryDirectory() as scratch:
                options = ["-o", str(folder / name), "-p", precision, "-e", "cpu", "-c", scratch]
                subprocess.run([*builder, *options], check=True, capture_output=True, cwd=scratch)

        name = f"{checkpoint.name}-{precision}"
        recipe = {"genai": sha256_of_source(checkpoint), "name": name}
        folder: Path = cached(recipe, write)
        return folder / name

    return make


@pytest.fixture(scope="session")
def build_tokenizer() -> Any:
    """`train_tokenizer`, for tests that need another tokenizer."""
    return train_tokenizer


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`make_checkpoint("name", vocab_size=448, tie_word_embeddings=True, seed=0, tokenizer=…)`: a folder."""
    root = tmp_path_factory.mktemp("checkpoints")

    def make(name: str, /, *, tokenizer: Any = None, seed: int = 0, dtype: str = "float32", **changes: Any) -> Path:
        import torch
        from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

        folder = root / name
        if folder.exists():
            return folder
        tokenizer = tokenizer or train_tokenizer()
        shape = {
            "vocab_size": 448, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
            "tie_word_embeddings": True, "bos_token_id": 400, "eos_token_id": 402,
        }  # fmt: skip
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(Qwen2Config(**(shape | changes)))
        for parameter in model.parameters():  # large enough for logits that tell formats apart
            torch.nn.init.normal_(parameter, std=0.1)
        model.generation_config.eos_token_id = [402, 400]
        model.to(getattr(torch, dtype)).save_pretrained(folder)
        special = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
        wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE, **special)
        wrapped.save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def make_gguf(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`make_gguf("name", checkpoint, quantisation="Q8_0", pre="qwen2", metadata={…})`: a file.

    `metadata` adds keys, or leaves out those that are None.
    """
    root = tmp_path_factory.mktemp("gguf")

    def make(
        name: str,
        checkpoint: Path,
        /,
        *,
        quantisation: str = "Q8_0",
        pre: str = "qwen2",
        metadata: dict[str, Any] | None = None,
    ) -> Path:
        path = root / f"{name}.gguf"
        if not path.exists():
            write_gguf(path, checkpoint, quantisation, pre, metadata or {})
        return path

    return make


@pytest.fixture(scope="session")
def gguf_name() -> Any:
    """`gguf_name("model.norm.weight")`: its name in a GGUF file; None for what is left out."""
    return gguf_name_of


@pytest.fixture(scope="session")
def tied(make_checkpoint: Any) -> Path:
    """A checkpoint whose output matrix is its embedding."""
    folder: Path = make_checkpoint("tied", vocab_size=448, seed=1)
    return folder


@pytest.fixture(scope="session")
def untied(make_checkpoint: Any) -> Path:
    """The same vocabulary under a wider output matrix, as in Qwen2.5 7B, and in its precision."""
    folder: Path = make_checkpoint(
        "untied", vocab_size=512, seed=2, dtype="bfloat16", tie_word_embeddings=False, hidden_size=128
    )
    return folder
