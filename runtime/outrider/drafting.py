"""The drafts of one round: policies choose, drafters draft, each in one call for all requests that share it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from outrider.request import Request
    from outrider.types import Draft, DraftPolicy, Pending, Turn


def propose(requests: Seq[Request], vocab_size: int) -> list[Turn | None]:
    """A draft for every request, as its policy chooses; None where nothing may be drafted."""
    turns: list[Turn | None] = [None] * len(requests)
    groups: dict[DraftPolicy, list[int]] = {}
    for i, request in enumerate(requests):
        if request.policy is not None and request.limit > 0:
            groups.setdefault(request.policy, []).append(i)
    for policy, mine in groups.items():
        try:
            chosen = policy.choose([requests[i].draft_request for i in mine])
            _ask(chosen)
            for i, turn in zip(mine, chosen, strict=True):
                turn.draft = _within(turn.draft, turn.request.limit, vocab_size)
                turns[i] = turn
            policy.drafted()
        except Exception as error:  # of an app's drafter, or of a draft model's device
            _fail(requests, policy, error)
    return turns


def _ask(turns: Seq[Turn]) -> None:
    """Have drafters draft for the turns that they were chosen for."""
    for drafter in {id(turn.drafter): turn.drafter for turn in turns if turn.drafter is not None}.values():
        mine = [turn for turn in turns if turn.drafter is drafter]
        for turn, draft in zip(mine, drafter.propose([turn.request for turn in mine]), strict=True):
            turn.draft = draft


def go_ahead(requests: Seq[Request], turns: Seq[Turn | None], check: Pending) -> None:
    """Let drafters draft for the next round, while this one's drafts are checked."""
    groups: dict[DraftPolicy, list[Turn]] = {}
    for request, turn in zip(requests, turns, strict=True):
        if request.ahead and request.policy is not None and turn is not None and len(turn.draft):
            groups.setdefault(request.policy, []).append(turn)
    for policy, mine in groups.items():
        try:
            policy.go_ahead(mine, check)
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
