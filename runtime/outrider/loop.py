"""The speculative loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.sampling import DraftRows
from outrider.types import NO_DRAFT, Chunk, Committed

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from outrider.request import Request
    from outrider.types import Backend, Draft, DraftPolicy, Pending, Turn


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


def propose(requests: Seq[Request], vocab_size: int) -> list[Turn | None]:
    """A draft for every request, as its policy chooses; None where nothing may be drafted."""
    turns: list[Turn | None] = [None] * len(requests)
    for policy in dict.fromkeys(request.policy for request in requests if request.policy is not None):
        mine = [i for i, request in enumerate(requests) if request.policy == policy and request.limit > 0]
        if not mine:
            continue
        try:
            chosen = policy.choose([requests[i].draft_request for i in mine])
            ask(chosen)
            for i, turn in zip(mine, chosen, strict=True):
                turn.draft = _within(turn.draft, turn.request.limit, vocab_size)
                turns[i] = turn
            policy.drafted()
        except Exception as error:  # of an app's drafter, or of a draft model's device
            _fail(requests, policy, error)
    return turns


def ask(turns: Seq[Turn]) -> None:
    """Have each drafter draft, in one call, for the turns that it was chosen for."""
    for drafter in {id(turn.drafter): turn.drafter for turn in turns if turn.drafter is not None}.values():
        mine = [turn for turn in turns if turn.drafter is drafter]
        for turn, draft in zip(mine, drafter.propose([turn.request for turn in mine]), strict=True):
            turn.draft = draft


def go_ahead(requests: Seq[Request], turns: Seq[Turn | None], check: Pending) -> None:
    """Let drafters draft for the next round, while this one's drafts are checked."""
    ahead = [(r.policy, turn) for r, turn in zip(requests, turns, strict=True) if r.ahead and turn and len(turn.draft)]
    for policy in dict.fromkeys(policy for policy, _ in ahead if policy is not None):
        try:
            policy.go_ahead([turn for its, turn in ahead if its == policy], check)
        except Exception as error:
            _fail(requests, policy, error)


def _fail(requests: Seq[Request], policy: DraftPolicy, error: Exception) -> None:
    """What goes wrong with a drafter ends the requests that may use it."""
    for request in requests:
        if request.policy == policy:
            request.fail(error)


def _within(draft: Draft, limit: int, vocab_size: int) -> Draft:
    """As much of a draft as there is room for: more tokens, or others, would be read beyond the device's arrays."""
    known = next((i for i, token_id in enumerate(draft.token_ids) if not 0 <= token_id < vocab_size), limit)
    return draft if len(draft) <= min(known, limit) else draft.cut(min(known, limit))
