"""Slices of a model in one form, compiled and timed.

    four, eight = (FormSlices.make(checkpoints, ("onnx", weights), folder, ...) for weights in ("int4", "int8"))
    time_slices([four, eight], rows=(1, 8), most_seconds=10)
    four.seconds(1)            # of a call of one row, of the whole model
    four.seconds(1, 32_768)    # with an output matrix for so many tokens

The first slice has one layer and some rows of the output matrix, the second one more layers, and the third one more
rows: so they tell what a layer, a row and everything else take. A weight of the output matrix takes less time than one
of a small model's layers.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from outrider.bundle.folder import Bundle
from outrider.bundle.manifest import SCHEMA_VERSION, FileEntry, Manifest, ModelEntry, TokenizerEntry
from outrider.models.backends.columns import COLUMNS
from outrider.models.cost.measure import timer
from outrider.models.cost.table import NEAR
from outrider.models.tuning.measure import estimate_padding
from outrider.models.tuning.measured import compile_for_trials
from outrider.models.tuning.model_spec import ModelSpec
from outrider.models.tuning.setting import settings_for
from outrider.types import Exactness
from outrider_export.describe.geometry import geometry_of_config
from outrider_export.direct.convert import convert
from outrider_export.progress import Silent
from outrider_export.sources.source import read_config

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from outrider.bundle.manifest import Format, Source
    from outrider.config import Config
    from outrider.models.tuning.setting import Setting
    from outrider.types import CompiledModel

_MAX_TOKENS = 512
_LEAST_PASSES, _MOST_PASSES = 3, 16  # over all slices, for each number of rows
# The longer one of a call's two shortest times, as a multiple of the shorter one, if they agree, or are at least close.
_ALIKE, _CLOSE = 1.03, 1.25
_WAITED = 1.1  # the clock's share in a call that has waited for other processes
_CACHE_BYTES = 128_000_000  # more than processors' caches have
_TOY = 4_000_000  # bytes of slices
_FEW_ROWS = 2  # that one row is padded to without taking longer


@dataclass(frozen=True)
class SliceCheckpoint:
    """A slice of a model, as a folder. num_layers, num_tokens: that it has."""

    folder: Path
    num_layers: int
    num_tokens: int


@dataclass(frozen=True)
class Whole:
    """What the whole model has of what slices have. num_tokens: rows of its output matrix."""

    num_layers: int
    num_tokens: int


@dataclass
class FormSlices:
    """A model's slices in one form. checkpoints: the smallest; with more layers; with more tokens, if there are more.

    parts: one for each checkpoint.

    processor: seconds of the processors in calls of each slice, by rows. shares: of the calls, by rows, the seconds by
    the clock as multiples of these. share: of them, what counts.
    """

    format: Format
    weights: str
    whole: Whole
    checkpoints: Sequence[SliceCheckpoint]
    parts: Sequence[ModelSpec]
    setting: str
    backends: Sequence[CompiledModel]
    processor: list[dict[int, list[float]]]
    shares: dict[int, list[float]] = field(default_factory=dict)
    share: dict[int, float] = field(default_factory=dict)

    @classmethod
    def make(
        cls,
        checkpoints: Sequence[SliceCheckpoint],
        form: tuple[Format, str],
        folder: Path,
        config: Config,
        whole: Whole,
        role: str,
        source: Source,
    ) -> FormSlices:
        """Convert and compile slices, with the padding that makes a main model's rows exact.

        folder: a new one. role: "main" or "draft".

        Raises:
            ExportError: when they cannot be converted.
            DeviceError: when the processor fails.
        """
        alone = [_convert(each, form, folder / str(number), role, source) for number, each in enumerate(checkpoints)]
        parts = [part.on("CPU", config.device) for part in alone]
        setting = next(iter(settings_for(parts[0])))

        def compiled(setting: Setting) -> list[CompiledModel]:
            return [compile_for_trials(part, setting, max_tokens=_MAX_TOKENS) for part in parts]

        backends = compiled(setting)
        exactness = estimate_padding(backends[0]) if role == "main" else Exactness()
        if exactness.rule.num_rows([1]) > _FEW_ROWS and parts[0].can_append():
            # A first load then tries the same; see `trials.Search.with_columns`.
            other = replace(setting, columns=COLUMNS)
            wider = compiled(other)
            found = estimate_padding(wider[0])
            if found.rule.num_rows([1]) < exactness.rule.num_rows([1]):
                backends, exactness, setting = wider, found, other
        for backend in backends:
            backend.use(exactness)
        return cls(*form, whole, checkpoints, parts, str(setting), backends, [{} for _ in backends])

    @property
    def size(self) -> int:
        """Bytes of the whole model's weights, but for the rows of matrices that slices lack."""
        small, large, *_ = (part.size for part in self.parts)
        return round(small + self._times * (large - small))

    def seconds(self, rows: int, num_tokens: int | None = None) -> float:
        """Of a call of the whole model. num_tokens: of its output matrix; by default all."""
        small, large, *wide = self.measured(rows)
        missing = (num_tokens or self.whole.num_tokens) - self.checkpoints[0].num_tokens
        more = self.checkpoints[-1].num_tokens - self.checkpoints[0].num_tokens
        of_token = max(wide[0] - small, 0.0) / more if wide else 0.0
        return max(small + self._times * max(large - small, 0.0) + missing * of_token, 0.0)

    @property
    def _times(self) -> float:
        """Layers that the small slice lacks, as a multiple of those that the large one has more."""
        small, large, *_ = (each.num_layers for each in self.checkpoints)
        return (self.whole.num_layers - small) / max(large - small, 1)

    def measured(self, rows: int) -> list[float]:
        """Seconds of a call of each slice."""
        return [self.share[rows] * _shortest(each[rows]) for each in self.processor]


def part_alone(folder: Path, role: str, entry: ModelEntry) -> ModelSpec:
    """A model that was written to the folder, as the only one of a bundle that has no tokenizer."""
    paths = [path for path in (folder / entry.folder).rglob("*") if path.is_file()]
    listed = tuple(FileEntry(path.relative_to(folder).as_posix(), path.stat().st_size, "0" * 64) for path in paths)
    tokenizer = TokenizerEntry("tokenizer", ())
    return ModelSpec(role, Bundle(folder, Manifest(SCHEMA_VERSION, "0", "slices", entry, (), tokenizer, listed)), entry)


def _convert(
    checkpoint: SliceCheckpoint, form: tuple[Format, str], folder: Path, role: str, source: Source
) -> ModelSpec:
    """A checkpoint in a form, as the only model of a bundle that has no tokenizer."""
    geometry = geometry_of_config(read_config(checkpoint.folder), checkpoint.folder)
    job = {
        "model": str(checkpoint.folder),
        "gguf": False,
        "format": form[0],
        "weights": form[1],
        "geometry": msgspec.to_builtins(geometry),
        "output": str(folder / role),
        "is_draft": role != "main",
    }
    folder.mkdir(parents=True)
    found = convert(job, Silent())
    geometry = msgspec.convert(msgspec.to_builtins(geometry) | found["layers"], type(geometry))
    entry = ModelEntry(role, *form, geometry, checkpoint.num_tokens, "0" * 64, source)
    return part_alone(folder, role, entry)


def time_slices(forms: Sequence[FormSlices], rows: Sequence[int], most_seconds: float) -> bool:
    """Time calls of so many rows, of all slices in turns, so that other work on the machine meets all alike.

    What counts is the shortest processor time of each call that another one confirms, times the smallest share that the
    clock has of it in any call of the form. Both grow while other processes have the processor, the former little: with
    16 of them on two cores, a call's three shortest ones differ by a tenth. On an idle machine it is the clock's time.
    Where all calls of a form have waited, only processor times count, of all forms. A call is made again until its two
    shortest times agree, for about `most_seconds` in all.

    A pass over all slices fills the processor's caches with other slices, as a whole model's layers do.

    Returns whether all times agree, or are at least close, and some call of each form has not waited: processor times
    alone tell what a form takes on a busy machine, where memory is no longer what limits it.
    """
    pairs = [(form, number) for form in forms for number in range(len(form.backends))]
    size = sum(part.size for form in forms for part in form.parts)
    # Ones, as zeros would be one page of memory. Times of toys mean nothing either way.
    others = np.ones(_CACHE_BYTES // 4 if _TOY < size < 2 * _CACHE_BYTES else 1, np.float32)
    has_waited = False
    began = time.perf_counter()
    for order, count in enumerate(rows, 1):
        until = began + most_seconds * order / len(rows)
        for number in range(_MOST_PASSES + 1):
            waiting = [
                (form, index)
                for form, index in pairs
                if number <= _LEAST_PASSES or not _agree(form.processor[index][count], _ALIKE)
            ]
            if not waiting or (number > _LEAST_PASSES and time.perf_counter() > until):
                break
            for form, index in waiting:
                others.max()
                clock, processor = _time(form.backends[index], count)
                if number:  # the first one compiles kernels
                    form.processor[index].setdefault(count, []).append(processor)
                    form.shares.setdefault(count, []).append(clock / processor)
        shares = [min(form.shares[count]) for form in forms]
        for form, share in zip(forms, shares, strict=True):
            form.share[count] = share if max(shares) <= _WAITED else 1.0
        has_waited |= max(shares) > _WAITED
    return not has_waited and all(
        _confirmed(seconds, _CLOSE) for form in forms for each in form.processor for seconds in each.values()
    )


def _time(backend: CompiledModel, rows: int) -> tuple[float, float]:
    """Seconds of a call by the clock, and of the processors; on Windows, which counts these in 16 ms, the former."""
    with timer(backend, NEAR + rows) as seconds:
        began = time.process_time()
        clock = seconds(rows, NEAR)
        spent = time.process_time() - began
    return clock, clock if sys.platform == "win32" or spent <= 0 else spent


def _agree(seconds: Sequence[float], most: float) -> bool:
    first, second, *_ = sorted(seconds)
    return second <= most * first


def _confirmed(seconds: Sequence[float], most: float) -> float | None:
    """The shortest time that another one confirms, which is `most` times as long at most."""
    ascending = sorted(seconds)
    return next((first for first, second in pairwise(ascending) if second <= most * first), None)


def _shortest(seconds: Sequence[float]) -> float:
    """The shortest time, unless it is an exception: one that no other confirms, where others confirm each other."""
    confirmed = _confirmed(seconds, _ALIKE)
    return min(seconds) if confirmed is None else confirmed
