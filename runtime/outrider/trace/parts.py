"""The parts of an engine, seen at work."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, cast

from outrider.request import Request
from outrider.trace.events import REQUESTS, Lane, TraceFile

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from collections.abc import Sequence as Seq
    from pathlib import Path

    from outrider.sampling import DraftRows
    from outrider.types import Backend, Chunk, Draft, Drafter, DraftPolicy, DraftRequest, Outcome, Pending, Step, Turn

_LATELY = 16  # commits over which tokens per second are counted
_now = time.perf_counter


class Trace(TraceFile):
    """A trace of an engine: what its parts need to be seen, and what is known of them.

    Raises:
        OptionError: when the file cannot be written.
    """

    def __init__(self, path: Path, labels: Iterable[str] = ()) -> None:
        super().__init__(path, labels)
        self.counts = Counts()
        self._numbers = itertools.count(1)
        self._hosts: dict[int, _Host] = {}
        self._free_lanes: SimpleQueue[Lane] = SimpleQueue()
        self._open: set[TracedRequest] = set()

    def close(self) -> None:
        """As a file does; requests that go on end here."""
        for request in tuple(self._open):
            request.leave("goes on")
        super().close()

    def host(self) -> _Host:
        """The lane of the thread that asks."""
        thread = threading.get_ident()
        if thread not in self._hosts:
            self._hosts[thread] = _Host(self, self.lane("host" if not self._hosts else f"host {len(self._hosts) + 1}"))
        return self._hosts[thread]

    def backend(self, inner: Backend, role: str, device: str) -> Backend:
        """A backend whose calls are drawn in a lane of their own. role: "main", or the drafter's name."""
        return cast("Backend", TracedBackend(inner, self, role, self.lane(f"{role}: {device}")))

    @contextmanager
    def seen(self, name: str, drafter: str, requests: Seq[DraftRequest]) -> Iterator[dict[str, Any]]:
        """Draw a span around what the block does for requests; yields what to say of it when it is over."""
        host = self.host()
        args: dict[str, Any] = {"sequences": len(requests)}
        limit = max((request.limit for request in requests), default=0)
        self.begin(host.lane, "host", name, host.turn(), drafter=drafter, limit=limit)
        try:
            yield args
        except BaseException as error:
            args = args | {"error": type(error).__name__}
            raise
        finally:
            self.end(host.lane, name, host.turn(), **args)

    def enter(self, request: TracedRequest) -> tuple[int, Lane]:
        """A request's number, and a lane that no other is in."""
        self._open.add(request)
        try:
            lane = self._free_lanes.get_nowait()
        except Empty:
            lane = self.lane("request", REQUESTS)
        return next(self._numbers), lane

    def leave(self, request: TracedRequest) -> bool:
        """Whether it had not left yet."""
        try:
            self._open.remove(request)
        except KeyError:
            return False
        return True

    def give_back(self, lane: Lane) -> None:
        """The lane is free for another request."""
        self._free_lanes.put(lane)


class Counts:
    """What the counters show, over all requests of a trace."""

    def __init__(self) -> None:
        self._num_drafted = self._num_accepted = 0
        self._commits: deque[tuple[float, int]] = deque(maxlen=_LATELY + 1)

    def add(self, at: float, num_tokens: int, num_drafted: int, num_accepted: int) -> tuple[float, float]:
        """Count a commit; returns the share of draft tokens accepted so far, and tokens a second lately."""
        self._num_drafted += num_drafted
        self._num_accepted += num_accepted
        self._commits.append((at, num_tokens))
        share = self._num_accepted / self._num_drafted if self._num_drafted else 0.0
        since, behind = self._commits[0]
        lately = sum(count for _, count in self._commits) - behind
        return share, lately / (at - since) if at > since else 0.0


class _Host:
    """One thread's lane.

    What it does behind a draft model's call is drawing a token, until it begins something else: reading the row back,
    the processors, the choice, and the next call's chunks.
    """

    def __init__(self, trace: Trace, lane: Lane) -> None:
        self._trace, self.lane = trace, lane
        self.drawing_since = 0.0

    def turn(self) -> float:
        """Something begins or ends here; returns now."""
        at = _now()
        if self.drawing_since:
            self._trace.span(self.lane, "host", "draw", self.drawing_since, at)
            self.drawing_since = 0.0
        return at


class TracedBackend:
    """A backend whose calls are drawn. All else is the backend's own."""

    def __init__(self, inner: Backend, trace: Trace, role: str, lane: Lane) -> None:
        self.inner, self.trace = inner, trace
        self.drafts = role != "main"
        self._lane = lane
        self._ended = 0.0  # the last call

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def submit(self, chunks: Seq[Chunk]) -> Pending:
        """Evaluate chunks, and draw the call when it is done."""
        num_tokens, num_rows = sum(len(chunk.token_ids) for chunk in chunks), sum(chunk.num_rows for chunk in chunks)
        reads = num_tokens - num_rows > (len(chunks) if self.drafts else 0)  # a draft that was kept leaves one token
        name = "read" if reads else "draft" if self.drafts else "check"
        context = max((chunk.slot.length for chunk in chunks), default=0)
        args = {"sequences": len(chunks), "tokens": num_tokens, "rows": num_rows, "context": context}
        began, busy = self.trace.host().turn(), self.inner.seconds
        try:
            pending = self.inner.submit(chunks)
        except BaseException as error:
            self.draw(name, began, _now(), args | {"error": type(error).__name__})
            raise
        return cast("Pending", _TracedPending(self, pending, name, args, began, busy))

    def draw(self, name: str, began: float, ended: float, args: dict[str, Any]) -> None:
        """A call of the device. One that is known to be over a little late does not reach into the next."""
        began = max(began, self._ended)
        self._ended = max(began, ended)
        self.trace.span(self._lane, "device", name, began, self._ended, **args)


class _TracedPending:
    """A call under way since `began`; busy: the backend's `seconds` then.

    The backend says for how long the device was busy. Where it was so within `submit`, it was at the end of it; else
    from its end on, and the rest of the wait is the host's, which came late.
    """

    def __init__(
        self, backend: TracedBackend, inner: Pending, name: str, args: dict[str, Any], began: float, busy: float
    ) -> None:
        self._backend, self.inner, self._name, self._args = backend, inner, name, args
        self._began, self._busy, self._submitted = began, busy, _now()
        self._ran = backend.inner.seconds - busy  # within `submit`
        started = self._submitted - self._ran
        host = backend.trace.host()
        backend.trace.span(host.lane, "host", "submit", began, started)
        if self._ran:
            backend.trace.span(host.lane, "host", "wait", started, self._submitted)
            backend.draw(name, started, self._submitted, args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def wait(self) -> Step:
        """Block until the rows are there."""
        backend = self._backend
        host = backend.trace.host()
        waited, args = host.turn(), self._args
        try:
            return self.inner.wait()
        except BaseException as error:
            args = args | {"error": type(error).__name__}
            raise
        finally:
            done = _now()
            if not self._ran:
                backend.trace.span(host.lane, "host", "wait", waited, done)
                busy = backend.inner.seconds - self._busy or done - self._submitted  # it may not say
                ended = min(self._submitted + busy, done)
                backend.draw(self._name, ended - busy, ended, args)
            host.drawing_since = done if backend.drafts else 0.0


class TracedDrafter:
    """A drafter that is seen proposing."""

    def __init__(self, inner: Drafter, trace: Trace, name: str) -> None:
        self._inner, self._trace, self._name = inner, trace, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def propose(self, requests: Seq[DraftRequest]) -> list[Draft]:
        """What the drafter proposes."""
        with self._trace.seen("propose", self._name, requests) as args:
            drafts = self._inner.propose(requests)
            args["drafted"] = sum(map(len, drafts))
        return drafts


class TracedPolicy:
    """A policy that is seen choosing, and whose drafters are seen at work. All else is the policy's own."""

    def __init__(self, inner: DraftPolicy, trace: Trace, name: str) -> None:
        self.inner: Any = inner
        self._trace, self._name = trace, name
        self._drafters = {id(drafter): TracedDrafter(drafter, trace, name) for drafter in inner.drafters}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __eq__(self, other: object) -> bool:
        return type(other) is TracedPolicy and bool(other.inner == self.inner)

    def __hash__(self) -> int:
        return hash(self.inner)

    def choose(self, requests: Seq[DraftRequest]) -> list[Turn]:
        """What the policy chooses, to be drafted by drafters that are seen."""
        with self._trace.seen("choose", self._name, requests) as args:
            turns: list[Turn] = self.inner.choose(requests)
            args["drafted"] = sum(len(turn.draft) for turn in turns)
        for turn in turns:
            if turn.drafter is not None:
                turn.drafter = cast("Drafter", self._drafters[id(turn.drafter)])
        return turns

    def go_ahead(self, turns: Seq[Turn], check: Pending) -> None:
        """What drafters draft while these drafts are checked."""
        with self._trace.seen("draft ahead", self._name, [turn.request for turn in turns]):
            self.inner.go_ahead(turns, check)


class TracedRequest(Request):
    """A request whose life is drawn, and whose policy is seen choosing. name: of the drafter in its options."""

    __slots__ = ("_label", "_lane", "_number", "_since", "_trace")

    def __init__(self, trace: Trace, name: str | None, **parts: Any) -> None:
        policy: DraftPolicy | None = parts["policy"]
        if policy is not None:
            parts["policy"] = TracedPolicy(policy, trace, str(name))
        super().__init__(**parts)
        self._trace = trace
        self._number, self._lane = trace.enter(self)
        began, self._label = _now(), f"request {self._number}: {name if policy is not None else 'plain'}"
        args = {"prompt": self.sequence.num_prompt_tokens, "limit": self.num_assistant_tokens}
        trace.begin(self._lane, "request", self._label, began, **args)
        self._since = began + 2e-6  # of two that begin at once, the viewer may take either for the outer one

    def admit(self, main: Backend) -> bool:
        """As a request does; it has been queued until then."""
        admitted = super().admit(main)
        if admitted:
            self._stage("queued", _now())
        return admitted

    def verify(self, draft: Draft, rows: DraftRows) -> Outcome:
        """As a request does."""
        host = self._trace.host()
        began, args = host.turn(), {"request": self._number, "drafted": len(draft)}
        try:
            outcome = super().verify(draft, rows)
            args["accepted"] = outcome.num_accepted
            return outcome
        finally:
            self._trace.span(host.lane, "host", "verify", began, _now(), **args)

    def commit(self, rows: DraftRows, outcome: Outcome) -> None:
        """As a request does; what its statistics count is the round's."""
        trace, host, stats = self._trace, self._trace.host(), self.stats
        before = stats.num_generated_tokens, stats.num_draft_tokens, stats.num_accepted_tokens
        began = host.turn()
        try:
            super().commit(rows, outcome)
        finally:
            ended = _now()
            after = stats.num_generated_tokens, stats.num_draft_tokens, stats.num_accepted_tokens
            tokens, drafted, accepted = (now - then for now, then in zip(after, before, strict=True))
            trace.span(host.lane, "host", "commit", began, ended, request=self._number, tokens=tokens)
            counts = {"tokens": tokens, "drafted": drafted, "accepted": accepted}
            self._stage("round" if before[0] else "prompt", ended, **counts, context=len(self.sequence))
            share, rate = trace.counts.add(ended, tokens, drafted, accepted)
            trace.count("draft", ended, tokens=drafted, accepted=accepted)
            trace.count("acceptance", ended, percent=100 * share)
            trace.count("tokens", ended, **{"per second": rate})

    def publish(self) -> None:
        """As a request does. Who hears that it has ended may close the trace."""
        if self.finish_reason or self.error:
            self.leave(type(self.error).__name__ if self.error else str(self.finish_reason))
        super().publish()
        if self.done:  # of the tokenizer's error
            self.leave(type(self.error).__name__)

    def leave(self, reason: str) -> None:
        """End the request's life here, for the timeline. Twice does no harm."""
        if self._trace.leave(self):
            stats = self.stats
            counts = {"tokens": stats.num_generated_tokens, "rounds": stats.num_rounds}
            self._trace.end(self._lane, self._label, _now(), finish_reason=reason, **counts)
            self._trace.give_back(self._lane)

    def _stage(self, name: str, at: float, **args: Any) -> None:
        self._trace.span(self._lane, "request", name, self._since, at, **args)
        self._since = at
