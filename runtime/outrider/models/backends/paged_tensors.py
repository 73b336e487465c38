"""The tensors of a paged call: its inputs, and a cache in blocks or rows of states, one for each layer and kind.

GPU: written against the documented interface; not verified on hardware.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from outrider.system.memory import allocate_zeros


class HostTensor:
    """A cache tensor [blocks, heads, block size, head size], or a state's [rows, …], in the host's memory."""

    def __init__(self, port: ov.ConstOutput, num_blocks: int) -> None:
        # Zeros: kernels may multiply blocks beyond a sequence's end by 0, and a NaN would stay NaN.
        self._bytes = allocate_zeros(bytes_of(port, num_blocks))
        self.tensor = ov.Tensor(self._bytes, shape_of(port, num_blocks), port.get_element_type())
        self._blocks: NDArray[np.uint8] = self._bytes.reshape(num_blocks, -1)

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block to another."""
        self._blocks[target] = self._blocks[source]

    def begin_with(self, other: Any) -> None:
        """Copy the content of a smaller tensor."""
        self._bytes[: len(other._bytes)] = other._bytes

    def read(self, blocks: NDArray[np.int64]) -> NDArray[np.uint8]:
        """A copy of these blocks' bytes, one after the other."""
        return self._blocks[blocks].ravel()

    def write(self, blocks: NDArray[np.int32], content: NDArray[np.uint8]) -> None:
        """Overwrite these blocks. content: uint8 [blocks, bytes]."""
        self._blocks[blocks] = content


class DeviceTensor:
    """The same in a device's memory."""

    def __init__(self, tensor: ov.RemoteTensor) -> None:
        self.tensor = tensor

    @classmethod
    def on(cls, context: ov.RemoteContext, port: ov.ConstOutput, num_blocks: int) -> DeviceTensor:
        """One for a cache input with so many blocks."""
        return cls(context.create_tensor(port.get_element_type(), shape_of(port, num_blocks), {}))

    def part(self, begin: int, end: int) -> ov.RemoteTensor:
        """Its blocks from `begin` to `end`."""
        _, *inner = self.tensor.get_shape()
        return ov.RemoteTensor(self.tensor, ov.Coordinate([begin, *(0 for _ in inner)]), ov.Coordinate([end, *inner]))

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block to another."""
        self.part(target, target + 1).copy_from(self.part(source, source + 1))

    def begin_with(self, other: Any) -> None:
        """Copy the content of a smaller tensor."""
        self.part(0, other.tensor.get_shape()[0]).copy_from(other.tensor)

    def read(self, blocks: NDArray[np.int64]) -> NDArray[np.uint8]:
        """A copy of these blocks' bytes, one after the other."""
        made = []
        for block in blocks.tolist():
            part = self.part(block, block + 1)
            host = ov.Tensor(part.get_element_type(), part.get_shape())
            part.copy_to(host)
            made.append(np.frombuffer(host.data.tobytes(), dtype=np.uint8))
        return np.concatenate(made)

    def write(self, blocks: NDArray[np.int32], content: NDArray[np.uint8]) -> None:
        """Overwrite these blocks. content: uint8 [blocks, bytes]."""
        for block, row in zip(blocks.tolist(), content, strict=True):
            part = self.part(block, block + 1)
            part.copy_from(ov.Tensor(np.ascontiguousarray(row), part.get_shape(), part.get_element_type()))


class BoundInputs(dict[str, NDArray[Any]]):
    """The inputs of a request by name: views of the tensors that are bound to it."""

    def __init__(self, request: ov.InferRequest) -> None:
        super().__init__()
        self._request = request
        self._tensors: dict[str, ov.Tensor] = {}

    def set(self, name: str, values: NDArray[Any]) -> None:
        """Set an input. To write to its tensor, resized if need be, costs a third of binding a new one, or less."""
        bound = self.get(name)
        if bound is None:
            self._tensors[name] = tensor = ov.Tensor(values)
            self._request.set_tensor(name, tensor)
            self[name] = tensor.data
            return
        if bound.shape != values.shape:
            self._tensors[name].shape = values.shape
            bound = self[name] = self._tensors[name].data
        bound[...] = values


def shape_of(port: ov.ConstOutput, num_blocks: int) -> ov.Shape:
    """The shape of a cache input with so many blocks."""
    return ov.Shape([num_blocks, *_inner_shape(port)])


def bytes_of(port: ov.ConstOutput, num_blocks: int) -> int:
    """Bytes of so many blocks of a cache input."""
    bits: int = num_blocks * math.prod(_inner_shape(port)) * port.get_element_type().bitwidth
    return -(-bits // 8)


def _inner_shape(port: ov.ConstOutput) -> list[int]:
    """The shape of a block, or of a state's row."""
    return [axis.get_length() for axis in list(port.partial_shape)[1:]]
