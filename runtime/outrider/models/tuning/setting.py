"""How a model is compiled and called, and the trials that this was chosen from."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from outrider.config import PRECISIONS, DeviceConfig
from outrider.types import Exactness

GROUP_SIZE = "DYNAMIC_QUANTIZATION_GROUP_SIZE"
_DEVICES = 32  # the CPU's own choice of it


@dataclass(frozen=True, slots=True)
class Setting:
    """How one model is compiled and called.

    group_size: of dynamic quantisation; None: the device's choice. num_threads: of the CPU; 0: as the options say.
    columns: that products are widened to, with zeros; 0: none is. See `append_columns`.
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

    def is_narrower(self, other: Setting) -> bool:
        """Whether it is another setting with narrower groups, which is closer to f32, and not faster by a tenth."""
        of_same = self.precision == other.precision and self.cache_precision == other.cache_precision
        return of_same and (self.group_size or _DEVICES) < (other.group_size or _DEVICES)

    @property
    def description(self) -> str:
        """The setting in words, with the measured exactness."""
        found = self.exactness
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


@dataclass(frozen=True, slots=True)
class Trial:
    """A setting that was tried. seconds: of calls, by their tokens; score: seconds of a request (`_MAIN_CALLS`).

    kl: see `MAX_KL`; None if a faster setting was chosen before it was measured. verdict: why it was chosen or not.
    """

    setting: Setting
    seconds: dict[int, float]
    score: float
    kl: float | None
    verdict: str


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen setting, and the trials that it was chosen from; none if the options left no choice."""

    setting: Setting
    trials: tuple[Trial, ...] = ()
