"""Measures how fast `outrider distill` writes answers, and openvino-genai's continuous batching on the same files.

    python bench/scripts/writing_speed.py BUNDLE [--prompts FILE] [--at-once 8,32,64] [--max-new-tokens 256]
        [--precision auto]

Each way writes the same greedy answers, so many at once: when one ends, the next prompt takes its place. All end at the
same tokens, lengths and loops, and read at most 256 prompt tokens a call. openvino-genai calculates in the Writer's
precisions, then with the cache and the quantisation that it chooses itself; it keeps neither probabilities nor hidden
states. The ways take turns, so that a machine whose speed changes is the same for all. A first turn, which does not
count, lasts until as many answers have ended as are written at once. Prints the median of the other turns, the slowest
and the fastest; answers per second are tokens per second over the mean length. For an idle machine, so it is run by
hand.
"""

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai

from outrider.bundle import Bundle, read_bundle
from outrider.config import DeviceConfig
from outrider_distill.data import tap_names
from outrider_distill.prompts import read_prompts
from outrider_distill.texts import LOOK, WritingTask, is_loop
from outrider_distill.writer import Writer

CHAT_PROMPTS = Path(__file__).parents[2] / "samples" / "chat_prompts.jsonl"
PRECISION, CACHE, GROUP = "INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION", "DYNAMIC_QUANTIZATION_GROUP_SIZE"

Prompts = Sequence[list[int]]
Count = Callable[[int], None]  # told how many tokens were written


class Way:
    """A way to write answers without end. lengths: of those that ended. speeds: tokens per second of each turn."""

    def __init__(self, name: str, answers: Callable[[Count], Iterator[int]]) -> None:
        self.name, self.speeds, self.lengths = name, list[float](), list[int]()
        self._num_tokens = 0
        self._answers = answers(self._count)

    def _count(self, num_tokens: int) -> None:
        self._num_tokens += num_tokens

    def warm_up(self, num_answers: int) -> None:
        for _ in itertools.islice(self._answers, num_answers):
            pass

    def turn(self, seconds: float) -> None:
        began, before, taken = time.perf_counter(), self._num_tokens, 0.0
        while taken < seconds:
            self.lengths.append(next(self._answers))
            taken = time.perf_counter() - began
        self.speeds.append((self._num_tokens - before) / taken)

    @property
    def row(self) -> str:
        """Its figures in the table."""
        speed, length = statistics.median(self.speeds), statistics.mean(self.lengths)
        figures = f"{speed:,.0f} ({min(self.speeds):,.0f}–{max(self.speeds):,.0f}) | {speed / length:.1f}"
        return f"{self.name} | {figures} | {speed * 3600 / 1e6:.1f} million | {length:.0f}"


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--prompts", type=Path, default=CHAT_PROMPTS)
    parser.add_argument("--at-once", default="8,32,64")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="of a turn")
    given = parser.parse_args()
    bundle = read_bundle(given.bundle)
    print("| at once | | tokens/s | answers/s | tokens per hour | tokens per answer |\n|---|---|---|---|---|---|")
    for at_once in map(int, given.at_once.split(",")):
        ways = find_ways(bundle, at_once, given)
        for way in ways:
            way.warm_up(at_once)
        for _ in range(given.turns):
            for way in ways:
                way.turn(given.seconds)
        for way in ways:
            print(f"| {at_once} | {way.row} |", flush=True)
    print(", ".join(f"{name} {version(name)}" for name in ("outrider", "openvino", "openvino-genai")))


def find_ways(bundle: Bundle, at_once: int, given: argparse.Namespace) -> list[Way]:
    """The Writer with and without hidden states, and openvino-genai in two settings."""
    options: dict[str, Any] = {"max_new_tokens": given.max_new_tokens, "batch_size": at_once}
    options["device"] = DeviceConfig(precision=given.precision)
    writer = Writer(bundle, **options)
    with_states = Writer(bundle, features=tap_names(bundle.manifest.main.geometry.num_layers), **options)
    prompts = [writer.tokenizer.encode_prompt(each.content) for each in read_prompts(given.prompts)]

    backend = writer._backend
    precision, cache, group = backend.precision, backend.cache_precision, backend.fingerprint[GROUP]
    cache_size = math.ceil(2 * at_once * writer.cache_bytes_per_text / 1e9)
    peer = partial(peer_answers, bundle, prompts, at_once, given.max_new_tokens, cache_size)
    same, own = {PRECISION: precision, CACHE: cache, GROUP: group}, {PRECISION: precision}
    return [
        Way(f"Writer, {precision}, cache {cache}, groups of {group}", partial(our_answers, writer, prompts)),
        Way("the same, hidden states kept", partial(our_answers, with_states, prompts)),
        Way(f"openvino-genai, {precision}, cache {cache}, groups of {group}", partial(peer, same)),
        Way(f"openvino-genai, {precision}, its own cache and groups", partial(peer, own)),
    ]


def our_answers(writer: Writer, prompts: Prompts, count: Count) -> Iterator[int]:
    """Lengths of the Writer's answers, as they end."""
    tasks = (WritingTask(number, prompt) for number, prompt in enumerate(itertools.cycle(prompts)))
    for text in writer.write(tasks, seed=0, watch=count):
        yield len(text.token_ids) - text.num_prompt_tokens


def peer_answers(
    bundle: Bundle,
    prompts: Prompts,
    at_once: int,
    max_new_tokens: int,
    cache_size: int,
    properties: dict[str, Any],
    count: Count,
) -> Iterator[int]:
    """Lengths of openvino-genai's answers, as they end. cache_size: GB."""
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = cache_size
    scheduler.enable_prefix_caching = False  # prompts are repeated
    tokenizer = openvino_genai.Tokenizer(str(bundle.tokenizer_path))
    folder = str(bundle.folder / bundle.manifest.main.folder)
    pipeline = openvino_genai.ContinuousBatchingPipeline(folder, tokenizer, scheduler, "CPU", **properties)
    options = openvino_genai.GenerationConfig()
    options.max_new_tokens = max_new_tokens
    options.stop_token_ids = set(bundle.manifest.tokenizer.eos_token_ids)

    waiting = enumerate(ov.Tensor(np.array([prompt], dtype=np.int64)) for prompt in itertools.cycle(prompts))
    running: dict[int, tuple[Any, list[int]]] = {}
    while True:
        for number, prompt in itertools.islice(waiting, at_once - len(running)):
            running[number] = pipeline.add_request(number, prompt, options), []
        pipeline.step()
        for number, (handle, answer) in list(running.items()):
            while handle.can_read():
                for output in handle.read().values():
                    answer += output.generated_ids
                    count(len(output.generated_ids))
                if len(answer) % LOOK == 0 and is_loop(answer):
                    handle.stop()
            if handle.get_status() != openvino_genai.GenerationStatus.RUNNING:
                del running[number]
                yield len(answer)


if __name__ == "__main__":
    main()
