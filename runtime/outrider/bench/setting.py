"""What a figure was measured on."""

from __future__ import annotations

import platform
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from outrider.bundle import Bundle


def describe_models(bundle: Bundle) -> dict[str, str]:
    """The bundle's main model and draft models, with their weights."""
    manifest = bundle.manifest
    return {
        "main": f"{manifest.main.source.id} {manifest.main.weights}",
        "draft": ", ".join(f"{d.model.source.id} {d.model.weights}" for d in manifest.drafters) or "none",
    }


def describe_versions(bundle: Bundle) -> dict[str, str]:
    """Of Outrider and what it runs on; the tokenizer is openvino-genai's whatever the models' formats are."""
    manifest = bundle.manifest
    formats = ["openvino", manifest.main.format, *(drafter.model.format for drafter in manifest.drafters)]
    packages = describe_runtimes(formats) | {"openvino-genai": version("openvino-genai")}
    return packages | {"python": platform.python_version()}


def describe_runtimes(formats: Iterable[str]) -> dict[str, str]:
    """The versions of Outrider and of what runs models of these formats, by name."""
    formats, versions = set(formats), {"outrider": version("outrider")}
    if "openvino" in formats:
        versions["openvino"] = version("openvino")
    if "onnx" in formats and find_spec("onnxruntime"):
        import onnxruntime  # several packages hold it: it is asked itself

        versions["onnxruntime"] = onnxruntime.__version__
    return versions


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
