"""Patches of images that keep their form: their order, token by token, and which of them attend to each other."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.bundle.vision import PatchesEntry


def patches_of(
    pixels: NDArray[np.float32], vision: PatchesEntry, num_frames: int = 1, *, by_pixel: bool = False
) -> NDArray[np.float32]:
    """An image's patches, tile by tile, float32 [n, 3 · frames · patch²]. pixels: float32 [3, height, width].

    by_pixel: the three colours of a pixel stand side by side, float32 [n, patch² · 3].
    """
    count = vision.patches
    edge = vision.tile_size // count
    rows, columns = (length // vision.tile_size for length in pixels.shape[1:])
    apart = pixels.reshape(3, rows, count, edge, columns, count, edge)
    if by_pixel:
        return np.ascontiguousarray(apart.transpose(1, 4, 2, 5, 3, 6, 0).reshape(rows * columns * count**2, -1))
    apart = apart.transpose(1, 4, 2, 5, 0, 3, 6)
    frames = np.repeat(apart[:, :, :, :, :, None], num_frames, axis=5)
    made: NDArray[np.float32] = np.ascontiguousarray(frames.reshape(rows * columns * count**2, -1))
    return made


def fitted(width: int, height: int, size: int, num_pixels: tuple[int, int], *, least: int = 0) -> tuple[int, int]:
    """The size of whole tiles that is nearest to an image's, within the numbers of pixels; (width, height).

    size: of a tile. least: of an edge, before the numbers of pixels are looked at.
    """
    fewest, most = num_pixels
    edges = [max(least, round(edge / size) * size) for edge in (width, height)]
    if edges[0] * edges[1] > most:
        factor = math.sqrt(width * height / most)
        edges = [max(size, math.floor(edge / factor / size) * size) for edge in (width, height)]
    elif edges[0] * edges[1] < fewest:
        factor = math.sqrt(fewest / (width * height))
        edges = [math.ceil(edge * factor / size) * size for edge in (width, height)]
    return edges[0], edges[1]


def positions_of(rows: int, columns: int, count: int) -> NDArray[np.int64]:
    """The row and the column of each patch, tile by tile, int64 [n, 2]. rows, columns: of tiles of count² patches."""
    height, width = rows * count, columns * count
    places = by_tile(np.arange(height * width).reshape(height, width), count)
    return np.stack([places // width, places % width], axis=1).astype(np.int64)


def by_tile(grid: NDArray[Any], count: int) -> NDArray[Any]:
    """The values of a grid of patches [height, width], tile by tile."""
    height, width = grid.shape
    return grid.reshape(height // count, count, width // count, count).transpose(0, 2, 1, 3).reshape(-1)


def windows_of(numbers: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """Which patches a window has, and the place of each in them. numbers: the window of each patch."""
    counts = np.bincount(numbers)
    order = np.argsort(numbers, kind="stable")
    of_window = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)  # place within it, in order
    members = np.zeros((len(counts), counts.max()), dtype=np.int64)
    mask = np.full(members.shape, -np.inf, dtype=np.float32)
    members[numbers[order], of_window], mask[numbers[order], of_window] = order, 0
    places = np.empty(len(order), dtype=np.int64)
    places[order] = numbers[order] * members.shape[1] + of_window
    return {"window_members": members, "window_mask": mask[:, None, None], "window_places": places}
