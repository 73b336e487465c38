"""Measures in which settings drafts cannot change the text on this machine, by precision and groups.

    python bench/scripts/exact_settings.py BUNDLE …

Each setting is measured as when a model is loaded; of layers that keep states, prompts that are cut anywhere and drafts
that are rejected at every place are compared, too, with the rule that was found.
"""

import itertools
import sys

import openvino as ov

from outrider.bundle import read_bundle
from outrider.config import DeviceConfig
from outrider.models.backends.processor import find_processor
from outrider.models.tuning.measure import measure_exactness
from outrider.models.tuning.measure.readings import compare_states
from outrider.models.tuning.model_spec import ModelSpec
from outrider.models.tuning.setting import Setting
from outrider.models.tuning.trials import compile_for_trials

CONTEXT = 150  # tokens that states are compared on
NAMES = {"f32": "FP32", "bf16": "BF16", "f16": "FP16"}
GROUPS = (128, None)  # of dynamic quantisation; None: OpenVINO's choice


def main(*folders: str) -> None:
    """Print the table."""
    known = ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    print(f"{find_processor()}\nOpenVINO {ov.get_version()}\n")
    print("| model | precision | groups | exact | rows |\n|---|---|---|---|---|")
    for folder in folders:
        bundle = read_bundle(folder)
        spec = ModelSpec("main", bundle, bundle.manifest.main, options=DeviceConfig())
        precisions = [name for name, capability in NAMES.items() if capability in known]
        for precision, groups in itertools.product(precisions, GROUPS):
            setting = Setting(precision, precision, groups)
            backend = compile_for_trials(spec, setting)
            found = measure_exactness(backend)
            backend.use(found)
            differences = dict(found.differences)
            if backend.capabilities.states:
                differences |= compare_states(backend, CONTEXT)
            worst = max(differences, key=lambda name: differences[name])
            said = str(found.rule) if not differences[worst] else f"{differences[worst]:.2g}: {worst}"
            cells = [bundle.folder.name, precision, "default" if groups is None else str(groups)]
            print(f"| {' | '.join(cells)} | {'no' if differences[worst] else 'yes'} | {said} |", flush=True)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
