"""Watching an engine at work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from outrider.types import CallObserver

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from outrider.request import Request
    from outrider.types import Draft, Outcome


class Observer(CallObserver, Protocol):
    """Hears what becomes of requests, and of each round's calls (`called`).

    A round goes: drafting and drafted for each drafter; the main model's call, with drafting and drafted before its end
    where a drafter drafts ahead; then for each request judged, unless a piece of its prompt was read, and committed.
    What fails is not told apart: a request has its `error`, and a verdict or a commit that failed is left out.

    All but `entered` is called by the thread that runs the rounds, and everything waits for it: it must not raise, nor
    take long. A round has one observer, or none, from its begin to its end.
    """

    def entered(self, request: Request, drafter: str | None) -> None:
        """A request was made, which has not been queued yet; in any thread. drafter: the name that was asked for."""

    def admitted(self, request: Request) -> None:
        """A request has its places in the caches, and takes part in the next round."""

    def drafting(self, requests: Seq[Request], *, ahead: bool = False) -> None:
        """A drafter is about to propose for these requests, which may be none, or to draft ahead."""

    def drafted(self, drafts: Seq[Draft]) -> None:
        """It has; or its requests have failed. drafts: what the round uses of them; none where it drafted ahead."""

    def judged(self, request: Request, draft: Draft, outcome: Outcome) -> None:
        """The main model's rows have been compared with a draft."""

    def committed(self, request: Request) -> None:
        """What the round has brought to a request is in its sequence, and its drafter has heard of it."""

    def left(self, request: Request) -> None:
        """A request has ended, or failed; its reader is about to hear of it, or has. May be said twice."""
