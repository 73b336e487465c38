"""A model whose arrays end before pages that cannot be read, to find kernels that read past an array's end.

    python tests/helpers/guarded.py BUNDLE bf16         # with the room that the runtime leaves behind arrays
    python tests/helpers/guarded.py BUNDLE f16 0        # with so many bytes: 0 finds every read past an end

Such a read ends the process with a segmentation fault, on any machine whose kernels do it. For Linux.
"""

import ctypes
import mmap
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from outrider.bundle import read_bundle
from outrider.models.backends import onnx_cache, paged_tensors, taps
from outrider.models.backends.onnxruntime import OnnxRuntime
from outrider.models.backends.openvino_paged import OpenVINOPaged
from outrider.models.backends.paged_graph import read_decoder
from outrider.system.memory import ROOM
from outrider.types import Chunk, Exactness, RowRule

_NOTHING = 0  # PROT_NONE
_kept: list[mmap.mmap] = []  # for the rest of the process: kernels know their addresses
CALLS = ((40, 1), (33, 2), (31, 8), (0, 32), (0, 96), (95, 1), (64, 32))  # tokens in the cache, and tokens of a call
_MOST = 96  # tokens: all of a small cache, to its last number


def guarded(num_bytes: int, room: int) -> NDArray[np.uint8]:
    """Zeros, uint8 [num_bytes], with `room` readable bytes and a protected page after them."""
    size = -(-(num_bytes + room) // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size + mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _kept.append(memory)
    array = np.frombuffer(memory, dtype=np.uint8)
    end = ctypes.c_void_p(array.ctypes.data + size)
    if ctypes.CDLL(None).mprotect(end, ctypes.c_size_t(mmap.PAGESIZE), _NOTHING):
        raise OSError("mprotect failed")
    return array[size - room - num_bytes : size - room]


def read_guarded(core: ov.Core, path: Path, room: int) -> ov.Model:
    """`read_decoder`, with each weight in an array of its own."""
    model = read_decoder(core, path)
    for old in model.get_ordered_ops():
        if old.get_type_name() != "Constant" or not old.get_byte_size():
            continue
        kind, shape = old.get_output_element_type(0), old.get_output_shape(0)
        array = guarded(old.get_byte_size(), room)
        array[:] = np.atleast_1d(old.get_tensor_view().data).reshape(-1).view(np.uint8)
        made = ov.op.Constant(ov.Tensor(array, shape, kind), shared_memory=True)
        made.set_friendly_name(old.get_friendly_name())
        old.output(0).replace(made.output(0))
    return model


def run(folder: str, precision: str, room: int | None) -> None:
    """Make calls of many sizes, which fill the cache to its end. room: in bytes; None: what the runtime leaves."""
    allocate = partial(guarded, room=ROOM if room is None else room)
    for module in (paged_tensors, onnx_cache):
        setattr(module, "allocate_zeros", allocate)  # noqa: B010  (it is not theirs)
    bundle = read_bundle(folder)
    model = bundle.manifest.main
    path = bundle.model_path(model)
    options: dict[str, Any] = {"vocab_size": model.vocab_size, "precision": precision}
    if model.format == "onnx":
        backend: Any = OnnxRuntime(path, **options)
    else:
        room = taps.ROOM if room is None else room
        backend = OpenVINOPaged(path, build=partial(read_guarded, room=room), **options)
    rng = np.random.default_rng(0)
    for separate in (False, True)[: 1 + (model.format == "openvino")]:
        backend.use(Exactness(rule=RowRule(separate=separate)))
        for past, count in CALLS:
            backend.allocate(_MOST)
            slot = backend.open(past + count)
            token_ids = rng.integers(model.vocab_size, size=past + count).tolist()
            if past:
                backend.submit([Chunk(slot, token_ids[:past], num_rows=1)]).wait()
            backend.submit([Chunk(slot, token_ids[past:], num_rows=1, generated=past > 0)]).wait()
            slot.close()


if __name__ == "__main__":
    asked = sys.argv[3:]
    run(sys.argv[1], sys.argv[2], int(asked[0]) if asked else None)
