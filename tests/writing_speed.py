"""Measures how fast training data is written in batches, beside openvino-genai's continuous batching.

    python tests/writing_speed.py BUNDLE [TURNS]

Both get the same prompts and write up to the same number of tokens for each, sampled, because `Writer` ends loops, with
the same bundle's files in the precision that the bundle's setting has. `Writer` also stores the likeliest 32 tokens of
each row, and in its second column the hidden states that EAGLE-3 reads. Each size is measured in turns, and the best
counts, because other work can only slow a run down. For an idle machine, so it is run by hand.
"""

import math
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai

from outrider.bundle import Bundle, read_bundle
from outrider.config import DeviceConfig
from outrider.models.part import Part
from outrider.models.settled import choice_of
from outrider_bench.modes.peers.link import link
from outrider_export.distill.data import tap_names
from outrider_export.distill.texts import Task
from outrider_export.distill.writer import Writer

SIZES = (8, 32, 64)
PROMPT_TOKENS, NEW_TOKENS = 64, 128


def main() -> None:
    """Measure."""
    bundle, turns = read_bundle(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 3
    generator = np.random.default_rng(0)
    prompts = generator.integers(1000, bundle.manifest.main.vocab_size, (max(SIZES), PROMPT_TOKENS)).tolist()
    setting = choice_of(Part("main", bundle, bundle.manifest.main), "CPU", DeviceConfig()).setting
    print(f"{bundle.folder.name}, {setting.precision}, dynamic quantisation in groups of {setting.group_size}")
    print(f"{PROMPT_TOKENS} tokens read and {NEW_TOKENS} written for each request")
    print(
        f"openvino {ov.get_version()}, openvino-genai {version('openvino-genai')}; tokens per second, best of {turns}"
    )
    print("requests  Writer  with hidden states  openvino-genai")
    taps = tap_names(bundle.manifest.main.geometry.num_layers)
    peer = _peer(bundle, setting.precision, setting.group_size)
    for size in SIZES:
        asked = prompts[:size]
        ways = [_ours(bundle, size, ()), _ours(bundle, size, taps), peer]
        best = [0.0] * len(ways)
        for turn in range(turns + 1):
            for i, way in enumerate(ways):
                began = time.perf_counter()
                count = way(asked)
                seconds = time.perf_counter() - began
                best[i] = max(best[i], count / seconds) if turn else 0.0  # the first one compiles kernels
        print(f"{size:8}  {best[0]:6.0f}  {best[1]:18.0f}  {best[2]:14.0f}", flush=True)


def _ours(bundle: Bundle, size: int, features: tuple[str, ...]) -> Callable[[list[list[int]]], int]:
    writer = Writer(bundle, features=features, batch_size=size, max_new_tokens=NEW_TOKENS)

    def write(prompts: list[list[int]]) -> int:
        tasks = [Task(i, token_ids, 1.0) for i, token_ids in enumerate(prompts)]
        texts = writer.write(tasks, seed=0, stop=frozenset())
        return sum(len(text.token_ids) - text.num_prompt_tokens for text in texts)

    return write


def _peer(bundle: Bundle, precision: str, group_size: int | None) -> Callable[[list[list[int]]], int]:
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = math.ceil(2 * max(SIZES) * (PROMPT_TOKENS + NEW_TOKENS) / 32_000)  # GB
    scheduler.enable_prefix_caching = False
    properties: dict[str, Any] = {"INFERENCE_PRECISION_HINT": precision}
    if group_size is not None:
        properties["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = group_size
    with tempfile.TemporaryDirectory() as folder:  # it expects model and tokenizer in one
        for part in (bundle.folder / bundle.manifest.main.folder, bundle.tokenizer_path):
            for path in part.iterdir():
                link(path, Path(folder) / path.name)
        pipeline = openvino_genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", properties)
    config = openvino_genai.GenerationConfig(
        max_new_tokens=NEW_TOKENS, ignore_eos=True, apply_chat_template=False, do_sample=True
    )

    def write(prompts: list[list[int]]) -> int:
        inputs = [ov.Tensor(np.array([token_ids], dtype=np.int64)) for token_ids in prompts]
        found = pipeline.generate(inputs, [config] * len(inputs))
        return sum(len(each.m_generation_ids[0]) for each in found)

    return write


if __name__ == "__main__":
    main()
