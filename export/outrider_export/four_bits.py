"""4-bit constants: two codes per byte, the first in the lower half."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def unpack(constant: Any) -> NDArray[np.uint8]:
    """The codes of a 4-bit constant as uint8, in its shape."""
    shape = list(constant.get_output_shape(0))
    pairs = constant.data.view(np.uint8).reshape(-1)
    codes: NDArray[np.uint8] = np.stack([pairs & 15, pairs >> 4], -1).reshape(-1)[: np.prod(shape)].reshape(shape)
    return codes


def pack(codes: NDArray[np.uint8], kind: Any = None) -> Any:
    """A constant from codes in one byte each. kind: its type, by default `u4`."""
    import openvino

    flat = codes.reshape(-1)
    flat = np.append(flat, np.zeros(flat.size % 2, dtype=np.uint8))
    kind = openvino.Type.u4 if kind is None else kind
    tensor = openvino.Tensor(flat[::2] | flat[1::2] << 4, openvino.Shape(list(codes.shape)), kind)
    # A copy: a constant that shares the memory does not keep it alive.
    return openvino.op.Constant(tensor, shared_memory=False)
