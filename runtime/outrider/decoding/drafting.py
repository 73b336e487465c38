"""The drafts of one round: policies choose drafters, and each drafter is called once for all answers of a policy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from outrider.decoding.answer import Answer, isolated
from outrider.decoding.checks import sound
from outrider.decoding.observer import DraftStage, Observer
from outrider.decoding.own import REMEDY, inner
from outrider.decoding.reading import Reading
from outrider.errors import DrafterError, OutriderError, one_line
from outrider.system.guard import is_interrupt
from outrider.types import NO_DRAFT, Draft, Drafter, DraftPolicy, Pending, Turn


def propose(answers: Sequence[Answer], vocab_size: int, observer: Observer | None = None) -> list[Turn | None]:
    """A turn with a draft for every answer, as its policy chooses; None if nothing may be drafted.

    Where an answer's grammar allows only one next token, the draft is that token and those forced after it. Nothing
    can draft them better or at a lower cost, so the policy is not asked, and learns nothing from them.

    An error in a policy or a drafter ends the answers that it was called for. A draft that breaks a rule ends its own.
    """
    turns: list[Turn | None] = [None] * len(answers)
    groups: dict[DraftPolicy, list[int]] = {}
    for i, answer in enumerate(answers):
        policy, limit = answer.request.policy, answer.limit
        if policy is None or limit <= 0:
            continue
        with isolated(answer):
            forced = answer.grammar.forced([], limit) if answer.grammar else []
            if forced:
                turns[i] = Turn(answer.draft_request(), draft=Draft(forced))
            else:
                groups.setdefault(policy, []).append(i)
    together = sum(answer.decodes for answer in answers)
    for policy, indices in groups.items():
        mine = [answers[i] for i in indices]
        with isolated(*mine), _named(policy):
            chosen = _choose(policy, mine, together, vocab_size, observer)
            _draft(mine, chosen, vocab_size, observer)
            policy.drafted()
            for i, turn in zip(indices, chosen, strict=True):
                turns[i] = turn
    return turns


@contextmanager
def _named(policy: DraftPolicy) -> Iterator[None]:
    """Raise errors of a policy's round as ours, if an app's drafter is among its drafters."""
    try:
        yield
    except BaseException as error:
        of_an_app = any(inner(each) is not each for each in policy.drafters)
        if not of_an_app or isinstance(error, OutriderError) or is_interrupt(error):
            raise
        what = f"An app's drafter returned drafts that cannot be read: {one_line(error)}. {REMEDY}"
        raise DrafterError(what) from error


def _choose(
    policy: DraftPolicy, answers: Sequence[Answer], together: int, vocab_size: int, observer: Observer | None
) -> Sequence[Turn]:
    """The policy's turns, one for each answer. together: answers of this round, those of other policies included."""
    with _observed(observer, "choose", answers) as drafts:
        chosen = policy.choose([answer.draft_request(answer.slot, together, observer) for answer in answers])
        for answer, turn in zip(answers, chosen, strict=True):
            turn.draft = _taken(answer, turn, vocab_size, turn.copier)
            drafts.append(turn.draft)
    return chosen


def _draft(answers: Sequence[Answer], turns: Sequence[Turn], vocab_size: int, observer: Observer | None) -> None:
    """Call the drafters that were chosen for these turns."""
    for drafter in {id(turn.drafter): turn.drafter for turn in turns if turn.drafter is not None}.values():
        mine = [i for i, turn in enumerate(turns) if turn.drafter is drafter]
        with _observed(observer, "propose", [answers[i] for i in mine]) as drafts:
            proposed = drafter.propose([turns[i].request for i in mine])
            if len(proposed) != len(mine):
                name = answers[mine[0]].request.name_of(drafter)
                raise DrafterError(
                    f"The drafter {name!r} proposed {len(proposed)} drafts for {len(mine)} requests. Propose one for "
                    "each; Draft([]) is an empty one."
                )
            for i, draft in zip(mine, proposed, strict=True):
                turns[i].draft = draft
                turns[i].draft = _taken(answers[i], turns[i], vocab_size, drafter)
                drafts.append(turns[i].draft)


def _taken(answer: Answer, turn: Turn, vocab_size: int, author: Drafter | None) -> Draft:
    """A turn's draft as far as the round uses it. One that breaks a rule ends its answer alone. author: made it."""
    if turn.draft is NO_DRAFT:
        return NO_DRAFT
    with isolated(answer):
        draft = turn.draft
        if author is not None and inner(author) is not author:  # an app's, which may propose anything
            draft = sound(draft, vocab_size, answer.request.name_of(author))
        draft = _within(draft, turn.request.limit, vocab_size)
        draft = _allowed(answer, draft, goes_on=turn.drafter is None or (author is not None and author.is_free))
        return _readable(answer, draft)
    return NO_DRAFT


def seconds_of(answers: Sequence[Answer]) -> dict[int, tuple[float, float]]:
    """By drafter, the seconds of its calls so far, and of those during target passes. One that fails is left out.

    An error ends the answers that use the drafter.
    """
    found: dict[int, tuple[float, float]] = {}
    for answer in answers:
        for drafter in answer.request.drafters:
            if id(drafter) not in found:
                with isolated(answer):
                    found[id(drafter)] = drafter.seconds, drafter.ahead_seconds
    return found


def draft_ahead(readings: Sequence[Reading], target_pass: Pending, observer: Observer | None = None) -> None:
    """Let drafters that can do so draft for the next round during this round's target pass.

    An error in a policy or a drafter ends the answers that it was called for.
    """
    groups: dict[DraftPolicy, list[tuple[Answer, Turn]]] = {}
    for reading in readings:
        request, turn = reading.answer.request, reading.turn
        if request.ahead and request.policy is not None and turn is not None and turn.drafter and len(turn.draft):
            groups.setdefault(request.policy, []).append((reading.answer, turn))
    for policy, both in groups.items():
        mine = [answer for answer, _ in both]
        with isolated(*mine), _observed(observer, "draft ahead", mine):
            policy.go_ahead([turn for _, turn in both], target_pass)


@contextmanager
def _observed(observer: Observer | None, stage: DraftStage, answers: Sequence[Answer]) -> Iterator[list[Draft]]:
    """Tell the observer when a stage begins and ends. Yields the list for its drafts."""
    drafts: list[Draft] = []
    if observer is None:
        yield drafts
        return
    observer.drafting(stage, answers)
    try:
        yield drafts
    except BaseException as error:
        observer.drafted(drafts, error)
        raise
    observer.drafted(drafts)


def _readable(answer: Answer, draft: Draft) -> Draft:
    """The draft, with room for its branches in the cache; its first candidates if there is too little.

    That depends on the number of candidates, not on which they are, so that it does not bias rejection sampling.
    """
    if draft.parents is None:
        return draft
    branches = draft.branches
    count, length = len(branches) - 1, max(map(len, branches)) + 1
    return draft if count > 0 and answer.slot.fork(count, length) == count else draft.first_chain


def _within(draft: Draft, limit: int, vocab_size: int) -> Draft:
    """The draft, cut to `limit` tokens and before any unknown id: these would be read beyond the device's arrays."""
    known = next((i for i, token_id in enumerate(draft.token_ids) if not 0 <= token_id < vocab_size), limit)
    return draft if len(draft) <= min(known, limit) else draft.cut(min(known, limit))


def _allowed(answer: Answer, draft: Draft, *, goes_on: bool) -> Draft:
    """The draft, cut before the first token that the answer's grammar does not allow.

    Sampled tokens stay: to drop one after seeing it would bias the output. Those of a draft model are allowed anyway.
    goes_on: add the tokens that the grammar forces after the others. A draft model's record and price are for its own.
    """
    grammar = answer.grammar
    if grammar is None or not len(draft) or draft.probs is not None or draft.parents is not None:
        return draft
    draft = draft.cut(grammar.num_allowed(draft.token_ids))
    forced = grammar.forced(draft.token_ids, answer.limit - len(draft)) if goes_on else []
    if not forced:
        return draft
    confidences = None if draft.confidences is None else [*draft.confidences, *(1.0 for _ in forced)]
    return replace(draft, token_ids=[*draft.token_ids, *forced], confidences=confidences)
