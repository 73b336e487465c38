"""The drafts of one round: policies choose drafters, and each drafter is called once for all requests of a policy."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import replace

from outrider.decoding.checks import copied, fault_of
from outrider.decoding.observer import DraftStage, Observer
from outrider.decoding.own import REMEDY, inner
from outrider.decoding.request import Request
from outrider.errors import DrafterError, OutriderError, one_line
from outrider.system.guard import Guard, is_interrupt
from outrider.types import NO_DRAFT, Draft, Drafter, DraftPolicy, Pending, Turn


def propose(requests: Seq[Request], vocab_size: int, observer: Observer | None = None) -> list[Turn | None]:
    """A turn with a draft for every request, as its policy chooses; None if nothing may be drafted.

    Where a request's grammar allows only one next token, the draft is that token and those forced behind it. Nothing
    can draft them better or at a lower cost, so the policy is not asked, and learns nothing from them.

    An error in a policy or a drafter ends the requests that it was called for. A draft that breaks a rule ends its own.
    """
    turns: list[Turn | None] = [None] * len(requests)
    groups: dict[DraftPolicy, list[int]] = {}
    for i, request in enumerate(requests):
        if request.policy is None or request.limit <= 0:
            continue
        try:
            forced = request.grammar.forced([], request.limit) if request.grammar else []
        except BaseException as error:  # a panic in llguidance is no Exception
            request.fail(error)
            continue
        if forced:
            turns[i] = Turn(request.draft_request(), draft=Draft(forced))
        else:
            groups.setdefault(request.policy, []).append(i)
    together = sum(request.decodes for request in requests)
    for policy, indices in groups.items():
        mine = [requests[i] for i in indices]
        try:
            chosen = _choose(policy, mine, together, vocab_size, observer)
            _draft(mine, chosen, vocab_size, observer)
            policy.drafted()
            for i, turn in zip(indices, chosen, strict=True):
                turns[i] = turn
        except BaseException as error:  # an app's drafter's, a draft model's device's, or a panic in llguidance
            _fail(mine, _named(policy, error))
    return turns


def _named(policy: DraftPolicy, error: BaseException) -> BaseException:
    """The error of a policy's round; if an app's drafter is among its drafters, as an error of ours."""
    of_an_app = any(inner(each) is not each for each in policy.drafters)
    if not of_an_app or isinstance(error, OutriderError) or is_interrupt(error):
        return error
    named = DrafterError(f"An app's drafter returned drafts that cannot be read: {one_line(error)}. {REMEDY}")
    named.__cause__ = error
    return named


def _choose(
    policy: DraftPolicy, requests: Seq[Request], together: int, vocab_size: int, observer: Observer | None
) -> Seq[Turn]:
    """The policy's turns, one for each request. together: answers of this round, those of other policies included."""
    with _observed(observer, "choose", requests) as drafts:
        chosen = policy.choose([request.draft_request(request.slot, together, observer) for request in requests])
        for request, turn in zip(requests, chosen, strict=True):
            turn.draft = _taken(request, turn, vocab_size, turn.copier)
            drafts.append(turn.draft)
    return chosen


def _draft(requests: Seq[Request], turns: Seq[Turn], vocab_size: int, observer: Observer | None) -> None:
    """Call the drafters that were chosen for these turns."""
    for drafter in {id(turn.drafter): turn.drafter for turn in turns if turn.drafter is not None}.values():
        mine = [i for i, turn in enumerate(turns) if turn.drafter is drafter]
        with _observed(observer, "propose", [requests[i] for i in mine]) as drafts:
            proposed = drafter.propose([turns[i].request for i in mine])
            if len(proposed) != len(mine):
                name = requests[mine[0]].name_of(drafter)
                raise DrafterError(
                    f"The drafter {name!r} proposed {len(proposed)} drafts for {len(mine)} requests. Propose one for "
                    "each; Draft([]) is an empty one."
                )
            for i, draft in zip(mine, proposed, strict=True):
                turns[i].draft = draft
                turns[i].draft = _taken(requests[i], turns[i], vocab_size, drafter)
                drafts.append(turns[i].draft)


def _taken(request: Request, turn: Turn, vocab_size: int, author: Drafter | None) -> Draft:
    """A turn's draft as far as the round uses it. One that breaks a rule ends its request alone. author: made it."""
    if turn.draft is NO_DRAFT:
        return NO_DRAFT
    try:
        with Guard("A draft", DrafterError, "Propose an outrider.types.Draft."):
            if fault := fault_of(turn.draft, vocab_size):
                name = "the engine" if author is None else request.name_of(author)
                raise DrafterError(f"The drafter {name!r} proposed {fault}")
        draft = _within(copied(turn.draft), turn.request.limit, vocab_size)
        draft = _allowed(request, draft, goes_on=turn.drafter is None or (author is not None and author.is_free))
        return _readable(request, draft)
    except BaseException as error:  # a panic in llguidance is no Exception
        request.fail(error)
        return NO_DRAFT


def seconds_of(requests: Seq[Request]) -> dict[int, tuple[float, float]]:
    """By drafter, the seconds of its calls so far, and of those during target passes. One that fails is left out.

    An error ends the requests that use the drafter.
    """
    found = {}
    for drafter in {id(drafter): drafter for request in requests for drafter in request.drafters}.values():
        try:
            found[id(drafter)] = drafter.seconds, drafter.ahead_seconds
        except Exception as error:
            _fail([request for request in requests if any(each is drafter for each in request.drafters)], error)
    return found


def draft_ahead(
    turns: Seq[tuple[Request, Turn | None]], target_pass: Pending, observer: Observer | None = None
) -> None:
    """Let drafters that can do so draft for the next round during this round's target pass.

    An error in a policy or a drafter ends the requests that it was called for.
    """
    groups: dict[DraftPolicy, list[tuple[Request, Turn]]] = {}
    for request, turn in turns:
        if request.ahead and request.policy is not None and turn is not None and turn.drafter and len(turn.draft):
            groups.setdefault(request.policy, []).append((request, turn))
    for policy, mine in groups.items():
        try:
            with _observed(observer, "draft ahead", [request for request, _ in mine]):
                policy.go_ahead([turn for _, turn in mine], target_pass)
        except BaseException as error:
            _fail([request for request, _ in mine], error)


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


def _fail(requests: Seq[Request], error: BaseException) -> None:
    """End these requests."""
    for request in requests:
        request.fail(error)


def _readable(request: Request, draft: Draft) -> Draft:
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


def _allowed(request: Request, draft: Draft, *, goes_on: bool) -> Draft:
    """The draft, cut before the first token that the request's grammar does not allow.

    Sampled tokens stay: to drop one after seeing it would bias the output. Those of a draft model are allowed anyway.
    goes_on: add the tokens that the grammar forces behind the others. A draft model's record and price are for its own.
    """
    grammar = request.grammar
    if grammar is None or not len(draft) or draft.probs is not None or draft.parents is not None:
        return draft
    draft = draft.cut(grammar.num_allowed(draft.token_ids))
    forced = grammar.forced(draft.token_ids, request.limit - len(draft)) if goes_on else []
    if not forced:
        return draft
    confidences = None if draft.confidences is None else [*draft.confidences, *(1.0 for _ in forced)]
    return replace(draft, token_ids=[*draft.token_ids, *forced], confidences=confidences)
