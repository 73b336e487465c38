"""An answer's slots: opened in the caches of main model and drafters when it is admitted, closed when it ends."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

from outrider.decoding.answer import Answer, Status
from outrider.decoding.request import Request
from outrider.errors import RequestError
from outrider.types import Backend, Drafter


def admit(answer: Answer, main: Backend) -> bool:
    """Open an answer's slots in the caches of main and draft model. False, with no slot open, while there is no room.

    Raises:
        RequestError: when the main model or the verifier lacks what the drafter requires.
    """
    request = answer.request
    # All hidden states are equally wide, and each is asked for once.
    wanted = [name for drafter in request.drafters for name in _check_needs(request, drafter, main)]
    answer.features = tuple(dict.fromkeys(wanted))
    answer.trees = main.capabilities.trees and request.verifier.trees
    max_tokens = answer.sequence.num_prompt_tokens + request.max_new_tokens
    for fetched in answer.fetched:
        fetched.restore(max_tokens)
    answer.fetched = ()
    # Of a prompt without tokens nothing is found in the prefix cache.
    prompt = request.prompt if request.reuse else replace(request.prompt, token_ids=(), scope=b"", answers=())
    slot = main.open(max_tokens, prompt)
    if slot is None:
        return False
    try:
        if not _reserve(answer, max_tokens, slot.length):
            slot.close()
            return False
    except BaseException:
        slot.close()
        raise
    answer.slot, answer.status = slot, Status.READING
    answer.stats.num_cached_tokens = slot.length
    answer.note_progress()
    return True


def _reserve(answer: Answer, max_tokens: int, num_cached: int) -> bool:
    """Reserve room with every drafter. False, with nothing reserved, while one has no room."""
    with ExitStack() as taken:
        for drafter in answer.request.drafters:
            if not drafter.reserve(answer.sequence, max_tokens, num_cached):
                return False
            taken.callback(drafter.release, answer.sequence)
        taken.pop_all()
    return True


def _check_needs(request: Request, drafter: Drafter, main: Backend) -> tuple[str, ...]:
    """The hidden states that a drafter wants. Raises RequestError if its requirements cannot be met."""
    needs, found = drafter.requirements, main.capabilities.features
    if missing := [name for name in needs.features if name not in found]:
        raise RequestError(
            f"The drafter needs the main model's hidden states {missing[0]!r}, and the main model gives "
            f"{', '.join(map(repr, found)) or 'none'}. Choose another drafter, or a bundle that has them."
        )
    if needs.trees and not request.verifier.trees:
        raise RequestError(
            f"The drafter needs drafts to be verified as trees, and {type(request.verifier).__name__} verifies "
            "chains only. Choose another drafter, or a lossless sampling mode."
        )
    return needs.features


def release(answer: Answer) -> None:
    """Publish the committed tokens and close the slots. After an error nothing is published."""
    policy = answer.request.policy
    with ExitStack() as slots:  # all are closed, even if one fails
        if policy is not None:
            slots.callback(policy.release, answer.sequence)
            for drafter in policy.drafters:
                slots.callback(drafter.release, answer.sequence)
        slots.callback(answer.slot.close)
        if answer.request.reuse and answer.error is None:
            answer.slot.publish(answer.sequence.token_ids)
