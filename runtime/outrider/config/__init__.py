"""All options: generation, memory and calls, devices.

    engine = outrider.load("my-pair", config="gpu", num_threads=4)
    engine.generate("Hello", temperature=0.7, seed=1)

Options come from a preset or a TOML file (`outrider.config.files`), then from keywords, which win. Each is described
once (`outrider.config.option`) and checked when it is set. The error for an unknown name gives the nearest known one.

Internal: apps import what docs/api.md lists.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from outrider.config.checks import GRAMMAR_OPTIONS
from outrider.config.device import PRECISIONS, DeviceConfig, SchedulerConfig, format_of_property, is_npu_property
from outrider.config.generation import DEFAULT_MAX_NEW_TOKENS, LOSSY, SAMPLING, GenerationConfig
from outrider.config.option import Option, options_of
from outrider.errors import OptionError, nearest

__all__ = [
    "DEFAULT_MAX_NEW_TOKENS", "GRAMMAR_OPTIONS", "LOSSY", "OPTIONS", "PRECISIONS", "SAMPLING", "SECTIONS", "SECTION_OF",
    "Config", "DeviceConfig", "GenerationConfig", "SchedulerConfig", "format_of_property", "is_npu_property",
    "without_word",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Config:
    """All options, in the sections of a TOML file."""

    generation: GenerationConfig = field(default_factory=GenerationConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)

    def replace(self, **options: Any) -> Config:
        """A copy with some options changed, whichever section they belong to.

        Raises:
            OptionError: for an unknown name or a value out of range.
        """
        changed: dict[str, dict[str, Any]] = {}
        for name, value in options.items():
            if name not in SECTION_OF:
                raise OptionError(f"There is no option '{name}'. {nearest(name, SECTION_OF)}")
            changed.setdefault(SECTION_OF[name], {})[name] = value
        sections = {name: dataclasses.replace(getattr(self, name), **values) for name, values in changed.items()}
        return dataclasses.replace(self, **sections)

    @property
    def drafts_may_join(self) -> bool:
        """Whether draft models may be loaded while the engine answers: none is asked for, and all are on the CPU."""
        device, can_wait = self.device, self.generation.drafter == "auto" and self.scheduler.overlap is not True
        on_cpu = device.main_device == "CPU" and device.draft_device in (None, "CPU")
        return can_wait and on_cpu and device.measure != "first"


SECTIONS: dict[str, type] = {"generation": GenerationConfig, "scheduler": SchedulerConfig, "device": DeviceConfig}
SECTION_OF = {name: section for section, cls in SECTIONS.items() for name in options_of(cls)}
OPTIONS: dict[str, Option] = {name: each for cls in SECTIONS.values() for name, each in options_of(cls).items()}


def without_word(name: str, value: Any) -> Any:
    """An option's value with None for "none", where that is a word for it."""
    return None if value == "none" and name in OPTIONS and OPTIONS[name].none_word else value
