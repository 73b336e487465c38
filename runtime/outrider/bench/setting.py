"""What a figure was measured on."""

from __future__ import annotations

import platform
from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.bundle import Bundle


def describe_models(bundle: Bundle) -> dict[str, str]:
    """The bundle's main model and draft models, with their weights."""
    manifest = bundle.manifest
    return {
        "main": f"{manifest.main.source.id} {manifest.main.weights}",
        "draft": ", ".join(f"{d.model.source.id} {d.model.weights}" for d in manifest.drafters) or "none",
    }


def describe_versions() -> dict[str, str]:
    """Of Outrider and what it runs on."""
    packages = {name: version(name) for name in ("outrider", "openvino", "openvino-genai")}
    return packages | {"python": platform.python_version()}


def describe_machine(device: str) -> dict[str, str]:
    """The device by its maker's name, and the system."""
    import openvino as ov

    name = str(ov.Core().get_property(device, "FULL_DEVICE_NAME")).strip()
    return {"device": f"{device}: {name}", "system": f"{platform.system()} {platform.machine()}"}


def default_num_threads() -> int:
    """As many CPU threads as OpenVINO takes by itself: the other runtimes get the same."""
    import numpy as np
    import openvino as ov
    from openvino import opset13 as ops

    parameter = ops.parameter([1], np.float32)
    compiled = ov.Core().compile_model(ov.Model([ops.relu(parameter)], [parameter], "any"), "CPU")
    return int(compiled.get_property("INFERENCE_NUM_THREADS"))
