"""No kernel reads farther past the end of a cache or a weight than there is room; see tests/helpers/guarded.py."""

import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path

import openvino as ov
import pytest

import guarded
from outrider.bundle import read_bundle
from outrider.models.backends.taps import ROOM as WEIGHTS_ROOM
from outrider.models.backends.taps import read_ir
from outrider.system.core import new_core
from outrider.testing import save_toy_bundle

pytestmark = pytest.mark.needs("Linux")  # protects pages as Linux does

# "": all instructions that there are. Without AVX-VNNI, OpenVINO takes the last level for AVX2 alone, and mixes sets.
LEVELS = ("", "AVX512_CORE", pytest.param("AVX2_VNNI", marks=pytest.mark.needs("avx_vnni")))


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_toy_bundle(tmp_path_factory.mktemp("guarded") / "bundle", draft=False).folder


@pytest.fixture(scope="session")
def onnx_toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("guarded") / "bundle"
    return save_toy_bundle(folder, draft=False, formats=("onnx", "onnx")).folder


def run(folder: Path, precision: str, level: str, *room: str) -> int:
    command = [sys.executable, guarded.__file__, str(folder), precision, *room]
    own = {"ONEDNN_MAX_CPU_ISA": level} if level else {}
    return subprocess.run(command, env=os.environ | own, check=False).returncode


@pytest.mark.parametrize("level", LEVELS)
def test_toys(toy: Path, level: str) -> None:
    assert run(toy, "f32", level) == 0


def test_a_toy_in_onnx(onnx_toy: Path) -> None:
    assert run(onnx_toy, "auto", "") == 0


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_a_real_model(smollm2: Path, level: str) -> None:
    assert run(smollm2, "f32" if level == "AVX512_CORE" else "auto", level) == 0


@pytest.mark.parametrize(("at", "code"), [(103, 0), (104, -signal.SIGSEGV)])
def test_a_read_past_the_end_is_found(at: int, code: int) -> None:
    program = f"""
import ctypes
from guarded import guarded
ctypes.c_uint8.from_address(guarded(100, room=4).ctypes.data + {at}).value
"""
    folder = Path(guarded.__file__).parent
    assert subprocess.run([sys.executable, "-c", program], cwd=folder, check=False).returncode == code


@pytest.mark.parametrize(("spare", "is_mapped"), [(0, False), (WEIGHTS_ROOM - 1, False), (WEIGHTS_ROOM, True)])
def test_weights_that_fill_their_files_last_page_are_not_mapped(tmp_path: Path, spare: int, *, is_mapped: bool) -> None:
    bundle = save_toy_bundle(tmp_path / "bundle", draft=False)
    path = read_bundle(bundle.folder).model_path(bundle.manifest.main)
    weights = path.with_suffix(".bin")
    size = weights.stat().st_size
    with weights.open("ab") as file:
        file.write(bytes(-(size + spare) % mmap.PAGESIZE))
    model = read_ir(new_core(), path)
    assert isinstance(model, ov.Model)
    assert (str(weights) in Path("/proc/self/maps").read_text(encoding="utf-8")) == is_mapped
