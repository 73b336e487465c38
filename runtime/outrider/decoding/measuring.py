"""Measures models while an engine is idle, where it answers before it is measured: whether rows are exact, and costs.

A job gives way to a request at its next call. What was measured before is kept: the job goes on after it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from typing import TYPE_CHECKING, Any, cast

from outrider.decoding.idle import IdleJob, harmless
from outrider.models.calls import teach
from outrider.models.cost.measure import CallTimes, timer
from outrider.models.cost.slots import GaveWay, GivingWay
from outrider.models.cost.stored import save_cost
from outrider.models.cost.table import LONGEST, ONE_LOAD
from outrider.models.tuning.loading import warn_of
from outrider.models.tuning.measure.exactness import check_exactness
from outrider.types import Exactness

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from outrider.models.tuning.loading import LoadedModel
    from outrider.types import Backend

log = logging.getLogger("outrider")

_PATIENCE_SECONDS, _MOST_PATIENCE_SECONDS = 2.0, 600.0  # without a request; longer after each try on a busy machine
_REPEATS = 2  # of the measurement of costs
_SHARE = 0.01  # of the time of answers, for calls that are made to be timed


class Measuring(IdleJob):
    """A measurement in one part, which is left for a request and gone on with after it."""

    measures = True
    patience = _PATIENCE_SECONDS
    fault = "A model could not be measured"

    def __init__(self) -> None:
        self._is_due = True

    @property
    def is_due(self) -> bool:
        """Whether it is not done."""
        return self._is_due

    def go_on(self, main: Backend, is_cancelled: Callable[[], bool]) -> None:
        """Measure to the end, or to the call before which a request comes."""
        with harmless(self.fault):
            with contextlib.suppress(GaveWay):
                self._is_due = not self.measure(main, is_cancelled)
            return
        self._is_due = False

    def measure(self, main: Backend, is_cancelled: Callable[[], bool]) -> bool:
        """Measure; whether that is done. Raises GaveWay."""
        raise NotImplementedError


class CheckExactness(Measuring):
    """Whether a main model's rows are exact by the rule that the table gives, as they are expected to be.

    What was found is saved. If they are not, a warning says so (`ExactnessWarning`), nothing more is drafted, and the
    next load tries other settings.

    may_draft: is called with whether they are.
    """

    fault = "Whether the main model's rows are exact could not be measured"

    def __init__(self, model: LoadedModel, may_draft: Callable[[bool], object]) -> None:
        super().__init__()
        self._model, self._may_draft = model, may_draft
        self._made: dict[str, float] = {}

    def measure(self, main: Backend, is_cancelled: Callable[[], bool]) -> bool:  # noqa: ARG002
        """Read the same tokens in several ways."""
        model = self._model
        backend, choice, prefixes = model.backend, model.choice, model.backend.prefixes
        told = prefixes.on_publish if prefixes else None
        backend.use(backend.exactness)  # calls keep no rows
        try:
            if prefixes:
                prefixes.on_publish = None  # no file is to have what is read here
            check_exactness(cast("Any", GivingWay(backend, is_cancelled)), self._made)
        finally:
            if prefixes:
                prefixes.on_publish = told
            backend.keep_rows(model.cost)
        found = Exactness(backend.exactness.groups, backend.exactness.rule, self._made)
        if not self._made:
            return True
        # Prefixes stay marked as they are, so that plain decoding goes on as before.
        backend.use(dataclasses.replace(found, is_expected=True))
        backend.keep_rows(model.cost)
        setting = dataclasses.replace(choice.setting, exactness=found)
        model.choice = dataclasses.replace(choice, setting=setting, waits=False, is_refuted=not found.holds)
        model.spec.saved_choice.write(model.choice)
        self._may_draft(found.holds)
        if found.holds:
            log.info("%s was checked while idle: its rows are exact in %s.", model.spec, setting)
        else:
            warn_of(model.spec, backend)
        return True


class MeasureCosts(Measuring):
    """Times the calls of models whose cost is doubtful: a guess, or known from one load only.

    Costs are used and saved if nothing else ran meanwhile. Beside answers, a hundredth of their time is for what little
    is known of: numbers of rows that the main model's calls are padded to, and calls of draft models.

    loaded: the models by role; read as a list, because closing an engine empties it.
    """

    fault = "The costs of calls could not be measured"

    def __init__(self, loaded: Mapping[str, LoadedModel]) -> None:
        super().__init__()
        self._loaded = loaded
        self._made: dict[str, list[float]] = {}  # by role, seconds of calls
        self._done: set[str] = set()  # roles whose costs were measured
        self._budgets: dict[str, float] = {}  # by role, seconds for calls beside answers

    @property
    def is_due(self) -> bool:
        """Whether a cost is doubtful."""
        return self._is_due and bool(self._doubtful())

    def _doubtful(self) -> list[LoadedModel]:
        both = [(model, model.backend.capabilities) for model in list(self._loaded.values())]
        able = [model for model, can in both if not (can.fixed or can.reads_sources)]
        return [model for model in able if model.cost.is_doubtful and model.spec.role not in self._done]

    def measure(self, main: Backend, is_cancelled: Callable[[], bool]) -> bool:  # noqa: ARG002
        """Time calls, model by model."""
        for model in self._doubtful():
            backend, cost, longest = model.backend, model.cost, model.spec.model.geometry.context_length
            made = self._made.setdefault(model.spec.role, [])
            giving_way = cast("Any", GivingWay(backend, is_cancelled))
            backend.use(backend.exactness)
            try:
                found = CallTimes(giving_way, cost.rows, longest).measure(_REPEATS, made)
            finally:
                backend.keep_rows(cost)
            del self._made[model.spec.role]
            worst = max if cost.is_guess else min  # anything is better than a guess
            if worst(found.calls) < ONE_LOAD:  # others used the processor
                self.patience = min(8 * self.patience, _MOST_PATIENCE_SECONDS)
                break
            self._done.add(model.spec.role)
            cost.take(found)
            save_cost(model.spec, backend, cost)
        return False  # another model may be loaded yet

    def spent(self, seconds: float) -> None:
        """Make a call that teaches something, if a share of the time of answers so far pays for it."""
        with harmless("A call could not be timed beside answers"):
            for model in self._doubtful():
                if rows := model.cost.unsure_rows:
                    role, try_one = model.spec.role, _pad if model.spec.is_main else _call
                    budget = self._budgets.get(role, 0.0) + _SHARE * seconds
                    self._budgets[role] = budget - try_one(model, rows, budget)

    def finish(self) -> None:
        """Save what calls have shown."""
        for model in list(self._loaded.values()):
            save_cost(model.spec, model.backend, model.cost)


def _pad(model: LoadedModel, rows: Sequence[int], budget: float) -> float:
    """Have the next call of answers padded to one of these numbers of rows. The seconds that this may take."""
    cost, steady = model.cost, model.backend.capabilities.steady
    for count in rows if steady else ():
        price = cost(count) - cost(cost.rows[0]) + 2 * cost.scale * (cost.change or 0.0)
        if steady and cost.rows[0] < count <= LONGEST + 1 and price <= budget and steady.pad(count):
            return price
    return 0.0


def _call(model: LoadedModel, rows: Sequence[int], budget: float) -> float:
    """Make two calls of the fewest rows, if these are among `rows`. The seconds that this was expected to take.

    None is made if the cache has no room.
    """
    cost, backend, first = model.cost, model.backend, model.cost.rows[0]
    price = 2 * cost(first) + cost.scale * (2 * (cost.change or 0.0) + (0.0 if backend.seconds else cost.first))
    if first not in rows or price > budget:
        return 0.0
    uncounted = cast("Any", GivingWay(backend, lambda: False))
    with contextlib.suppress(AssertionError), timer(uncounted, cost.contexts[0] + first) as make:
        for _ in range(2):
            began = backend.seconds
            make(first, cost.contexts[0])
            teach(cost, backend, backend.seconds - began, [(first, cost.contexts[0])], [])
    return price
