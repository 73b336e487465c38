"""Throughput: tokens per second of several requests at the same time.

    results = run(setup, prompts, ["plain", "auto", "genai"], levels=[1, 4, 8], repeats=3)

A level is a number of requests that one engine decodes at any time, as with a server under load: where one ends, the
next begins. So an answer that ends early makes room, and the slowest one does not decide. Ours has a thread for each,
openvino-genai's `ContinuousBatchingPipeline` gets a request where another ended, llama.cpp's server one from each
client. All read their whole prompts, and continue past the end of the answer, so that every request has the same number
of tokens in every mode.

Each load runs twice: for one new token, which reads the prompts, and for all new tokens. Decoding is the difference.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from outrider.config import GenerationConfig
from outrider.drafters import Suffix
from outrider.engine.engine import Engine
from outrider.errors import OptionError, OutriderError
from outrider.inputs.text import Tokenizer
from outrider_bench.benchmark import check_setup, describe_modes, describe_run
from outrider_bench.modes.make import our_modes
from outrider_bench.modes.mode import AnsweredLoad, BatchMode, Load, Mode
from outrider_bench.modes.name import ModeName
from outrider_bench.modes.peers.known import PEERS
from outrider_bench.modes.setup import Setup
from outrider_bench.prompts import BenchPrompt, encode_prompts
from outrider_bench.report.summary import compare
from outrider_bench.runs.workers import RemoteMode, RunFailed, start_workers

WARM_UP_TOKENS = 8
REQUESTS = 4  # one after the other, for each that runs at a time
_SLACK = 64  # tokens of cache per request besides its own: the rest of a block, and a draft


@dataclass(frozen=True, slots=True)
class MeasuredLoad:
    """One load of a mode. num_requests: at a time. read_seconds: for the same prompts with one new token each."""

    mode: str
    num_requests: int
    repeat: int
    batch: AnsweredLoad
    read_seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Decoded tokens per second of all requests, after the first of each; 0 if noise exceeds decoding."""
        seconds = self.batch.seconds - self.read_seconds
        return (self.batch.num_tokens - len(self.batch.token_ids)) / seconds if seconds > 0 else 0.0

    @property
    def total_seconds(self) -> float:
        """From the start of the first request to the end of the last."""
        return self.batch.seconds

    @property
    def end_to_end(self) -> float:
        """New tokens per second of all requests, reading the prompts included."""
        return self.batch.num_tokens / self.batch.seconds


def run(
    setup: Setup,
    prompts: list[BenchPrompt],
    names: list[str],
    levels: Sequence[int],
    *,
    repeats: int = 3,
    progress: Callable[[int], AbstractContextManager[Callable[[], None]]] = lambda _: nullcontext(lambda: None),
) -> dict[str, Any]:
    """Run every level in every mode, interleaved. The others are compared with the first mode.

    A level has `REQUESTS` times as many requests in all, if there are prompts for them. With fewer prompts than a level
    has requests, these are used again from the first on. A prompt's `references` are not used. progress: as
    `benchmark.run`.

    Raises:
        OptionError: for an invalid mode, or one that decodes one request at a time.
        OutriderError: when no mode can be loaded.
    """
    config = check(setup, names)
    failures: list[dict[str, Any]] = []

    def fail(mode: str, error: str, num_requests: int | None = None) -> None:
        failures.append({"mode": mode, "num_requests": num_requests, "error": error})

    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        tokenizer = setup.tokenizer or Tokenizer(setup.bundle.tokenizer_path)
        tasks = encode_prompts(prompts, tokenizer)
        counts = {level: max(min(REQUESTS * level, len(tasks)), level) for level in levels}
        loads = [Load([tasks[i % len(tasks)].token_ids for i in range(n)], level) for level, n in counts.items()]
        modes = stack.enter_context(start_workers(names, setup, logs, fail, load_together))
        if not modes:
            raise OutriderError(f"No mode can be loaded; {failures[0]['mode']}: {failures[0]['error']}.")
        advance = stack.enter_context(progress(len(modes) * len(levels) * repeats))
        measured = measure(modes, loads, config, repeats, fail, advance)
        described = describe_modes(modes)
    setting = describe_run(setup, prompts, names, repeats, quick=False)
    return {
        "setting": setting | {"ignore_eos": True, "concurrency": list(levels), "num_prompts": len(prompts)},
        "reference": names[0],
        "modes": described,
        "summary": summarize(measured, levels, names),
        "failures": failures,
        "runs": [
            {
                "mode": one.mode,
                "num_requests": one.num_requests,
                "repeat": one.repeat,
                "seconds": one.batch.seconds,
                "read_seconds": one.read_seconds,
                "token_ids": one.batch.token_ids,
            }
            for one in measured
        ],
    }


def measure(
    modes: Sequence[RemoteMode],
    loads: Sequence[Load],
    config: GenerationConfig,
    repeats: int,
    fail: Callable[[str, str, int | None], None],
    advance: Callable[[], None],
) -> list[MeasuredLoad]:
    """Run every load in every mode, `repeats` times, each time starting with another mode.

    Each load first runs for a few tokens, uncounted, because first calls of a shape compile kernels. A load that fails
    is not tried again, nor is a mode whose process died.
    """
    read = config.replace(max_new_tokens=1, min_new_tokens=0)
    warm = config.replace(max_new_tokens=min(WARM_UP_TOKENS, config.max_new_tokens or 2), min_new_tokens=0)
    failed: set[tuple[str, int]] = set()
    measured = []
    for repeat in range(repeats):
        for number, load in enumerate(loads):
            level = load.at_once
            shift = (number + repeat) % len(modes)
            for mode in (*modes[shift:], *modes[:shift]):
                if (mode.name, level) in failed:
                    advance()
                    continue
                try:
                    if not repeat:
                        mode.run(load, warm)
                    read_seconds = mode.run(load, read).seconds
                    batch: AnsweredLoad = mode.run(load, config)
                    measured.append(MeasuredLoad(mode.name, level, repeat, batch, read_seconds))
                except RunFailed as error:
                    fail(mode.name, str(error), level)
                    failed |= {(mode.name, each.at_once) for each in (loads if error.died else [load])}
                advance()
    return measured


def summarize(measured: Sequence[MeasuredLoad], levels: Sequence[int], names: Sequence[str]) -> list[dict[str, Any]]:
    """For each level and mode, medians over repeats, their smallest and largest, and ratios to the first mode.

    Ratios are paired, repeat by repeat, as the two ran one after the other. identical: how many of the answers had the
    first mode's tokens in every repeat.
    """
    rows = []
    for level in levels:
        found = {
            name: {one.repeat: one for one in measured if (one.mode, one.num_requests) == (name, level)}
            for name in names
        }
        others = found[names[0]]
        reference = others[min(others)].batch.token_ids if others else []
        for name, own in found.items():
            if not own:
                continue
            rows.append(
                {
                    "num_requests": level,
                    "num_answers": len(reference),
                    "mode": name,
                    **compare(own, others),
                    "read_seconds": statistics.median(one.read_seconds for one in own.values()),
                    "end_to_end_tokens_per_second": statistics.median(one.end_to_end for one in own.values()),
                    "identical": sum(
                        all(one.batch.token_ids[i] == token_ids for one in own.values())
                        for i, token_ids in enumerate(reference)
                    ),
                }
            )
    return rows


def load_together(names: list[str], setup: Setup) -> list[BatchMode]:
    """The modes of one worker, with the engine that they share.

    Raises:
        OptionError: as `outrider_bench.modes.make.load_modes`.
    """
    parsed = [ModeName.parse(name) for name in names]
    if parsed[0].kind in PEERS:
        module = import_module(f"outrider_bench.modes.peers.{PEERS[parsed[0].kind].module}")
        made: list[BatchMode] = module.load_together(parsed, setup)
        return made
    modes, engine = our_modes(parsed, setup, forgets=False)
    return [_Ours(mode, engine) for mode in modes]


class _Ours:
    """One of our own modes, with a thread for each request that runs at a time."""

    def __init__(self, mode: Mode, engine: Engine) -> None:
        self.name, self.runtime, self.description = mode.name, mode.runtime, mode.description
        self._mode, self._engine = mode, engine
        self._copier = cast("Suffix", engine.find_drafter("suffix"))

    def run(self, load: Load, config: GenerationConfig) -> AnsweredLoad:
        """Decode these prompts, so many at a time."""
        longest = sorted(map(len, load.prompts))[-load.at_once :]
        needed = sum(length + (config.max_new_tokens or 0) + _SLACK for length in longest)
        room = min(use.num_tokens for use in self._engine.cache.values())
        if needed > room:
            size = self._engine.config.scheduler.cache_size
            raise OutriderError(
                f"cache_size={size:g} GB holds {room:,} tokens, and {load.at_once} requests need {needed:,} at the "
                f"same time. Raise it to {1.1 * size * needed / room:.2g} or more."
            )
        self._copier.forget()  # a load that is repeated would be copied from the one before
        return load.run(lambda prompt: self._mode.run(prompt, config).token_ids)


def check(setup: Setup, names: list[str]) -> GenerationConfig:
    """Check, without loading anything, that these modes can be compared. Returns the config for all requests.

    Raises:
        OptionError: for a mode or an option that cannot be compared.
    """
    for name in map(ModeName.parse, names):
        if name.kind in PEERS and not PEERS[name.kind].together:
            raise OptionError(
                f"Mode '{name.text}' decodes one request at a time here. Leave it out: several at a time are compared "
                "in our own modes, openvino-genai's and llama-server's."
            )
    check_setup(setup, names)
    config = setup.config.generation
    if config.stop or config.stop_token_ids:
        raise OptionError(
            "--stop would end some answers early, and all must have the same number of tokens. Leave it out."
        )
    if (config.max_new_tokens or 0) < 2:
        raise OptionError(
            f"max_new_tokens={config.max_new_tokens} leaves no token to decode after the first. Give 2 or more."
        )
    return config.replace(ignore_eos=True, references=())
