"""The costs of models' calls: saved, or measured at the first load."""

from __future__ import annotations

import dataclasses
import weakref
from functools import partial
from typing import TYPE_CHECKING

from outrider.models.tuning.first import expected_cost
from outrider.models.tuning.learned_cost import LearnedCost, is_guess
from outrider.models.tuning.measure import (
    PassCost,
    check_pass,
    contexts_of,
    measure_change,
    measure_pass,
    timed_rows,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.models.tuning.model_spec import ModelSpec
    from outrider.system.saved import SavedValue
    from outrider.types import CompiledModel


# Hidden states are given by calls that ask for them, and those that are timed do not. So a drafter that reads some does
# not have the main model timed again.
UNMEASURED = ("features",)


def cost_of(
    spec: ModelSpec, backend: CompiledModel, repeats: int | None = None, scale: float | None = None
) -> LearnedCost:
    """The cost of a model's calls: saved, or measured now, at the first time or with `repeats`.

    Where the engine answers first, it is a guess at the first time, and no calls are timed.

    The backend then keeps the number of rows of its calls where that saves time.

    It is also measured again if the cache has room for a longer context than it had then. scale: of a saved cost, if
    the machine's speed today is known; by default a few calls are timed.

    Calls correct it, see `LearnedCost`.
    """
    if backend.capabilities.steady:
        backend.use(backend.exactness)  # calls that are timed keep no rows
    file = _file(spec, backend)
    known = file.read()
    rows, longest = timed_rows(spec.role, backend), spec.model.geometry.context_length
    if known is not None and not _can_be(known, backend, rows, longest):
        known = None
    far = contexts_of(backend, rows, longest)[1]
    fits = known is not None and far <= known.contexts[1] and known.contexts[0] + known.rows[0] <= backend.max_tokens
    stored = True
    if spec.answers_first and not repeats:
        cost = known if known is not None and fits else expected_cost(spec, backend)
    elif known is not None and fits and not repeats and not is_guess(known):
        cost = known
        if scale is None:
            check_pass(backend, cost)
        else:
            cost.scale = scale
    else:
        cost = measure_pass(backend, rows, repeats, max_tokens=longest)
        cost.change = measure_change(backend, rows)
        stored = bool(repeats) or known is None or known.contexts[1] <= far
        if stored:  # a cost that was measured with a larger cache stays
            file.write(cost)
    if cost.change is None:  # it was measured on slices
        cost.change = measure_change(backend, rows) / cost.scale
        file.write(dataclasses.replace(cost, scale=1.0))
    cost.one_call, cost.rule = backend.capabilities.one_call, backend.capabilities.rows
    backend.keep_rows(cost, cost.scale * cost.change)
    learned = LearnedCost.of(cost)
    learned.file, learned.stored = file, dataclasses.replace(cost, scale=1.0) if stored else None
    learned.told = partial(_tell, weakref.ref(backend))
    return learned


def _tell(backend: weakref.ref[CompiledModel], cost: PassCost) -> None:
    """Have a backend keep the rows of its calls by a cost that has changed."""
    found = backend()
    if found is not None and (steady := found.capabilities.steady) is not None:
        steady.price(cost, cost.scale * (cost.change or 0.0))


def save_cost(spec: ModelSpec, backend: CompiledModel, cost: PassCost) -> None:
    """Save a cost that was measured on slices of the model, for `cost_of`."""
    _file(spec, backend).write(cost)


def _file(spec: ModelSpec, backend: CompiledModel) -> SavedValue[PassCost]:
    return spec.identity.compiled(backend).saved("costs", PassCost, UNMEASURED)


def _can_be(known: PassCost, backend: CompiledModel, rows: Sequence[int], longest: int) -> bool:
    """Whether a saved cost is valid for this model, these rows and contexts up to `longest`."""
    fixed = backend.capabilities.fixed
    alike = known.rows[:2] == (1, fixed.window) if fixed else known.rows == rows
    return alike and known.contexts[1] < max(longest, backend.max_tokens)
