"""Images as Mistral Small 3 and Ministral 3 read them: in their own form, with a token that ends each row.

Source: `PixtralImageProcessorPil` and `PixtralProcessor` of Transformers 5.5.
"""

from __future__ import annotations

import math
from typing import Any

from outrider.bundle.vision import PixtralEntry
from outrider.inputs.vision.grids import patches_of, positions_of
from outrider.inputs.vision.processor import ImageProcessor, Tiles, normalised, resized, too_narrow


class PixtralProcessor(ImageProcessor[PixtralEntry]):
    """Rows and columns are of tokens; each row is a run of them."""

    def cut(self, image: Any, vision: PixtralEntry) -> Tiles:
        """See `ImageProcessor`."""
        size = vision.tile_size
        width, height = image.size
        if (ratio := max(width, height) / vision.longest_edge) > 1:
            width, height = math.floor(width / ratio), math.floor(height / ratio)
        if not (width and height):
            raise too_narrow()
        rows, columns = math.ceil(height / size), math.ceil(width / size)
        pixels = normalised([resized(image, columns * size, rows * size, vision)], vision)[0]
        others = {"patch_positions": positions_of(rows, columns, vision.patches)}
        return Tiles(patches_of(pixels, vision), rows, columns, (columns,) * rows, others)

    def text(self, tiles: Tiles, vision: PixtralEntry) -> str:
        """See `ImageProcessor`."""
        return vision.row_token.join([vision.image_token * tiles.columns] * tiles.rows) + vision.end_token

    def described(self, vision: PixtralEntry) -> str:
        """See `ImageProcessor`."""
        size = vision.tile_size
        most = math.ceil(vision.longest_edge / size)
        return f"{most} × {most} tokens at most, each of {size} × {size} pixels"
