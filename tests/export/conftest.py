"""Tiny random models with a real tokenizer, as checkpoint folders and as GGUF files."""

import hashlib
import importlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

import outrider
import outrider_export
from exports import Recorder
from outrider.bundle import Bundle, read_bundle
from outrider.errors import ExportError
from outrider_export.child import _one_line
from tiny import TEMPLATE, train_tokenizer, write_gguf

# Conversions in this process: a child for each would load Python's libraries, PyTorch among them, some hundred times.

CALLERS = ("bundles.convert_model", "with_torch.fidelity", "text_encoders.export")


class Relay:
    """A progress for the conversion; remembers what the caller's own raised, which would not reach a child."""

    def __init__(self, progress: Any) -> None:
        self._progress = progress
        self.raised: BaseException | None = None

    def __getattr__(self, name: str) -> Callable[..., None]:
        def tell(*message: Any) -> None:
            try:
                getattr(self._progress, name)(*message)
            except BaseException as error:
                self.raised = error
                raise

        return tell


def run_here(work: str, job: dict[str, Any], what: str, progress: Any) -> dict[str, Any]:
    """What `run_child` does, without a child."""
    (module, _, function), relay = work.rpartition("."), Relay(progress)
    call = getattr(importlib.import_module(module), function)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "openvino_telemetry", None)
        try:
            found: dict[str, Any] = json.loads(json.dumps(call(json.loads(json.dumps(job)), relay)))
        except Exception as error:
            if error is relay.raised:
                raise
            raise ExportError(f"{what}: {_one_line(error)}") from error
    return found


def convert_here(patch: pytest.MonkeyPatch) -> None:
    """From now on, conversions run in this process."""
    for caller in CALLERS:
        patch.setattr(f"outrider_export.{caller}.run_child", run_here)


# Conversions are slow: each is made once, and found again while nothing that it depends on has changed.


class Conversions:
    """Folders by recipe, made in this run or in one before.

        made = Conversions(cache, copies, packages=[Path(outrider_export.__file__).parent])
        folder = made.find({"export": sha256_of(checkpoint), "weights": "int8"}, make)    # make(folder) fills it

    A folder is found again by the sha256 of its recipe and of what every recipe depends on: all files of `packages`,
    the versions of all that is installed, Python, and the machine. What was made on other ground is deleted. Callers
    get a copy in `copies`, the same for all, which is to be read only: what a test does to it is gone with the run.
    """

    def __init__(self, cache: Path, copies: Path, packages: Iterable[Path]) -> None:
        self._folder, self._copies = cache / _ground(packages), copies
        for other in cache.iterdir() if cache.exists() else ():
            if other != self._folder:
                shutil.rmtree(other, ignore_errors=True)

    def find(self, recipe: dict[str, Any], make: Callable[[Path], object]) -> Path:
        """A copy of the folder that `make` has filled, whole: one that fails leaves nothing to be found."""
        key = _digest(recipe)
        copy = self._copies / key
        if not copy.exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            with FileLock(self._folder / f"{key}.lock"):  # another process of the same run may be making it
                if not (self._folder / key).exists():
                    made = Path(tempfile.mkdtemp(prefix="part-", dir=self._folder))
                    make(made)
                    made.rename(self._folder / key)
            shutil.copytree(self._folder / key, copy)
        return copy


def sha256_of(path: Path) -> str:
    """Of a file, or of all files of a folder; of their names, too, and of its own."""
    found = hashlib.sha256()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file() and file.parent.name != "__pycache__":  # another process may be writing into it
            content = file.read_bytes()
            found.update(f"{file.relative_to(path.parent).as_posix()} {len(content)}\n".encode())
            found.update(content)
    return found.hexdigest()


def _ground(packages: Iterable[Path]) -> str:
    versions = sorted(f"{found.name} {found.version}" for found in distributions())
    return _digest([list(map(sha256_of, packages)), versions, platform.python_version(), platform.platform()])


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


# PyTorch reads them when it is loaded, here and in child processes. Toys are too small for two threads. Where a test
# asks for two, they are not to hold a processor while they wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

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


@pytest.fixture(scope="module", autouse=True)
def in_this_process(request: pytest.FixtureRequest) -> Iterator[None]:
    """Conversions run in this process, but for tests of modules that are marked `children`."""
    with pytest.MonkeyPatch.context() as patch:
        if not request.node.get_closest_marker("children"):
            convert_here(patch)
        yield


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    """A copy of the tiny bundle, to add to."""
    return shutil.copytree(tiny, tmp_path / "bundle")


@pytest.fixture(scope="module")
def shared(bundle: Bundle) -> Any:
    """The embedding and the output matrix of a module's main model, both float32 [vocabulary, hidden]."""
    import torch

    from heads import matrices_of_main

    return (*map(torch.tensor, matrices_of_main(bundle)),)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """PyTorch has one: toys are too small for two."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def cached(tmp_path_factory: pytest.TempPathFactory) -> Conversions:
    """What was converted, in this run or before: git ignores it, and deleting it costs time only."""
    packages = [Path(module.__file__ or "").parent for module in (outrider, outrider_export)]
    return Conversions(Path(__file__).parents[1] / ".cache", tmp_path_factory.mktemp("cached"), packages)


@pytest.fixture(scope="session")
def convert(cached: Conversions) -> Any:
    """`convert(main, draft, weights="fp32")`: the bundle of `export_bundle`, and its progress, with all that was told.

    Each recipe is converted once; the bundle is to be read only.
    """

    def make(*sources: Path, **options: Any) -> tuple[Bundle, Recorder]:
        def write(folder: Path) -> None:
            told = Recorder()
            outrider_export.export_bundle(*sources, output=folder / "new" / "pair", progress=told, **options)
            (folder / "progress.json").write_text(json.dumps(told.told), encoding="utf-8")

        folder = cached.find({"export": list(map(sha256_of, sources)), **options}, write)
        told = json.loads((folder / "progress.json").read_text(encoding="utf-8"))
        return read_bundle(folder / "new" / "pair"), Recorder(**told)

    return make


@pytest.fixture(scope="session")
def build_genai(cached: Conversions) -> Any:
    """`build_genai(checkpoint, "int8", "name")`: what onnxruntime-genai's own builder makes of it; to be read only."""

    def make(checkpoint: Path, precision: str, name: str = "") -> Path:
        name = name or f"{checkpoint.name}-{precision}"

        def write(folder: Path) -> None:
            builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(checkpoint)]
            with tempfile.TemporaryDirectory() as scratch:
                options = ["-o", str(folder / name), "-p", precision, "-e", "cpu", "-c", scratch]
                subprocess.run([*builder, *options], check=True, capture_output=True, cwd=scratch)

        return cached.find({"genai": sha256_of(checkpoint), "precision": precision, "name": name}, write) / name

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


@pytest.fixture(scope="session")
def gguf_file(make_checkpoint: Any, make_gguf: Any) -> Path:
    """A tiny model in 8 bits."""
    path: Path = make_gguf("plain", make_checkpoint("plain"))
    return path
