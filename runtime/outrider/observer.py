"""The interface of an engine's observers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from outrider.types import CallObserver

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from outrider.request import Request
    from outrider.types import Draft, Outcome


class Observer(CallObserver, Protocol):
    """Is told of requests, of the steps of each round, and of models' calls (`called`).

    The order within a round: `drafting` and `drafted` for each drafter. Then the main model's call; for each drafter
    that drafts ahead, `drafting` and `drafted` come before the call's end. Then, for each request, `verified` and
    `committed`; a request that read a piece of its prompt has no `verified`. A failed step is left out, and the request
    has an `error`.

    `entered` is called in any thread. All others are called in the thread that runs the rounds, and all requests wait
    for them: they must be fast, and must not raise. The observer never changes within a round.
    """

    def entered(self, request: Request, drafter: str | None) -> None:
        """A request was made; it is not queued yet. drafter: the name that was asked for."""

    def admitted(self, request: Request) -> None:
        """A request has its slots in the caches, and takes part in the next round."""

    def drafting(self, requests: Seq[Request], *, ahead: bool = False) -> None:
        """A drafter is about to propose for these requests, or to draft ahead. There may be none."""

    def drafted(self, drafts: Seq[Draft]) -> None:
        """The drafter has ended, or its requests have failed. drafts: as the round uses them; none for `ahead`."""

    def verified(self, request: Request, draft: Draft, outcome: Outcome) -> None:
        """A draft was verified by the main model's rows."""

    def committed(self, request: Request) -> None:
        """The round's tokens are in the request's sequence, and its drafter has observed them."""

    def left(self, request: Request) -> None:
        """A request has ended, or failed. Its reader is told just before or after. May be called twice."""
