"""Measures models while an engine is idle, where it answers before it is measured: whether rows are exact, and costs.

A job gives way to a request at its next call. What was measured before is kept: the job goes on after it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from typing import TYPE_CHECKING, Any, cast

from outrider.decoding.idle import IdleJob, harmless
from outrider.models.tuning.learned_cost import LearnedCost, is_guess
from outrider.models.tuning.loading import save_choice, warn_of
from outrider.models.tuning.measure import check_exactness, measure_change, measure_pass
from outrider.models.tuning.measure.cost import UNKNOWN
from outrider.models.tuning.measure.slots import GaveWay, GivingWay
from outrider.types import Exactness

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from outrider.models.tuning.loading import LoadedModel
    from outrider.types import Backend

log = logging.getLogger("outrider")

_PATIENCE_SECONDS, _MOST_PATIENCE_SECONDS = 2.0, 600.0  # without a request; longer after each try on a busy machine
_REPEATS = 2  # of the measurement of costs


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
            _keep_rows(model)
        found = Exactness(backend.exactness.groups, backend.exactness.rule, self._made)
        if not self._made:
            return True
        # Prefixes stay marked as they are, so that plain decoding goes on as before.
        backend.use(dataclasses.replace(found, is_expected=True))
        _keep_rows(model)
        setting = dataclasses.replace(choice.setting, exactness=found)
        model.choice = dataclasses.replace(choice, setting=setting, waits=False, is_refuted=not found.holds)
        save_choice(model.spec, model.choice)
        self._may_draft(found.holds)
        if found.holds:
            log.info("%s was checked while idle: its rows are exact in %s.", model.spec, setting)
        else:
            warn_of(model.spec, backend)
        return True


class MeasureCosts(Measuring):
    """Times the calls of models whose cost is a guess. Costs are used and saved if nothing else ran meanwhile.

    loaded: the models by role; read as a list, because closing an engine empties it.
    """

    fault = "The costs of calls could not be measured"

    def __init__(self, loaded: Mapping[str, LoadedModel]) -> None:
        super().__init__()
        self._loaded = loaded
        self._made: dict[str, tuple[list[float], list[float]]] = {}  # by role, seconds of calls
        self.patience = _PATIENCE_SECONDS

    @property
    def is_due(self) -> bool:
        """Whether a cost is a guess."""
        return self._is_due and bool(self._guessed())

    def _guessed(self) -> list[tuple[LoadedModel, LearnedCost]]:
        both = [(model, model.cost) for model in list(self._loaded.values()) if model.spec.answers_first]
        return [(model, cost) for model, cost in both if isinstance(cost, LearnedCost) and is_guess(cost.learned())]

    def measure(self, main: Backend, is_cancelled: Callable[[], bool]) -> bool:  # noqa: ARG002
        """Time calls, model by model."""
        for model, cost in self._guessed():
            backend, longest = model.backend, model.spec.model.geometry.context_length
            calls, changes = self._made.setdefault(model.spec.role, ([], []))
            giving_way = cast("Any", GivingWay(backend, is_cancelled))
            backend.use(backend.exactness)
            try:
                found = measure_pass(giving_way, cost.rows, _REPEATS, max_tokens=longest, made=calls)
                found.change = measure_change(giving_way, cost.rows, made=changes)
            finally:
                _keep_rows(model)
            del self._made[model.spec.role]
            if max(found.doubt, default=0.0) >= UNKNOWN:  # others used the processor
                self.patience = min(8 * self.patience, _MOST_PATIENCE_SECONDS)
                break
            cost.take(found)
            _keep_rows(model)
            cost.save()
        return False  # another model may be loaded yet


def _keep_rows(model: LoadedModel) -> None:
    """Have calls keep their rows again, after `use`."""
    model.backend.keep_rows(model.cost, model.cost.scale * (model.cost.change or 0.0))
