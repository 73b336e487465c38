"""Compares what is measured on slices of a bundle's models with what is measured on the whole models.

    python tests/slices_and_wholes.py my-pair --isa AVX512_CORE_VNNI

For each setting that would be tried: the row rule and whether rows are exact, the KL divergence to f32, and the seconds
that score it. isa: a limit of oneDNN's instructions, which a process reads once.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

from outrider.models.part import Part


def main() -> None:
    """Compare in a child process for each level, and print a line for each setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("--isa", action="append", default=[], help="a value of ONEDNN_MAX_CPU_ISA; several times")
    parser.add_argument("--few", action="store_true", help="the first setting of each precision only")
    arguments = parser.parse_args()
    wrong = 0
    for level in arguments.isa or [os.environ.get("ONEDNN_MAX_CPU_ISA", "")]:
        environment = os.environ | ({"ONEDNN_MAX_CPU_ISA": level} if level else {})
        child = [sys.executable, __file__, "--child", arguments.bundle, str(int(arguments.few))]
        with subprocess.Popen(child, env=environment, stdout=subprocess.PIPE, text=True) as running:
            for line in running.stdout or ():
                row = json.loads(line)
                wrong += not row["same"]
                print(level or "all", *(f"{name}={value}" for name, value in row.items()), sep="  ", flush=True)
            if running.wait():
                sys.exit(running.returncode)
    sys.exit(f"{wrong} settings have another rule on a slice" if wrong else 0)


def compare(bundle: str, *, few: bool) -> None:
    """Print a JSON object for each setting of each model."""
    from outrider.bundle.folder import read_bundle
    from outrider.config import DeviceConfig
    from outrider.models.candidates import settings_for
    from outrider.models.part import parts_of

    opened = read_bundle(bundle)
    main_part, drafts = parts_of(opened, opened)
    for part in (main_part, *drafts):
        own = part.options(DeviceConfig(), "CPU")
        seen = set()
        for setting in settings_for(part, "CPU", own):
            if few and setting.precision in seen:
                continue
            seen.add(setting.precision)
            on_slice, on_whole = (measure(part, own, setting, sliced=sliced) for sliced in (True, False))
            print(
                json.dumps(
                    {
                        "model": part.role,
                        "setting": str(setting),
                        "same": on_slice["rule"] == on_whole["rule"] and on_slice["exact"] == on_whole["exact"],
                    }
                    | {f"slice_{name}": value for name, value in on_slice.items()}
                    | {f"whole_{name}": value for name, value in on_whole.items()}
                ),
                flush=True,
            )


def measure(part: Part, own: Any, setting: Any, *, sliced: bool) -> dict[str, Any]:
    """What is found of a setting, on a slice or on the whole model. seconds: of finding it."""
    from outrider.errors import DeviceError
    from outrider.models.measured import Subject
    from outrider.models.reference import Reference
    from outrider.models.trials import _Search

    subject = Subject(part, "CPU", own, part.slices("CPU") if sliced else None)
    began = time.perf_counter()
    try:
        measured = subject.compile(setting)
        exactness = measured.cheapest(measured.needed())
        search = _Search(subject, [setting])
        score, seconds = search._time(measured).score, time.perf_counter() - began
        measured.use(replace(exactness, rule=type(exactness.rule)()))
        kl = Reference(subject).kl(measured.main)
    except DeviceError:
        return {"rule": "does not run", "exact": False, "score": 0.0, "kl": 0.0, "seconds": 0.0}
    del measured
    gc.collect()
    found = {"score": round(score, 3), "kl": round(kl, 5), "seconds": round(seconds, 1)}
    return {"rule": str(exactness.rule), "exact": exactness.holds} | found


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        compare(sys.argv[2], few=sys.argv[3] == "1")
    else:
        main()
