"""Measures the prefix cache in conversations, and its memory.

Token ids are random, because the figures depend only on their number.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from outrider.bundle.folder import Bundle
from outrider.config import Config
from outrider.engine.engine import Engine
from outrider.models.cost.slots import open_slot
from outrider.system.memory import memory_in_use
from outrider.types import Chunk

_FIT = 20  # conversations that fit in the cache
_PROMPT, _QUESTION, _ANSWER = 144, 48, 32  # tokens: of the first turn, of the second one, of either answer
_TOKENS = _PROMPT + _QUESTION + 2 * _ANSWER
_BETWEEN = _FIT // 2  # other conversations that begin before one continues
_LONG = 4096  # tokens of the conversation that is continued from the cache, or read again
_CONTEXTS, _DRAFT = (1024, 4096, 16384), 8
_REPEATS, _TRIMS = 3, 50


def measure_conversations(bundle: Bundle, config: Config, count: int) -> dict[str, Any]:
    """Run `count` conversations of two turns in a cache with room for 20, and time the gain of a long one.

    Memory is measured in a process of its own. All options but `cache_size` are as in `config`.

    Raises:
        OutriderError: when loading or a request fails.
    """
    from outrider.engine.engine import Engine

    engine = Engine(bundle, config.replace(enable_prefix_caching=True))
    bytes_per_token = sum(use.bytes_per_token for use in engine.cache.values())
    found = {"take_up": _time_long(engine), "rollback": list(_time_trims(engine))}
    del engine
    # Padding and a part-full block need some room, too.
    cache_size = _FIT * (_TOKENS + 32) * bytes_per_token / 1e9
    small = config.replace(enable_prefix_caching=True, cache_size=cache_size)
    had = _in_a_child(bundle, small, count)
    without = _in_a_child(bundle, small.replace(enable_prefix_caching=False), min(count, 2 * _FIT))["resident_bytes"]
    # Models take memory for every new shape of calls, so compare with the same run without prefix caching.
    rises = [each["highest"] - each["loaded"] for each in (had["resident_bytes"], without)]
    had["rise_without_keeping"] = rises[1]
    had["added_by_keeping"] = (rises[0] - rises[1]) / (cache_size * 1e9)
    return {"conversations": had} | found


def _in_a_child(bundle: Bundle, config: Config, count: int) -> dict[str, Any]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as child:
        return child.submit(_converse, bundle.folder, config, count).result()


def _converse(folder: Path, config: Config, count: int) -> dict[str, Any]:
    """Start the second turn of each conversation after ten others have begun."""
    from outrider.engine.engine import load

    options: dict[str, Any] = {"max_new_tokens": _ANSWER, "ignore_eos": True}
    if config.generation.drafter is not None:
        options["num_assistant_tokens"] = 3  # so that a draft model reads all texts
    engine = load(folder, config)
    loaded = memory_in_use(mapped=False)
    texts = _texts(engine)
    peak, second, ages = loaded, [], {}
    for i in range(count + _BETWEEN):
        if i < count:
            prompt = next(texts)[:_PROMPT]
            ages[i] = prompt + engine.generate(prompt, **options).token_ids
            engine.settle()
        if i >= _BETWEEN:
            text = ages.pop(i - _BETWEEN)
            second.append(engine.generate(text + next(texts)[:_QUESTION], **options).stats)
            engine.settle()
        peak = max(peak, memory_in_use(mapped=False))
    return {
        "num_conversations": count,
        "num_that_fit": _FIT,
        "tokens": _TOKENS,
        "cache_size": config.scheduler.cache_size,
        "num_second_turns_taken_up": sum(stats.num_cached_tokens >= _PROMPT for stats in second),
        "second_turn_prompt_tokens": sum(stats.num_prompt_tokens for stats in second),
        "second_turn_cached_tokens": sum(stats.num_cached_tokens for stats in second),
        "caches": {role: dataclasses.asdict(use) for role, use in engine.cache.items()},
        "weights_bytes": sum(file.stat().st_size for file in folder.rglob("*") if file.suffix in (".bin", ".data")),
        "resident_bytes": {"loaded": loaded, "highest": peak},
    }


def _time_long(engine: Engine) -> dict[str, Any]:
    """Seconds to the first token of a conversation's second turn: from the prefix cache, and read again."""
    options: dict[str, Any] = {"max_new_tokens": _ANSWER, "ignore_eos": True}
    texts = _texts(engine)
    length = min(_LONG, engine.max_tokens - _QUESTION - 2 * _ANSWER)
    prompt = next(texts)[:length]
    text = prompt + engine.generate(prompt, **options).token_ids
    engine.settle()
    taken_up, read_again = [], []
    for _ in range(_REPEATS):
        question = next(texts)[:_QUESTION]
        taken_up.append(engine.generate(text + question, **options).stats)
        engine.settle()
        other = next(texts)[:1] + text[1:]  # another first token, so that no prefix is cached
        read_again.append(engine.generate(other + question, **options).stats)
        engine.settle()
    seconds = [statistics.median(s.time_to_first_token for s in stats) for stats in (taken_up, read_again)]
    return {
        "prompt_tokens": length + _ANSWER + _QUESTION,
        "cached_tokens": [stats.num_cached_tokens for stats in taken_up],
        "cached_tokens_read_again": [stats.num_cached_tokens for stats in read_again],
        "seconds": seconds[0],
        "seconds_read_again": seconds[1],
        "ratio": seconds[0] / seconds[1],
    }


def _time_trims(engine: Engine) -> Iterator[dict[str, float]]:
    """Seconds for trimming a rejected draft, by tokens of context."""
    backend, model, most = engine.main, engine.bundle.manifest.main, engine.main.max_tokens
    if model.format == "onnx":  # it has a table of positions; OpenVINO's models continue beyond their context
        most = min(most, model.geometry.context_length)
    for context in _CONTEXTS:
        if context + _DRAFT > most:
            continue
        slot = open_slot(backend, context + _DRAFT)
        slot.skip_to(context)
        seconds = []
        for _ in range(_TRIMS):
            backend.submit([Chunk(slot, [0] * _DRAFT, num_rows=1)]).wait()
            began = time.perf_counter()
            slot.trim(context)
            seconds.append(time.perf_counter() - began)
        slot.close()
        yield {"context": context, "median_seconds": statistics.median(seconds), "longest_seconds": max(seconds)}


def _texts(engine: Engine) -> Iterator[list[int]]:
    """Endless texts of random tokens. Two begin alike only by chance."""
    rng = np.random.default_rng(0)
    most = engine.bundle.manifest.main.vocab_size
    while True:
        yield rng.integers(0, most, _LONG).tolist()
