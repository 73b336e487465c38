"""Decides who takes part in a round: which answers wait and which run, their slots, and what each of them reads.

scheduler = Scheduler(main, RowBudget(512, "auto", cost), cost=cost)
scheduler.waiting.append(answer)
scheduler.settle()         # between rounds: answers come and go
step(main, scheduler)      # a round of those that run
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.decoding.answer import Answer, isolated
from outrider.decoding.idle import IdleJob, Replaying
from outrider.decoding.observer import Observer
from outrider.decoding.prefix_check import PrefixCheck
from outrider.decoding.reading import Reading, draft_of
from outrider.decoding.rereading import Rereading
from outrider.decoding.row_budget import RowBudget
from outrider.decoding.slots import admit, release
from outrider.errors import RequestError
from outrider.models.calls import teach
from outrider.models.cost.table import CallCost
from outrider.tokens.grammar import GrammarState
from outrider.types import Backend, Chunk, Draft, Turn

_MAX_ROUNDS_AHEAD = 8  # rounds that an answer may be ahead of its reader


@dataclass(frozen=True, slots=True)
class Round:
    """What one call of the main model reads of all answers in it."""

    readings: list[Reading]

    @property
    def num_prompt_rows(self) -> int:
        """Rows of pieces of prompts."""
        return sum(len(each.chunk.token_ids) for each in self.readings if each.is_prompt)

    @property
    def chunks(self) -> list[Chunk]:
        """What is read, answer by answer."""
        return [reading.chunk for reading in self.readings]

    @property
    def judged(self) -> list[tuple[GrammarState, Draft]]:
        """The drafts to verify whose answers follow a grammar."""
        return [
            (grammar, reading.draft)
            for reading in self.readings
            if (grammar := reading.answer.grammar) is not None and reading.chunk.num_rows
        ]


@dataclass(eq=False)
class Scheduler:
    """The answers that wait for room and those that run, in order of arrival.

    rows: shares those of a call. rereading, prefix_check, replaying: what is done while nothing runs; see `idle_jobs`.
    """

    main: Backend | None  # None: the engine is closed
    rows: RowBudget
    running: list[Answer] = field(default_factory=list)
    waiting: deque[Answer] = field(default_factory=deque)
    observer: Observer | None = None
    rereading: Rereading = field(default_factory=Rereading)
    prefix_check: PrefixCheck = field(default_factory=PrefixCheck)
    replaying: Replaying = field(default_factory=Replaying)
    cost: CallCost | None = None  # of the main model's calls, which teach it
    _refused: Answer | None = None  # there was no room for it, and none was freed since
    _round_began: float = 0.0

    @property
    def is_far_ahead(self) -> bool:
        """Whether no answer waits for room, and no reader waits for text."""
        return not self.waiting and all(each.delivery.sink.qsize() >= _MAX_ROUNDS_AHEAD for each in self.running)

    @property
    def idle_jobs(self) -> Sequence[IdleJob]:
        """What is done while nothing runs, the most urgent first."""
        return self.rereading, self.prefix_check, self.replaying

    def forget(self, observer: object) -> None:
        """Tell an observer that has failed no more."""
        if self.observer is observer:
            self.observer = None

    def settle(self) -> None:
        """Between rounds: send texts, release ended answers, admit waiting ones."""
        for answer in (*self.running, *self.waiting):
            answer.end_if_cancelled()
            if not (answer.ended or answer.delivery.has_news):
                continue
            # Release first: a reader that is told of the end may rely on the room.
            if answer.ended:
                self._leave(answer)
            self._publish(answer)
            if answer.delivery.done:  # a tokenizer error may have ended it
                self._leave(answer)
        while self.waiting:
            answer = self.waiting[0]
            if not answer.delivery.done and (answer is self._refused or not self._admit(answer)):
                if self.running and not answer.error:
                    self._refused = answer
                    break  # there is room once these have ended
                answer.fail(
                    RequestError("The cache is too small for this request, although no other request is running.")
                )
                self._publish(answer)
            self.waiting.popleft()
            if not answer.delivery.done:
                self.running.append(answer)

    def give_up(self, error: BaseException) -> None:
        """End all answers with an error."""
        running, given_up = self.running, (*self.running, *self.waiting)
        self.running = []
        self.waiting.clear()
        for answer in given_up:
            answer.fail(error)  # before it is released, so that its tokens are not published
        for answer in running:
            self._release(answer)
        for answer in given_up:
            self._publish(answer)

    def ready(self) -> list[Answer]:
        """The answers that take part in a round."""
        self._round_began = time.perf_counter()
        return [answer for answer in self.running if not answer.ended]

    def round(self, proposed: Sequence[tuple[Answer, Turn | None]]) -> Round:
        """What each answer reads in this round's call, with its turn's draft."""
        for answer, _ in proposed:
            answer.end_if_cancelled()  # while drafting
        sound = [(answer, turn) for answer, turn in proposed if not answer.ended]
        counts = self.rows.share(
            [_num_wanted(answer, turn) for answer, turn in sound],
            [answer.decodes and not answer.request.waits for answer, _ in sound],
            [answer.slot.length for answer, _ in sound],
            begun=time.perf_counter() - self._round_began,
        )
        readings: list[Reading] = []
        for (answer, turn), count in zip(sound, counts, strict=True):
            if count and turn is not None and answer.request.waits:
                turn.draft = turn.draft.cut(count - 1)
            if count:  # else it waits
                readings.append(Reading.of(answer, turn, count))
        return Round(readings)

    def took(self, done: Round, seconds: float, *, alone: bool) -> None:
        """Teach the cost what a round's call took. alone: nothing else ran meanwhile."""
        if self.main is None or self.cost is None:
            return
        # A tree's rows are known where calls keep theirs.
        alone &= self.main.capabilities.steady is not None or all(each.draft.parents is None for each in done.readings)
        answers, prompts = (
            [(len(each.chunk.token_ids), each.begin) for each in done.readings if alone and each.is_prompt == is_prompt]
            for is_prompt in (False, True)
        )
        teach(self.cost, self.main, seconds, answers, prompts)

    def _admit(self, answer: Answer) -> bool:
        admitted = False
        with isolated(answer):
            admitted = self.main is not None and admit(answer, self.main)
        if admitted:
            self.prefix_check.note(answer.sequence, answer.stats.num_cached_tokens)
            if (observer := self.observer) is not None:
                observer.admitted(answer)
        return admitted

    def _leave(self, answer: Answer) -> None:
        if answer in self.running:
            self.running.remove(answer)
            self._release(answer)

    def _release(self, answer: Answer) -> None:
        self._refused = None
        try:
            release(answer)
            if self.main and self.main.capabilities.marks_answers and answer.request.reuse and not answer.error:
                self.rereading.add(answer.sequence)
            if answer.request.policy is not None and not answer.error:
                self.replaying.add(answer.request.policy)
        except BaseException as error:  # whatever it is: the answer itself has ended, and its reader waits
            with isolated(answer):  # if the app turns warnings into errors, or has its own `showwarning`
                warnings.warn(f"A drafter failed to release a sequence: {error!r}.", stacklevel=2)

    def _publish(self, answer: Answer) -> None:
        """Send an answer's news. The observer is told first that it has ended."""
        has_ended, observer = answer.ended, self.observer
        if has_ended and observer is not None:
            observer.left(answer)
        answer.publish()
        if answer.delivery.done and not has_ended and observer is not None:  # a tokenizer error has ended it
            observer.left(answer)


def _num_wanted(answer: Answer, turn: Turn | None) -> int:
    """Most rows of an answer in one call: its newest tokens and draft, or its prompt up to the next boundary."""
    begin, length = answer.slot.length, len(answer.sequence)
    if not answer.decodes:
        return len(answer.sequence.next_piece(begin, length)[0])
    return length - begin - 1 + draft_of(turn).num_rows
