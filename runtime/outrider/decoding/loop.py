"""The speculative loop."""

from __future__ import annotations

import time

from outrider.decoding.answer import isolated
from outrider.decoding.drafting import draft_ahead, propose
from outrider.decoding.observer import Observer
from outrider.decoding.scheduler import Scheduler
from outrider.models.calls import submit
from outrider.tokens.grammar import fill_masks
from outrider.types import Backend


def step(main: Backend, scheduler: Scheduler, observer: Observer | None = None) -> None:
    """One round for every answer that runs: propose, verify, commit (Leviathan et al. 2022, algorithm 1).

    An answer whose prompt is not read yet reads its next piece instead, or waits, as the scheduler decides. All
    answers share one target pass. Plain decoding is a round with an empty draft. An answer whose grammar is slow waits
    until its mask is known.

    Raises:
        DeviceError: when a model's call fails. Other errors end only the answer that they belong to.
    """
    proposed = propose(scheduler.ready(), main.vocab_size, observer)
    together = scheduler.round(proposed)
    if not together.readings:
        return
    main_began = main.seconds
    target_pass = submit(main, together.chunks, observer)
    try:
        fill_masks(together.judged)
        goes_ahead = draft_ahead(together.readings, target_pass, observer)
    finally:  # whatever happens: the next round writes where this one reads
        target = target_pass.wait()
    took = main.seconds - main_began
    for reading in together.readings:
        commit_began = time.perf_counter()
        with isolated(reading.answer):
            reading.commit(target, observer, beside_prompts=together.num_prompt_rows > 0)
        if reading.answer.request.waits:  # all of its rows are read on the host
            took += time.perf_counter() - commit_began
    scheduler.took(together, took, alone=not goes_ahead)
