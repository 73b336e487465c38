"""The devices that OpenVINO and ONNX Runtime find on this machine, and the models each can run.

No model is compiled for that.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from outrider.bundle.manifest import Format
from outrider.errors import DeviceError, OptionError, install, nearest, one_line
from outrider.system.core import new_core
from outrider.system.memory import system_memory
from outrider.types import CompiledModel

_PRECISIONS = {"FP32": "f32", "BF16": "bf16", "FP16": "f16", "INT8": "int8", "INT4": "int4"}
_EXACT = "whether it is bit-exact, so that drafts cannot change the text, is measured when a model is loaded"
_MORE_ONNX = "not in the installed ONNX Runtime: onnxruntime-gpu, -directml or -openvino have them"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device as one library sees it.

    name: the value for `main_device` and `draft_device`. format: the model format that it runs. full_name: empty if
    there is no such device; the entry then gives the reason. memory, free: bytes; None if unknown. precisions: those it
    calculates in; empty if the model's own precision decides. driver: its version. not_for_main, not_for_draft: why it
    cannot run the model; None if it can. remark: what the user should know. fixed: whether models are compiled for a
    longest prompt and answer.
    """

    name: str
    format: Format
    full_name: str = ""
    memory: int | None = None
    free: int | None = None
    precisions: tuple[str, ...] = ()
    driver: str | None = None
    not_for_main: str | None = None
    not_for_draft: str | None = None
    remark: str | None = None
    fixed: bool = False

    def why_not(self, role: str) -> str | None:
        """Why it cannot run a main or a draft model; None if it can."""
        return self.not_for_main if role == "main" else self.not_for_draft

    @property
    def identity(self) -> dict[str, str]:
        """What a verdict on it depends on."""
        return {"device": self.name, "format": self.format, "name": self.full_name, "driver": str(self.driver)}


def find_devices() -> list[Device]:
    """All devices, OpenVINO's first. Known kinds that are missing are listed with the reason."""
    return _openvino_devices(new_core()) + _onnx_devices()


def find_device(name: str, format: Format) -> Device | None:  # noqa: A002  (what the bundle calls it)
    """The device of this name for models of a format; None if there is none."""
    known = {device.name: device for device in find_devices() if device.format == format and device.full_name}
    listed = find_name(name, known)
    return None if listed is None else known[listed]


def find_name(name: str, known: Iterable[str]) -> str | None:
    """The name in `known` that `name` means: "GPU" and "GPU.0" are the same. None if it is not known."""
    names = list(known)
    return next((each for each in (name, name.removesuffix(".0"), f"{name}.0") if each in names), None)


def resolve_auto(core: ov.Core) -> str:
    """The device that OpenVINO's AUTO would run a model on.

    AUTO itself starts on one device and moves to another when that is ready. Our cache cannot move, because each device
    has its own layout. So AUTO is asked once, and its choice is used as if the user had named it.

    Raises:
        OptionError: when AUTO finds no device.
    """
    hints = {"PERFORMANCE_HINT": "LATENCY", "ENABLE_STARTUP_FALLBACK": False}
    try:
        chosen = core.compile_model(one_operator(), "AUTO", hints).get_property("EXECUTION_DEVICES")
    except RuntimeError as error:
        raise OptionError("OpenVINO's AUTO finds no device here. Name one: see 'outrider devices'.") from error
    # The name is in brackets while the device is not ready.
    return str(chosen[0] if isinstance(chosen, list | tuple) else chosen).strip("()").split(",")[0]


def compile_error(core: ov.Core, device: str, what: str, error: Exception) -> DeviceError:
    """The error for a model, `what`, that OpenVINO cannot compile. An unknown property gets the nearest known one."""
    if "proc_type_table is empty" in str(error):
        return DeviceError(
            f"{device} has no cores for {what}: ENABLE_CPU_RESERVATION keeps those of the other model, or there are "
            "none of the SCHEDULING_CORE_TYPE. Lower num_threads and draft_num_threads, or leave these properties out."
        )
    unknown = re.search(r"Unsupported property (\S+)", str(error))
    if unknown is None:
        return DeviceError(f"{device} cannot compile {what}: {one_line(error)}")
    instead = nearest(unknown[1], core.get_property(device, "SUPPORTED_PROPERTIES"))
    return DeviceError(f"{device} cannot compile {what}: it has no property '{unknown[1]}'. {instead}")


def free_memory(core: ov.Core, device: str) -> int | None:
    """Free bytes of an OpenVINO device; None if unknown.

    GPU: as OpenVINO GenAI counts (`utils::get_available_gpu_memory`): the total minus 1.1 times the known use. On an
    integrated GPU, host memory that the device uses counts too.
    """
    if device.startswith("CPU"):
        return system_memory()[1]
    if device.split(".")[0] not in {name.split(".")[0] for name in core.available_devices}:
        return None  # such as an emulated NPU
    supported = core.get_property(device, "SUPPORTED_PROPERTIES")
    if device.startswith("NPU") and "NPU_DEVICE_ALLOC_MEM_SIZE" in supported:
        return int(core.get_property(device, "NPU_DEVICE_TOTAL_MEM_SIZE")) - int(
            core.get_property(device, "NPU_DEVICE_ALLOC_MEM_SIZE")
        )
    if "GPU_MEMORY_STATISTICS" not in supported:
        return None
    used: Mapping[str, int] = core.get_property(device, "GPU_MEMORY_STATISTICS")
    kinds = ["cl_mem", "usm_device"] + (["usm_host"] if is_integrated(core, device) else [])
    total = int(core.get_property(device, "GPU_DEVICE_TOTAL_MEM_SIZE"))
    return max(total - int(1.1 * sum(used.get(kind, 0) for kind in kinds)), 0)


def largest_tensor(core: ov.Core, device: str) -> int | None:
    """Most bytes of one tensor on an OpenVINO GPU; None on other devices, and if unknown."""
    if not device.startswith("GPU") or "GPU" not in {name.split(".")[0] for name in core.available_devices}:
        return None
    name = "GPU_DEVICE_MAX_ALLOC_MEM_SIZE"
    return int(core.get_property(device, name)) if name in core.get_property(device, "SUPPORTED_PROPERTIES") else None


def check_room(backends: Iterable[CompiledModel], max_tokens: int) -> None:
    """Raise DeviceError if a device has less memory than its models' full caches of `max_tokens` would take.

    This is done at load, as in OpenVINO GenAI: later, a system that runs out of memory slows down, and drivers abort.
    The memory of ONNX Runtime's devices other than the CPU is unknown.
    """
    core = new_core()
    wanted: dict[str, float] = {}
    for backend in backends:
        device, size = backend.device, max_tokens * backend.bytes_per_token
        if not size or (device != "CPU" and backend.runtime != "OpenVINO"):
            continue
        wanted[device] = wanted.get(device, 0.0) + size
        most, each = largest_tensor(core, device), size / max(2 * backend.num_layers, 1)
        if most is not None and each > most:
            raise DeviceError(
                f"{device} makes no tensor above {most / 1e9:.2f} GB, and the keys of a layer may take "
                f"{each / 1e9:.2f} GB. Lower cache_size."
            )
    for device, size in wanted.items():
        room = system_memory()[0] if device == "CPU" else free_memory(core, device)
        if room is not None and size > room:
            has = f"{room / 1e9:.2f} GB of memory" + ("" if device == "CPU" else " left")
            raise DeviceError(f"{device} has {has}, and the cache may take {size / 1e9:.2f} GB. Lower cache_size.")


def is_integrated(core: ov.Core, device: str) -> bool:
    """Whether a GPU shares the system's memory."""
    return "INTEGRATED" in str(core.get_property(device, "DEVICE_TYPE")).upper()


def _openvino_devices(core: ov.Core) -> list[Device]:
    found = [_openvino_device(core, name) for name in core.available_devices]
    kinds = {device.name.split(".")[0] for device in found}
    absent = "not found: there is none here, or its driver is missing"
    missing = [kind for kind in ("GPU", "NPU") if kind not in kinds]
    return found + [Device(name=n, format="openvino", not_for_main=absent, not_for_draft=absent) for n in missing]


def _openvino_device(core: ov.Core, name: str) -> Device:
    try:
        return _describe(core, name)
    except RuntimeError as error:
        reason = f"its properties cannot be read: {one_line(error)}"
        return Device(name=name, format="openvino", full_name="not known", not_for_main=reason, not_for_draft=reason)


def _describe(core: ov.Core, name: str) -> Device:
    supported = core.get_property(name, "SUPPORTED_PROPERTIES")
    kind = name.split(".")[0]
    asked: dict[str, Any] = {}
    if kind == "CPU":
        asked = {"memory": system_memory()[0], "remark": _EXACT}
    elif f"{kind}_DEVICE_TOTAL_MEM_SIZE" in supported:
        asked["memory"] = int(core.get_property(name, f"{kind}_DEVICE_TOTAL_MEM_SIZE"))
    if kind == "GPU":
        shared = "shares the system's memory; " if is_integrated(core, name) else ""
        asked["remark"] = f"{shared}not verified on hardware: run 'outrider verify'"
    elif kind == "NPU":
        asked |= {
            "fixed": True,
            "remark": "prompts and answers of a main model have a maximum length; not verified on hardware",
        }
    elif kind != "CPU":
        reason = "Outrider has no backend for it"
        asked |= {"not_for_main": reason, "not_for_draft": reason}
    capabilities = core.get_property(name, "OPTIMIZATION_CAPABILITIES")
    driver = next((str(core.get_property(name, n)) for n in supported if n.endswith("DRIVER_VERSION")), None)
    return Device(
        name=name,
        format="openvino",
        full_name=str(core.get_property(name, "FULL_DEVICE_NAME")).strip(),
        free=free_memory(core, name),
        precisions=tuple(_PRECISIONS[each] for each in _PRECISIONS if each in capabilities),
        driver=driver,
        **asked,
    )


def _onnx_devices() -> list[Device]:
    if not find_spec("onnxruntime"):
        reason = f"onnxruntime is not installed: {install('onnx')}"
        return [Device(name="CPU", format="onnx", not_for_main=reason, not_for_draft=reason)]
    try:
        from outrider.models.backends.onnx_providers import list_providers
    except ImportError as error:
        reason = f"onnxruntime cannot be imported: {one_line(error)}"
        return [Device(name="CPU", format="onnx", not_for_main=reason, not_for_draft=reason)]
    made = []
    for kind, provider in list_providers().items():
        if provider is None:
            made.append(Device(name=kind, format="onnx", not_for_main=_MORE_ONNX, not_for_draft=_MORE_ONNX))
            continue
        memory, free = system_memory() if kind == "CPU" else (None, None)
        remark = _EXACT if kind == "CPU" else "not verified on hardware; measured when a model is loaded"
        made.append(Device(name=kind, format="onnx", full_name=provider, memory=memory, free=free, remark=remark))
    return made


def count_cores(core: ov.Core) -> dict[str, int]:
    """The CPU's cores: "performance" and "efficiency" if it has both kinds, otherwise "cores"; and "threads".

    Compiles a model of one operator for either kind of core and for both, and reads the numbers of threads. With one
    kind of core, all three numbers are the same.
    """
    model = one_operator()
    found = {}
    for kind in ("ANY_CORE", "PCORE_ONLY", "ECORE_ONLY"):
        hints = {"SCHEDULING_CORE_TYPE": kind, "ENABLE_HYPER_THREADING": False, "INFERENCE_NUM_THREADS": 1024}
        found[kind] = int(core.compile_model(model, "CPU", hints).get_property("INFERENCE_NUM_THREADS"))
    threads = {"threads": os.cpu_count() or found["ANY_CORE"]}
    if found["PCORE_ONLY"] + found["ECORE_ONLY"] == found["ANY_CORE"]:
        return {"performance": found["PCORE_ONLY"], "efficiency": found["ECORE_ONLY"]} | threads
    return {"cores": found["ANY_CORE"]} | threads


def one_operator() -> ov.Model:
    """The least model, to be compiled only to ask for properties."""
    parameter = ops.parameter([1], np.float32)
    return ov.Model([ops.relu(parameter)], [parameter], "one")


def hints_of(device: str, num_threads: int, properties: Mapping[str, Any] | None, **own: Any) -> dict[str, Any]:
    """OpenVINO's properties for compiling a model. own: the backend's; `properties` win."""
    threads = {"INFERENCE_NUM_THREADS": num_threads} if num_threads and device.startswith("CPU") else {}
    return {"PERFORMANCE_HINT": "LATENCY", **own, **threads, **(properties or {})}


def facts_of(core: ov.Core, device: str, compiled: Any = None) -> dict[str, str]:
    """What the time of a call depends on: of OpenVINO, the device and its driver, and a compiled model."""
    names = ["FULL_DEVICE_NAME", "DEVICE_ARCHITECTURE"]
    supported = core.get_property(device, "SUPPORTED_PROPERTIES")
    names += [name for name in supported if "DRIVER_VERSION" in name]
    facts = {name: str(core.get_property(device, name)) for name in names if name in supported}
    asked = ("INFERENCE_NUM_THREADS", "INFERENCE_PRECISION_HINT", "DYNAMIC_QUANTIZATION_GROUP_SIZE")
    known = () if compiled is None else compiled.get_property("SUPPORTED_PROPERTIES")
    facts |= {name: str(compiled.get_property(name)) for name in asked if name in known}
    return facts | {"openvino": ov.get_version()}


def check_device(core: ov.Core, device: str) -> None:
    """Raise OptionError unless `device` is there and runs paged attention."""
    found = core.available_devices
    if find_name(device, found) is None:
        raise OptionError(f"There is no device '{device}' here. Found: {', '.join(found)}.")
