"""The drafts of one round: policies choose drafters, and each drafter is called once for all answers of a policy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from outrider.decoding.answer import Answer, isolated
from outrider.decoding.checks import usable
from outrider.decoding.observer import DraftStage, Observer
from outrider.decoding.own import REMEDY, inner
from outrider.decoding.reading import Reading
from outrider.errors import DrafterError, OutriderError, one_line
from outrider.system.guard import is_interrupt
from outrider.types import Draft, DraftPolicy, Pending, Turn


def propose(
    answers: Sequence[Answer], vocab_size: int, observer: Observer | None = None
) -> list[tuple[Answer, Turn | None]]:
    """Each answer with a turn and its draft, as its policy chooses; None if nothing may be drafted.

    Where an answer's grammar allows only one next token, the draft is that token and those forced after it. Nothing
    can draft them better or at a lower cost, so the policy is not asked, and learns nothing from them.

    An error in a policy or a drafter ends the answers that it was called for. A draft that breaks a rule ends its own.
    """
    turns: dict[Answer, Turn] = {}
    groups: dict[DraftPolicy, list[Answer]] = {}
    for answer in answers:
        policy, limit = answer.request.policy, answer.limit
        if policy is None or limit <= 0:
            continue
        with isolated(answer):
            forced = answer.grammar.forced([], limit) if answer.grammar else []
            if forced:
                turns[answer] = Turn(answer.draft_request(), draft=Draft(forced))
            else:
                groups.setdefault(policy, []).append(answer)
    together = sum(answer.decodes for answer in answers)
    for policy, mine in groups.items():
        with isolated(*mine), _named(policy):
            chosen = _choose(policy, mine, together, vocab_size, observer)
            _draft(chosen, vocab_size, observer)
            policy.drafted()
            turns.update(chosen)
    return [(answer, turns.get(answer)) for answer in answers]


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
) -> Sequence[tuple[Answer, Turn]]:
    """Each answer with the policy's turn. together: answers of this round, those of other policies included."""
    with _observed(observer, "choose", answers) as drafts:
        turns = policy.choose([answer.draft_request(answer.slot, together, observer) for answer in answers])
        chosen = [*zip(answers, turns, strict=True)]
        for answer, turn in chosen:
            turn.draft = usable(turn.draft, answer, turn, turn.copier, vocab_size)
            drafts.append(turn.draft)
    return chosen


def _draft(chosen: Sequence[tuple[Answer, Turn]], vocab_size: int, observer: Observer | None) -> None:
    """Call the drafters that were chosen for these turns."""
    for drafter in {id(turn.drafter): turn.drafter for _, turn in chosen if turn.drafter is not None}.values():
        mine = [(answer, turn) for answer, turn in chosen if turn.drafter is drafter]
        with _observed(observer, "propose", [answer for answer, _ in mine]) as drafts:
            proposed = drafter.propose([turn.request for _, turn in mine])
            if len(proposed) != len(mine):
                name = mine[0][0].request.name_of(drafter)
                raise DrafterError(
                    f"The drafter {name!r} proposed {len(proposed)} drafts for {len(mine)} requests. Propose one for "
                    "each; Draft([]) is an empty one."
                )
            for (answer, turn), draft in zip(mine, proposed, strict=True):
                turn.draft = usable(draft, answer, turn, drafter, vocab_size)
                drafts.append(turn.draft)


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


def draft_ahead(readings: Sequence[Reading], target_pass: Pending, observer: Observer | None = None) -> bool:
    """Let drafters that can do so draft for the next round during this round's target pass. Whether one may have.

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
    return bool(groups)


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
