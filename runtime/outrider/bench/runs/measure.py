"""Runs modes against one another."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider.bench.runs.workers import RunFailed

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as Seq

    from outrider.bench.modes.mode import Mode, Run
    from outrider.bench.prompts import Task
    from outrider.bench.runs.budget import Budget
    from outrider.config import GenerationConfig


@dataclass(frozen=True, slots=True)
class Record:
    """One run of a prompt in a mode, or the line that says why there is none. number: the prompt's place."""

    number: int
    mode: str
    repeat: int
    run: Run | None
    error: str | None = None

    @property
    def key(self) -> tuple[int, str, int]:
        """Which run it is."""
        return self.number, self.mode, self.repeat


def layers(tasks: Seq[Task], repeats: int) -> list[list[tuple[int, int]]]:
    """What is run, in order: (prompt's place, repeat), a prompt of every category at a time.

    All prompts run once before any runs again. So a measurement that is cut short between two layers has about as
    much of every category.
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


def warm_up(modes: Seq[Mode], tasks: Seq[Task], config: GenerationConfig) -> float:
    """Run the first prompt in every mode, uncounted, as first calls of a shape compile kernels; returns the seconds.

    What fails here fails again, and is reported, in the measurement.
    """
    began = time.perf_counter()
    for mode in modes:
        _run(mode, tasks, 0, 0, config)
    return time.perf_counter() - began


def measure(
    modes: Seq[Mode],
    tasks: Seq[Task],
    config: GenerationConfig,
    repeats: int = 1,
    *,
    done: Seq[Record] = (),
    record: Callable[[Record], None] = lambda _: None,
    budget: Budget | None = None,
) -> list[Record]:
    """Run every prompt in every mode, interleaved, so that a machine that slows down slows all of them.

    done: records that are there already, and come first in what is returned. record: called with each new one.
    budget: ends the measurement before the first layer that does not fit into it, or within it where the machine has
    become slower; the first layer is run in any case.
    """
    records = list(done)
    there = {old.key for old in done if old.run}
    dead: set[str] = set()  # modes that killed their process: once is enough
    planned = layers(tasks, repeats)
    first = set(planned[0])
    for layer in planned:
        if budget and not budget.fits(len(layer)):
            break
        for number, repeat in layer:
            if budget and (number, repeat) not in first and not budget.fits(1):
                return records
            # Another mode begins each time: what runs behind a long answer may meet a warmer machine.
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


def _run(mode: Mode, tasks: Seq[Task], number: int, repeat: int, config: GenerationConfig) -> tuple[Record, bool]:
    """A run, and whether it killed its process."""
    task = tasks[number]
    if task.prompt.references and mode.runtime == "outrider":  # nobody else reads them
        config = config.replace(references=task.prompt.references)
    try:
        return Record(number, mode.name, repeat, mode.run(task.token_ids, config)), False
    except RunFailed as error:
        return Record(number, mode.name, repeat, None, str(error)), error.died
