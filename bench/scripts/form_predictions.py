"""Compares what slices of a model predict with whole models, all timed in turns, in one process.

    python bench/scripts/form_predictions.py MODEL BUNDLE …

MODEL is a .gguf file or a checkpoint folder, each BUNDLE has it as main model in a form. Prints milliseconds of a call
of 1, 2, 4 and 8 tokens, and what is predicted as a multiple of them. For an idle machine, so it is run by hand.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from outrider.bundle import read_bundle
from outrider.config import Config
from outrider.models.tuning.measure import estimate_padding
from outrider.models.tuning.measured import allocate_for_trials
from outrider.models.tuning.setting import settings_for
from outrider_export.describe.plan import make_plan
from outrider_export.progress import Silent
from outrider_export.sources.source import fetch, locate
from outrider_export.weights_choice import speed
from outrider_export.weights_choice.slices import FormSlices, part_alone, time_slices
from outrider_export.weights_choice.speed import ROWS, FormTrial

MAX_TOKENS = 512


def whole(bundle: Path, slices: FormSlices) -> FormSlices:
    """The whole model, as if it were slices of one size."""
    entry = read_bundle(bundle).manifest.main
    part = part_alone(bundle, "main", entry).on("CPU", Config().device)
    setting = next(iter(settings_for(part)))
    backend = part.compile(setting)
    allocate_for_trials(backend, MAX_TOKENS)
    backend.use(estimate_padding(backend))
    return FormSlices(
        entry.format, entry.weights, slices.whole, slices.checkpoints[:1], [part], str(setting), [backend], [{}]
    )


def main(model: str, *bundles: str) -> None:
    """Print the table."""
    entries = {bundle: read_bundle(Path(bundle)).manifest.main for bundle in bundles}
    forms = {(entry.format, entry.weights): Path(bundle) for bundle, entry in entries.items()}
    found: list[tuple[FormSlices, FormSlices]] = []

    def time_both(slices: Sequence[FormSlices], rows: Sequence[int], most_seconds: float) -> bool:
        found.extend((each, whole(forms[each.format, each.weights], each)) for each in slices)
        return time_slices([each for pair in found for each in pair], rows, most_seconds)

    cast("Any", speed).time_slices = time_both
    plan = make_plan("main", fetch(locate(model), trust_remote_code=False, progress=Silent()), "openvino", None)
    with FormTrial(plan, Config()) as trial:
        trial.measure(list(forms), ROWS)
        for slices, real in found:
            (seconds,) = zip(*(real.measured(rows) for rows in ROWS), strict=True)
            ratios = [slices.seconds(rows) / each for rows, each in zip(ROWS, seconds, strict=True)]
            shown = ", ".join(f"{1000 * each:.1f}" for each in seconds)
            print(f"{slices.weights}, {slices.format}: {shown} ms; predicted {', '.join(f'{r:.2f}' for r in ratios)}")
        print("Times agree." if trial.is_settled else "The machine was busy.")


if __name__ == "__main__":
    main(*sys.argv[1:])
