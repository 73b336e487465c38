"""The protocols of modes, for one request or several at a time, and their results."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from outrider.config import GenerationConfig


@dataclass(frozen=True, slots=True)
class Run:
    """One request in one mode. Seconds are wall time; total_seconds starts before the prompt is read."""

    token_ids: list[int]
    first_token_seconds: float
    total_seconds: float
    stats: dict[str, Any] = field(default_factory=dict)  # as `Stats.as_dict`, of modes that have them

    @property
    def tokens_per_second(self) -> float:
        """Decoded tokens per second after the first token."""
        seconds = self.total_seconds - self.first_token_seconds
        return (len(self.token_ids) - 1) / seconds if len(self.token_ids) > 1 and seconds > 0 else 0.0

    @property
    def end_to_end(self) -> float:
        """Tokens per second of the whole request, reading the prompt included."""
        return len(self.token_ids) / self.total_seconds


class Mode(Protocol):
    """One way to decode. description: weights, precision, threads and version, in one line."""

    name: str
    runtime: str
    description: str
    num_parallel: int  # runs at the same time

    def run(self, prompt_token_ids: list[int], config: GenerationConfig) -> Run:
        """Decode one prompt."""


@dataclass(frozen=True, slots=True)
class Load:
    """Prompts, as token ids, of which `at_once` are decoded at any time: where one ends, the next begins."""

    prompts: list[list[int]]
    at_once: int

    def run(self, decode: Callable[[list[int]], list[int]]) -> AnsweredLoad:
        """Decode them with so many threads. decode: one prompt; returns its new tokens."""
        with ThreadPoolExecutor(self.at_once) as threads:
            began = time.perf_counter()
            return AnsweredLoad(list(threads.map(decode, self.prompts)), time.perf_counter() - began)


@dataclass(frozen=True, slots=True)
class AnsweredLoad:
    """The answers to a `Load`. seconds: from the start of the first to the end of the last."""

    token_ids: list[list[int]]
    seconds: float

    @property
    def num_tokens(self) -> int:
        """New tokens of all requests."""
        return sum(map(len, self.token_ids))


class BatchMode(Protocol):
    """One way to decode several prompts at a time."""

    name: str
    runtime: str
    description: str

    def run(self, load: Load, config: GenerationConfig) -> AnsweredLoad:
        """Decode these prompts, so many at a time."""
