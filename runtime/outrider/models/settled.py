"""Compiles models in their settings, which are saved for later starts, or found now.

A setting is saved for the model's files, the device, the options and the libraries' versions.
"""

from __future__ import annotations

import dataclasses
import gc
import warnings
from typing import Any

from outrider.config import DeviceConfig
from outrider.errors import ExactnessWarning
from outrider.models.costs import save_cost
from outrider.models.measure import allocate_for_trials, measure_exactness
from outrider.models.measure.slots import Adapted
from outrider.models.part import Part, machine
from outrider.models.setting import Choice
from outrider.models.trials import Found, choose
from outrider.system import saved
from outrider.system.progress import report
from outrider.types import CompiledModel, Exactness


def compile_settled(part: Part, device: str, options: DeviceConfig) -> CompiledModel:
    """Compile a model in its setting, which is saved, or found now.

    Warns (`ExactnessWarning`) if a main model's rows depend on the batch. Raises as `load_model`.
    """
    own = part.options(options, device)
    choice, backend = _choice_of(part, device, own)
    setting = choice.setting
    if backend is None:
        backend = part.compile(setting.options(own), device, columns=setting.columns)
        backend.use(setting.exactness)
    if part.is_main and not setting.exactness.holds:
        if setting.exactness.differences:
            how = f"logits differ by up to {setting.exactness.largest_difference:.2g} with the other rows of a call"
        else:
            how = "its cache is too small to measure whether logits depend on the other rows of a call"
        if backend.cache_precision == "u8":
            remedy = "Leave cache_precision at 'auto'"
        elif own.precision != "auto":
            remedy = "Leave precision at 'auto'"
        elif backend.precision != "f32":
            remedy = "Load with precision='f32'"
        else:
            remedy = "Load with drafter='none' and one request at a time, or export the model to ONNX,"
        warnings.warn(
            f"{part} on {backend.device} in {backend.precision}, cache {backend.cache_precision}: {how}, so drafts may "
            f"change the text. {remedy} to avoid this; 'outrider verify' shows by how much.",
            ExactnessWarning,
            stacklevel=2,
        )
    return backend


def choice_of(part: Part, device: str, options: DeviceConfig) -> Choice:
    """The setting of a model on a device, and its trials: saved, or found now."""
    return _choice_of(part, device, part.options(options, device))[0]


def _choice_of(part: Part, device: str, own: DeviceConfig) -> tuple[Choice, CompiledModel | None]:
    """The same, with the model if it was just compiled in that setting."""
    if part.adapters:
        return _choice_with_adapters(part, device, own)
    file = _file(part, device, own)
    if found := file.read():
        return found, None
    chosen = choose(part, device, own)
    file.write(chosen.choice)
    return chosen.choice, _compiled(part, device, own, chosen)


def is_settled(part: Part, device: str, options: DeviceConfig) -> bool:
    """Whether a model's setting is saved, so that `compile_settled` measures nothing."""
    return not part.adapters and _file(part, device, part.options(options, device)).read() is not None


def _file(part: Part, device: str, own: DeviceConfig) -> saved.SavedValue[Choice]:
    key: dict[str, Any] = {"role": part.role if part.is_main else "draft", "files": part.files, "device": device}
    key |= {"asked": part.asked(own, device), **machine(), **part.versions}
    if part.cuts:
        key["cuts"] = part.cuts
    return saved.SavedValue(saved.FOLDER / "settings", key, Choice)


def _compiled(part: Part, device: str, own: DeviceConfig, chosen: Found) -> CompiledModel | None:
    """The model in its setting, if that was compiled as a whole, or its slices. Saves the cost that slices have."""
    measured = chosen.measured
    if measured is None:
        return None
    if measured.subject.slices is None:
        return measured.main
    report(f"{part} is timed.")
    cost = measured.cost()
    del measured, chosen.measured  # frees the slices
    gc.collect()
    setting, backend = chosen.choice.setting, chosen.whole
    if backend is None:
        report(f"{part} is compiled.")
        backend = part.compile(setting.options(own), device, columns=setting.columns)
    backend.use(setting.exactness)
    save_cost(part, backend, cost)
    return backend


def _choice_with_adapters(part: Part, device: str, own: DeviceConfig) -> tuple[Choice, CompiledModel | None]:
    """The setting of the model without adapters, with its padding if that is enough with them, or another.

    So a row without an adapter has the bits that it has in an engine without adapters, wherever kernels allow that.
    """
    choice = _choice_of(dataclasses.replace(part, adapters=None), device, own)[0]
    gc.collect()
    adapters = part.adapters
    if adapters is None:
        raise AssertionError("the caller has found some")
    key: dict[str, Any] = {
        "files": part.files,
        "device": device,
        "asked": part.asked(own, device),
        "adapters": adapters.shapes,
    }
    key |= {"cuts": part.cuts, **machine(), **part.versions}
    key |= {"setting": str(choice.setting), "rule": str(choice.setting.exactness.rule)}
    file = saved.SavedValue(saved.FOLDER / "settings", key, Exactness)
    known, backend = file.read(), None
    if known is None:
        setting = choice.setting
        backend = part.compile(setting.options(own), device, columns=setting.columns)
        allocate_for_trials(backend)
        known = measure_exactness(Adapted(backend, adapters.names[0]), choice.setting.exactness)
        backend.use(known)
        file.write(known)
    return dataclasses.replace(choice, setting=dataclasses.replace(choice.setting, exactness=known)), backend
