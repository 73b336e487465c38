"""Records what an engine's requests, models and host do."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from outrider.decoding.answer import Answer
from outrider.decoding.observer import DraftStage
from outrider.decoding.trace.events import REQUESTS, Lane, TraceFile
from outrider.types import Call, CompiledModel, Draft, Outcome

_NUM_RECENT_COMMITS = 16  # commits that tokens per second are counted over
_now = time.perf_counter


class Trace(TraceFile):
    """Records a trace of an engine, as its observer; see `outrider.decoding.observer`.

        trace = Trace(Path("out.json"), {"main": main, "draft": draft})
        step(main, Scheduler(main, RowBudget(512), answers), trace)
        trace.close()

    models: by role, "main" and the drafters' names. Requests that were made before the trace have no lane. The
    model calls of rounds that they share with others are recorded.

    The host does one thing at a time, so each span begins where the one before has ended. Between two calls of a draft
    model it draws a token (reads the row back, runs the processors, chooses). After the main model's call it verifies
    and commits, request by request.

    Raises:
        OptionError: when the file cannot be written.
    """

    def __init__(self, path: Path, models: Mapping[str, CompiledModel], labels: Iterable[str] = ()) -> None:
        super().__init__(path, labels)
        lanes = {role: self.lane(f"{role}: {model.device}") for role, model in models.items()}
        self._devices = {id(model): _Device(self, lanes[role], role != "main") for role, model in models.items()}
        self._models = models  # holds them, so that their ids stay theirs
        self._host = self.lane("host")
        self._counts = _Counts()
        self._numbers = itertools.count(1)
        self._free_lanes: SimpleQueue[Lane] = SimpleQueue()
        self._lives: dict[Answer, _Life] = {}
        # Used only by the thread that runs the rounds
        self._drafting: _Drafting | None = None
        self._drawing_since = 0.0  # the end of a draft model's call; 0 if no token is being drawn
        self._free_since = 0.0  # the end of the host's last span

    def close(self) -> None:
        """End the trace and its file. Spans of running requests end here."""
        self.stop()  # first, so that no event is later than these ends
        for answer in [*self._lives]:
            self._finish(answer, "goes on")
        super().close()

    def entered(self, answer: Answer, drafter: str | None) -> None:
        """Give a request a number and a free lane."""
        number = next(self._numbers)
        try:
            lane = self._free_lanes.get_nowait()
        except Empty:
            lane = self.lane("request", REQUESTS)
        name = "plain" if answer.request.policy is None else str(drafter)
        began, label = _now(), f"request {number}: {name}"
        args = {"prompt": answer.sequence.num_prompt_tokens, "limit": answer.request.num_assistant_tokens}
        self.begin(lane, "request", label, began, **args)
        # Of two spans that begin at the same time, the viewer may take either for the outer one.
        self._lives[answer] = _Life(number, lane, label, name, since=began + 2e-6)

    def admitted(self, answer: Answer) -> None:
        """The request was queued until now."""
        if life := self._lives.get(answer):
            self._stage(life, "queued", _now())

    def drafting(self, stage: DraftStage, answers: Sequence[Answer]) -> None:
        """Begin a span, which contains the draft model's calls."""
        known = [life for answer in answers if (life := self._lives.get(answer))]
        began = self._turn()
        self._drafting = _Drafting(stage, answers, known[0].drafter, began) if known else None

    def drafted(self, drafts: Sequence[Draft], error: BaseException | None = None) -> None:
        """End the span."""
        ended = self._turn()
        drafting, self._drafting = self._drafting, None
        if drafting is None:
            return
        answers = drafting.answers
        args = {"drafter": drafting.drafter, "limit": drafting.limit, "sequences": len(answers)}
        if error is not None:
            args["error"] = type(error).__name__
        elif drafting.stage != "draft ahead":
            args["drafted"] = sum(map(len, drafts))
        self.span(self._host, "host", drafting.stage, drafting.began, ended, **args)

    def called(self, call: Call) -> None:
        """Add a model's call to the device's lane, and `submit` and `wait` to the host's.

        The backend says how long the device was busy. If it was busy within `submit`, that was at the end of `submit`.
        Otherwise it was busy from the end of `submit` on, and what is left until `wait` ends is not the device's.
        """
        device = self._devices.get(id(call.backend))
        if device is None:  # an app's own model
            return
        self._turn(call.began)
        started = call.submitted - call.ran
        self.span(self._host, "host", "submit", call.began, started)
        if call.ran:
            self.span(self._host, "host", "wait", started, call.submitted)
            device.draw(call, started, call.submitted)
        else:
            self.span(self._host, "host", "wait", call.waited, call.ended)
            busy = call.busy or call.ended - call.submitted  # 0: the backend does not say
            ended = min(call.submitted + busy, call.ended)
            device.draw(call, ended - busy, ended)
        self._free_since = call.ended
        self._drawing_since = call.ended if device.drafts else 0.0

    def verified(self, answer: Answer, draft: Draft, outcome: Outcome) -> None:
        """Add a span since the call's end, or since the commit of the request before."""
        began, ended = self._free_since, self._turn()
        if life := self._lives.get(answer):
            counts = {"drafted": len(draft), "accepted": outcome.num_accepted}
            self.span(self._host, "host", "verify", began, ended, request=life.number, **counts)
            life.before = _counted(answer)

    def committed(self, answer: Answer) -> None:
        """Add a span since `verified`, and the round's counts: the change of the request's statistics."""
        began, ended = self._free_since, self._turn()
        life = self._lives.get(answer)
        if life is None or life.before is None:  # a piece of its prompt was read
            return
        before, life.before = life.before, None
        tokens, drafted, accepted = (now - then for now, then in zip(_counted(answer), before, strict=True))
        self.span(self._host, "host", "commit", began, ended, request=life.number, tokens=tokens)
        counts = {"tokens": tokens, "drafted": drafted, "accepted": accepted}
        self._stage(life, "round" if before[0] else "prompt", ended, **counts, context=len(answer.sequence))
        share, rate = self._counts.add(ended, tokens, drafted, accepted)
        self.count("draft", ended, tokens=drafted, accepted=accepted)
        self.count("acceptance", ended, percent=100 * share)
        self.count("tokens", ended, **{"per second": rate})

    def left(self, answer: Answer) -> None:
        """End a request's span. A second call does nothing."""
        self._finish(answer, type(answer.error).__name__ if answer.error else str(answer.finish_reason))

    def _finish(self, answer: Answer, reason: str) -> None:
        if life := self._lives.pop(answer, None):
            counts = {"tokens": answer.stats.num_generated_tokens, "rounds": answer.stats.num_rounds}
            self.end(life.lane, life.label, _now(), finish_reason=reason, **counts)
            self._free_lanes.put(life.lane)

    def _stage(self, life: _Life, name: str, at: float, **args: Any) -> None:
        self.span(life.lane, "request", name, life.since, at, **args)
        life.since = at

    def _turn(self, at: float = 0.0) -> float:
        """End the host's current span now, or at the given time. Returns that time."""
        at = at or _now()
        if self._drawing_since:
            self.span(self._host, "host", "draw", self._drawing_since, at)
            self._drawing_since = 0.0
        self._free_since = at
        return at


class _Device:
    """The lane of a model's calls. drafts: whether this is a draft model."""

    def __init__(self, trace: TraceFile, lane: Lane, drafts: bool) -> None:
        self._trace, self._lane, self.drafts = trace, lane, drafts
        self._ended = 0.0  # the last call

    def draw(self, call: Call, began: float, ended: float) -> None:
        """Add a call's span, cut so that it does not overlap the one before."""
        chunks = call.chunks
        num_tokens, num_rows = sum(len(chunk.token_ids) for chunk in chunks), sum(chunk.num_rows for chunk in chunks)
        more = len(chunks) if self.drafts else 0  # which it reads after a draft that was accepted whole
        name = "read" if num_tokens - num_rows > more else "draft" if self.drafts else "check"
        args: dict[str, Any] = {"sequences": len(chunks), "tokens": num_tokens, "rows": num_rows}
        args["context"] = call.context
        if call.error:
            args["error"] = type(call.error).__name__
        began = max(began, self._ended)
        self._ended = max(began, ended)
        self._trace.span(self._lane, "device", name, began, self._ended, **args)


@dataclass(slots=True)
class _Life:
    """A running request. since: when its stage began. before: its counts at `verified`, until the commit."""

    number: int
    lane: Lane
    label: str
    drafter: str
    since: float
    before: tuple[int, int, int] | None = None


class _Drafting:
    """A running stage of drafting. drafter: the name that was asked for."""

    def __init__(self, stage: DraftStage, answers: Sequence[Answer], drafter: str, began: float) -> None:
        self.stage, self.answers, self.drafter, self.began = stage, answers, drafter, began
        self.limit = max(answer.limit for answer in answers)


class _Counts:
    """The counters over all requests of a trace."""

    def __init__(self) -> None:
        self._num_drafted = self._num_accepted = 0
        self._commits: deque[tuple[float, int]] = deque(maxlen=_NUM_RECENT_COMMITS + 1)

    def add(self, at: float, num_tokens: int, num_drafted: int, num_accepted: int) -> tuple[float, float]:
        """Count a commit. Returns the accepted share of draft tokens so far, and recent tokens per second."""
        self._num_drafted += num_drafted
        self._num_accepted += num_accepted
        self._commits.append((at, num_tokens))
        share = self._num_accepted / self._num_drafted if self._num_drafted else 0.0
        since, oldest = self._commits[0]
        lately = sum(count for _, count in self._commits) - oldest
        return share, lately / (at - since) if at > since else 0.0


def _counted(answer: Answer) -> tuple[int, int, int]:
    """Tokens generated, drafted and accepted so far."""
    stats = answer.stats
    return stats.num_generated_tokens, stats.num_draft_tokens, stats.num_accepted_tokens
