"""A timeline of what the devices and the host do, for a viewer.

    with engine.trace("out.json"):
        engine.generate("Why is the sky blue?")

https://ui.perfetto.dev and chrome://tracing open the file; `outrider trace out.json` sums it up. Its lanes::

    outrider   main: CPU    the device's calls, from when they began to when they were done: prompt, check
               draft: CPU   prompt, draft
               host         propose, and within it for each draft token submit, wait, draw; submit, wait, verify, commit
    requests   request 1    what became of one request: queued, prompt, then a round after the other

and counters: the draft tokens of a round and how many were accepted, the accepted share so far, tokens per second. It
says nothing of what was said: no text, no token ids.

The format is the JSON array of Google's "Trace Event Format", an event a line. The array may lack its end, so a program
that dies leaves a file that can be opened; it lacks the last half second.

The parts do not know of any of this. While a trace runs, the engine puts a `TracedBackend` in front of each backend,
gives its requests a `TracedDrafter`, and makes them `TracedRequest`s. When none runs, none of these is there.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import deque
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakValueDictionary

import msgspec

from outrider.errors import OptionError, one_line
from outrider.request import Request

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from collections.abc import Sequence as Seq
    from pathlib import Path

    from outrider.request import RequestRows
    from outrider.types import Backend, Chunk, Draft, Drafter, DraftRequest, Outcome, Pending, Step

_PATIENCE = 0.5  # seconds between writes: what a program that dies loses
_CATCH_UP = 16  # tokens that a draft call may read first without being called the prompt's: the longest copy's
_LATELY = 16  # commits over which tokens per second are counted
_now = time.perf_counter


@dataclass(frozen=True, slots=True)
class Lane:
    """A row of the timeline, by the numbers that the format calls process and thread."""

    pid: int
    tid: int


_WORK, _REQUESTS = 1, 2  # the groups that lanes are in


class Trace:
    """A file that events are written to, in a thread of its own.

        trace = Trace(Path("out.json"))
        lane = trace.lane("main: CPU")
        trace.span(lane, "device", "check", began, ended, rows=4)    # times as `time.perf_counter` has them
        trace.close()

    Events may come from any thread; behind `close` they are ignored. None of this takes a lock, for a Ctrl-C may come
    anywhere. labels: shown beside the timeline, such as what the models run on.

    Raises:
        OptionError: when the file cannot be written.
    """

    def __init__(self, path: Path, labels: Iterable[str] = ()) -> None:
        self.path = path
        try:
            self._file = path.open("wb")
        except OSError as error:
            raise OptionError(f"Trace {path} cannot be written: {one_line(error)}. Name another file.") from error
        self.counts = Counts()
        self._zero = _now()
        self._events: deque[dict[str, Any]] = deque()
        self._end: SimpleQueue[None] = SimpleQueue()
        self._takes_more = True
        self._failure: OSError | None = None
        self._numbers, self._tids = itertools.count(1), itertools.count(10)
        self._hosts: dict[int, _Host] = {}
        self._drafters: WeakValueDictionary[int, TracedDrafter] = WeakValueDictionary()
        self._free_lanes: SimpleQueue[Lane] = SimpleQueue()
        self._open: set[TracedRequest] = set()
        for pid, name in ((_WORK, "outrider"), (_REQUESTS, "requests")):
            self._name("process_name", Lane(pid, 0), name=name)
            self._name("process_sort_index", Lane(pid, 0), sort_index=pid)
        self._name("process_labels", Lane(_WORK, 0), labels="; ".join(labels))
        self._writer = threading.Thread(target=self._write, name="outrider-trace", daemon=True)
        self._writer.start()

    def close(self) -> None:
        """Write what is left, and end the file. Requests that go on end here.

        Raises:
            OptionError: when not all could be written.
        """
        for request in tuple(self._open):
            request.leave("goes on")
        self._takes_more = False
        self._end.put(None)
        self._writer.join()
        if self._failure:
            raise OptionError(
                f"Trace {self.path} is cut short: {one_line(self._failure)}. Name a file where there is room."
            ) from self._failure

    def lane(self, name: str, group: int = _WORK) -> Lane:
        """A new row of the timeline."""
        lane = Lane(group, next(self._tids))
        self._name("thread_name", lane, name=name)
        self._name("thread_sort_index", lane, sort_index=lane.tid)
        return lane

    def span(self, lane: Lane, kind: str, name: str, began: float, ended: float, **args: Any) -> None:
        """Something that is over. In one lane, spans follow each other or lie within those of `begin`."""
        at = self._micros(began)
        self._add("X", lane, name, ts=at, dur=max(self._micros(ended) - at, 0), cat=kind, args=args)

    def begin(self, lane: Lane, kind: str, name: str, at: float, **args: Any) -> None:
        """Something that others lie within begins; see `end`."""
        self._add("B", lane, name, ts=self._micros(at), cat=kind, args=args)

    def end(self, lane: Lane, name: str, at: float, **args: Any) -> None:
        """What has begun last in a lane is over; the viewer wants its name again."""
        self._add("E", lane, name, ts=self._micros(at), args=args)

    def count(self, name: str, at: float, **values: float) -> None:
        """Counters, from here on."""
        self._add("C", Lane(_REQUESTS, 0), name, ts=self._micros(at), args=values)

    def host(self) -> _Host:
        """The lane of the thread that asks."""
        thread = threading.get_ident()
        if thread not in self._hosts:
            self._hosts[thread] = _Host(self, self.lane("host" if not self._hosts else f"host {len(self._hosts) + 1}"))
        return self._hosts[thread]

    def backend(self, inner: Backend, role: str, device: str) -> Backend:
        """A backend whose calls are drawn in a lane of their own. role: "main", or the drafter's name."""
        return cast("Backend", TracedBackend(inner, self, role, self.lane(f"{role}: {device}")))

    def drafter(self, inner: Drafter, name: str) -> Drafter:
        """A drafter that is seen proposing; the same one for all requests, as those of one drafter go together."""
        made = self._drafters.get(id(inner)) or TracedDrafter(inner, self, name)
        return cast("Drafter", self._drafters.setdefault(id(inner), made))

    def enter(self, request: TracedRequest) -> tuple[int, Lane]:
        """A request's number, and a lane that no other is in."""
        self._open.add(request)
        try:
            lane = self._free_lanes.get_nowait()
        except Empty:
            lane = self.lane("request", _REQUESTS)
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

    def _micros(self, at: float) -> int:
        """The format's unit, from the trace's begin; whole, so that what ends and what begins there agree on when."""
        return max(round((at - self._zero) * 1e6), 0)

    def _name(self, what: str, lane: Lane, **args: Any) -> None:
        self._add("M", lane, what, ts=0, args=args)

    def _add(self, phase: str, lane: Lane, name: str, **more: Any) -> None:
        if self._takes_more:
            self._events.append({"ph": phase, "pid": lane.pid, "tid": lane.tid, "name": name, **more})

    def _write(self) -> None:
        """Write what has come, now and then: the thread that brings it is in a hurry."""
        separator, ended = b"[\n", False
        try:
            with self._file as file:
                while not ended:
                    with contextlib.suppress(Empty):
                        self._end.get(timeout=_PATIENCE)
                        ended = True
                    if lines := [msgspec.json.encode(event) for event in self._taken()]:
                        file.write(separator + b",\n".join(lines))
                        file.flush()  # whole lines
                        separator = b",\n"
                file.write(b"\n]\n")
        except OSError as error:  # the disk is full, perhaps: no answer shall suffer for it
            self._failure, self._takes_more = error, False

    def _taken(self) -> Iterator[dict[str, Any]]:
        for _ in range(len(self._events)):
            yield self._events.popleft()


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
        is_prompt = num_tokens - num_rows > (_CATCH_UP * len(chunks) if self.drafts else 0)
        name = "prompt" if is_prompt else "draft" if self.drafts else "check"
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
    """A drafter that is seen proposing. All else is the drafter's own."""

    def __init__(self, inner: Drafter, trace: Trace, name: str) -> None:
        self.inner, self._trace, self._name = inner, trace, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def propose(self, requests: Seq[DraftRequest]) -> list[Draft]:
        """What the drafter proposes."""
        if not requests:  # their prompts are read
            return self.inner.propose(requests)
        trace, host = self._trace, self._trace.host()
        limit = max(request.limit for request in requests)
        trace.begin(host.lane, "host", "propose", host.turn(), drafter=self._name, limit=limit)
        args: dict[str, Any] = {}
        try:
            drafts = self.inner.propose(requests)
            args = {"drafted": sum(map(len, drafts)), "sequences": len(drafts)}
            return drafts
        except BaseException as error:
            args = {"error": type(error).__name__}
            raise
        finally:
            trace.end(host.lane, "propose", host.turn(), **args)


class TracedRequest(Request):
    """A request whose life is drawn. name: what drafts for it."""

    __slots__ = ("_label", "_lane", "_number", "_since", "_trace")

    def __init__(self, trace: Trace, name: str, **parts: Any) -> None:
        super().__init__(**parts)
        self._trace = trace
        self._number, self._lane = trace.enter(self)
        began, self._label = _now(), f"request {self._number}: {name}"
        args = {"prompt": self.sequence.num_prompt_tokens, "limit": self.num_assistant_tokens}
        trace.begin(self._lane, "request", self._label, began, **args)
        self._since = began + 2e-6  # of two that begin at once, the viewer may take either for the outer one

    def admit(self, main: Backend) -> bool:
        """As a request does; it has been queued until then."""
        admitted = super().admit(main)
        if admitted:
            self._stage("queued", _now())
        return admitted

    def verify(self, draft: Draft, rows: RequestRows) -> Outcome:
        """As a request does."""
        host = self._trace.host()
        began, args = host.turn(), {"request": self._number, "drafted": len(draft)}
        try:
            outcome = super().verify(draft, rows)
            args["accepted"] = outcome.num_accepted
            return outcome
        finally:
            self._trace.span(host.lane, "host", "verify", began, _now(), **args)

    def commit(self, rows: RequestRows, outcome: Outcome) -> None:
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
