"""The files of a model in ONNX: its graph, and the weights beside it."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from outrider.errors import ExportError, install, one_line
from outrider_export.keep import link_or_copy
from outrider_export.onnx_graph import graphs_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

MODEL = "model.onnx"


def import_onnx() -> Any:
    """The package `onnx`.

    Raises:
        ExportError: with the command that installs it.
    """
    try:
        import onnx
    except ImportError as error:
        raise ExportError(f"Models in ONNX need onnx, which is not installed. Run: {install('onnx-export')}") from error
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
    for entry in _external(model):
        name = entry["location"]
        if PurePosixPath(name).is_absolute() or {"..", "\\", ":"} & {*PurePosixPath(name).parts, *name}:
            raise ExportError(
                f"{folder} has weights in {name!r}, which is not inside it. They are not read from there."
            )
        end = int(entry.get("offset", 0)) + int(entry.get("length", 0))
        ends[name] = max(ends.get(name, 0), end)
    for name, end in ends.items():
        if not (folder / name).is_file():
            raise ExportError(f"{folder / name} is missing, which holds the model's weights. Download it, too.")
        if (size := (folder / name).stat().st_size) < end:
            raise ExportError(f"{folder / name} has {size:,} bytes of {end:,}. Download it again.")
    return list(ends)


def save(model: Any, source: Path, folder: Path, copy_file: Callable[[Path, Path], object] = link_or_copy) -> None:
    """Write model.onnx into `folder`, and its weights from `source` as model.onnx.data, model.onnx.data_1, ….

    copy_file: links or copies a file of weights to a path. Afterwards the model refers to the new files.

    Raises:
        ExportError: if a file of weights is missing or cut short.
    """
    import onnx

    names = {name: f"{MODEL}.data" + (f"_{i}" if i else "") for i, name in enumerate(data_files(model, source))}
    folder.mkdir(parents=True, exist_ok=True)
    for name, ours in names.items():
        copy_file(source / name, folder / ours)
    for tensor in _tensors(model):
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = names[entry.value]
    onnx.save(model, folder / MODEL)


def _tensors(model: Any) -> Iterator[Any]:
    """Every constant tensor in the model, including those with data in another file."""
    from onnx.external_data_helper import uses_external_data

    for graph in graphs_of(model.graph):
        held = [attribute.t for node in graph.node for attribute in node.attribute if attribute.HasField("t")]
        yield from (tensor for tensor in (*graph.initializer, *held) if uses_external_data(tensor))


def _external(model: Any) -> list[dict[str, str]]:
    """Location, offset and length of each tensor whose data is in another file."""
    return [{entry.key: entry.value for entry in tensor.external_data} for tensor in _tensors(model)]
