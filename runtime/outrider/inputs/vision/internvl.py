"""Images as InternVL reads them: the tiles of an image stand in one row, and the whole image after them.

Source: `GotOcr2ImageProcessorPil` and `InternVLProcessor` of Transformers 5.5.
"""

from __future__ import annotations

import math
from typing import Any

from outrider.bundle.vision import InternVLEntry
from outrider.inputs.vision.processor import ImageProcessor, Tiles, cut_up, normalised, resized


class InternVLProcessor(ImageProcessor[InternVLEntry]):
    """An image that is one tile has one row and column."""

    def cut(self, image: Any, vision: InternVLEntry) -> Tiles:
        """See `ImageProcessor`."""
        size, (width, height) = vision.tile_size, image.size
        columns, rows = grid_of(width, height, size, vision.num_tiles)
        tiles = cut_up(resized(image, columns * size, rows * size, vision), rows, columns, size)
        if len(tiles) > 1:
            tiles.append(resized(image, size, size, vision))
        return Tiles(normalised(tiles, vision), rows, columns, (vision.tokens_per_tile,) * len(tiles))

    def described(self, vision: InternVLEntry) -> str:
        """See `ImageProcessor`."""
        cut = f"cut into {vision.num_tiles[1]} tiles at most, and the whole" if vision.num_tiles[1] > 1 else "not cut"
        return f"{cut}, tiles of {vision.tile_size}, {vision.tokens_per_tile} tokens each"


def grid_of(width: int, height: int, size: int, num_tiles: tuple[int, int]) -> tuple[int, int]:
    """The grid of tiles whose form is nearest to the image's, (columns, rows).

    Of equally near ones, the largest whose tiles have less than twice the image's pixels.
    """
    fewest, most = num_tiles
    counts = range(1, most + 1)
    grids = [(columns, rows) for columns in counts for rows in counts if fewest <= columns * rows <= most]
    grids.sort(key=lambda grid: grid[0] * grid[1])
    best, least = (1, 1), math.inf
    for columns, rows in grids:
        difference = abs(width / height - columns / rows)
        is_filled = width * height > 0.5 * size**2 * columns * rows
        if difference < least or (difference == least and is_filled):
            best, least = (columns, rows), difference
    return best
