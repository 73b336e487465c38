"""Measures how much memory models of several sizes take, and how fast they decode plainly.

    python bench/scripts/model_sizes.py MODEL.gguf FOLDER [SIZE …]

The models have random weights in the shapes of published ones, and MODEL.gguf's tokenizer: what they say means nothing,
and their memory and speed are those of the real ones. Each size is exported in int8 and in int4 into FOLDER, where it
stays; what is there already is measured only. Each figure is of the second start: resident memory after 64 tokens
after a short prompt, with the default options, and tokens per second. For an idle machine, so it is run by hand. The
largest int8 model takes 9 GB of disk and as much memory.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np

# hidden size, inner size, layers, heads, heads for keys and values, whether the output matrix is the embedding
SHAPES = {
    "0.5B": (896, 4864, 24, 14, 2, True),  # Qwen2.5-0.5B
    "1.5B": (1536, 8960, 28, 12, 2, True),  # Qwen2.5-1.5B
    "3B": (2048, 11008, 36, 16, 2, True),  # Qwen2.5-3B
    "8B": (4096, 12288, 36, 32, 8, False),  # Qwen3-8B
}
OUTRIDER = [sys.executable, "-c", "from outrider.cli import main; main()"]
PROGRAM = """
import json, sys, outrider
with outrider.load(sys.argv[1], drafter=None) as engine:
    result = engine.generate("Why is the sky blue?", max_new_tokens=64, ignore_eos=True)
    fields = dict(line.split(":", 1) for line in open("/proc/self/status") if line.startswith("Rss"))
memory = sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssFile")) / 1e6
print(json.dumps([memory, result.stats.tokens_per_second]))
"""


def write_model(path: Path, tokenizer: Path, shape: tuple[int, int, int, int, int, bool]) -> None:
    """A Qwen2 model in Q4_0 with random weights."""
    hidden, inner, num_layers, num_heads, num_kv_heads, tied = shape
    narrow = hidden // num_heads * num_kv_heads
    writer = gguf.GGUFWriter(path, "qwen2", use_temp_file=False)
    vocab_size = 0
    for name, found in gguf.GGUFReader(tokenizer).fields.items():
        if not name.startswith("tokenizer."):
            continue
        content = found.contents()
        if name == "tokenizer.ggml.tokens":
            vocab_size = len(content)
        kind, *inside = found.types
        writer.add_key_value(name, content, kind, inside[0] if inside else None)
    numbers = {
        "block_count": num_layers, "context_length": 8192, "embedding_length": hidden, "feed_forward_length": inner,
        "attention.head_count": num_heads, "attention.head_count_kv": num_kv_heads,
    }  # fmt: skip
    for name, number in numbers.items():
        writer.add_uint32(f"qwen2.{name}", number)
    writer.add_float32("qwen2.rope.freq_base", 1e6)
    writer.add_float32("qwen2.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_uint32("general.file_type", int(gguf.LlamaFileType.MOSTLY_Q4_0))
    rng = np.random.default_rng(0)

    def add(name: str, rows: int, columns: int) -> None:
        blocks = rng.integers(0, 256, (rows, columns // 32, 18), dtype=np.uint8)
        blocks[..., :2] = np.array([0.5 / columns**0.5], dtype=np.float16).view(np.uint8)
        writer.add_tensor(name, blocks.reshape(rows, -1), raw_dtype=gguf.GGMLQuantizationType.Q4_0)

    def add_vector(name: str, size: int, value: float) -> None:
        writer.add_tensor(name, np.full(size, value, np.float32))

    add("token_embd.weight", vocab_size, hidden)
    add_vector("output_norm.weight", hidden, 1)
    if not tied:
        add("output.weight", vocab_size, hidden)
    for i in range(num_layers):
        for name, rows in (("q", hidden), ("k", narrow), ("v", narrow)):
            add(f"blk.{i}.attn_{name}.weight", rows, hidden)
            add_vector(f"blk.{i}.attn_{name}.bias", rows, 0)
        add(f"blk.{i}.attn_output.weight", hidden, hidden)
        add(f"blk.{i}.ffn_gate.weight", inner, hidden)
        add(f"blk.{i}.ffn_up.weight", inner, hidden)
        add(f"blk.{i}.ffn_down.weight", hidden, inner)
        add_vector(f"blk.{i}.attn_norm.weight", hidden, 1)
        add_vector(f"blk.{i}.ffn_norm.weight", hidden, 1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def export(tokenizer: Path, folder: Path, size: str) -> None:
    """Export a size in both formats, where it is not there."""
    missing = [weights for weights in ("int8", "int4") if not (folder / f"{size}-{weights}").exists()]
    if not missing:
        return
    model = folder / f"{size}.gguf"
    write_model(model, tokenizer, SHAPES[size])
    for weights in missing:
        into = folder / f"{size}-{weights}"
        subprocess.run([*OUTRIDER, "export", model, "--weights", weights, "-o", into], check=True, capture_output=True)
    model.unlink()


def measure(bundle: Path) -> tuple[float, float]:
    """GB of memory and tokens a second, of the second start."""
    done: Any = None
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", PROGRAM, bundle], check=True, capture_output=True, text=True)
    memory, speed = json.loads(done.stdout.splitlines()[-1])
    return memory, speed


def main(tokenizer: str, folder: str, *sizes: str) -> None:
    """Print the table."""
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    chosen = sizes or tuple(SHAPES)
    for size in chosen:
        export(Path(tokenizer), place, size)
    print(
        "| parameters | int8: disk, GB | memory, GB | tokens a second | int4: disk, GB | memory, GB | tokens a second |"
    )
    print("|---|---|---|---|---|---|---|")
    for size in chosen:
        cells = [size]
        for weights in ("int8", "int4"):
            bundle = place / f"{size}-{weights}"
            disk = sum(path.stat().st_size for path in bundle.rglob("*") if path.is_file()) / 1e9
            memory, speed = measure(bundle)
            cells += [f"{disk:.1f}", f"{memory:.1f}", f"{speed:.1f}"]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
