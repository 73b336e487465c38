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


SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
USER_DEFINED = ("<tool_call>",)
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NUM_TOKENS = 404  # 400 trained pieces, the bytes among them, and the four above
TEXT = (
    "def quicksort(items):\n    if len(items) <= 1:\n        return items\n    pivot, *rest = items\n",
    "The quick brown fox jumps over the lazy dog. It's 2024, isn't it? We'll see: 3.14 and 2,718.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. 日本語 中文 한국어 🙂",
) * 8


def train_tokenizer(pre: str = "qwen2", special: Iterable[str] = SPECIAL, text: Iterable[str] = TEXT) -> Any:
    """A byte-level BPE tokenizer as the real ones are made, written here by hand: `pre` is "qwen2" or "smollm"."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
        words = (
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
            r"|\s+(?!\S)|\s+"
        )
        first: Any = pre_tokenizers.Split(Regex(words), behavior="isolated")
        second = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    else:
        first = pre_tokenizers.Digits(individual_digits=True)
        second = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([first, second])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(text, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in USER_DEFINED])
    return tokenizer


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


FILE_TYPES = {"F32": "ALL_F32", "Q4_K": "MOSTLY_Q4_K_M"}


def random_q4_k(array: Any) -> Any:
    """Q4_K blocks for a matrix of this shape, uint8 [rows, bytes]: the gguf package reads them and makes none."""
    import gguf
    import numpy as np

    rng = np.random.default_rng(array.view(np.uint32).reshape(-1)[:4])  # another for each matrix
    scales = rng.integers(32, 64, (*array.shape[:-1], array.shape[-1] // 256, 8))
    minima = np.minimum(scales + rng.integers(-3, 4, scales.shape), 63)
    blocks = rng.integers(0, 256, (*scales.shape[:-1], 144)).astype(np.uint8)
    blocks[..., :4] = np.array([0.0004, 0.003], dtype=np.float16).view(np.uint8)
    low, high = slice(0, 4), slice(4, 8)
    blocks[..., 4:8] = scales[..., low] | scales[..., high] >> 4 << 6
    blocks[..., 8:12] = minima[..., low] | minima[..., high] >> 4 << 6
    blocks[..., 12:16] = scales[..., high] & 15 | (minima[..., high] & 15) << 4
    found = gguf.dequantize(blocks.reshape(len(array), -1), gguf.GGMLQuantizationType.Q4_K)
    assert found.shape == array.shape
    assert 0.05 < found.std() < 0.2
    return blocks.reshape(len(array), -1)


@pytest.fixture(scope="session")
def gguf_name() -> Any:
    """`gguf_name("model.norm.weight")`: its name in a GGUF file; None for what is left out."""
    return _gguf_name


def write_gguf(path: Path, checkpoint: Path, quantisation: str, pre: str, metadata: dict[str, Any]) -> None:
    """Write a Qwen2 checkpoint as GGUF, the way its converter does: padded vocabulary, named pre-tokenizer."""
    import gguf
    from safetensors.numpy import load_file

    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(path, "qwen2")
    tokens = {token_id: (token, 1) for token, token_id in tokenizer["model"]["vocab"].items()}
    for token in tokenizer["added_tokens"]:
        tokens[token["id"]] = (token["content"], 3 if token["special"] else 4)
    rows = [tokens.get(i, (f"[PAD{i}]", 5)) for i in range(config["vocab_size"])]
    values: dict[str, Any] = {
        "general.file_type": int(gguf.LlamaFileType[FILE_TYPES.get(quantisation, f"MOSTLY_{quantisation}")]),
        "qwen2.block_count": config["num_hidden_layers"],
        "qwen2.context_length": config["max_position_embeddings"],
        "qwen2.embedding_length": config["hidden_size"],
        "qwen2.feed_forward_length": config["intermediate_size"],
        "qwen2.attention.head_count": config["num_attention_heads"],
        "qwen2.attention.head_count_kv": config["num_key_value_heads"],
        "qwen2.rope.freq_base": 10000.0,
        "qwen2.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [token for token, _ in rows],
        "tokenizer.ggml.token_type": [kind for _, kind in rows],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in tokenizer["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": 402,
        "tokenizer.ggml.padding_token_id": 400,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }
    for key, value in (values | metadata).items():
        _add(writer, key, value)
    for weight, array in load_file(checkpoint / "model.safetensors").items():
        if (name := _gguf_name(weight)) is None:
            continue
        if array.ndim == 1:
            writer.add_tensor(name, array.astype("float32"))
        else:
            kind = gguf.GGMLQuantizationType[quantisation]
            packed = random_q4_k(array) if quantisation == "Q4_K" else gguf.quantize(array.astype("float32"), kind)
            writer.add_tensor(name, packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: Any, key: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _gguf_name(weight: str) -> str | None:
    names = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if weight in names:
        return names[weight]
    _, _, layer, rest = weight.split(".", 3)
    parts = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    part, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{parts[part]}.{kind}"


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
