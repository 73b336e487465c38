"""Measures how long a long prompt takes beside answers that are being decoded, and what it costs them.

    python bench/scripts/newcomer.py BUNDLE [MODE,… [LEVEL,… [TURNS]]]    # modes: plain, auto, genai, genai-whole, …
    LLAMA_SERVER=llama-server python bench/scripts/newcomer.py BUNDLE plain,llama=MODEL.gguf

Some answers are decoded for a while, then a prompt of 3,000 tokens arrives. The table has the seconds to the newcomer's
first token, and of the others the gaps between tokens, in milliseconds: the median and the 99th percentile before the
newcomer came, the same while its prompt was read, and their tokens per second then. genai is openvino-genai's
ContinuousBatchingPipeline with the same files, precision and tokens per call; genai-whole reads prompts in one call
(dynamic_split_fuse=False). llama=MODEL.gguf is llama.cpp's llama-server with a slot for each answer, as many threads as
processors and else its defaults; this process reads its streams in one thread. Modes take turns; the table has medians.
For an idle machine, so it is run by hand.
"""

import atexit
import json
import os
import selectors
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import httpx
import numpy as np
import openvino as ov
import openvino_genai

import outrider
from outrider.bundle import Bundle, read_bundle

LEVELS = (1, 8, 31)  # answers that are being decoded
PROMPT_TOKENS, NEW_TOKENS = 3000, 1500
STEADY = 2.0  # seconds of decoding before the newcomer comes
CACHE_SIZE = 4  # GB
MODES = ("plain", "auto", "genai", "genai-whole")


@dataclass(frozen=True)
class Run:
    """When tokens came, in seconds: of each answer that was there before, and of the newcomer its first."""

    others: list[list[float]]
    came: float
    first: float

    def figures(self) -> list[float]:
        """A row of the table."""
        before, during = self._gaps(self.came - STEADY / 2, self.came), self._gaps(self.came, self.first)
        rate = sum(self.came < at <= self.first for times in self.others for at in times) / (self.first - self.came)
        percentiles = [1e3 * float(np.percentile(gaps, q)) for gaps in (before, during) for q in (50, 99)]
        return [self.first - self.came, *percentiles, rate]

    def _gaps(self, begin: float, end: float) -> list[float]:
        """The gaps between tokens that ended in this time; a gap that did not end in it counts as far as it went."""
        gaps = []
        for times in self.others:
            inside = [at for at in times if begin < at <= end]
            last = max((at for at in times if at <= begin), default=begin)
            gaps += np.diff([last, *inside, *([] if inside else [end])]).tolist()
        return gaps


def main() -> None:
    """Measure."""
    bundle = read_bundle(sys.argv[1])
    names = sys.argv[2].split(",") if len(sys.argv) > 2 else list(MODES)
    levels = [int(level) for level in sys.argv[3].split(",")] if len(sys.argv) > 3 else LEVELS
    turns = int(sys.argv[4]) if len(sys.argv) > 4 else 1
    engine = outrider.load(bundle.folder, cache_size=CACHE_SIZE, enable_prefix_caching=False, measure="first")
    precision = engine.choices["main"].setting.precision
    print(f"{bundle.folder.name}; {engine.setting['main_device']}")
    print(f"openvino {ov.get_version()}, openvino-genai {version('openvino-genai')}")
    ways: dict[str, Callable[[list[list[int]], list[int]], Run]] = {}
    for name in names:
        if name.startswith("llama="):
            ways["llama-server"] = llama_server(name.removeprefix("llama="))
        elif name.startswith("genai"):
            ways[name] = peer(bundle, precision, split=name == "genai")
        else:
            ways[name] = ours(engine, None if name == "plain" else "auto")
    generator = np.random.default_rng(0)
    long = generator.integers(1000, bundle.manifest.main.vocab_size, PROMPT_TOKENS).tolist()
    short = [
        engine.tokenizer.encode_prompt(f"Tell me a very long story about {i} sailors.") for i in range(max(LEVELS))
    ]
    print(
        f"{'decoding':>8} {'mode':12} {'first s':>8} {'p50 ms':>8} {'p99 ms':>8} {'p50':>8} {'p99':>8} {'tokens/s':>8}"
    )
    for level in levels:
        found: dict[str, list[list[float]]] = {name: [] for name in ways}
        for _ in range(turns):
            for name, way in ways.items():
                found[name].append(way(short[:level], long).figures())
        for name, rows in found.items():
            first, *others = [statistics.median(column) for column in zip(*rows, strict=True)]
            print(f"{level:8} {name:12} {first:8.2f} " + " ".join(f"{each:8.1f}" for each in others), flush=True)
    engine.close()


def ours(engine: outrider.Engine, drafter: str | None) -> Callable[[list[list[int]], list[int]], Run]:
    """Our engine."""

    def run(prompts: list[list[int]], newcomer: list[int]) -> Run:
        others: list[list[float]] = [[] for _ in prompts]
        first: list[float] = []
        told = threading.Event()

        def noting(times: list[float]) -> Callable[[object], None]:
            def note(news: object) -> None:
                if isinstance(news, BaseException):
                    print("failed:", news)
                times.append(time.perf_counter())
                told.set()

            return note

        options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True, "drafter": drafter}
        handles = [
            engine.submit(prompt, sink=noting(times), **options) for prompt, times in zip(prompts, others, strict=True)
        ]
        while not all(others):
            time.sleep(0.01)
        time.sleep(STEADY)
        came = time.perf_counter()
        handles.append(engine.submit(newcomer, sink=noting(first), **options | {"max_new_tokens": 2}))
        while not first:
            told.clear()
            told.wait(1.0)
        for handle in handles:
            handle.cancel()
        while not all(handle.done for handle in handles):
            time.sleep(0.01)
        return Run(others, came, first[0])

    return run


def peer(bundle: Bundle, precision: str, *, split: bool) -> Callable[[list[list[int]], list[int]], Run]:
    """openvino-genai's continuous batching, in the same precision."""
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size, scheduler.enable_prefix_caching = CACHE_SIZE, False
    scheduler.dynamic_split_fuse = split
    scheduler.max_num_batched_tokens = outrider.Config().scheduler.max_num_batched_tokens if split else 8192
    tokenizer = openvino_genai.Tokenizer(str(bundle.tokenizer_path))
    folder = str(bundle.folder / bundle.manifest.main.folder)
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        folder, tokenizer, scheduler, "CPU", INFERENCE_PRECISION_HINT=precision
    )

    def run(prompts: list[list[int]], newcomer: list[int]) -> Run:
        options = openvino_genai.GenerationConfig(max_new_tokens=NEW_TOKENS, ignore_eos=True)

        def add(number: int, prompt: list[int]) -> Any:
            return pipeline.add_request(number, ov.Tensor(np.array([prompt], dtype=np.int64)), options)

        handles = [add(i, prompt) for i, prompt in enumerate(prompts)]
        times: list[list[float]] = [[] for _ in range(len(prompts) + 1)]

        def step() -> None:
            pipeline.step()
            now = time.perf_counter()
            for handle, own in zip(handles, times, strict=False):
                if handle.can_read():
                    handle.read()
                    own.append(now)

        while not all(times[:-1]):
            step()
        began = time.perf_counter()
        while time.perf_counter() - began < STEADY:
            step()
        came = time.perf_counter()
        handles.append(add(len(prompts), newcomer))
        while not times[-1]:
            step()
        for handle in handles:
            handle.stop()
        while pipeline.has_non_finished_requests():
            pipeline.step()
        return Run(times[:-1], came, times[-1][0])

    return run


def llama_server(model: str) -> Callable[[list[list[int]], list[int]], Run]:
    """llama.cpp's server, which reads the streams' prompts as token ids."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    slots, program = max(LEVELS) + 1, os.environ.get("LLAMA_SERVER", "llama-server")
    context = max(LEVELS) * (NEW_TOKENS + 100) + PROMPT_TOKENS + 100  # of all slots together
    sizes = ["-c", context, "-np", slots, "--kv-unified", "-t", os.cpu_count(), "--port", port]
    process = subprocess.Popen(
        [program, "-m", model, *map(str, sizes)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    atexit.register(process.kill)
    url = f"http://127.0.0.1:{port}"

    def is_ready() -> bool:
        try:
            return httpx.get(f"{url}/health").status_code == 200
        except httpx.TransportError:
            return False

    while not is_ready():
        assert process.poll() is None, "llama-server has ended"
        time.sleep(0.1)

    def begin(prompt: list[int], num_tokens: int) -> socket.socket:
        asked = {"prompt": prompt, "n_predict": num_tokens, "stream": True, "ignore_eos": True, "cache_prompt": False}
        body = json.dumps(asked | {"temperature": 0}).encode()
        head = f"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
        return connection

    def run(prompts: list[list[int]], newcomer: list[int]) -> Run:
        times: list[list[float]] = [[] for _ in range(len(prompts) + 1)]
        with selectors.DefaultSelector() as streams:

            def add(number: int, prompt: list[int], num_tokens: int) -> None:
                streams.register(begin(prompt, num_tokens), selectors.EVENT_READ, times[number])

            def read() -> None:
                for key, _ in streams.select(0.1):
                    assert isinstance(key.fileobj, socket.socket)
                    received = key.fileobj.recv(1 << 16)
                    assert received, "llama-server has ended a stream"
                    key.data.extend([time.perf_counter()] * received.count(b'"content":'))

            for number, prompt in enumerate(prompts):
                add(number, prompt, NEW_TOKENS)
            while not all(times[:-1]):
                read()
            began = time.perf_counter()
            while time.perf_counter() - began < STEADY:
                read()
            came = time.perf_counter()
            add(len(prompts), newcomer, 2)
            while not times[-1]:
                read()
            for key in [*streams.get_map().values()]:
                assert isinstance(key.fileobj, socket.socket)
                key.fileobj.close()
        while any(slot["is_processing"] for slot in httpx.get(f"{url}/slots").json()):
            time.sleep(0.1)
        return Run(times[:-1], came, times[-1][0])

    return run


if __name__ == "__main__":
    main()
