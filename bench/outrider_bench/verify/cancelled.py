"""Checks that cancelled answers leave no trace: those that come after them are plain decoding's."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from outrider.decoding.results import TextChunk
from outrider.engine.engine import Engine
from outrider.types import Prompt

WAYS = ("cancel", "close", "submit")  # the option `cancel`, a stream that is closed early, a submitted request


@dataclass(frozen=True, slots=True)
class Known:
    """A prompt, its answer by plain decoding before anything was cancelled, and the seconds that took."""

    prompt: list[int] | Prompt
    token_ids: list[int]
    seconds: float


@dataclass(frozen=True, slots=True)
class Wrong:
    """An answer that was not the known one. after: what was cancelled before it."""

    prompt: int
    drafter: str | None
    after: str
    num_cached_tokens: int


def known_answers(engine: Engine, prompts: Sequence[list[int] | Prompt], **options: Any) -> list[Known]:
    """Each prompt's answer by plain decoding, with these options."""
    found = []
    for prompt in prompts:
        began = time.perf_counter()
        token_ids = engine.generate(prompt, drafter=None, **options).token_ids
        found.append(Known(prompt, token_ids, time.perf_counter() - began))
    return found


def cancel_and_compare(
    engine: Engine,
    known: Sequence[Known],
    drafters: Sequence[str | None],
    num_cancels: int,
    seed: int,
    advance: Callable[[], None] = lambda: None,
    **options: Any,
) -> list[Wrong]:
    """Cancel answers at random moments, in all ways; after each, compare answers with the known ones.

    After each cancelled answer come one to the same prompt and one to another. Beside every third runs a bystander.
    options: those of `known`.
    """
    rng, found = random.Random(seed), []  # noqa: S311

    def compare(index: int, after: str) -> None:
        drafter = rng.choice(drafters)
        result = engine.generate(known[index].prompt, drafter=drafter, **options)
        if result.token_ids != known[index].token_ids:
            found.append(Wrong(index, drafter, after, result.stats.num_cached_tokens))

    with ThreadPoolExecutor(1) as pool:
        for number in range(num_cancels):
            index, way, drafter = rng.randrange(len(known)), rng.choice(WAYS), rng.choice(drafters)
            after = f"{way} of prompt {index} with {drafter}"
            beside = pool.submit(compare, rng.randrange(len(known)), f"beside {after}") if number % 3 == 0 else None
            seconds = rng.random() ** 2 * 1.5 * known[index].seconds
            _cancel(engine, known[index].prompt, way, seconds, drafter=drafter, **options)
            compare(index, after)
            compare(rng.randrange(len(known)), after)
            if beside is not None:
                beside.result()
            advance()
    return found


def _cancel(engine: Engine, prompt: list[int] | Prompt, way: str, seconds: float, **options: Any) -> None:
    """Begin an answer, and end it after so many seconds; it may end before."""
    if way == "submit":
        ended = threading.Event()

        def take(news: TextChunk | BaseException) -> None:
            if isinstance(news, BaseException) or news.result:
                ended.set()

        handle = engine.submit(prompt, sink=take, **options)
        ended.wait(seconds)
        handle.cancel()
        ended.wait()
        return
    cancel = threading.Event()
    timer = threading.Timer(seconds, cancel.set)
    timer.start()
    try:
        for _ in engine.stream(prompt, cancel=cancel if way == "cancel" else None, **options):
            if way == "close" and cancel.is_set():
                break
    finally:
        timer.cancel()
