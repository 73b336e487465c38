"""The processor of this machine, for reports: its name, and the instructions that matrix kernels choose between.

Each fact comes from the system. Unknown facts are left out. Nothing here raises.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import math
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TypeVar

import openvino as ov

from outrider.errors import DeviceError
from outrider.models.backends.devices import count_cores
from outrider.system.core import new_core

_Answer = TypeVar("_Answer")

# As /proc/cpuinfo names them: x86, then ARM.
INSTRUCTIONS = (
    "avx2", "avx_vnni", "avx_vnni_int8", "avx_ne_convert", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16",
    "avx512_fp16", "amx_int8", "amx_bf16", "amx_fp16",
    "asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve",
)  # fmt: skip
LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")  # environment variables that limit oneDNN's instructions

# Levels of these variables that have no instructions for a precision.
_BELOW_BF16 = frozenset({"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI"})
_BELOW = {"bf16": _BELOW_BF16, "f16": _BELOW_BF16 | {"AVX512_CORE_BF16"}}

_CPUINFO, _OWN_CGROUPS, _CGROUPS = Path("/proc/cpuinfo"), Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_SYSCTL = {
    "hw.optional.avx2_0": "avx2",
    "hw.optional.avx512f": "avx512f",
    "hw.optional.avx512bw": "avx512bw",
    "hw.optional.AdvSIMD": "asimd",
    "hw.optional.arm.FEAT_FP16": "asimdhp",
    "hw.optional.arm.FEAT_DotProd": "asimddp",
    "hw.optional.arm.FEAT_I8MM": "i8mm",
    "hw.optional.arm.FEAT_BF16": "bf16",
}
# Arguments of IsProcessorFeaturePresent, from winnt.h. It knows no others for x86.
_WINDOWS = {40: "avx2", 41: "avx512f", 19: "asimd", 67: "asimdhp", 43: "asimddp", 66: "i8mm", 68: "bf16", 46: "sve"}


@dataclass(frozen=True, slots=True)
class ProcessorFacts:
    """What the system says of the processor.

    instructions: those of `INSTRUCTIONS` that it has, in that order; Windows knows only AVX2 and AVX-512F on x86.
    cores: as `outrider.models.backends.devices.count_cores`. capabilities: what OpenVINO computes in on the CPU.
    limits: environment variables that keep oneDNN from using all instructions.
    """

    name: str
    instructions: tuple[str, ...] = ()
    cores: Mapping[str, int] = field(default_factory=dict)
    capabilities: tuple[str, ...] = ()
    limits: Mapping[str, str] = field(default_factory=dict)
    quota: int = 0  # cores whose time a container may use, if they are fewer than there are; 0: all

    @property
    def description(self) -> dict[str, str]:
        """The facts in words, for a report, by topic."""
        counted = (
            f"{count} {kind if kind in ('cores', 'threads') else f'{kind} cores'}" for kind, count in self.cores.items()
        )
        return {
            "processor": ", ".join([self.name, *counted, *([f"a quota of {self.quota}"] if self.quota else [])]),
            "instructions": " ".join(self.instructions) or "not known",
            "capabilities": " ".join(self.capabilities) or "not known",
            **self.limits,
        }


_WHOLE_WEIGHTS = ("fp16", "fp32", "f16", "bf16", "f32")  # that are not compressed to fewer bits


def find_processor() -> ProcessorFacts:
    """The processor, as far as it is known."""
    core = _attempt(new_core)
    flags: set[str] = set()
    names = []
    if core is not None:
        names.append(_attempt(lambda: str(core.get_property("CPU", "FULL_DEVICE_NAME")).strip()))
    for ask in (_ask_linux, _ask_windows, _ask_macos):
        name, found = _attempt(ask) or ("", set())
        names.append(name)
        flags |= found
    names += [platform.processor(), platform.machine()]
    capabilities = [] if core is None else _attempt(lambda: _capabilities(core)) or []
    cores = (None if core is None else _attempt(lambda: count_cores(core))) or {"threads": os.cpu_count() or 1}
    quota = find_quota()
    return ProcessorFacts(
        name=next((name for name in names if name), "not known"),
        instructions=tuple(each for each in INSTRUCTIONS if each in flags),
        cores=cores,
        capabilities=tuple(sorted(capability for capability in capabilities if capability[:2] in ("FP", "BF", "IN"))),
        limits={name: value for name in LIMITS if (value := os.environ.get(name))},
        quota=quota if quota < (sum(count for kind, count in cores.items() if kind != "threads") or math.inf) else 0,
    )


def find_quota() -> int:
    """The cores whose time Linux' control groups leave this process, rounded down, but 1 at least; 0 for no quota.

    More threads than that stand still together until the next period begins. Source: Linux' cgroup-v1 and cgroup-v2.
    """
    folders = []
    for line in (_attempt(lambda: _OWN_CGROUPS.read_text(encoding="utf-8")) or "").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if not controllers or "cpu" in controllers.split(","):
            own = PurePosixPath(path.lstrip("/"))
            folders += [_CGROUPS / ("cpu" if controllers else "") / each for each in (own, *own.parents)]
    found = [quota for folder in folders if (quota := _attempt(functools.partial(_quota_of, folder))) is not None]
    return max(1, int(min(found))) if found else 0


def _quota_of(folder: Path) -> float | None:
    """The cores of one control group; None for no quota."""
    names = ["cpu.max"] if (folder / "cpu.max").exists() else ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
    quota, period = " ".join((folder / name).read_text(encoding="utf-8") for name in names).split()
    return None if quota in ("max", "-1") else int(quota) / int(period)


@functools.cache
def this_processor() -> ProcessorFacts:
    """The processor, which is asked once: counting its cores takes a tenth of a second."""
    return find_processor()


def limit_on(precision: str) -> str | None:
    """The environment's limit that leaves oneDNN no kernels of a precision, as NAME=VALUE; None if there is none.

    OpenVINO 2026.4 offers such a precision nevertheless, and its first call ends the process.
    """
    limits = ((name, os.environ.get(name, "")) for name in LIMITS)
    return next((f"{name}={level}" for name, level in limits if level.upper() in _BELOW.get(precision, ())), None)


def may_divide_by_zero(processor: ProcessorFacts, precision: str, weights: str, num_threads: int) -> bool:
    """Whether OpenVINO may end the process in this precision, with weights of this format and this many threads.

    With AMX it fuses the products of some MLPs whose weights have 16 bits, and gives them to pairs of threads. With one
    thread it divides by no pairs (`LLMMLP`, as of OpenVINO 2026.4). num_threads: 0 for the library's choice.
    """
    tiles = {"bf16": "amx_bf16", "f16": "amx_fp16"}.get(precision)
    if tiles not in processor.instructions or weights.lower() not in _WHOLE_WEIGHTS:
        return False
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(num_threads or processors, processors) == 1


def _attempt(ask: Callable[[], _Answer]) -> _Answer | None:
    try:
        return ask()
    except Exception:  # a report can do without one fact
        return None


def _ask_linux() -> tuple[str, set[str]]:
    """The first processor's entry; on ARM it has Features instead of flags, and no name."""
    entry = _CPUINFO.read_text(encoding="utf-8", errors="replace").split("\n\n")[0]
    said = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in entry.splitlines())}
    return said.get("model name", ""), set((said.get("flags") or said.get("Features") or "").split())


def _ask_windows() -> tuple[str, set[str]]:
    """The registry's name, and what the kernel tells programs. Not verified there."""
    if sys.platform != "win32":
        return "", set()
    registry = importlib.import_module("winreg")
    key_path = r"HARDWARE\DESCRIPTION\System\CentralProcessor\0"
    with registry.OpenKey(registry.HKEY_LOCAL_MACHINE, key_path) as key:
        name = str(registry.QueryValueEx(key, "ProcessorNameString")[0]).strip()
    kernel = ctypes.CDLL("kernel32")
    return name, {flag for number, flag in _WINDOWS.items() if kernel.IsProcessorFeaturePresent(number)}


def _ask_macos() -> tuple[str, set[str]]:
    """Not verified there."""
    if sys.platform != "darwin":
        return "", set()
    keys = ["machdep.cpu", "hw.optional"]
    done = subprocess.run(["/usr/sbin/sysctl", *keys], capture_output=True, text=True, check=False, timeout=10)  # noqa: S603
    said = dict(line.split(": ", 1) for line in done.stdout.splitlines() if ": " in line)
    return said.get("machdep.cpu.brand_string", ""), {flag for key, flag in _SYSCTL.items() if said.get(key) == "1"}


def resolve_precisions(core: ov.Core, device: str, precision: str, cache_precision: str) -> tuple[str, str]:
    """The properties for calculation and for the cache. "auto": the device's choice, and the same for the cache.

    Raises:
        DeviceError: for a precision that the CPU has no kernels of.
    """
    own = precision == "auto"
    if own:
        precision = name_of(core.get_property(device, "INFERENCE_PRECISION_HINT"))
    elif device.startswith("CPU") and precision == "bf16" and "BF16" not in _capabilities(core):
        raise DeviceError("This CPU cannot compute in bf16. Load with precision='f32', or leave the option out.")
    if device.startswith("CPU") and (limit := limit_on(precision)):
        if not own:
            raise DeviceError(
                f"The CPU cannot compute in {precision} with {limit} in the environment. Load with precision='f32', "
                "or leave that variable out."
            )
        precision = "f32"
    return precision, precision if cache_precision == "auto" else cache_precision


def _capabilities(core: ov.Core) -> list[str]:
    """What OpenVINO computes in on the CPU: "FP32", "BF16", …"""
    return [*core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")]


def precision_of_device(core: ov.Core, device: str) -> str:
    """What an OpenVINO device calculates in by default; empty if it does not say."""
    try:
        return name_of(core.get_property(device, "INFERENCE_PRECISION_HINT"))
    except RuntimeError:
        return ""


def name_of(kind: ov.Type) -> str:
    """ "bf16", "f32", "u8", …"""
    return str(kind.get_type_name())
