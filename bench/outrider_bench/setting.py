"""The setting of a measurement: models, versions, machine."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from importlib.util import find_spec

from outrider.bundle.manifest import ModelEntry
from outrider.system.core import new_core


def describe_models(models: Mapping[str, ModelEntry]) -> dict[str, str]:
    """The main model and the draft models, with their weights. models: "main" and others, by name."""
    said = {name: f"{model.source.id} {model.weights}" for name, model in models.items()}
    return {"main": said.pop("main"), "draft": ", ".join(said.values()) or "none"}


def describe_versions(models: Iterable[ModelEntry]) -> dict[str, str]:
    """The versions of Outrider and its libraries. The tokenizer is openvino-genai's for all formats."""
    packages = describe_runtimes(["openvino", *(model.format for model in models)])
    return packages | {"openvino-genai": version("openvino-genai"), "python": platform.python_version()}


def describe_runtimes(formats: Iterable[str]) -> dict[str, str]:
    """The versions of Outrider and of the libraries for these formats, by name."""
    formats, versions = set(formats), {"outrider": version("outrider")}
    if "openvino" in formats:
        versions["openvino"] = version("openvino")
    if "onnx" in formats and find_spec("onnxruntime"):
        import onnxruntime  # several packages contain it, so its metadata cannot be asked

        versions["onnxruntime"] = onnxruntime.__version__
    return versions


def describe_machine(device: str) -> dict[str, str]:
    """The device by its maker's name, the processor with its instructions, and the system."""
    name = str(new_core().get_property(device, "FULL_DEVICE_NAME")).strip()
    return {
        "device": f"{device}: {name}",
        **describe_processor(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def describe_processor() -> dict[str, str]:
    """The processor's name, cores and instructions, and limits on these for oneDNN."""
    from outrider.models.backends.processor import find_processor

    return find_processor().description


def default_num_threads() -> int:
    """OpenVINO's default number of CPU threads. The other runtimes get the same number."""
    from outrider.models.backends.devices import one_operator

    return int(new_core().compile_model(one_operator(), "CPU").get_property("INFERENCE_NUM_THREADS"))
