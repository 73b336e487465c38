"""Images as Idefics3 and SmolVLM read them: named tiles, and the whole image after them.

Source: `SmolVLMImageProcessorPil` and `SmolVLMProcessor` of Transformers 5.5.
"""

from __future__ import annotations

import math
from typing import Any

from outrider.bundle.vision import Idefics3Entry
from outrider.inputs.vision.processor import ImageProcessor, Tiles, cut_up, normalised, resized, too_narrow

_MOST_EDGE = 4_096  # pixels: no image is larger before it is cut


class Idefics3Processor(ImageProcessor[Idefics3Entry]):
    """An image that is one tile has 0 rows and columns."""

    def cut(self, image: Any, vision: Idefics3Entry) -> Tiles:
        """See `ImageProcessor`."""
        size, (width, height) = vision.tile_size, image.size
        width, height = _fitted(width, height, vision.longest_edge)
        image = resized(image, width, height, vision)
        if vision.splits:
            width, height = _in_tiles(width, height, size)
            image = resized(image, width, height, vision)
        rows, columns = (height // size, width // size) if vision.splits and max(width, height) > size else (0, 0)
        whole = image if image.size == (size, size) else resized(image, size, size, vision)
        made = [*cut_up(image, rows, columns, size), whole]
        return Tiles(normalised(made, vision), rows, columns, (vision.tokens_per_tile,) * len(made))

    def text(self, tiles: Tiles, vision: Idefics3Entry) -> str:
        """See `ImageProcessor`."""
        around, seen = vision.around_token, vision.image_token * vision.tokens_per_tile
        lines = [
            "".join(f"{around}<row_{row}_col_{column}>{seen}" for column in range(1, tiles.columns + 1)) + "\n"
            for row in range(1, tiles.rows + 1)
        ]
        return "".join(lines) + "\n" * bool(lines) + f"{around}{vision.global_token}{seen}{around}"

    def described(self, vision: Idefics3Entry) -> str:
        """See `ImageProcessor`."""
        cut = f"cut at {vision.longest_edge:,} pixels" if vision.splits else "not cut"
        return f"{cut}, tiles of {vision.tile_size}, {vision.tokens_per_tile} tokens each"


def _fitted(width: int, height: int, longest: int) -> tuple[int, int]:
    """The size with this longest edge, and an even other one; (width, height)."""
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2
    else:
        width, height = int(longest * ratio), longest
        width += width % 2
    width, height = max(width, 1), max(height, 1)
    ratio = width / height
    if width >= height and width > _MOST_EDGE:
        width, height = _MOST_EDGE, int(_MOST_EDGE / ratio)
    elif height > width and height > _MOST_EDGE:
        width, height = int(_MOST_EDGE * ratio), _MOST_EDGE
    return max(width, 1), max(height, 1)


def _in_tiles(width: int, height: int, size: int) -> tuple[int, int]:
    """The size rounded up to whole tiles; (width, height)."""
    ratio = width / height
    if width >= height:
        width = math.ceil(width / size) * size
        height = math.ceil(int(width / ratio) / size) * size
    else:
        height = math.ceil(height / size) * size
        width = math.ceil(int(height * ratio) / size) * size
    if not (width and height):
        raise too_narrow()
    return width, height
