"""How a model is compiled and called: the settings that it may be tried in, and the trials that one was chosen from."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outrider.config import PRECISIONS, DeviceConfig
from outrider.models.backends.columns import COLUMNS
from outrider.models.backends.processor import this_processor
from outrider.models.tuning.machines import this_machine
from outrider.types import Exactness

if TYPE_CHECKING:
    from outrider.models.tuning.model_spec import ModelSpec

GROUP_SIZE = "DYNAMIC_QUANTIZATION_GROUP_SIZE"
_THREADS = "INFERENCE_NUM_THREADS"


@dataclass(frozen=True, slots=True)
class Setting:
    """How one model is compiled and called.

    group_size: of dynamic quantisation; None: the device's choice. num_threads: of the CPU; 0: as the options say.
    columns: that products are widened to, with zeros, if there are some; 0: none is. See `append_columns`.
    """

    precision: str
    cache_precision: str
    group_size: int | None = None
    exactness: Exactness = field(default_factory=Exactness)
    num_threads: int = 0
    columns: int = 0

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS or self.cache_precision not in (*PRECISIONS, "u8"):
            raise ValueError(f"a precision is one of {', '.join(PRECISIONS)}")
        if self.group_size is not None and not 0 <= self.group_size <= 1 << 16:
            raise ValueError("a group has from 0 to 65,536 numbers")
        if not 0 <= self.num_threads <= 1 << 12:
            raise ValueError("a CPU has from 0 to 4,096 threads")
        if not 0 <= self.columns <= 1 << 16:
            raise ValueError("a product is widened to 65,536 columns at most")

    def options(self, own: DeviceConfig) -> DeviceConfig:
        """A model's own options with this setting."""
        properties = dict(own.properties)
        if self.group_size is not None:
            properties[GROUP_SIZE] = self.group_size
        return dataclasses.replace(
            own,
            precision=self.precision,
            cache_precision=self.cache_precision,
            num_threads=self.num_threads or own.num_threads,
            properties=properties,
        )

    @property
    def description(self) -> str:
        """The setting in words, with the measured exactness."""
        found = self.exactness
        if found.is_expected:
            return f"{self}, known to be bit-exact on such processors, yet to be measured here"
        if found.holds:
            return f"{self}, bit-exact: drafts cannot change the text"
        if found.differences:
            gap = f"{found.largest_difference:.2g}"
            return f"{self}, not bit-exact: logits differ by up to {gap}, so drafts may change the text"
        return f"{self}: not measured whether drafts can change the text"

    def __str__(self) -> str:
        groups = "" if self.group_size is None else f", groups of {self.group_size}"
        cache = "" if self.cache_precision == self.precision else f", cache {self.cache_precision}"
        threads = f", {self.num_threads} threads" if self.num_threads else ""
        columns = f", products of {self.columns:,} columns" if self.columns else ""
        return f"{self.precision}{groups}{cache}{threads}{columns}"


def settings_for(spec: ModelSpec) -> list[Setting]:
    """The settings that the options allow, in the order of preference.

    On the CPU in f32 unless another precision is named: f32 is exact and, on all processors that were measured, the
    fastest or within a fifth of it. On other devices, compiling may take minutes: there only the device's own choice.
    """
    own = spec.options
    if not spec.support.tries_settings:
        return [Setting(own.precision, own.cache_precision)]
    precision = "f32" if own.precision == "auto" else own.precision
    cache = own.cache_precision
    if cache == "auto":  # an encoder-decoder model's has one precision
        cache = precision if spec.model.encoder is None else "f32"
    # Groups of 8-bit weights are whole rows; of 4-bit ones mostly 32 or 64, and wider dynamic groups are slow.
    groups: tuple[int | None, ...] = (128, None) if spec.model.weights == "int8" else (None, 64)
    if GROUP_SIZE in own.properties or spec.is_small or spec.model.weights in ("fp32", "fp16"):
        groups = (None,)
    columns = COLUMNS if spec.is_main and spec.support.paged and this_machine().columns else 0
    of_role = groups if spec.is_main else groups[:1]  # a draft model's bits do not matter
    return [Setting(precision, cache, group_size, columns=columns) for group_size in of_role]


def fewer_threads(spec: ModelSpec) -> list[int]:
    """Numbers of threads to try: the performance cores alone, then halves.

    Threads wait for each other at the end of each operator. In small models, that may take longer than they save.
    """
    own = spec.options
    if not spec.support.tries_settings or own.num_threads or _THREADS in own.properties:
        return []
    cores = this_processor().cores
    count = cores["performance"] if "performance" in cores else cores.get("cores", 0) // 2
    halves = (count >> n for n in range(count.bit_length()))
    return [each for each in halves if each >= 2]


@dataclass(frozen=True, slots=True)
class Trial:
    """A setting that was tried, with what was measured."""

    setting: Setting
    seconds: dict[int, float]  # of calls, by their tokens; none if it failed
    score: float  # seconds of a request
    failure: str  # why it cannot be used; empty if it can

    @property
    def is_usable(self) -> bool:
        """Whether it may be chosen."""
        return not self.failure


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen setting, and the trials that it was chosen from; none if the options or the table left no choice."""

    setting: Setting
    trials: tuple[Trial, ...] = ()
    waits: bool = False  # nothing is drafted before its rows are measured to be exact
    is_refuted: bool = False  # they were expected to be exact, and are not: others are tried at the next load

    def is_enough(self, *, answers_first: bool) -> bool:
        """Whether a load that finds it saved has nothing to measure. answers_first: it may be measured later."""
        return not self.is_refuted and (answers_first or not self.setting.exactness.is_expected)
