"""The fastest format and weights of a model on this machine, measured on exports of it.

    trials = search_forms("model.gguf", "main", config.device, progress)    # a few minutes, and gigabytes meanwhile

Exports take what `weights_choice` says; this is how to see whether it holds on a machine that the table does not know.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, cast

from outrider.errors import ExportError
from outrider.models.tuning.machines import this_machine
from outrider.models.tuning.model_spec import ModelSpec
from outrider.models.tuning.trials import form_of, search
from outrider.system import saved
from outrider_export.bundles.export import export_bundle
from outrider_export.describe.plan import make_plan
from outrider_export.sources.source import fetch, locate
from outrider_export.weights_choice.choice import PORTABLE, may_have

if TYPE_CHECKING:
    from outrider.bundle.manifest import Format
    from outrider.config import DeviceConfig
    from outrider.models.tuning.setting import Trial
    from outrider_export.progress import Progress

FORMS = ("openvino int8", "openvino int4", "onnx int8", "onnx int4")


def search_forms(model: str, role: str, options: DeviceConfig, progress: Progress) -> list[Trial]:
    """The trials of all forms that a model can have: first those of the table of processors.

    role: "main" or "draft". A main model's forms are compared with int8 in f32. Raises as `export_bundle`.
    """
    plan = make_plan(role, fetch(locate(model), trust_remote_code=False, progress=progress), "openvino", None)
    if not plan.direct or plan.encoder is not None or plan.vision is not None:
        raise ExportError(f"{model} has one form: it is no decoder of text that is converted without PyTorch.")
    machine, specs = this_machine(), list[ModelSpec]()
    saved.FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="forms-", dir=saved.FOLDER, ignore_cleanup_errors=True) as folder:
        for form in dict.fromkeys([*(machine.main if role == "main" else machine.draft), *FORMS]):
            format_, weights = form.split()
            if not may_have(plan, cast("Format", format_), weights):
                continue
            output = Path(folder) / form.replace(" ", "-")
            made = export_bundle(model, "none", output=output, format=format_, weights=weights, progress=progress)
            specs.append(ModelSpec(role, made, made.manifest.main).on("CPU", options))
        return search(specs, next(each for each in specs if form_of(each) == " ".join(PORTABLE)))[1]
