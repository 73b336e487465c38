"""An image for Qwen's vision encoders: in its own form, as rows and columns of patches.

Source: `Qwen2VLImageProcessorPil` of Transformers 5.5, and of its vision models what depends on an image's size alone:
`rot_pos_emb`, `get_window_index` (Qwen2.5-VL) and `fast_pos_embed_interpolate` (Qwen3-VL).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.bundle.manifest import VisionEntry
from outrider.errors import RequestError

_FRAMES = 2  # of a video that are read together; an image is both
_MOST_RATIO = 200  # of an image's edges


def fitted(width: int, height: int, vision: VisionEntry) -> tuple[int, int]:
    """The size of whole tiles that is nearest to an image's, within the numbers of pixels; (width, height).

    Raises:
        RequestError: when it is too narrow.
    """
    if max(width, height) > _MOST_RATIO * min(width, height):
        raise RequestError(
            f"The image has {width:,} × {height:,} pixels, and one edge is at most {_MOST_RATIO} times the other for "
            "this model. Cut it."
        )
    size, (fewest, most) = vision.tile_size, vision.num_pixels
    found = [round(edge / size) * size for edge in (width, height)]
    if found[0] * found[1] > most:
        factor = math.sqrt(width * height / most)
        found = [max(size, math.floor(edge / factor / size) * size) for edge in (width, height)]
    elif found[0] * found[1] < fewest:
        factor = math.sqrt(fewest / (width * height))
        found = [math.ceil(edge * factor / size) * size for edge in (width, height)]
    return found[0], found[1]


def patches_of(pixels: NDArray[np.float32], vision: VisionEntry) -> NDArray[np.float32]:
    """An image's patches, tile by tile, float32 [n, 3 · frames · patch²]. pixels: float32 [3, height, width]."""
    count = vision.patches
    edge = vision.tile_size // count
    rows, columns = (length // vision.tile_size for length in pixels.shape[1:])
    apart = pixels.reshape(3, rows, count, edge, columns, count, edge).transpose(1, 4, 2, 5, 0, 3, 6)
    frames = np.repeat(apart[:, :, :, :, :, None], _FRAMES, axis=5)
    made: NDArray[np.float32] = np.ascontiguousarray(frames.reshape(rows * columns * count**2, -1))
    return made


def inputs_of(rows: int, columns: int, vision: VisionEntry) -> dict[str, NDArray[Any]]:
    """The encoder's inputs that depend on an image's size alone. rows, columns: of tiles."""
    height, width = rows * vision.patches, columns * vision.patches
    places = _by_tile(np.arange(height * width).reshape(height, width), vision.patches)
    down, along = places // width, places % width
    made: dict[str, NDArray[Any]] = {"patch_positions": np.stack([down, along], axis=1).astype(np.int64)}
    if vision.window:
        made |= _windows(down // vision.window, along // vision.window)
    if vision.num_places:
        made |= _learned(height, width, places, vision.num_places)
    return made


def _by_tile(grid: NDArray[Any], count: int) -> NDArray[Any]:
    """The values of a grid of patches [height, width], tile by tile."""
    height, width = grid.shape
    return grid.reshape(height // count, count, width // count, count).transpose(0, 2, 1, 3).reshape(-1)


def _windows(down: NDArray[Any], along: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """Which patches a window has, and the place of each in them. down, along: the window of each patch."""
    numbers = down * (along.max() + 1) + along
    counts = np.bincount(numbers)
    order = np.argsort(numbers, kind="stable")
    of_window = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)  # place within it, in order
    members = np.zeros((len(counts), counts.max()), dtype=np.int64)
    mask = np.full(members.shape, -np.inf, dtype=np.float32)
    members[numbers[order], of_window], mask[numbers[order], of_window] = order, 0
    places = np.empty(len(order), dtype=np.int64)
    places[order] = numbers[order] * members.shape[1] + of_window
    return {"window_members": members, "window_mask": mask[:, None, None], "window_places": places}


def _learned(height: int, width: int, places: NDArray[Any], side: int) -> dict[str, NDArray[Any]]:
    """The four learned positions that a patch is between, and the weight of each. places: of patches in their grid."""
    one = np.float32(1)
    top, bottom, lower = (each[places // width] for each in _between(height, side))
    left, right, further = (each[places % width] for each in _between(width, side))
    corners = [top * side + left, top * side + right, bottom * side + left, bottom * side + right]
    weights = [(one - lower) * (one - further), (one - lower) * further, lower * (one - further), lower * further]
    return {"corners": np.stack(corners, axis=1).astype(np.int64), "corner_weights": np.stack(weights, axis=1)}


def _between(length: int, side: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
    """By place along an edge of `length`: the learned positions before and after it, and how far it is between."""
    exact = np.linspace(0, side - 1, length, dtype=np.float32)
    before = exact.astype(np.int64)
    return before, np.minimum(before + 1, side - 1), exact - before.astype(np.float32)
