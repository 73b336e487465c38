"""Measures what a model of each family takes: on disk, in memory, and until its first token from empty caches.

    python bench/scripts/family_sizes.py FOLDER TOKENIZER [MODEL …]

The models have random weights in the shapes of published ones, and the tokenizer of a checkpoint's folder: what they
say means nothing, and their memory and speed are those of the real ones. Each is written to FOLDER as a checkpoint in
bf16, exported in int8 and in int4, measured, and deleted. A first start is a process that loads the checkpoint, with
empty caches: it chooses the form of the weights, converts, compiles and measures the model. A second start finds all of
that. Both end with the first token of an answer. Memory is resident after 64 tokens, in a second start. For an idle
machine, so it is run by hand; `--sizes` leaves out the starts and deletes nothing, `--starts` measures them alone.
Needs PyTorch and Transformers, which know the names of the tensors. The largest take 30 GB of disk and 9 GB of memory.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_QWEN3: dict[str, Any] = {"head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151_936}
_LFM2: dict[str, Any] = {
    "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8, "conv_L_cache": 3, "vocab_size": 65_536,
    "tie_word_embeddings": True,
}  # fmt: skip
_GEMMA4: dict[str, Any] = {
    "num_attention_heads": 8, "head_dim": 256, "global_head_dim": 512, "hidden_size_per_layer_input": 256,
    "vocab_size": 262_144, "vocab_size_per_layer_input": 262_144, "sliding_window": 512, "tie_word_embeddings": True,
}  # fmt: skip
_SLIDE, _FULL = "sliding_attention", "full_attention"


def _conv(count: int, *full: int) -> list[str]:
    return [_FULL if i in full else "conv" for i in range(count)]


# By name: model_type, and what its config.json says.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3 0.6B": (
        "qwen3",
        _QWEN3
        | {
            "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
            "tie_word_embeddings": True,
        },
    ),
    "Granite 3.1 1B-A400M": (
        "granitemoe",
        {
            "hidden_size": 1024, "intermediate_size": 512, "num_hidden_layers": 24, "num_attention_heads": 16,
            "num_key_value_heads": 8, "num_local_experts": 32, "num_experts_per_tok": 8, "vocab_size": 49_155,
            "tie_word_embeddings": True, "attention_multiplier": 0.015625, "embedding_multiplier": 12.0,
            "logits_scaling": 6.0, "residual_multiplier": 0.22,
        },
    ),
    "LFM2.5 1.2B": (
        "lfm2",
        _LFM2
        | {"num_hidden_layers": 16, "intermediate_size": 12_288, "layer_types": _conv(16, 2, 5, 8, 10, 12, 14)},
    ),
    "Gemma 4 E2B": (
        "gemma4_text",
        _GEMMA4
        | {
            "hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35, "num_key_value_heads": 1,
            "num_kv_shared_layers": 20, "use_double_wide_mlp": True, "layer_types": ([_SLIDE] * 4 + [_FULL]) * 7,
        },
    ),
    "Youtu-LLM 2B": (
        "youtu",
        {
            "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 32, "num_attention_heads": 16,
            "num_key_value_heads": 16, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 128_256, "tie_word_embeddings": True,
        },
    ),
    "Qwen3 8B": (
        "qwen3",
        _QWEN3
        | {
            "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32,
            "tie_word_embeddings": False,
        },
    ),
    "LFM2 8B-A1B": (
        "lfm2_moe",
        _LFM2
        | {
            "num_hidden_layers": 24, "intermediate_size": 7168, "moe_intermediate_size": 1792, "num_experts": 32,
            "num_experts_per_tok": 4, "num_dense_layers": 2, "layer_types": _conv(24, 2, 6, 10, 14, 18, 21),
        },
    ),
    "Gemma 4 E4B": (
        "gemma4_text",
        _GEMMA4
        | {
            "hidden_size": 2560, "intermediate_size": 10_240, "num_hidden_layers": 42, "num_key_value_heads": 2,
            "num_kv_shared_layers": 18, "use_double_wide_mlp": False, "layer_types": ([_SLIDE] * 5 + [_FULL]) * 7,
        },
    ),
}  # fmt: skip
FORMATS = ("int8", "int4")
OUTRIDER = [sys.executable, "-c", "from outrider.cli import main; main()"]
PROGRAM = """
import json, sys, time, outrider
times = []
with outrider.load(sys.argv[1]) as engine:
    for chunk in engine.stream("Why is the sky blue?", max_new_tokens=64, ignore_eos=True):
        times.extend([time.time()] * len(chunk.tokens))
    fields = dict(line.split(":", 1) for line in open("/proc/self/status") if line.startswith("Rss"))
memory = sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssFile")) / 1e6
print(json.dumps([times[0], (len(times) - 1) / (times[-1] - times[0]), memory]))
"""


def write_checkpoint(folder: Path, tokenizer: Path, kind: str, fields: dict[str, Any]) -> None:
    """A checkpoint with random weights in bf16, one tensor after the other."""
    import torch
    import transformers

    config = transformers.AutoConfig.for_model(
        kind, **fields, max_position_embeddings=32_768, bos_token_id=1, eos_token_id=2, pad_token_id=2
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    config.architectures, config.dtype = [type(model).__name__], "bfloat16"
    shapes: dict[str, tuple[int, ...]] = {}
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight" or not fields["tie_word_embeddings"]:
            shapes |= _published(name, tuple(tensor.shape))
    folder.mkdir()
    config.save_pretrained(folder)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    head = json.dumps(header).encode()
    drawn = np.random.default_rng(0).standard_normal(1 << 22, dtype=np.float32)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for shape in shapes.values():
            made = drawn / np.float32(shape[-1] ** 0.5) if len(shape) > 1 else np.ones(1 << 16, np.float32)
            _write(file, made, int(np.prod(shape)))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder)


def _published(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """A tensor by its publisher's names: Transformers has the matrices of LFM2's experts in one."""
    at, is_expert, part = name.partition(".feed_forward.experts.")
    if not is_expert:
        return {name: shape}
    count, rows, columns = shape
    names = ("w1", "w3") if part.startswith("gate_up") else ("w2",)
    each = (rows // len(names), columns)
    return {f"{at}.feed_forward.experts.{i}.{one}.weight": each for i in range(count) for one in names}


def _write(file: Any, values: NDArray[np.float32], count: int) -> None:
    """Write `count` numbers in bf16, over and over the given ones."""
    stored = (values.view(np.uint32) >> 16).astype("<u2")
    while count:
        part = stored[:count]
        file.write(part.tobytes())
        count -= len(part)


def prepare(place: Path, tokenizer: Path, name: str, formats: tuple[str, ...]) -> None:
    """The checkpoint of a model, and its bundles in these formats, where they are not there."""
    checkpoint = place / name
    if not checkpoint.exists():
        write_checkpoint(checkpoint, tokenizer, *SHAPES[name])
    for weights in formats:
        made = place / f"{name}-{weights}"
        if not made.exists():
            command = [*OUTRIDER, "export", str(checkpoint), "--weights", weights, "-o", str(made)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def start(model: Path, cache: str) -> list[float]:
    """Start a process: seconds to the first token, tokens per second, and GB of memory."""
    began = time.time()
    environment = {**os.environ, "OUTRIDER_CACHE": cache}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(model)], check=True, capture_output=True, text=True, env=environment
    )
    first, speed, memory = json.loads(done.stdout.splitlines()[-1])
    return [first - began, speed, memory]


def sizes(place: Path, name: str) -> list[str]:
    """The cells of a model that do not depend on what else the machine does."""
    cells = []
    for weights in FORMATS:
        bundle = place / f"{name}-{weights}"
        disk = sum(path.stat().st_size for path in bundle.rglob("*") if path.is_file()) / 1e9
        with tempfile.TemporaryDirectory() as cache:
            start(bundle, cache)
            cells += [f"{disk:.1f}", f"{start(bundle, cache)[2]:.1f}"]
    return cells


def starts(place: Path, name: str) -> list[str]:
    """Seconds of the first and of the second start, and tokens per second."""
    with tempfile.TemporaryDirectory(dir=place) as cache:
        first, again = start(place / name, cache), start(place / name, cache)
    return [f"{first[0]:.0f}", f"{again[0]:.1f}", f"{again[1]:.1f}"]


def main(folder: str, tokenizer: str, *given: str) -> None:
    """Print the table."""
    place, only = Path(folder), {each for each in given if each.startswith("--")}
    place.mkdir(parents=True, exist_ok=True)
    print(
        "| model | int8: disk, GB | memory, GB | int4: disk, GB | memory, GB | first start, s | second, s "
        "| tokens per second |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name in [each for each in given if each not in only] or SHAPES:
        cells = [name]
        prepare(place, Path(tokenizer), name, () if "--starts" in only else FORMATS)
        if "--starts" not in only:
            cells += sizes(place, name)
        if "--sizes" not in only:
            cells += starts(place, name)
        print(f"| {' | '.join(cells)} |", flush=True)
        if not only:
            for path in (place / name, *(place / f"{name}-{weights}" for weights in FORMATS)):
                shutil.rmtree(path)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
