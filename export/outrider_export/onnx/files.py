"""The files of a model in ONNX: its graph, and the weights beside it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.errors import ExportError, needs, one_line
from outrider.system.files import FAULTS, reading, shown, why
from outrider_export.onnx.graph import graphs_of

MODEL = "model.onnx"
PIECE = 1 << 24  # bytes of weights that are read or written at a time
# Large tensors are aligned so that they can be mapped on every system: to 64 KiB for Windows.
_LARGE, _PAGE, _LINE = 1 << 20, 1 << 16, 64


def import_onnx() -> Any:
    """The package `onnx`.

    Raises:
        ExportError: with the command that installs it.
    """
    with needs("Models in ONNX need onnx, which is not installed", "onnx", ExportError):
        import onnx
    return onnx


def load(path: Path) -> Any:
    """The `onnx.ModelProto` at `path`, without weights in separate files.

    Raises:
        ExportError: if it is missing or damaged, or the package `onnx` is missing.
    """
    onnx = import_onnx()
    try:
        return onnx.load(path, load_external_data=False)
    except Exception as error:  # protobuf's DecodeError, whose name depends on the version
        raise ExportError(f"{path} is not an ONNX model that can be read: {one_line(error)}") from error


def data_files(model: Any, folder: Path) -> list[str]:
    """The names of the files in `folder` with the model's weights, in the order of their first use.

    Raises:
        ExportError: if one lies elsewhere, is missing or cut short.
    """
    ends: dict[str, int] = {}
    for tensor in _tensors(model):
        name, offset, length = _place_of(tensor, folder)
        ends[name] = max(ends.get(name, 0), offset + length)
    for name, end in ends.items():
        with reading(str(folder / name), "Download it again.", ExportError):
            if not (folder / name).is_file():
                raise ExportError(
                    f"{shown(folder / name)} is missing, which holds the model's weights. Download it, too."
                )
            size = (folder / name).stat().st_size
        if size < end:
            raise ExportError(f"{folder / name} has {size:,} bytes of {end:,}. Download it again.")
    return list(ends)


def _place_of(tensor: Any, folder: Path) -> tuple[str, int, int]:
    """The file in `folder` with a tensor's values, and where they begin and how many bytes they have; 0 if unknown.

    Raises:
        ExportError: if it is not inside the folder, or the numbers are none.
    """
    entry = {each.key: each.value for each in tensor.external_data}
    name = entry.get("location", "")
    if not name or PurePosixPath(name).is_absolute() or {"..", "\\", ":"} & {*PurePosixPath(name).parts, *name}:
        raise ExportError(
            f"{folder} has weights in {shown(repr(name))}, which is not inside it. They are not read from there."
        )
    numbers = [entry.get(key, "0") for key in ("offset", "length")]
    if not all(re.fullmatch("[0-9]{1,19}", number) for number in numbers):
        raise ExportError(
            f"{folder / name} holds the weights {shown(repr(tensor.name))} from byte {shown(numbers[0])} on, "
            f"{shown(numbers[1])} bytes: these have to be numbers from 0 on. Download the model again."
        )
    return name, int(numbers[0]), int(numbers[1])


def save(model: Any, source: Path, folder: Path, advance: Callable[[int], None]) -> None:
    """Write model.onnx into `folder`, and its weights from `source` as model.onnx.data, model.onnx.data_1, ….

    They are copied, not linked: if the source is exported again, the new files must not change. Afterwards the model
    refers to these. advance: is called with bytes.

    Raises:
        ExportError: if a file of weights is missing or cut short.
    """
    import onnx

    names = {name: f"{MODEL}.data" + (f"_{i}" if i else "") for i, name in enumerate(data_files(model, source))}
    folder.mkdir(parents=True, exist_ok=True)
    for name, ours in names.items():
        shutil.copyfile(source / name, folder / ours)
        advance((folder / ours).stat().st_size)
    for tensor in _tensors(model):
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = names[entry.value]
    onnx.save(model, folder / MODEL)
    advance((folder / MODEL).stat().st_size)


def _tensors(model: Any) -> Iterator[Any]:
    """Every constant tensor in the model, including those with data in another file."""
    from onnx.external_data_helper import uses_external_data

    for graph in graphs_of(model.graph):
        held = [attribute.t for node in graph.node for attribute in node.attribute if attribute.HasField("t")]
        yield from (tensor for tensor in (*graph.initializer, *held) if uses_external_data(tensor))


class OnnxWeights:
    """A graph (`onnx.ModelProto`) and its initializers, which are in the folder of its file."""

    def __init__(self, model: Any, folder: Path) -> None:
        self.model, self.folder = model, folder
        self._tensors = {tensor.name: tensor for tensor in model.graph.initializer}

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def read(self, name: str) -> NDArray[Any]:
        """An initializer, read-only.

        Raises:
            ExportError: if its values are not in the folder, or not as many as its shape says.
        """
        from onnx import helper, numpy_helper

        tensor = self._tensors[name]
        try:
            if not tensor.external_data:
                return np.asarray(numpy_helper.to_array(tensor))
            file, offset, _ = _place_of(tensor, self.folder)
            dtype, shape = helper.tensor_dtype_to_np_dtype(tensor.data_type), tuple(tensor.dims)
            if offset + prod(shape) * dtype.itemsize > (self.folder / file).stat().st_size:
                raise ValueError(f"{file} is too short for their shape")
            return np.memmap(self.folder / file, dtype, mode="r", offset=offset, shape=shape)
        except (*FAULTS, LookupError, TypeError) as error:
            raise ExportError(
                f"{self.folder / MODEL} has weights {shown(repr(name))} that cannot be read: {why(error)}. Export it "
                "again."
            ) from error


def alignment(num_bytes: int) -> int:
    """Where an array of so many bytes begins in the file of weights: at a multiple of this."""
    return _PAGE if num_bytes >= _LARGE else _LINE


def point_to(tensor: Any, offset: int, length: int) -> None:
    """Have a tensor's values in the file of weights, model.onnx.data."""
    from onnx import TensorProto

    del tensor.external_data[:]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", f"{MODEL}.data"), ("offset", offset), ("length", length)):
        tensor.external_data.add(key=key, value=str(value))
