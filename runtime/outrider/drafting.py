"""The drafts of one round: policies choose drafters, and each drafter is called once for all requests of a policy."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from collections.abc import Sequence as Seq

    from outrider.observer import DraftStage, Observer
    from outrider.request import Request
    from outrider.types import Draft, DraftPolicy, DraftRequest, Pending, Turn


def propose(requests: Seq[Request], vocab_size: int, observer: Observer | None = None) -> list[Turn | None]:
    """A turn with a draft for every request, as its policy chooses; None if nothing may be drafted.

    An error in a policy or a drafter ends the requests of that policy.
    """
    turns: list[Turn | None] = [None] * len(requests)
    groups: dict[DraftPolicy, list[int]] = {}
    for i, request in enumerate(requests):
        if request.policy is not None and request.limit > 0:
            groups.setdefault(request.policy, []).append(i)
    for policy, indices in groups.items():
        mine = [requests[i] for i in indices]
        try:
            chosen = _choose(policy, mine, vocab_size, observer)
            _draft(mine, chosen, vocab_size, observer)
            policy.drafted()
            for i, turn in zip(indices, chosen, strict=True):
                turns[i] = turn
        except Exception as error:  # an app's drafter's, or a draft model's device's
            _fail(requests, policy, error)
    return turns


def _choose(policy: DraftPolicy, requests: Seq[Request], vocab_size: int, observer: Observer | None) -> Seq[Turn]:
    """The policy's turns, one for each request."""
    with _observed(observer, "choose", requests) as drafts:
        chosen = policy.choose([_draft_request(request, observer) for request in requests])
        for _, turn in zip(requests, chosen, strict=True):
            turn.draft = _within(turn.draft, turn.request.limit, vocab_size)
            drafts.append(turn.draft)
    return chosen


def _draft(requests: Seq[Request], turns: Seq[Turn], vocab_size: int, observer: Observer | None) -> None:
    """Call the drafters that were chosen for these turns."""
    for drafter in {id(turn.drafter): turn.drafter for turn in turns if turn.drafter is not None}.values():
        mine = [i for i, turn in enumerate(turns) if turn.drafter is drafter]
        with _observed(observer, "propose", [requests[i] for i in mine]) as drafts:
            proposed = drafter.propose([turns[i].request for i in mine])
            for i, draft in zip(mine, proposed, strict=True):
                turns[i].draft = _forked(requests[i], _within(draft, turns[i].request.limit, vocab_size))
                drafts.append(turns[i].draft)


def draft_ahead(
    requests: Seq[Request], turns: Seq[Turn | None], target_pass: Pending, observer: Observer | None = None
) -> None:
    """Let drafters that can do so draft for the next round during this round's target pass.

    An error in a policy or a drafter ends the requests of that policy.
    """
    groups: dict[DraftPolicy, list[tuple[Request, Turn]]] = {}
    for request, turn in zip(requests, turns, strict=True):
        if request.ahead and request.policy is not None and turn is not None and len(turn.draft):
            groups.setdefault(request.policy, []).append((request, turn))
    for policy, mine in groups.items():
        try:
            with _observed(observer, "draft ahead", [request for request, _ in mine]):
                policy.go_ahead([turn for _, turn in mine], target_pass)
        except Exception as error:
            _fail(requests, policy, error)


@contextmanager
def _observed(observer: Observer | None, stage: DraftStage, requests: Seq[Request]) -> Iterator[list[Draft]]:
    """Tell the observer when a stage begins and ends. Yields the list for its drafts."""
    drafts: list[Draft] = []
    if observer is None:
        yield drafts
        return
    observer.drafting(stage, requests)
    try:
        yield drafts
    except BaseException as error:
        observer.drafted(drafts, error)
        raise
    observer.drafted(drafts)


def _draft_request(request: Request, observer: Observer | None) -> DraftRequest:
    """The request for a drafter, with the observer of its calls."""
    return request.draft_request if observer is None else replace(request.draft_request, observer=observer)


def _fail(requests: Seq[Request], policy: DraftPolicy, error: Exception) -> None:
    """End the requests of a policy."""
    for request in requests:
        if request.policy == policy:
            request.fail(error)


def _forked(request: Request, draft: Draft) -> Draft:
    """The draft, with room for its branches in the cache; its first candidates if there is too little.

    That depends on the number of candidates, not on which they are, so that it does not bias rejection sampling.
    """
    if draft.parents is None:
        return draft
    branches = draft.branches
    count, length = len(branches) - 1, max(map(len, branches)) + 1
    return draft if count > 0 and request.slot.fork(count, length) == count else draft.first_chain


def _within(draft: Draft, limit: int, vocab_size: int) -> Draft:
    """The draft, cut to `limit` tokens and before any unknown id: these would be read beyond the device's arrays."""
    known = next((i for i, token_id in enumerate(draft.token_ids) if not 0 <= token_id < vocab_size), limit)
    return draft if len(draft) <= min(known, limit) else draft.cut(min(known, limit))
