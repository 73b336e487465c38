"""The speculative loop."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from outrider.calls import submit
from outrider.sampling import DraftRows
from outrider.types import NO_DRAFT, Chunk, Committed, Draft

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from outrider.observer import Observer
    from outrider.request import Request
    from outrider.types import Backend, DraftRequest, Pending


def step(main: Backend, requests: Seq[Request], max_num_batched_tokens: int, observer: Observer | None = None) -> None:
    """One round for every request: propose, verify, commit (Leviathan et al. 2022, algorithm 1).

    A request whose prompt is not read yet reads its next piece instead. All requests share one target pass.
    Plain decoding is a round with an empty draft.

    Raises:
        DeviceError: when a model's call fails. Other errors end only the request that they belong to.
    """
    drafts = propose(requests, main.vocab_size, observer)

    piece = max(max_num_batched_tokens // len(requests), 2)
    chunks = []
    for request, draft in zip(requests, drafts, strict=True):
        unread = request.sequence.token_ids[request.slot.length :]
        if len(unread) > piece:
            chunks.append(Chunk(request.slot, unread[:piece], 0, request.features))
        else:
            chunks.append(Chunk(request.slot, unread + draft.token_ids, len(draft) + 1, request.features))
    target_pass = submit(main, chunks, observer)
    draft_ahead(requests, drafts, target_pass, observer)
    target = target_pass.wait()

    row = 0
    for request, draft, chunk in zip(requests, drafts, chunks, strict=True):
        begin, path = request.slot.length - len(chunk.token_ids), list[int]()
        try:
            if chunk.num_rows:
                rows = DraftRows.of(target, row, request.sampler, draft.token_ids)
                row += chunk.num_rows
                outcome = request.verify(draft, rows)
                if observer is not None:
                    observer.verified(request, draft, outcome)
                request.commit(rows, outcome)
                request.slot.trim(len(request.sequence) - 1)  # drops the rejected tokens
                path = outcome.path
            if request.drafter is not None:
                read = request.sequence.token_ids[begin : request.slot.length]
                features = target.features(chunk)[: len(read)] if chunk.features else None
                request.drafter.observe(request.sequence, Committed(read, path, features))
            if observer is not None:
                observer.committed(request)
        except Exception as error:  # isolate failures per request
            request.fail(error)


def propose(requests: Seq[Request], vocab_size: int, observer: Observer | None = None) -> list[Draft]:
    """A draft for every request. Each drafter is called once for all requests that use it.

    An error in a drafter ends the requests that use it.
    """
    drafts = [NO_DRAFT] * len(requests)
    drafters = {id(request.drafter): request.drafter for request in requests if request.drafter is not None}
    for drafter in drafters.values():
        mine = [i for i, request in enumerate(requests) if request.drafter is drafter and request.limit > 0]
        if observer is not None:
            observer.drafting([requests[i] for i in mine])
        try:
            proposed = drafter.propose([_asked(requests[i], observer) for i in mine])
            for i, draft in zip(mine, proposed, strict=True):
                drafts[i] = _within(draft, requests[i].limit, vocab_size)
        except Exception as error:  # an app's drafter's, or a draft model's device's
            for request in requests:
                if request.drafter is drafter:
                    request.fail(error)
        if observer is not None:
            observer.drafted([drafts[i] for i in mine])
    return drafts


def draft_ahead(
    requests: Seq[Request], drafts: Seq[Draft], target_pass: Pending, observer: Observer | None = None
) -> None:
    """Let drafters that can do so draft for the next round during this round's target pass.

    An error in a drafter ends the requests that use it.
    """
    drafters = {id(request.ahead_drafter): request.ahead_drafter for request in requests if request.ahead_drafter}
    for drafter in drafters.values():
        mine = [i for i, request in enumerate(requests) if request.ahead_drafter is drafter and len(drafts[i])]
        if not mine:
            continue
        if observer is not None:
            observer.drafting([requests[i] for i in mine], ahead=True)
        try:
            drafter.draft_ahead([_asked(requests[i], observer) for i in mine], [drafts[i] for i in mine], target_pass)
        except Exception as error:
            for request in requests:
                if request.ahead_drafter is drafter:
                    request.fail(error)
        if observer is not None:
            observer.drafted([])


def _asked(request: Request, observer: Observer | None) -> DraftRequest:
    """The request for a drafter, with the observer of its calls."""
    return request.draft_request if observer is None else replace(request.draft_request, observer=observer)


def _within(draft: Draft, limit: int, vocab_size: int) -> Draft:
    """The draft, cut to `limit` tokens and before any unknown id: these would be read beyond the device's arrays."""
    known = next((i for i, token_id in enumerate(draft.token_ids) if not 0 <= token_id < vocab_size), limit)
    return draft if len(draft) <= min(known, limit) else draft.cut(min(known, limit))
