"""Images as LLaVA-NeXT and Granite Vision read them: the whole image, then its tiles, put together without padding.

Source: `LlavaNextImageProcessorPil`, and `pack_image_features` of modeling_llava_next.py, in Transformers 5.5.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.bundle.vision import LlavaNextEntry
from outrider.inputs.vision.processor import ImageProcessor, Tiles, cut_up, normalised, resized, too_narrow


class LlavaNextProcessor(ImageProcessor[LlavaNextEntry]):
    """The encoder puts the tokens of tiles in the order that `places` says: a row ends with a token of its own."""

    def cut(self, image: Any, vision: LlavaNextEntry) -> Tiles:
        """See `ImageProcessor`."""
        size, (width, height) = vision.tile_size, image.size
        target = _nearest(width, height, vision.sizes)
        columns, rows = target[0] // size, target[1] // size
        tiles = [resized(image, size, size, vision), *cut_up(_padded(image, *target, vision), rows, columns, size)]
        places = _places(rows, columns, width, height, math.isqrt(vision.tokens_per_tile))
        return Tiles(normalised(tiles, vision), rows, columns, (len(places),), {"places": places})

    def described(self, vision: LlavaNextEntry) -> str:
        """See `ImageProcessor`."""
        size = vision.tile_size
        most = max(width * height // size**2 for width, height in vision.sizes)
        return f"the whole and {most} tiles at most, tiles of {size}, {vision.tokens_per_tile} tokens each"


def _nearest(width: int, height: int, sizes: tuple[tuple[int, int], ...]) -> tuple[int, int]:
    """The size that keeps most of an image's pixels, and of equal ones the smallest; (width, height)."""
    best, most, least_waste = (0, 0), 0, math.inf
    for size in sizes:
        scale = min(size[0] / width, size[1] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        waste = size[0] * size[1] - kept
        if kept > most or (kept == most and waste < least_waste):
            best, most, least_waste = size, kept, waste
    if not most:
        raise too_narrow()
    return best


def _padded(image: Any, width: int, height: int, vision: LlavaNextEntry) -> Any:
    """An image in its own form, in the middle of a black one of this size."""
    across, down = width / image.size[0], height / image.size[1]
    if across < down:
        fitted = width, min(math.ceil(image.size[1] * across), height)
    else:
        fitted = min(math.ceil(image.size[0] * down), width), height
    made = resized(image, *fitted, vision)
    left, top = (width - fitted[0]) // 2, (height - fitted[1]) // 2
    return made.crop((-left, -top, width - left, height - top))


def _places(rows: int, columns: int, width: int, height: int, side: int) -> NDArray[np.int64]:
    """Where the tokens of an image stand among those of all tiles, and of a row's end after them, int64 [n].

    rows, columns: of tiles. width, height: of the image. side: tokens along the edge of a tile.
    """
    count = side * side
    down, along = np.arange(rows * side)[:, None], np.arange(columns * side)[None]
    grid = ((down // side * columns + along // side + 1) * count + down % side * side + along % side).astype(np.int64)
    tall, wide = grid.shape
    if width / height > wide / tall:
        padding = (tall - int(round(height * (wide / width), 7))) // 2
        grid = grid[padding : tall - padding]
    else:
        padding = (wide - int(round(width * (tall / height), 7))) // 2
        grid = grid[:, padding : wide - padding]
    ends = np.full((len(grid), 1), (rows * columns + 1) * count)
    return np.concatenate([np.arange(count), np.concatenate([grid, ends], axis=1).reshape(-1)])
