"""The interface of an engine's observers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, TypeAlias, cast

from outrider.decoding.answer import Answer
from outrider.errors import OutriderError
from outrider.system.guard import Guard
from outrider.types import CallObserver, Draft, Outcome

log = logging.getLogger("outrider")

# A policy chooses drafters, a drafter proposes, or a policy's drafters draft ahead.
DraftStage: TypeAlias = Literal["choose", "propose", "draft ahead"]


class Observer(CallObserver, Protocol):
    """Is told of answers, of the steps of each round, and of models' calls (`called`).

    The order within a round: for each policy, `drafting` and `drafted` with the stage "choose", then with "propose" for
    each drafter that was chosen. Then the main model's call; "draft ahead" comes before its end. Then, for each
    answer in it, `verified` and `committed`; one that read a piece of its prompt has no `verified`. If either
    fails, it is left out, and the answer has an `error`.

    `entered` is called in any thread. All others are called in the thread that runs the rounds, and all requests wait
    for them: they must be fast, and must not raise. The observer never changes within a round.
    """

    def entered(self, answer: Answer, drafter: str | None) -> None:
        """An answer was prepared; it is not queued yet. drafter: the name that was asked for."""

    def admitted(self, answer: Answer) -> None:
        """An answer has its slots in the caches, and takes part in the next round."""

    def drafting(self, stage: DraftStage, answers: Sequence[Answer]) -> None:
        """A stage begins for these answers, which share a policy."""

    def drafted(self, drafts: Sequence[Draft], error: BaseException | None = None) -> None:
        """The stage has ended, or failed with an error. drafts: those that it made, cut to what the round uses."""

    def verified(self, answer: Answer, draft: Draft, outcome: Outcome) -> None:
        """A draft was verified by the main model's rows."""

    def committed(self, answer: Answer) -> None:
        """The round's tokens are in the answer's sequence, and its drafter has observed them."""

    def left(self, answer: Answer) -> None:
        """An answer has ended, or failed. Its reader is told just before or after. May be called twice."""


def guarded(observer: Observer, forget: Callable[[object], None]) -> Observer:
    """The observer, which is told no more once it has failed: no request suffers. forget: is called with it then."""
    return cast("Observer", _Guarded(observer, forget))


class _Guarded:
    """An observer whose every method is called through the guard."""

    def __init__(self, inner: Observer, forget: Callable[[object], None]) -> None:
        self._inner: Observer | None = inner
        self._forget = forget

    def __getattr__(self, name: str) -> Callable[..., None]:
        def tell(*args: Any) -> None:
            if self._inner is None:
                return
            try:
                with Guard(f"{name}() of an observer", OutriderError, "It is not called again."):
                    getattr(self._inner, name)(*args)
            except OutriderError as error:
                self._inner = None
                self._forget(self)
                log.warning("%s", error)

        return tell
