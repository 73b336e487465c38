"""Weights beside a model in ONNX: only those in its folder are read, and as many as there are."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from outrider.errors import BundleError, ExportError
from outrider.models.backends.onnxruntime import OnnxRuntime
from outrider_export.onnx.files import MODEL, OnnxWeights, data_files, load, save

FLOAT = TensorProto.FLOAT


@pytest.fixture
def model(tmp_path: Path) -> Any:
    """A model in a folder, of one matrix with its 4096 bytes in a file beside it, as it was read."""
    folder = tmp_path / "model"
    folder.mkdir()
    matrix = numpy_helper.from_array(np.ones((32, 32), np.float32), "matrix")
    ports = [helper.make_tensor_value_info(name, FLOAT, [1, 32]) for name in ("hidden", "logits")]
    node = helper.make_node("MatMul", ["hidden", "matrix"], ["logits"])
    graph = helper.make_graph([node], "head", ports[:1], ports[1:], [matrix])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(made, folder / MODEL, save_as_external_data=True, location="weights", size_threshold=0)
    (tmp_path / "secret").write_bytes(bytes(8192))
    return load(folder / MODEL)


def entry(key: str, value: str | None) -> Callable[[Any], None]:
    """Set or remove what the model says of where the matrix is."""

    def change(tensor: Any) -> None:
        known = {each.key: each.value for each in tensor.external_data}
        del tensor.external_data[:]
        for name, text in (known | {key: value}).items():
            if text is not None:
                tensor.external_data.add(key=name, value=text)

    return change


def shape(*dims: int) -> Callable[[Any], None]:
    def change(tensor: Any) -> None:
        del tensor.dims[:]
        tensor.dims.extend(dims)

    return change


def kind(tensor: Any) -> None:
    tensor.data_type = 99


NUMBERS = "these have to be numbers from 0 on"
OUTSIDE = "is not inside it. They are not read from there"


@pytest.mark.parametrize(("change", "of_files", "of_values"), [
    (entry("location", "../secret"), OUTSIDE, OUTSIDE),
    (entry("location", "/etc/passwd"), OUTSIDE, OUTSIDE),
    (entry("location", None), "weights in '', which", "weights in '', which"),
    (entry("location", "x" * 5000), "cannot be read: .*|is missing", "cannot be read: "),
    (entry("location", "x\0"), r"x\\x00 (is missing|cannot be read)", "cannot be read: "),
    (entry("location", "."), "is missing", "cannot be read: "),
    (entry("offset", "-1"), NUMBERS, NUMBERS),
    (entry("offset", "all"), NUMBERS, NUMBERS),
    (entry("length", "-1"), NUMBERS, NUMBERS),
    (entry("offset", str(2**62)), r"has 4,096 bytes of 4,611,686,018,427,392,000", "too short for their shape"),
    (shape(2**32, 2**32), None, "too short for their shape"),
    (shape(-1, 32), None, "cannot be read: "),
    (kind, None, "cannot be read: 99"),
])  # fmt: skip
def test_weights_that_are_not_there_are_refused(
    model: Any, tmp_path: Path, change: Callable[[Any], None], of_files: str | None, of_values: str
) -> None:
    folder = tmp_path / "model"
    change(model.graph.initializer[0])
    if of_files is not None:
        with pytest.raises(ExportError, match=of_files):
            data_files(model, folder)
        with pytest.raises(ExportError, match=of_files):
            save(model, folder, tmp_path / "copy", shutil.copyfile)
    with pytest.raises(ExportError, match=of_values):
        OnnxWeights(model, folder).read("matrix")


@pytest.mark.parametrize("location", ["../secret", "/etc/passwd", "link"])
def test_onnx_runtime_reads_nothing_elsewhere(model: Any, tmp_path: Path, location: str) -> None:
    folder = tmp_path / "model"
    if location == "link":
        try:
            (folder / "link").symlink_to(tmp_path / "secret")
        except OSError:
            pytest.skip("Windows allows links only to some users")
    entry("location", location)(model.graph.initializer[0])
    (folder / MODEL).write_bytes(model.SerializeToString())
    with pytest.raises(BundleError, match=r"External data path|Absolute path not allowed"):
        OnnxRuntime(folder / MODEL, vocab_size=32)
