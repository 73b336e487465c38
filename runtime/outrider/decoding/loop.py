"""The speculative loop."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq

from outrider.decoding.drafting import draft_ahead, propose
from outrider.decoding.observer import Observer
from outrider.decoding.reading import Reading, draft_of, observe
from outrider.decoding.request import Request
from outrider.decoding.scheduler import Scheduler
from outrider.models.calls import submit
from outrider.tokens.grammar import LATE, fill_masks
from outrider.types import Backend, Turn

_LATE_SECONDS = 0.02  # that a round waits for slow masks, where no request is ready


def step(main: Backend, requests: Seq[Request], scheduler: Scheduler, observer: Observer | None = None) -> None:
    """One round for every request: propose, verify, commit (Leviathan et al. 2022, algorithm 1).

    A request whose prompt is not read yet reads its next piece instead, or waits, as the scheduler decides. All
    requests share one target pass. Plain decoding is a round with an empty draft. A request whose grammar is slow waits
    until its mask is known.

    Raises:
        DeviceError: when a model's call fails. Other errors end only the request that they belong to.
    """
    ready = [request for request in requests if request.is_ready]
    if not ready:
        if not any(request.ended for request in requests):
            LATE.wait(_LATE_SECONDS)
        return
    requests, began = ready, time.perf_counter()
    turns = propose(requests, main.vocab_size, observer)
    for request in requests:
        request.end_if_cancelled()  # while drafting
    readings = _share(requests, turns, scheduler, began)
    if not readings:
        return
    main_began = main.seconds
    target_pass = submit(main, [reading.chunk for reading in readings], observer)
    try:
        judged = [(reading.request.grammar, reading.draft) for reading in readings if reading.chunk.num_rows]
        fill_masks([(grammar, draft) for grammar, draft in judged if grammar])
        draft_ahead([(reading.request, reading.turn) for reading in readings], target_pass, observer)
    finally:  # whatever happens: the next round writes where this one reads
        target = target_pass.wait()
    took = main.seconds - main_began
    for reading in readings:
        request, commit_began = reading.request, time.perf_counter()
        try:
            path = reading.commit(target, observer) if reading.chunk.num_rows else []
            if request.policy is not None:
                observe(request, reading.committed(target, path, beside_prompts=scheduler.num_prompt_rows > 0))
            if observer is not None:
                observer.committed(request)
        except BaseException as error:  # isolate failures per request; a panic in llguidance is no Exception
            request.fail(error)
        if request.waits:  # all of its rows are read on the host
            took += time.perf_counter() - commit_began
    steady = main.capabilities.steady
    is_alone = not any(reading.request.ahead or reading.chunk.parents for reading in readings)
    scheduler.took(took, steady.current if steady else 0, alone=is_alone)


def _share(requests: Seq[Request], turns: Seq[Turn | None], scheduler: Scheduler, began: float) -> list[Reading]:
    """What each request reads in this round's call, as the scheduler shares its rows. began: the round."""
    sound = [(request, turn) for request, turn in zip(requests, turns, strict=True) if not request.ended]
    counts = scheduler.share(
        [_num_wanted(request, turn) for request, turn in sound],
        [request.decodes and not request.waits for request, _ in sound],
        [request.slot.length for request, _ in sound],
        begun=time.perf_counter() - began,
    )
    readings: list[Reading] = []
    row = 0
    for (request, turn), count in zip(sound, counts, strict=True):
        if count and turn is not None and request.waits:
            turn.draft = turn.draft.cut(count - 1)
        if count:  # else it waits
            readings.append(Reading.of(request, turn, count, row))
            row += readings[-1].chunk.num_rows
    return readings


def _num_wanted(request: Request, turn: Turn | None) -> int:
    """Most rows of a request in one call: an answer's newest tokens and draft, or a prompt up to its next boundary."""
    begin, length = request.slot.length, len(request.sequence)
    if not request.decodes:
        return len(request.sequence.next_piece(begin, length)[0])
    return length - begin - 1 + draft_of(turn).num_rows
