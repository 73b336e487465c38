"""Unpacks the weights of GGUF files, by the package gguf."""

from __future__ import annotations

import math

import gguf
import numpy as np
from gguf.quants import _type_traits as _UNPACKED  # noqa: N812 - the types that `gguf.dequantize` knows, by their number
from numpy.typing import NDArray

from outrider.errors import ExportError
from outrider_export.sources.gguf_file import GGUFHeader, TensorInfo


def check_type(tensor: TensorInfo, name: str) -> None:
    """Raise ExportError for a tensor, of this name, that cannot be unpacked."""
    if gguf.GGMLQuantizationType[tensor.type] not in _UNPACKED and tensor.type not in ("F32", "F16"):
        raise ExportError(f"{tensor.path} stores {name} as {tensor.type}, which the package gguf does not unpack.")


def unpack(tensor: TensorInfo, rows: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The weights float32 [n, columns] of a tensor's rows as they are stored, uint8 [n, bytes]."""
    kind = gguf.GGMLQuantizationType[tensor.type]
    found: NDArray[np.float32] = gguf.dequantize(np.ascontiguousarray(rows), kind).astype(np.float32, copy=False)
    return found


def values_of(header: GGUFHeader, name: str) -> NDArray[np.float32]:
    """All weights of a tensor, in its shape.

    Raises:
        ExportError: when its type cannot be read.
    """
    tensor = header.tensors[name]
    check_type(tensor, name)
    num_rows = math.prod(tensor.shape[:-1])
    rows = tensor.stored().reshape(num_rows, tensor.num_bytes // max(num_rows, 1))
    return unpack(tensor, rows).reshape(tensor.shape)
