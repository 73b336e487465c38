"""The speculative loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.calls import submit
from outrider.drafting import draft_ahead, propose
from outrider.grammar import fill_masks
from outrider.sampling import DraftRows
from outrider.types import NO_DRAFT, Chunk, Committed

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from outrider.observer import Observer
    from outrider.request import Request
    from outrider.types import Backend


def step(main: Backend, requests: Seq[Request], max_num_batched_tokens: int, observer: Observer | None = None) -> None:
    """One round for every request: propose, verify, commit (Leviathan et al. 2022, algorithm 1).

    A request whose prompt is not read yet reads its next piece instead. All requests share one target pass.
    Plain decoding is a round with an empty draft.

    Raises:
        DeviceError: when a model's call fails. Other errors end only the request that they belong to.
    """
    turns = propose(requests, main.vocab_size, observer)
    drafts = [turn.draft if turn else NO_DRAFT for turn in turns]
    readings = [draft.with_masks(main.capabilities.mask_token_ids) for draft in drafts]

    piece = max(max_num_batched_tokens // len(requests), 2)
    chunks = []
    for request, reading in zip(requests, readings, strict=True):
        begin = request.slot.length
        token_ids, generated = request.sequence.next_piece(begin, piece)
        num_rows, parents = 0, reading.parents_behind(len(token_ids))
        if begin + len(token_ids) == len(request.sequence):
            token_ids, num_rows = token_ids + reading.token_ids, len(reading) + 1
        chunks.append(Chunk(request.slot, token_ids, num_rows, request.features, parents, generated))
    begins = [request.slot.length for request in requests]
    target_pass = submit(main, chunks, observer)
    every = zip(requests, drafts, chunks, strict=True)
    fill_masks([(request.grammar, draft) for request, draft, chunk in every if request.grammar and chunk.num_rows])
    draft_ahead(requests, turns, target_pass, observer)
    target = target_pass.wait()

    row = 0
    for request, turn, draft, chunk, begin in zip(requests, turns, drafts, chunks, begins, strict=True):
        path, kept = list[int](), [*range(len(chunk.token_ids))]
        first, row = row, row + chunk.num_rows
        try:
            if chunk.num_rows:
                rows = DraftRows.of(target, first, request.sampler, draft)
                outcome = request.verify(draft, rows)
                if observer is not None:
                    observer.verified(request, draft, outcome)
                request.commit(rows, outcome, turn.author if turn else None)
                path = outcome.path
                if chunk.parents is not None:
                    before = len(chunk.token_ids) - chunk.num_rows + 1
                    kept = [*range(before), *(before + i for i in path)]
                    request.slot.keep(kept)
                request.slot.trim(len(request.sequence) - 1)  # drops the rejected tokens, and masks
            if request.policy is not None:
                read = request.sequence.token_ids[begin : request.slot.length]
                features = target.features(chunk)[kept[: len(read)]] if chunk.features else None
                masks = [target.row(first + i + 1) for i in draft.masks_behind(path)]
                request.observe(Committed(read, path, features, masks))
            if observer is not None:
                observer.committed(request)
        except Exception as error:  # isolate failures per request
            request.fail(error)
