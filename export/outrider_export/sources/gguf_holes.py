"""Finds holes in GGUF files: places that a download reserved on the disk and never wrote, which read as zeros.

Such a file has its full size and a whole header. A norm of nothing but zeros is no part of a trained model, nor is a
matrix whose zeros go on in a tensor beside it. So a hole that covers a whole one is found by reading the beginning of
each; one that lies within a matrix is not. A matrix of zeros by itself may be a layer that does nothing yet.
"""

from __future__ import annotations

from outrider.errors import ExportError
from outrider_export.sources.gguf_file import GGUFHeader, TensorInfo

_BEGINNING = 4096  # bytes, of which one is not zero in all but holes and pruned rows
_BESIDE = 64  # bytes beyond what fills the space between two tensors


def check_holes(header: GGUFHeader) -> None:
    """Check that no tensor lies in a hole. Takes one read of a page for each.

    Raises:
        ExportError: with the first one and its place.
    """
    empty = [
        (name, tensor)
        for name, tensor in header.tensors.items()
        if (len(tensor.shape) > 1 or name.endswith("norm.weight"))  # biases may be zeros alone
        and _is_zero(tensor)
        and (len(tensor.shape) == 1 or _goes_on(tensor, header.alignment + _BESIDE))
    ]
    if not empty:
        return
    name, first = min(empty, key=lambda each: (str(each[1].path), each[1].begin))
    others = f" and {len(empty) - 1:,} more tensors" if empty[1:] else ""
    raise ExportError(
        f"{first.path} has a hole at byte {first.begin:,}: {name}{others} of {len(header.tensors):,} are all zeros, as "
        "after a download that was not finished. Fetch it again."
    )


def _goes_on(tensor: TensorInfo, num_bytes: int) -> bool:
    """Whether so many bytes before or after a tensor are zeros, too."""
    end = tensor.begin + tensor.num_bytes
    with tensor.path.open("rb") as file:
        for begin in (tensor.begin - num_bytes, end):
            file.seek(begin)
            if file.read(num_bytes) == bytes(num_bytes):
                return True
    return False


def _is_zero(tensor: TensorInfo) -> bool:
    if not tensor.num_bytes:
        return False
    stored = tensor.stored()
    return not stored[:_BEGINNING].any() and not stored.any()
