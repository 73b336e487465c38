"""Images as Gemma 3 and Gemma 4 read them: as one square, and in their own form.

Source: `Gemma3ImageProcessorPil`, `Gemma3Processor`, `Gemma4ImageProcessorPil` and `Gemma4Processor` of Transformers
5.5.
"""

from __future__ import annotations

import math
from typing import Any

from outrider.bundle.vision import Gemma3Entry, Gemma4Entry
from outrider.inputs.vision.grids import patches_of, positions_of
from outrider.inputs.vision.processor import ImageProcessor, Tiles, normalised, resized


class Gemma3Processor(ImageProcessor[Gemma3Entry]):
    """One tile, and with pan and scan, the crops of an image that is much longer than wide."""

    def cut(self, image: Any, vision: Gemma3Entry) -> Tiles:
        """See `ImageProcessor`."""
        size, parts = vision.tile_size, [image, *(_crops_of(image, vision) if vision.splits else [])]
        tiles = normalised([resized(part, size, size, vision) for part in parts], vision)
        return Tiles(tiles, 0, 0, (vision.tokens_per_tile,) * len(parts))

    def text(self, tiles: Tiles, vision: Gemma3Entry) -> str:
        """See `ImageProcessor`."""
        whole, *crops = (vision.around_token + vision.soft_token * count + vision.end_token for count in tiles.lengths)
        if not crops:
            return whole
        return f"Here is the original image {whole} and here are some crops to help you see better {' '.join(crops)}"

    def described(self, vision: Gemma3Entry) -> str:
        """See `ImageProcessor`."""
        cut = f", and of {vision.num_tiles[1]} crops at most" if vision.splits else ""
        return f"{vision.tokens_per_tile} tokens of {vision.tile_size} × {vision.tile_size} pixels{cut}"


class Gemma4Processor(ImageProcessor[Gemma4Entry]):
    """Rows and columns are of tokens, all of which are one run."""

    def cut(self, image: Any, vision: Gemma4Entry) -> Tiles:
        """See `ImageProcessor`."""
        width, height = image.size
        width, height = largest(width, height, vision)
        pixels = normalised([resized(image, width, height, vision)], vision)[0]
        rows, columns = height // vision.tile_size, width // vision.tile_size
        others = {"patch_positions": positions_of(rows, columns, vision.patches)}
        return Tiles(patches_of(pixels, vision, by_pixel=True), rows, columns, (rows * columns,), others)

    def described(self, vision: Gemma4Entry) -> str:
        """See `ImageProcessor`."""
        size = vision.tile_size
        return f"{vision.num_pixels[1] // size**2} tokens at most, each of {size} × {size} pixels"


def _crops_of(image: Any, vision: Gemma3Entry) -> list[Any]:
    """Pieces along the longer edge of an image; none if it is nearly square, or they would be too small."""
    longer, shorter = max(image.size), min(image.size)
    if longer / shorter < vision.tolerance:
        return []
    fewest, most = vision.num_tiles
    count = min(max(fewest, min(longer // vision.least_edge, math.floor(longer / shorter + 0.5))), most)
    length = math.ceil(longer / count)
    if min(length, shorter) < vision.least_edge:
        return []
    is_wide = image.size[0] >= image.size[1]
    ends = [(i * length, min((i + 1) * length, longer)) for i in range(count)]
    return [image.crop((begin, 0, end, shorter) if is_wide else (0, begin, shorter, end)) for begin, end in ends]


def largest(width: int, height: int, vision: Gemma4Entry) -> tuple[int, int]:
    """The largest size of whole tiles that has an image's form and at most its most pixels; (width, height)."""
    size, most = vision.tile_size, vision.num_pixels[1]
    factor = math.sqrt(most / (width * height))
    found = [math.floor(edge * factor / size) * size for edge in (width, height)]
    if not all(found):  # too narrow for its form
        longest = most // size**2 * size
        found = [
            min(max(width // height, 1) * size, longest) if found[0] else size,
            min(max(height // width, 1) * size, longest) if found[1] else size,
        ]
    return found[0], found[1]
