"""The devices that models run on: those that the options name, or the first that runs the main model."""

from __future__ import annotations

import dataclasses
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider.errors import DeviceWarning
from outrider.models.backends.devices import find_device, find_devices, resolve_auto
from outrider.models.tuning.probe import verdict_of
from outrider.system.core import new_core

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.config import DeviceConfig
    from outrider.models.tuning.model_spec import ModelSpec

_AUTO = "auto chooses the first GPU that runs the model, otherwise the CPU"


@dataclass(frozen=True, slots=True)
class Placement:
    """The devices of the main and the draft model, and why these, in a sentence. draft: None without a draft model."""

    main: str
    draft: str | None
    why: str

    def named_in(self, options: DeviceConfig) -> DeviceConfig:
        """The options with these devices in place of "auto" and "AUTO"."""
        return dataclasses.replace(options, main_device=self.main, draft_device=self.draft or options.draft_device)


def choose_devices(main: ModelSpec, drafts: Sequence[ModelSpec], options: DeviceConfig) -> Placement:
    """The devices that `options` name; for "auto" the first GPU that runs the model, otherwise the CPU.

    A GPU is tried in a process of its own (see `verdict_of`). Warns (`DeviceWarning`) of one that fails.
    """
    draft = next((spec for spec in drafts if not spec.uses_main_cache), None)
    main_device = _resolved(main, options.main_device, options)
    draft_device = None
    if draft and options.draft_device is not None:
        draft_device = _resolved(draft, options.draft_device, options)
    elif draft:
        draft_device = device_beside(main_device, draft) if options.main_device == "auto" else main_device
    is_chosen = "auto" in (options.main_device, options.draft_device if draft else None)
    return Placement(main_device, draft_device, why=_AUTO if is_chosen else "as asked for")


def _resolved(spec: ModelSpec, name: str, options: DeviceConfig) -> str:
    """The device that an option's value stands for, for this model."""
    if name == "AUTO":
        return resolve_auto(new_core())
    if name != "auto":
        return name
    for device in find_devices():
        kind = device.name.split(".")[0]
        # An NPU limits prompts and answers: it has to be named.
        if kind in ("CPU", "NPU") or device.format != spec.model.format or device.why_not(spec.role):
            continue
        verdict = verdict_of(spec.on(device.name, options))
        if verdict.works is not False:
            return device.name
        warnings.warn(
            f"{spec} does not run on {device.name}: {verdict.reason}. It is not chosen.", DeviceWarning, stacklevel=2
        )
    return "CPU"


def device_beside(main_device: str, draft: ModelSpec) -> str:
    """A draft model's device where "auto" chose the main model's: that one if it runs the draft's format."""
    return main_device if main_device != "CPU" and find_device(main_device, draft.model.format) else "CPU"
