"""Chooses the setting of a model by measuring it: the first that is exact, or on request the fastest.

    choice, backend = choose(spec, settings_for(spec))    # at a load, where no table says it
    choice = search(spec)                                 # `outrider tune --search`

Settings have an order of preference, which begins with that of the table of processors. Another one is taken if it is
faster by a tenth: times of two searches differ by smaller gains.
"""

from __future__ import annotations

import dataclasses
import gc
from typing import TYPE_CHECKING, Any

from outrider.errors import DeviceError, one_line
from outrider.models.backends.registry import compile_model
from outrider.models.cost.measure import CallTimes, timed_rows
from outrider.models.cost.slots import Adapted
from outrider.models.cost.table import FAR, NEAR
from outrider.models.tuning.first import expected_exactness, has_rule
from outrider.models.tuning.measure.exactness import TRIAL_SEQUENCES, TRIAL_TOKENS, check_exactness, measure_exactness
from outrider.models.tuning.setting import Choice, Setting, Trial, fewer_threads, settings_for
from outrider.system.progress import report
from outrider.types import Exactness, RowRule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.models.tuning.model_spec import ModelSpec
    from outrider.types import CompiledModel

# The calls that score a setting, as (tokens, context), and how often each is made. Main model: a prompt of 256 tokens
# and 60 rounds, half of them with drafts. Draft model: as many rounds of three draft tokens. With short and long
# contexts, as the speed of attention depends on the setting, too.
_MAIN_CALLS = {(1, NEAR): 15, (8, NEAR): 15, (1, FAR): 15, (8, FAR): 15, (32, NEAR): 8}
_DRAFT_CALLS = {(1, NEAR): 90, (1, FAR): 90, (128, NEAR): 2}

_GAIN = 0.9  # of the time of the setting before, at most, that another one takes if it is to be preferred


def choose(spec: ModelSpec, settings: Sequence[Setting]) -> tuple[Choice, CompiledModel]:
    """The first of these settings in which rows are exact, or the first of all; and the model in it.

    Raises as `compile_model`.
    """
    found: list[Exactness] = []
    for setting in settings:
        if not spec.is_small:
            report(f"{spec} is measured on {spec.device}: {setting}")
        backend = compile_for_trials(spec, setting)
        found.append(_needed(spec, setting, backend))
        if not spec.is_main or found[-1].holds or len(settings) == 1:
            return Choice(dataclasses.replace(setting, exactness=found[-1])), backend
        del backend  # there is room for one
        gc.collect()
    backend = compile_for_trials(spec, settings[0])
    backend.use(found[0])
    return Choice(dataclasses.replace(settings[0], exactness=found[0])), backend


def search(spec: ModelSpec) -> Choice | None:
    """The fastest setting of a model that is exact, if there is one, with all that were tried.

    First those that the options allow, then fewer threads in the best of these, as long as that is faster.
    """
    trials = [_try(spec, setting) for setting in settings_for(spec)]
    best = trials[0]
    for trial in trials[1:]:
        best = _better(best, trial)
    for count in fewer_threads(spec) if best.is_usable else ():
        trials.append(_try(spec, dataclasses.replace(best.setting, num_threads=count)))
        if _better(best, trials[-1]) is best:
            break
        best = trials[-1]
    return Choice(best.setting, tuple(trials)) if best.is_usable else None


def _better(best: Trial, other: Trial) -> Trial:
    """The setting that is preferred: the first one, unless it cannot be used, or the other one is faster enough."""
    if other.is_usable and (not best.is_usable or other.score < _GAIN * best.score):
        return other
    return best


def _try(spec: ModelSpec, setting: Setting) -> Trial:
    """Measure the exactness and the speed of a setting. A failure is said in the result."""
    report(f"{spec} is measured on {spec.device}: {setting}")
    gc.collect()  # there is room for one
    try:
        backend = compile_for_trials(spec, setting)
        setting = dataclasses.replace(setting, exactness=_needed(spec, setting, backend))
        cost = CallTimes(backend, timed_rows(spec.role, backend), spec.model.geometry.context_length).measure()
    except DeviceError as error:
        return Trial(setting, {}, 0.0, one_line(error))
    cost.rule = backend.capabilities.rows
    calls = _MAIN_CALLS if spec.is_main else _DRAFT_CALLS
    score = sum(times * cost(count, context) for (count, context), times in calls.items())
    failure = "not exact" if spec.is_main and not setting.exactness.holds else ""
    return Trial(setting, {count: cost(count) for count, _ in calls}, score, failure)


def _needed(spec: ModelSpec, setting: Setting, backend: CompiledModel) -> Exactness:
    """The padding that makes a main model's rows exact, which is used from now on; a draft model's fastest.

    That of the setting or of the table is tried before all others.
    """
    known = setting.exactness
    if known.rule == RowRule() and (not spec.is_main or has_rule(spec, setting)):
        known = expected_exactness(spec, backend)
    found = Exactness(known.groups, known.rule)
    if spec.is_main:
        rows: Any = Adapted(backend, spec.adapters.names[0]) if spec.adapters else backend
        if known.rule != RowRule():
            backend.use(found)
            found = dataclasses.replace(found, differences=check_exactness(rows))
        if not found.holds:
            found = measure_exactness(rows)
    backend.use(found)
    return found


def compile_for_trials(spec: ModelSpec, setting: Setting) -> CompiledModel:
    """Compile a model with a cache for measurements, which has states for all sequences that are open at a time."""
    backend = compile_model(spec, setting)
    backend.allocate(TRIAL_TOKENS)
    if backend.capabilities.states:
        backend.allocate(max(TRIAL_TOKENS, TRIAL_SEQUENCES * backend.tokens_for(1)))
    return backend
