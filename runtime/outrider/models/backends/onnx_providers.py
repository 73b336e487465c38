"""Which execution provider of ONNX Runtime runs models on which device.

CPU: measured. The OpenVINO, DirectML and CUDA execution providers: written against the documented interface; not
verified on hardware.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnxruntime as ort

from outrider.errors import OptionError


@dataclass(frozen=True, slots=True)
class Provider:
    """An execution provider, and what it is told to run on a device.

    memory: where its caches are. index: the option that a device's number goes to.
    """

    name: str
    memory: str
    options: Mapping[str, str]
    index: str | None = None


# Who can run on a device, in the order in which they are tried.
_CUDA = Provider("CUDAExecutionProvider", "cuda", {}, "device_id")
_DIRECTML = Provider("DmlExecutionProvider", "dml", {}, "device_id")
_PROVIDERS = {
    "CPU": (Provider("CPUExecutionProvider", "cpu", {}),),
    "GPU": (Provider("OpenVINOExecutionProvider", "cpu", {"device_type": "GPU"}, "device_type"), _DIRECTML, _CUDA),
    "NPU": (Provider("OpenVINOExecutionProvider", "cpu", {"device_type": "NPU"}),),
    "CUDA": (_CUDA,),
    "DML": (_DIRECTML,),
}


def find_provider(device: str) -> tuple[Provider, int, dict[str, str]]:
    """The execution provider for a device, the device's number, and the provider's options.

    Raises:
        OptionError: when there is none.
    """
    kind, _, number = device.partition(".")
    here = ort.get_available_providers()
    found = [kind for kind, providers in _PROVIDERS.items() if any(p.name in here for p in providers)]
    provider = next((p for p in _PROVIDERS.get(kind, ()) if p.name in here), None)
    if provider is None or (number and (not number.isdecimal() or provider.index is None)):
        raise OptionError(
            f"There is no device '{device}' for a model in ONNX here. Found: {', '.join(found)}. Other devices need "
            "another package of ONNX Runtime, such as onnxruntime-gpu, onnxruntime-directml or onnxruntime-openvino."
        )
    options = dict(provider.options)
    if number and provider.index:
        options[provider.index] = device if provider.index == "device_type" else number
    return provider, int(number or 0), options


def list_providers() -> dict[str, str | None]:
    """Every device that a model in ONNX may run on, and its execution provider; None where there is none here."""
    here = ort.get_available_providers()
    return {
        kind: next((provider.name for provider in providers if provider.name in here), None)
        for kind, providers in _PROVIDERS.items()
    }
