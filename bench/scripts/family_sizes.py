"""Measures what a model of each family takes: on disk, in memory, and until its first token from empty caches.

    python bench/scripts/family_sizes.py FOLDER TOKENIZER [--calculate | --sizes | --starts | --drafts] [MODEL …]

The models have random weights in the shapes of `published_shapes.toml`, and the tokenizer of a checkpoint's folder:
what they say means nothing, and their memory and speed are those of the real ones.

- `--calculate` prints for each shape its weights, and bytes on disk and in the cache, as the conversion will lay them
  out. Nothing is written but a checkpoint without content.
- `--sizes` writes a checkpoint in bf16 into FOLDER, exports it in int8 and in int4, and loads both in f32; the bundles
  are deleted. Large ones are exported in int4 only, from zeros, which take no room on the disk.
- `--starts` measures two processes that load the checkpoint, the first with empty caches: it chooses the form of the
  weights, converts, compiles and measures the model. The second finds all of that. Both end with the first token.
- `--drafts` compares drafts by kind with plain decoding, in what was started: greedy and with a seed, two prompts.

Memory is sampled every 20 ms over all processes of a step: their own, without mapped files, and with these. That of a
loaded model is taken after 64 tokens. What was measured is kept in FOLDER/figures.json; `docs/generate.py` makes tables
of it, as `family_figures.json` beside this file. Starts need an idle machine, so this is run by hand. Needs PyTorch and
Transformers, which know the names of the tensors.
"""

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable
from pathlib import Path
from threading import Event, Thread
from typing import Any, BinaryIO
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

with (Path(__file__).parent / "published_shapes.toml").open("rb") as opened:
    SHAPES: dict[str, dict[str, Any]] = tomllib.load(opened)
FORMATS = ("int8", "int4")
LARGE = 3e8  # weights of one square matrix in each layer of a model that is measured in int4 only
OUTRIDER = [sys.executable, "-c", "from outrider.cli import main; main()"]
STEPS = ("--calculate", "--sizes", "--starts", "--drafts")
# Measured by default: the smallest of each family, and some of 8 billion weights.
FAMILIES = {
    "Qwen3 0.6B": "dense",
    "Gemma 3 270M": "sliding window",
    "Granite 3.1 1B-A400M": "mixture of experts",
    "LFM2 350M": "short convolution",
    "Qwen3.5 0.8B": "gated delta net",
    "Granite 4.0-H 1B": "Mamba-2",
    "Youtu-LLM 2B": "latent attention",
    "Gemma 4 E2B": "embeddings by layer",
    "Qwen3 8B": "dense",
    "LFM2 8B-A1B": "mixture of experts, short convolution",
}
START = """
import json, sys, time, outrider
times = []
with outrider.load(sys.argv[1]) as engine:
    for chunk in engine.stream("Why is the sky blue?", max_new_tokens=64, ignore_eos=True):
        times.extend([time.time()] * len(chunk.tokens))
    fields = dict(line.split(":", 1) for line in open("/proc/self/status") if line.startswith("Rss"))
memory = sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssFile")) / 1e6
print(json.dumps([times[0], (len(times) - 1) / (times[-1] - times[0]), memory]))
"""
MEMORY = """
import json, sys, outrider
with outrider.load(sys.argv[1], drafter=None, precision="f32") as engine:
    engine.generate("Why is the sky blue?", max_new_tokens=64, ignore_eos=True)
    fields = dict(line.split(":", 1) for line in open("/proc/self/status") if line.startswith("Rss"))
    memory = sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssFile")) / 1e6
    print(json.dumps({"memory": memory, "cache": engine.main.bytes_per_token}))
"""
DRAFTS = """
import json, sys, numpy, outrider
with outrider.load(sys.argv[1]) as engine:
    drawn = numpy.random.default_rng(3).integers(100, 40_000, 40).tolist()
    found = {}
    for drafter in engine.drafters:
        same, runs, drafted, accepted = 0, 0, 0, 0
        for prompt in ("Why is the sky blue?", drawn * 2):
            for options in ({}, {"temperature": 0.8, "seed": 1}):
                options |= {"max_new_tokens": 32, "ignore_eos": True}
                plain = engine.generate(prompt, drafter=None, **options)
                made = engine.generate(prompt, drafter=drafter, num_assistant_tokens=3, **options)
                same, runs = same + (made.token_ids == plain.token_ids), runs + 1
                drafted += made.stats.num_draft_tokens
                accepted += made.stats.num_accepted_tokens
        found[drafter] = [same, runs, drafted, accepted]
    print(json.dumps({"exact": plain.exact, "setting": engine.setting["main_device"], "drafts": found}))
"""


class Watch:
    """The most memory that a process and those that it starts have at once, in GB: their own, and with mapped files."""

    def __init__(self, group: int) -> None:
        self.own, self.all = 0.0, 0.0
        self._group, self._ended = group, Event()
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(0.02):
            own, mapped = 0, 0
            for folder in Path("/proc").iterdir():
                if folder.name.isdecimal() and _group_of(folder) == self._group:
                    found = _resident(folder)
                    own, mapped = own + found[0], mapped + found[1]
            self.own, self.all = max(self.own, own / 1e6), max(self.all, (own + mapped) / 1e6)

    def end(self) -> None:
        """Stop to look."""
        self._ended.set()
        self._thread.join()


def _group_of(folder: Path) -> int:
    try:
        return int((folder / "stat").read_text().rpartition(")")[2].split()[2])
    except (OSError, IndexError):
        return -1  # it has ended


def _resident(folder: Path) -> tuple[int, int]:
    """kB of a process: its own, and of mapped files."""
    try:
        fields = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
        return int(fields["RssAnon"].split()[0]), int(fields["RssFile"].split()[0])
    except (OSError, KeyError):
        return 0, 0


def run(command: list[str], cache: str = "") -> tuple[Any, Watch]:
    """Run a program; what it prints, as JSON, and its memory. cache: Outrider's folder, if not the user's."""
    environment = os.environ | ({"OUTRIDER_CACHE": cache} if cache else {})
    done = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True)
    watch = Watch(done.pid)
    said = done.communicate()[0].splitlines()
    watch.end()
    if done.returncode:
        raise SystemExit(f"{command} failed")
    return (json.loads(said[-1]) if said and said[-1][0] in "[{" else None), watch


def program(text: str, model: Path, cache: str) -> tuple[Any, Watch]:
    """Run one of the programs above."""
    return run([sys.executable, "-c", text, str(model)], cache)


def config_of(shape: dict[str, Any]) -> Any:
    """Transformers' configuration of a shape."""
    import transformers

    fields = {key: value for key, value in shape.items() if key not in ("kind", "full", "pattern", "without")}
    count, full = shape["num_hidden_layers"], shape.get("full", ())
    if full:
        kinds = ("attention", "mamba") if shape["kind"].startswith("granite") else ("full_attention", "conv")
        fields["layer_types"] = [kinds[0] if i in full else kinds[1] for i in range(count)]
    if step := shape.get("pattern"):
        fields["layer_types"] = (["sliding_attention"] * (step - 1) + ["full_attention"]) * (count // step)
    fields |= dict.fromkeys(shape.get("without", ()))
    fields["sliding_window"] = shape.get("sliding_window") or None
    made = transformers.AutoConfig.for_model(
        shape["kind"], **fields, max_position_embeddings=32_768, bos_token_id=1, eos_token_id=2, pad_token_id=2
    )
    made.dtype = "bfloat16"
    return made


def shapes_of(config: Any) -> dict[str, tuple[int, ...]]:
    """The shapes of a model's tensors, by its publisher's names."""
    import torch
    import transformers
    from transformers.core_model_loading import revert_weight_conversion

    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    config.architectures = [type(model).__name__]
    found = revert_weight_conversion(model, model.state_dict())
    tied = config.tie_word_embeddings
    return {name: tuple(each.shape) for name, each in found.items() if name != "lm_head.weight" or not tied}


def write_checkpoint(folder: Path, tokenizer: Path, shape: dict[str, Any], *, empty: bool = False) -> int:
    """A checkpoint with random weights in bf16, one tensor after the other; how many they are. empty: all are zero."""
    config = config_of(shape)
    shapes = shapes_of(config)
    folder.mkdir()
    config.save_pretrained(folder)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, each in shapes.items():
        begin, end = end, end + 2 * math.prod(each)
        header[name] = {"dtype": "BF16", "shape": each, "data_offsets": [begin, end]}
    head = json.dumps(header).encode()
    drawn = np.random.default_rng(0).standard_normal(1 << 22, dtype=np.float32)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        if empty:
            file.truncate(8 + len(head) + end)
        for name, each in ({} if empty else shapes).items():
            made = drawn / np.float32(each[-1] ** 0.5) if len(each) > 1 else np.ones(1 << 16, np.float32)
            if name.endswith("A_log"):  # how fast states forget: from 0.2 to 40 % a token
                made = np.linspace(-6, -1, each[0], dtype=np.float32)
            elif shape["kind"].startswith("qwen3_5") and name.endswith("norm.weight") and ".linear_attn." not in name:
                made = np.zeros(1 << 16, np.float32)  # its norms multiply by 1 + weight
            _write(file, made, math.prod(each))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder)
    return end // 2


def _write(file: BinaryIO, values: NDArray[np.float32], count: int) -> None:
    """Write `count` numbers in bf16, over and over the given ones."""
    stored = (values.view(np.uint32) >> 16).astype("<u2")
    while count:
        part = stored[:count]
        file.write(part.tobytes())
        count -= len(part)


def calculate(place: Path, tokenizer: Path, name: str) -> dict[str, Any]:
    """Weights in billions, GB in each format, kB of a token's keys and values in f32, MB of a text's states in f32."""
    from outrider_export.describe.geometry import geometry_of_config
    from outrider_export.direct import pack
    from outrider_export.direct.convert import describe_layers, open_weights
    from outrider_export.sources.source import read_config

    def room(_: Path, layouts: Iterable[tuple[Any, tuple[int, ...]]], __: Any) -> list[tuple[Any, int]]:
        return [(np.broadcast_to(np.zeros((), dtype), shape), 0) for dtype, shape in layouts]

    with tempfile.TemporaryDirectory(dir=place) as made:
        folder = Path(made) / "empty"
        count = write_checkpoint(folder, tokenizer, SHAPES[name], empty=True)
        weights = open_weights(folder, is_gguf=False)
        found: dict[str, Any] = {"weights": count / 1e9}
        with patch.object(pack, "allocate", room), patch.object(pack, "read_all"):
            for form in FORMATS:
                packed = pack.pack(weights, form, folder, lambda _: None).values()
                parts = [array for each in packed for array in (each.codes, each.zero_points, each.scales)]
                found[form] = sum(array.nbytes for array in parts) / 1e9
        import msgspec

        geometry = geometry_of_config(read_config(folder), folder)
        geometry = msgspec.structs.replace(geometry, **describe_layers(weights.decoder))
        states = [layer.state for layer in weights.decoder.layers if layer.state is not None]
        numbers = sum(map(_numbers_of, states))
        return found | {"token": 4 * geometry.numbers_per_token / 1e3, "states": 4 * numbers / 1e6}


def _numbers_of(state: Any) -> int:
    """Numbers that a layer keeps of a text instead of keys and values: see `outrider_export.direct.states`."""
    if state.kind == "short_convolution":
        return int(state.width * state.kernel)
    inner = state.key_size if state.kind == "gated_delta_net" else state.state_size
    return int(state.conv_width * state.kernel + state.num_heads * state.head_size * inner)


def measure_sizes(place: Path, tokenizer: Path, name: str) -> dict[str, Any]:
    """What does not depend on what else the machine does: disk, and the most memory of an export and of a load."""
    checkpoint, found = place / name, {}
    is_large = SHAPES[name]["num_hidden_layers"] * SHAPES[name]["hidden_size"] ** 2 > LARGE
    if not checkpoint.exists():
        write_checkpoint(checkpoint, tokenizer, SHAPES[name], empty=is_large)
    for form in ("int4",) if is_large else FORMATS:
        bundle = place / f"{name}-{form}"
        shutil.rmtree(bundle, ignore_errors=True)
        exported = run([*OUTRIDER, "export", str(checkpoint), "--weights", form, "-o", str(bundle)])[1]
        disk = sum(path.stat().st_size for path in (bundle / "main").rglob("*") if path.is_file()) / 1e9
        with tempfile.TemporaryDirectory() as cache:
            loaded, watch = program(MEMORY, bundle, cache)
        shutil.rmtree(bundle)
        found[form] = loaded | {"disk": disk, "export": exported.own, "peak": watch.all}
    return found


def measure_starts(place: Path, tokenizer: Path, name: str) -> dict[str, Any]:
    """Seconds of the first and of the second start, tokens per second, memory, and how busy the machine was."""
    checkpoint, cache = place / name, place / f"{name}-cache"
    if not checkpoint.exists():
        write_checkpoint(checkpoint, tokenizer, SHAPES[name])
    shutil.rmtree(cache, ignore_errors=True)
    found: dict[str, Any] = {}
    others = {}
    for which in ("first", "second"):
        began, before = time.time(), _busy()
        (first, speed, memory), watch = program(START, checkpoint, str(cache))
        others[which] = (_busy() - before) / (time.time() - began) / (os.cpu_count() or 1)
        found |= {which: first - began, f"{which}_own": watch.own, f"{which}_all": watch.all}
    bundle = next(cache.glob("bundles/*/main"))
    main = json.loads((bundle.parent / "outrider.json").read_text())["main"]
    found["form"] = f"{main['weights']} in {main['format']}"
    found["disk"] = sum(path.stat().st_size for path in bundle.rglob("*") if path.is_file()) / 1e9
    return found | {"speed": speed, "memory": memory, "others": max(others.values())}


def compare_drafts(place: Path, _: Path, name: str) -> dict[str, Any]:
    """Whether drafts by kind change the text of a model that was started; the setting that loading chose."""
    return dict(program(DRAFTS, place / name, str(place / f"{name}-cache"))[0])


def _busy() -> float:
    """Seconds of all processors that this process and those that it started did not take, since the machine began."""
    numbers = [int(each) for each in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    return (sum(numbers) - numbers[3] - numbers[4]) / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4])


def main(folder: str, tokenizer: str, *given: str) -> None:
    """Measure."""
    place, steps = Path(folder), [each for each in given if each in STEPS] or STEPS[1:]
    place.mkdir(parents=True, exist_ok=True)
    kept = place / "figures.json"
    do = dict(zip(STEPS, (calculate, measure_sizes, measure_starts, compare_drafts), strict=True))
    default = SHAPES if "--calculate" in steps else FAMILIES
    for name in [each for each in given if each not in STEPS] or default:
        for step in steps:
            found = do[step](place, Path(tokenizer), name)
            known: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
            of_model = known.setdefault(name, {"kind": SHAPES[name]["kind"], "family": FAMILIES.get(name, "")})
            of_model[step.removeprefix("--")] = _rounded(found)
            rows = (f"{json.dumps(model)}: {json.dumps(figures)}" for model, figures in known.items())
            kept.write_text("{\n" + ",\n".join(rows) + "\n}\n")
            print(name, step, json.dumps(found), flush=True)


def _rounded(found: Any) -> Any:
    """The same with four digits."""
    if isinstance(found, dict):
        return {key: _rounded(value) for key, value in found.items()}
    return float(f"{found:.4g}") if isinstance(found, float) else found


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
