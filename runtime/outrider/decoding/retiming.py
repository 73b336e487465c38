"""Times calls again whose seconds are doubtful: while an engine has nothing else to do, and rarely beside answers."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

from outrider.decoding.idle import IdleJob
from outrider.models.tuning.learned_cost import LearnedCost
from outrider.models.tuning.measure import LONGEST
from outrider.models.tuning.measure.slots import open_slot, random_tokens
from outrider.types import Backend, Chunk, Prompt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from outrider.models.tuning.loading import LoadedModel

log = logging.getLogger("outrider")

_REST, _MOST_REST = 2.0, 600.0  # seconds without a request before calls are timed; longer after each try
_TURNS = 3  # of all numbers of rows
# Of the time of answers, for doubtful calls beside them: more rows of the main model's, calls of drafters.
_SHARE_OF_ROWS, _SHARE_OF_CALLS = 0.005, 0.01
_LOOK_SECONDS = 0.1  # of answers, between two looks for doubtful calls


class Retiming(IdleJob):
    """The calls of an engine's models that are to be timed again.

    Only what is doubtful is timed: see `LearnedCost`. Nothing is, before the first answer has ended.

    loaded: the models by role; read as a list, because closing an engine empties it.
    """

    measures = True

    def __init__(self, loaded: Mapping[str, LoadedModel]) -> None:
        self._loaded = loaded
        self._job: Iterator[None] | None = None
        self._is_due = False
        self.patience = _REST
        self._budgets: dict[str, float] = {}  # by role, seconds for calls beside answers
        self._spent = 0.0  # seconds of answers since the last look
        self._is_sure = not any(cost.is_unsure for _, cost in self._learning)

    @property
    def _learning(self) -> list[tuple[LoadedModel, LearnedCost]]:
        """The models whose calls can be timed beside requests, with their costs."""
        both = [(model, model.cost) for model in list(self._loaded.values())]
        return [
            (model, cost)
            for model, cost in both
            if isinstance(cost, LearnedCost)
            and not (model.backend.capabilities.fixed or model.backend.capabilities.reads_sources)
        ]

    @property
    def is_due(self) -> bool:
        """Whether an answer has ended since something was timed, and something is doubtful."""
        return self._is_due

    @property
    def has_begun(self) -> bool:
        """Whether calls are being timed."""
        return self._job is not None

    def answered(self) -> None:
        """A request has ended."""
        self._is_due = any(cost.doubtful_rows for _, cost in self._learning)

    def pause(self) -> None:
        """A request has come, or somebody measures: end what has begun."""
        self._job, self._is_due = None, False  # closes its slot

    def go_on(self, main: Backend, is_cancelled: Callable[[], bool]) -> None:  # noqa: ARG002
        """Make one call. At the end the numbers are used, and saved."""
        if self._job is None:
            self._job = self._measure()
        try:
            next(self._job)
            return
        except StopIteration:
            self.finish()
        except Exception as error:  # requests are not affected
            log.warning("Calls could not be timed again: %r", error)
        self.pause()
        self.patience = min(8 * self.patience, _MOST_REST)

    def _measure(self) -> Iterator[None]:
        for model, cost in self._learning:
            if rows := cost.doubtful_rows:
                yield from _time(model, cost, [cost.rows[0], *rows])
        self._is_sure = not any(cost.is_unsure for _, cost in self._learning)

    def spent(self, seconds: float) -> None:
        """Answers have taken so many seconds: time a doubtful call, if that takes little of their time so far."""
        self._spent += seconds
        if self._is_sure or self._spent < _LOOK_SECONDS:
            return
        seconds, self._spent = self._spent, 0.0
        learning = self._learning
        try:
            for model, cost in learning:
                role, is_main = model.spec.role, model.spec.is_main
                budget = self._budgets.get(role, 0.0) + (_SHARE_OF_ROWS if is_main else _SHARE_OF_CALLS) * seconds
                self._budgets[role] = budget - (_pad if is_main else _call)(model, cost, budget)
            self._is_sure = not any(cost.is_unsure for _, cost in learning)
        except Exception as error:  # requests are not affected
            log.warning("A call could not be timed beside answers: %r", error)
            self._is_sure = True

    def finish(self) -> None:
        """Save what the costs have learned."""
        for _, cost in self._learning:
            cost.save()


def _time(model: LoadedModel, cost: LearnedCost, rows: list[int]) -> Iterator[None]:
    """Time calls with these numbers of rows in turns, twice each: the first one changes the number."""
    taken: dict[int, list[float]] = {count: [] for count in rows}
    with _calls(model, cost, max(rows)) as seconds:
        if seconds is None:
            return
        for _ in range(_TURNS):
            for count in rows:
                seconds(count)
                yield
                taken[count].append(seconds(count))
                yield
    cost.measured_again(taken)


def _call(model: LoadedModel, cost: LearnedCost, budget: float) -> float:
    """Make two calls of the least rows, if their level is doubtful. Returns the seconds that this was expected to take.

    The first call after a load takes longer, and nothing is learned from that.
    """
    first, is_unused = cost.rows[0], not model.backend.seconds
    price = cost.scale * (2 * cost.near[0] + 2 * (cost.change or 0.0) + is_unused * cost.first)
    if not cost.is_level_unsure or price > budget:
        return 0.0
    with _calls(model, cost, first) as seconds:
        if seconds:
            seconds(first)
            cost.observed_alone(first, seconds(first))
    return price


def _pad(model: LoadedModel, cost: LearnedCost, budget: float) -> float:
    """Have the next call of answers padded to a doubtful number of rows. Returns the seconds that this may take."""
    steady = model.backend.capabilities.steady
    for rows in cost.unsure_rows if steady else ():
        price = cost.scale * (cost.near[cost.rows.index(rows)] - cost.near[0] + 2 * (cost.change or 0.0))
        if steady and rows <= LONGEST + 1 and price <= budget and steady.pad(rows):
            return price
    return 0.0


@contextlib.contextmanager
def _calls(model: LoadedModel, cost: LearnedCost, most: int) -> Iterator[Callable[[int], float] | None]:
    """Yield a function that times a call of so many rows; None if the cache has no room."""
    backend, context = model.backend, cost.contexts[0]
    try:
        slot = open_slot(backend, context + most, Prompt((), counted=False))
    except AssertionError:
        yield None
        return
    token_ids = random_tokens(backend, most)

    def seconds(count: int) -> float:
        slot.trim(0)
        slot.skip_to(context)
        if steady := backend.capabilities.steady:
            steady.current = 0  # this call has its own rows
        began = backend.seconds
        backend.submit([Chunk(slot, token_ids[:count], count, generated=True)]).wait()
        return backend.seconds - began

    with contextlib.closing(slot):
        yield seconds
