"""An image for Qwen's vision encoders: in its own form, as rows and columns of patches.

Source: `Qwen2VLImageProcessorPil` of Transformers 5.5, and of its vision models what depends on an image's size alone:
`rot_pos_emb`, `get_window_index` (Qwen2.5-VL) and `fast_pos_embed_interpolate` (Qwen3-VL).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.bundle.vision import QwenEntry
from outrider.errors import RequestError
from outrider.inputs.vision.grids import fitted, patches_of, positions_of, windows_of
from outrider.inputs.vision.processor import ImageProcessor, Tiles, normalised, resized

_FRAMES = 2  # of a video that are read together; an image is both
_MOST_RATIO = 200  # of an image's edges


class QwenProcessor(ImageProcessor[QwenEntry]):
    """Rows and columns are of tokens, all of which are one run."""

    has_grid = True

    def cut(self, image: Any, vision: QwenEntry) -> Tiles:
        """See `ImageProcessor`."""
        width, height = image.size
        width, height = resized_to(width, height, vision)
        pixels = normalised([resized(image, width, height, vision)], vision)[0]
        rows, columns = height // vision.tile_size, width // vision.tile_size
        others = inputs_of(rows, columns, vision)
        return Tiles(patches_of(pixels, vision, _FRAMES), rows, columns, (rows * columns,), others)

    def described(self, vision: QwenEntry) -> str:
        """See `ImageProcessor`."""
        size = vision.tile_size
        fewest, most = (count // size**2 for count in vision.num_pixels)
        return f"{fewest:,} to {most:,} tokens, each of {size} × {size} pixels"


def resized_to(width: int, height: int, vision: QwenEntry) -> tuple[int, int]:
    """The size in which an image is read; (width, height).

    Raises:
        RequestError: when it is too narrow.
    """
    if max(width, height) > _MOST_RATIO * min(width, height):
        raise RequestError(
            f"The image has {width:,} × {height:,} pixels, and one edge is at most {_MOST_RATIO} times the other for "
            "this model. Cut it."
        )
    return fitted(width, height, vision.tile_size, vision.num_pixels)


def inputs_of(rows: int, columns: int, vision: QwenEntry) -> dict[str, NDArray[Any]]:
    """The encoder's inputs that depend on an image's size alone. rows, columns: of tiles."""
    height, width = rows * vision.patches, columns * vision.patches
    positions = positions_of(rows, columns, vision.patches)
    made: dict[str, NDArray[Any]] = {"patch_positions": positions}
    if vision.window:
        windows = positions // vision.window
        made |= windows_of(windows[:, 0] * (windows[:, 1].max() + 1) + windows[:, 1])
    if vision.num_places:
        made |= _learned(height, width, positions, vision.num_places)
    return made


def _learned(height: int, width: int, positions: NDArray[Any], side: int) -> dict[str, NDArray[Any]]:
    """The four learned positions that a patch is between, and the weight of each. positions: of patches."""
    one = np.float32(1)
    top, bottom, lower = (each[positions[:, 0]] for each in _between(height, side))
    left, right, further = (each[positions[:, 1]] for each in _between(width, side))
    corners = [top * side + left, top * side + right, bottom * side + left, bottom * side + right]
    weights = [(one - lower) * (one - further), (one - lower) * further, lower * (one - further), lower * further]
    return {"corners": np.stack(corners, axis=1).astype(np.int64), "corner_weights": np.stack(weights, axis=1)}


def _between(length: int, side: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
    """By place along an edge of `length`: the learned positions before and after it, and how far it is between."""
    exact = np.linspace(0, side - 1, length, dtype=np.float32)
    before = exact.astype(np.int64)
    return before, np.minimum(before + 1, side - 1), exact - before.astype(np.float32)
