"""The costs of models' calls: saved, or measured at the first load."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING

from outrider.models.cost.measure import CallTimes, timed_rows
from outrider.models.cost.table import ONE_LOAD, CallCost
from outrider.models.tuning.first import expected_cost

if TYPE_CHECKING:
    from outrider.models.tuning.model_spec import ModelSpec
    from outrider.system.saved import SavedValue
    from outrider.types import CompiledModel


# Hidden states are given by calls that ask for them, and those that are timed do not. So a drafter that reads some does
# not have the main model timed again.
UNMEASURED = ("features",)
_EQUAL = 0.03  # what is saved differs by more, in its logarithm


def cost_of(spec: ModelSpec, backend: CompiledModel, repeats: int | None = None) -> CallCost:
    """The cost of a model's calls: saved, or measured now, at the first time or with `repeats`.

    Where the engine answers first, it is a guess at the first time, and no calls are timed.

    The backend then keeps the number of rows of its calls where that saves time.

    It is also measured again if the cache has room for a longer context than it had then.
    """
    if backend.capabilities.steady:
        backend.use(backend.exactness)  # calls that are timed keep no rows
    file = _file(spec, backend)
    times = CallTimes(backend, timed_rows(spec.role, backend), spec.model.geometry.context_length)
    known, far = file.read(), times.contexts[1]
    if known is not None and not times.can_be(known):
        known = None
    fits = known is not None and far <= known.contexts[1] and known.contexts[0] + known.rows[0] <= backend.max_tokens
    usable = known if fits and not repeats else None
    if spec.answers_first and not repeats:
        cost = usable or expected_cost(spec, times.rows, times.contexts, backend.bytes_per_token)
    elif usable is not None and not usable.is_guess:
        cost = usable  # the first calls show the machine's speed today
    else:
        cost = times.measure(repeats)
        if repeats or known is None or known.contexts[1] <= far:  # one that was measured with a larger cache stays
            file.write(cost)
    cost.one_call, cost.rule = backend.capabilities.one_call, backend.capabilities.rows
    backend.keep_rows(cost)
    return cost


def save_cost(spec: ModelSpec, backend: CompiledModel, cost: CallCost) -> None:
    """Save a cost for `cost_of`, if it says something new: one that was measured, or what calls have shown."""
    file = _file(spec, backend)
    with contextlib.suppress(ValueError):  # numbers that nothing measures
        made, known = cost.learned(), file.read()
        fits = known is None or (known.contexts[1] <= made.contexts[1] and _differs(known, made))
        if fits and not made.is_guess:
            file.write(made)


def _differs(known: CallCost, made: CallCost) -> bool:
    """Whether a cost says something new: of the times, or of how well they are known."""
    if known.rows != made.rows or [n < ONE_LOAD for n in known.calls] != [n < ONE_LOAD for n in made.calls]:
        return True
    pairs = [*zip(known.near, made.near, strict=True), *zip(known.far, made.far, strict=True)]
    return any(abs(math.log(a / b)) > _EQUAL for a, b in pairs)


def _file(spec: ModelSpec, backend: CompiledModel) -> SavedValue[CallCost]:
    return spec.identity.compiled(backend).saved("costs", CallCost, UNMEASURED)
