"""Conversions in this process: a child for each would load Python's libraries, PyTorch among them, some hundred times.

Tests of the children themselves are marked `children`.
"""

import importlib
import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

from outrider.errors import ExportError
from outrider_export.child import _one_line

WORK = {"job": "work", "compare": "compare"}  # elsewhere it is `convert`
CALLERS = ("bundles.convert_model", "with_torch.fidelity", "text_encoders.export")


class Relay:
    """A progress for the conversion; remembers what the caller's own raised, which would not reach a child."""

    def __init__(self, progress: Any) -> None:
        self._progress = progress
        self.raised: BaseException | None = None

    def __getattr__(self, name: str) -> Callable[..., None]:
        def tell(*message: Any) -> None:
            try:
                getattr(self._progress, name)(*message)
            except BaseException as error:
                self.raised = error
                raise

        return tell


def run_here(module: str, job: dict[str, Any], what: str, progress: Any) -> dict[str, Any]:
    """What `run_child` does, without a child."""
    converter, relay = importlib.import_module(module), Relay(progress)
    work = getattr(converter, WORK.get(module.rpartition(".")[2], "convert"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "openvino_telemetry", None)
        try:
            found: dict[str, Any] = json.loads(json.dumps(work(json.loads(json.dumps(job)), relay)))
        except Exception as error:
            if error is relay.raised:
                raise
            raise ExportError(f"{what}: {_one_line(error)}") from error
    return found


def convert_here(patch: pytest.MonkeyPatch) -> None:
    """From now on, conversions run in this process."""
    for caller in CALLERS:
        patch.setattr(f"outrider_export.{caller}.run_child", run_here)
