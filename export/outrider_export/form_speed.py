"""Which weights are fastest on this machine: `outrider tune --weights`.

    source = locate("model.gguf")
    forms, left_out = measure_forms(source, config)
    forms[0].seconds[1]    # of a call of one row, of the whole model

Two slices of the model are exported in each form, loaded as any bundle is, with the settings that are best for it, and
timed. A layer's time is their difference; the whole model's is that of all its layers and of what is around them.
Before each call the processor's cache is filled with other data: a slice would stay in it, and no whole model does.
What a form loses is measured on the large slice, against the same slice in 16 bits.
"""

from __future__ import annotations

import gc
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from outrider.bundle import read_bundle
from outrider.drafters.prediction import Costs, predict
from outrider.errors import ExportError
from outrider.models.measure.cost import NEAR, time_calls
from outrider.models.measured import Subject
from outrider.models.part import parts_of
from outrider.models.reference import Reference
from outrider.models.trials import choose
from outrider.system.progress import report
from outrider_export.cut import count_layers, write_slice
from outrider_export.export import export_bundle

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from outrider.config import Config
    from outrider_export.sources import Located

FORMS = (("openvino", "int8"), ("openvino", "int4"), ("onnx", "int8"), ("onnx", "int4"))
ROWS = (1, 2, 4, 8)
SMALL, LARGE = 1, 5  # layers of the slices
# What `auto` is predicted for: a draft model whose token takes this share of the fastest form's call of one row, and
# whose tokens are accepted as often as this.
DRAFT_SHARE, ACCEPTANCE = 0.25, 0.6
_MAX_TOKENS = 512
_PATIENCE, _TURNS = 0.03, 4  # seconds that each call is repeated for, at least, in each turn
_CACHE_BYTES = 128_000_000  # more than processors' caches have


@dataclass(frozen=True)
class Form:
    """The whole model in one form, as predicted.

    seconds: of a call, by rows. num_bytes: of its weights, on disk and at least in memory. slice_kl: the mean KL
    divergence of the large slice's distributions from those in 16-bit weights, calculated in f32, in nats.
    """

    format: str
    weights: str
    seconds: dict[int, float]
    num_bytes: int
    setting: str
    slice_kl: float

    @property
    def plain(self) -> float:
        """Tokens a second of plain decoding."""
        return 1 / self.seconds[1]

    def auto(self, draft: float) -> float:
        """Tokens a second with the draft length that is best. draft: seconds of a draft token."""

        rows = range(1, ROWS[-1] + 1)
        check = np.interp(rows, [*self.seconds], [*self.seconds.values()]).tolist()
        costs = Costs(check, [draft * length for length in rows])
        return self.plain * predict([ACCEPTANCE] * ROWS[-1], costs).speed_up


def measure_forms(
    source: Located, config: Config, forms: Seq[tuple[str, str]] = FORMS
) -> tuple[list[Form], dict[str, str]]:
    """Measure slices of a model in these forms, (format, weights). Returns them, and why a format was left out.

    Raises:
        ExportError: when the model cannot be cut, or not be exported to any of the formats.
        DeviceError: when the processor fails.
    """
    num_layers = count_layers(source)
    sizes = (SMALL, min(LARGE, num_layers))
    with tempfile.TemporaryDirectory(prefix="outrider-slices-", ignore_cleanup_errors=True) as scratch:
        slices = [Path(scratch, f"of-{count}") for count in sizes]
        for count, folder in zip(sizes, slices, strict=True):
            write_slice(source, count, folder)
        report(f"A slice of {source.id} is exported in 16 bits, to compare with.")
        exact = export_bundle(slices[1], output=Path(scratch, "exact"), format="openvino", weights="fp16")
        reference = Reference(Subject(parts_of(exact, exact)[0], "CPU", config.device.of("main"), None))
        made: list[Form] = []
        left_out: dict[str, ExportError] = {}
        for form, weights in forms:
            if form in left_out:
                continue
            report(f"Slices of {source.id} are exported and timed: {weights}, {form}.")
            bundles = [Path(scratch, f"{form}-{weights}-{count}") for count in sizes]
            try:
                for folder, bundle in zip(slices, bundles, strict=True):
                    export_bundle(folder, output=bundle, format=form, weights=weights)
            except ExportError as error:
                left_out[form] = error
                continue
            times = (num_layers - sizes[0]) / max(sizes[1] - sizes[0], 1)
            made.append(_measure(bundles, config, form, weights, times, reference))
        if not made:
            raise next(iter(left_out.values()))
        said = {form: str(error) for form, error in left_out.items()}
        for folder in slices:  # their names say nothing to a reader
            said = {form: text.replace(folder.name, source.id) for form, text in said.items()}
        return made, said


def _measure(bundles: Seq[Path], config: Config, form: str, weights: str, times: float, reference: Reference) -> Form:
    """The whole model's figures from those of two slices. times: layers it has more than the small slice, by theirs."""
    small, large = (parts_of(opened, opened)[0] for opened in map(read_bundle, bundles))
    setting = choose(large, "CPU", config.device.of("main")).choice.setting
    gc.collect()
    backends = [part.compile(setting.options(config.device.of("main")), "CPU") for part in (small, large)]
    calls = [(rows, NEAR) for rows in ROWS]
    taken: list[dict[tuple[int, int], float]] = [dict.fromkeys(calls, math.inf) for _ in backends]
    for backend in backends:
        backend.allocate(_MAX_TOKENS)
        backend.use(setting.exactness)
    other_data = np.ones(_CACHE_BYTES // 4, np.float32)  # zeros would be one page of memory
    for _ in range(_TURNS):  # so that noise meets both alike
        for backend, known in zip(backends, taken, strict=True):
            new = time_calls(backend, calls, patience=_PATIENCE, before=other_data.max)
            known.update({call: min(known[call], new[call]) for call in calls})
    first, second = taken
    seconds = {rows: first[rows, NEAR] + times * max(second[rows, NEAR] - first[rows, NEAR], 0.0) for rows in ROWS}
    num_bytes = round(small.size + times * (large.size - small.size))
    return Form(form, weights, seconds, num_bytes, str(setting), reference.kl(backends[1]))
