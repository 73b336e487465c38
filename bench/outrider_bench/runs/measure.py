"""Runs modes interleaved, and ends in time: `outrider bench --quick`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.config import GenerationConfig
from outrider_bench.modes.mode import Mode, Run
from outrider_bench.prompts import Task
from outrider_bench.runs.workers import RunFailed

QUICK_SECONDS = 600.0
FEWEST_TOKENS = 16


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One run of a prompt in a mode, or the error instead. number: the prompt's."""

    number: int
    mode: str
    repeat: int
    run: Run | None
    error: str | None = None

    @property
    def key(self) -> tuple[int, str, int]:
        """Identifies the run."""
        return self.number, self.mode, self.repeat


class TimeBudget:
    """A time budget from now on, and the time that prompts took so far.

    clock: returns seconds; tests use another one.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds
        self._measuring_since: float | None = None
        self._num_prompts = 0

    @property
    def left(self) -> float:
        """Seconds left."""
        return self._end - self._clock()

    def choose_tokens(self, wanted: int, warm_up_seconds: float, num_prompts: int) -> int:
        """The answer length with which this smallest useful set of prompts takes half of the time left.

        warm_up_seconds: the time of one prompt in all modes, with answers of `wanted` tokens.
        """
        share = self.left / 2 / max(warm_up_seconds * num_prompts, 1e-9)
        return wanted if share >= 1 else min(wanted, max(FEWEST_TOKENS, int(wanted * share)))

    def fits(self, num_prompts: int) -> bool:
        """Whether `num_prompts` more prompts, in all modes, are likely to end in time; True for the first ones."""
        if self._measuring_since is None:
            self._measuring_since = self._clock()
        if not self._num_prompts:
            return True
        seconds = (self._clock() - self._measuring_since) / self._num_prompts
        return num_prompts * seconds <= self.left

    def count(self) -> None:
        """Count a prompt that has run in all modes."""
        self._num_prompts += 1


def layers(tasks: Sequence[Task], repeats: int) -> list[list[tuple[int, int]]]:
    """The order of runs, as layers of (prompt's number, repeat), with one prompt of every category each.

    All prompts run once before any runs again. So a measurement that ends between two layers covers all categories
    about equally.
    """
    by_category: dict[str, list[int]] = {}
    for number, task in enumerate(tasks):
        by_category.setdefault(task.prompt.category, []).append(number)
    deepest = max(len(numbers) for numbers in by_category.values())
    return [
        [(numbers[depth], repeat) for numbers in by_category.values() if depth < len(numbers)]
        for repeat in range(repeats)
        for depth in range(deepest)
    ]


def warm_up(modes: Sequence[Mode], tasks: Sequence[Task], config: GenerationConfig) -> float:
    """Run the first prompt in every mode, uncounted, because first calls of a shape compile kernels. Returns seconds.

    Errors are ignored here. They occur again, and are reported, in the measurement.
    """
    began = time.perf_counter()
    for mode in modes:
        _run(mode, tasks, 0, 0, config)
    return time.perf_counter() - began


def measure(
    modes: Sequence[Mode],
    tasks: Sequence[Task],
    config: GenerationConfig,
    repeats: int = 1,
    *,
    done: Sequence[RunRecord] = (),
    record: Callable[[RunRecord], None] = lambda _: None,
    budget: TimeBudget | None = None,
) -> list[RunRecord]:
    """Run every prompt in every mode, interleaved, so that a machine that slows down slows all of them.

    done: earlier records, which come first in the result. record: called with each new one. budget: ends the
    measurement before the first layer that does not fit, or within a layer if the machine has become slower. The first
    layer always runs.
    """
    records = list(done)
    there = {old.key for old in done if old.run}
    dead: set[str] = set()  # modes whose process died
    planned = layers(tasks, repeats)
    first = set(planned[0])
    for layer in planned:
        if budget and not budget.fits(len(layer)):
            break
        for number, repeat in layer:
            if budget and (number, repeat) not in first and not budget.fits(1):
                return records
            # Start with another mode each time: after a long answer the machine may be warmer.
            shift = (number + repeat) % len(modes)
            ran = False
            for mode in (*modes[shift:], *modes[:shift]):
                if (number, mode.name, repeat) in there or mode.name in dead:
                    continue
                made, died = _run(mode, tasks, number, repeat, config)
                dead |= {mode.name} if died else set()
                records.append(made)
                record(made)
                ran = True
            if budget and ran:
                budget.count()
    return records


def _run(
    mode: Mode, tasks: Sequence[Task], number: int, repeat: int, config: GenerationConfig
) -> tuple[RunRecord, bool]:
    """A run, and whether its process died."""
    task = tasks[number]
    if task.prompt.references and mode.runtime == "outrider":  # other runtimes do not read them
        config = config.replace(references=task.prompt.references)
    try:
        return RunRecord(number, mode.name, repeat, mode.run(task.token_ids, config)), False
    except RunFailed as error:
        return RunRecord(number, mode.name, repeat, None, str(error)), error.died
