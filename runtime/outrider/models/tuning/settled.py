"""Compiles models in their settings, which are saved for later starts, or found now.

A setting is saved under the model's identity.
"""

from __future__ import annotations

import dataclasses
import gc
import warnings
from typing import TYPE_CHECKING

from outrider.errors import ExactnessWarning
from outrider.models.tuning.costs import save_cost
from outrider.models.tuning.measure import measure_exactness
from outrider.models.tuning.measure.slots import Adapted
from outrider.models.tuning.measured import compile_for_trials
from outrider.models.tuning.model_spec import ModelSpec
from outrider.models.tuning.setting import Choice, Setting
from outrider.models.tuning.trials import choose
from outrider.system.progress import report
from outrider.types import CompiledModel, Exactness

if TYPE_CHECKING:
    from outrider.system.saved import SavedValue


# Hidden states that drafters read change no setting. With one file for them all, a text is the same with each drafter.
_ALIKE = ("features",)


def compile_settled(spec: ModelSpec) -> tuple[Choice, CompiledModel]:
    """Compile a model in its setting, which is saved, or found now. Returns both.

    Warns (`ExactnessWarning`) if a main model's rows depend on the batch. Raises as `ModelSpec.compile`.
    """
    choice, backend = _choice_of(spec)
    setting = choice.setting
    if backend is None:
        backend = spec.compile(setting)
        backend.use(setting.exactness)
    if spec.is_main and not setting.exactness.holds:
        if setting.exactness.differences:
            how = f"logits differ by up to {setting.exactness.largest_difference:.2g} with the other rows of a call"
        else:
            how = "its cache is too small to measure whether logits depend on the other rows of a call"
        if backend.cache_precision == "u8":
            remedy = "Leave cache_precision at 'auto'"
        elif spec.options.precision != "auto":
            remedy = "Leave precision at 'auto'"
        elif backend.precision != "f32":
            remedy = "Load with precision='f32'"
        else:
            remedy = "Load with drafter='none' and one request at a time, or export the model to ONNX,"
        warnings.warn(
            f"{spec} on {backend.device} in {backend.precision}, cache {backend.cache_precision}: {how}, so drafts may "
            f"change the text. {remedy} to avoid this; 'outrider verify' shows by how much.",
            ExactnessWarning,
            stacklevel=2,
        )
    return choice, backend


def choice_of(spec: ModelSpec) -> Choice:
    """The setting of a model on its device, and its trials: saved, or found now.

    None are tried of one that uses the main model's cache, and is not compiled alone.
    """
    if spec.uses_main_cache:
        own = spec.options
        return Choice(Setting(own.precision, own.cache_precision, num_threads=own.num_threads))
    return _choice_of(spec)[0]


def _choice_of(spec: ModelSpec) -> tuple[Choice, CompiledModel | None]:
    """The same, with the model if it was just compiled in that setting. Saves the cost that slices have."""
    if spec.adapters:
        return _choice_with_adapters(spec)
    file = _file(spec)
    if found := file.read():
        return found, None
    choice, measured = choose(spec)
    file.write(choice)
    if measured is None:
        return choice, None
    if measured.slices is None:
        return choice, measured.main
    report(f"{spec} is timed.")
    cost, whole = measured.cost(), measured.whole
    del measured  # frees the slices
    gc.collect()
    if whole is None:
        report(f"{spec} is compiled.")
    backend = spec.compile(choice.setting) if whole is None else whole.result()
    backend.use(choice.setting.exactness)
    save_cost(spec, backend, cost)
    return choice, backend


def is_settled(spec: ModelSpec) -> bool:
    """Whether a model's setting is saved, so that `compile_settled` measures nothing."""
    return not spec.adapters and _file(spec).read() is not None


def _file(spec: ModelSpec) -> SavedValue[Choice]:
    return spec.identity.saved("settings", Choice, _ALIKE)


def _choice_with_adapters(spec: ModelSpec) -> tuple[Choice, CompiledModel | None]:
    """The setting of the model without adapters, with its padding if that is enough with them, or another.

    So a row without an adapter has the bits that it has in an engine without adapters, wherever kernels allow that.
    """
    choice = _choice_of(dataclasses.replace(spec, adapters=None))[0]
    gc.collect()
    adapters = spec.adapters
    if adapters is None:
        raise AssertionError("the caller has found some")
    taken = {"setting": str(choice.setting), "rule": str(choice.setting.exactness.rule)}
    file = spec.identity.saved("settings", Exactness, _ALIKE, **taken)
    known, backend = file.read(), None
    if known is None:
        backend = compile_for_trials(spec, choice.setting)
        known = measure_exactness(Adapted(backend, adapters.names[0]), choice.setting.exactness)
        backend.use(known)
        file.write(known)
    return dataclasses.replace(choice, setting=dataclasses.replace(choice.setting, exactness=known)), backend
