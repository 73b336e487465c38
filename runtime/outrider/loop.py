"""The speculative loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.drafting import go_ahead, propose
from outrider.sampling import DraftRows
from outrider.types import NO_DRAFT, Chunk, Committed

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from outrider.request import Request
    from outrider.types import Backend


def step(main: Backend, requests: Seq[Request], max_num_batched_tokens: int) -> None:
    """One round for every request: propose, check, commit (Leviathan et al. 2022, algorithm 1).

    A request whose prompt is not read yet reads its next piece instead; all go through the main model in one call.
    Plain decoding is a round with an empty draft.

    Raises:
        DeviceError: when a model's call fails. What goes wrong with one request alone ends that request.
    """
    turns = propose(requests, main.vocab_size)
    drafts = [turn.draft if turn else NO_DRAFT for turn in turns]

    piece = max(max_num_batched_tokens // len(requests), 2)
    chunks = []
    for request, draft in zip(requests, drafts, strict=True):
        unread = request.sequence.token_ids[request.slot.length :]
        if len(unread) > piece:
            chunks.append(Chunk(request.slot, unread[:piece], 0, request.features))
        else:
            chunks.append(Chunk(request.slot, unread + draft.token_ids, len(draft) + 1, request.features))
    check = main.submit(chunks)
    go_ahead(requests, turns, check)
    checked = check.wait()

    row = 0
    for request, draft, chunk in zip(requests, drafts, chunks, strict=True):
        begin, path = request.slot.length - len(chunk.token_ids), list[int]()
        try:
            if chunk.num_rows:
                rows = DraftRows.of(checked, row, request.sampler, draft.token_ids)
                row += chunk.num_rows
                outcome = request.verify(draft, rows)
                request.commit(rows, outcome)
                request.slot.trim(len(request.sequence) - 1)  # drops the rejected tokens
                path = outcome.path
            if request.policy is not None:
                read = request.sequence.token_ids[begin : request.slot.length]
                features = checked.features(chunk)[: len(read)] if chunk.features else None
                request.observe(Committed(read, path, features))
        except Exception as error:  # of one request, which the others shall not suffer for
            request.fail(error)
