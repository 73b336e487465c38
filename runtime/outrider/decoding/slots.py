"""A request's slots: opened in the caches of main model and drafters when it is admitted, closed when it ends."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

from outrider.decoding.request import Request
from outrider.errors import RequestError
from outrider.types import Backend, Drafter, Prompt


def admit(request: Request, main: Backend) -> bool:
    """Open a request's slots in the caches of main and draft model. False, with no slot open, while there is no room.

    Raises:
        RequestError: when the main model or the verifier lacks what the drafter requires.
    """
    # All hidden states are equally wide, and each is asked for once.
    wanted = [name for drafter in request.drafters for name in _check_needs(request, drafter, main)]
    request.features = tuple(dict.fromkeys(wanted))
    request.trees = main.capabilities.trees and request.verifier.trees
    max_tokens = request.sequence.num_prompt_tokens + request.max_new_tokens
    sequence = request.sequence
    prompt = Prompt((), adapter=sequence.adapter, source=sequence.source, embeds=sequence.embeds)
    if request.reuse:
        prompt = replace(prompt, token_ids=sequence.token_ids, scope=sequence.scope, answers=sequence.answers)
    for fetched in request.fetched:
        fetched.restore(max_tokens)
    request.fetched = ()
    slot = main.open(max_tokens, prompt)
    if slot is None:
        return False
    try:
        if not _reserve(request, max_tokens, slot.length):
            slot.close()
            return False
    except BaseException:
        slot.close()
        raise
    request.slot = slot
    request.stats.num_cached_tokens = slot.length
    return True


def _reserve(request: Request, max_tokens: int, num_cached: int) -> bool:
    """Reserve room with every drafter. False, with nothing reserved, while one has no room."""
    with ExitStack() as taken:
        for drafter in request.drafters:
            if not drafter.reserve(request.sequence, max_tokens, num_cached):
                return False
            taken.callback(drafter.release, request.sequence)
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


def release(request: Request) -> None:
    """Publish the committed tokens and close the slots. After an error nothing is published."""
    with ExitStack() as slots:  # all are closed, even if one fails
        if request.policy is not None:
            slots.callback(request.policy.release, request.sequence)
            for drafter in request.drafters:
                slots.callback(drafter.release, request.sequence)
        slots.callback(request.slot.close)
        if request.reuse and request.error is None:
            request.slot.publish(request.sequence.token_ids)
