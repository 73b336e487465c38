"""Whether a device runs a model: it is loaded in a process of its own first, so a driver that aborts ends no app.

The child loads the model as the engine would, makes one small call and prints a verdict. If it ends without one, the
device has ended it.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np

from outrider.bundle.folder import read_bundle
from outrider.bundle.manifest import ModelEntry
from outrider.config import DeviceConfig
from outrider.errors import DeviceError, OutriderError, one_line
from outrider.models.backends.devices import find_device
from outrider.models.backends.registry import compile_model
from outrider.models.cost.slots import copied_rows
from outrider.models.tuning.model_spec import ModelSpec
from outrider.system import saved
from outrider.system.files import FAULTS
from outrider.system.processes import start_child
from outrider.types import Chunk

PATIENCE = 900.0  # seconds: a large model may take minutes on some devices the first time
_NUM_TOKENS = 256  # of the child's cache
_TOKEN_IDS = [0, 0]  # that it evaluates; few, as models in fixed shapes may have little room
# Signals from outside. A system that runs out of memory also sends SIGKILL.
_FROM_OUTSIDE = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGKILL") if hasattr(signal, name)]


class _Job(msgspec.Struct, frozen=True):
    """The child's task: a `ModelSpec`, whose graph the child does not change."""

    folder: str  # of the bundle
    role: str
    model: ModelEntry
    device: str
    options: DeviceConfig


class Verdict(msgspec.Struct, frozen=True):
    """The child's result. works: None if it could not be tried. reason: in words, if it does not work."""

    works: bool | None
    reason: str = ""


def verdict_of(spec: ModelSpec) -> Verdict:
    """Whether a device runs a model. It is tried in a child process, now or at an earlier start."""
    device = spec.device
    if not device.startswith("NPU") and find_device(device, spec.model.format) is None:  # an NPU can be emulated
        return Verdict(works=None, reason="there is no such device")
    file = spec.identity.saved("verdicts", Verdict, ["features", "cuts", "adapters"])  # the child changes no graph
    verdict = file.read()
    if verdict is None or verdict.works is None:  # "could not be tried" is not saved
        verdict = try_apart(spec)
        if verdict.works is not None:
            file.write(verdict)
    return verdict


def forget() -> None:
    """Delete the saved verdicts, so that all devices are tried again."""
    saved.forget("verdicts")


def try_apart(spec: ModelSpec) -> Verdict:
    """Load a model in a child process and make a call. A crash of the device does not end this process."""
    job = _Job(str(spec.bundle.folder.resolve()), spec.role, spec.model, spec.device, spec.compile_options)
    try:
        sent = msgspec.json.encode(job)
    except TypeError as error:  # objects among the properties
        return Verdict(works=None, reason=f"its options cannot be handed to another process: {one_line(error)}")
    try:
        with start_child("outrider.models.tuning.probe", stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            try:
                printed, _ = child.communicate(sent, PATIENCE)
            finally:
                child.kill()
    except subprocess.TimeoutExpired:
        return Verdict(works=False, reason=f"it was not ready after {PATIENCE:g} seconds")
    except OSError as error:
        return Verdict(works=None, reason=f"no other process could be started: {one_line(error)}")
    for line in reversed(printed.splitlines()):  # a driver may print, too
        with contextlib.suppress(*FAULTS):
            return msgspec.json.decode(line, type=Verdict)
    works = None if -child.returncode in _FROM_OUTSIDE else False
    return Verdict(works=works, reason=f"the process that tested it {_ending(child.returncode)}")


def main() -> None:
    """The child: load the model that standard input describes, make a call, print the verdict."""
    _die_quietly()
    faulthandler.dump_traceback_later(PATIENCE, exit=True)  # the parent may be gone by then
    verdict = _try(msgspec.json.decode(sys.stdin.buffer.read(), type=_Job))
    sys.stdout.buffer.write(b"\n" + msgspec.json.encode(verdict) + b"\n")
    sys.stdout.buffer.flush()
    os._exit(0)  # a driver that crashes at exit counts as working


def _try(job: _Job) -> Verdict:
    try:
        bundle = read_bundle(Path(job.folder))
        backend = compile_model(ModelSpec(job.role, bundle, job.model, device=job.device, options=job.options))
        backend.allocate(_NUM_TOKENS)
        slot = backend.open(len(_TOKEN_IDS))
        if slot is None:
            return Verdict(works=False, reason="it has no memory for a cache")
        chunk = Chunk(slot, _TOKEN_IDS, num_rows=1)
        if not np.isfinite(copied_rows(backend.submit([chunk]).wait(), chunk)).all():
            return Verdict(works=False, reason="its logits are not numbers")
    except DeviceError as error:
        return Verdict(works=False, reason=one_line(error))
    except OutriderError as error:  # an error in the options or the bundle: the load itself reports it
        return Verdict(works=None, reason=one_line(error))
    except Exception as error:
        return Verdict(works=False, reason=f"{type(error).__name__}: {one_line(error)}")
    return Verdict(works=True)


def _die_quietly() -> None:
    """Show no dialogue on Windows, and write no core dump elsewhere, when a driver aborts."""
    if sys.platform == "win32":
        fail_critical_errors, no_fault_box = 0x1, 0x2
        getattr(ctypes, "windll").kernel32.SetErrorMode(fail_critical_errors | no_fault_box)  # noqa: B009
    else:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _ending(code: int) -> str:
    """How a process ended, in words."""
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(-code).name}"
    return f"ended with code {code if abs(code) < 1 << 16 else hex(code & 0xFFFFFFFF)}"


if __name__ == "__main__":
    main()
