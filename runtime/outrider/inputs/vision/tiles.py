"""Cuts an image into the tiles that the encoder reads, and writes the tokens that stand for them.

Source: the image processors with Pillow and the processors of Idefics3, SmolVLM and InternVL in Transformers 5.5. For
Qwen's, see `grids`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.bundle.manifest import VisionEntry
from outrider.errors import RequestError
from outrider.inputs.vision.grids import fitted, inputs_of, patches_of

_MOST_EDGE = 4_096  # pixels: no image is larger before it is cut


@dataclass(frozen=True, slots=True)
class Tiles:
    """An image in tiles.

    pixels: float32 [n, 3, size, size], row by row, and the whole image last. rows, columns: of the tiles before that
    one; if the image is one tile, 0 in Idefics3's layout and 1 in InternVL's. In Qwen's, pixels are float32
    [patches, n], and the tiles are all of the image. others: the encoder's other inputs, by name.
    """

    pixels: NDArray[np.float32]
    rows: int
    columns: int
    others: dict[str, NDArray[Any]] = field(default_factory=dict)


def cut_into_tiles(image: Any, vision: VisionEntry) -> Tiles:
    """The tiles of an image of Pillow's in RGB."""
    size = vision.tile_size
    width, height = image.size
    if vision.layout == "qwen":
        width, height = fitted(width, height, vision)
        pixels = _normalised([_resized(image, width, height, vision)], vision)[0]
        rows, columns = height // size, width // size
        return Tiles(patches_of(pixels, vision), rows, columns, inputs_of(rows, columns, vision))
    if vision.layout == "internvl":
        columns, rows = _grid(width, height, vision)
        tiles = _cut(_resized(image, columns * size, rows * size, vision), rows, columns, size)
        if len(tiles) > 1:
            tiles.append(_resized(image, size, size, vision))
        return Tiles(_normalised(tiles, vision), rows, columns)
    width, height = _fitted(width, height, vision.longest_edge)
    image = _resized(image, width, height, vision)
    if not vision.splits:
        return Tiles(_normalised([_resized(image, size, size, vision)], vision), 0, 0)
    width, height = _in_tiles(width, height, size)
    image = _resized(image, width, height, vision)
    if max(width, height) <= size:
        return Tiles(_normalised([image], vision), 0, 0)
    rows, columns = height // size, width // size
    made = _cut(image, rows, columns, size)
    return Tiles(_normalised([*made, _resized(image, size, size, vision)], vision), rows, columns)


def image_text(tiles: Tiles, vision: VisionEntry) -> str:
    """The tokens that stand for an image in a prompt, as text."""
    around, seen = vision.around_token, vision.image_token * vision.tokens_per_tile
    if vision.layout == "qwen":
        return seen * tiles.rows * tiles.columns
    if vision.layout == "internvl":
        return around + seen * len(tiles.pixels) + vision.end_token
    lines = [
        "".join(f"{around}<row_{row}_col_{column}>{seen}" for column in range(1, tiles.columns + 1)) + "\n"
        for row in range(1, tiles.rows + 1)
    ]
    return "".join(lines) + "\n" * bool(lines) + f"{around}{vision.global_token}{seen}{around}"


def _grid(width: int, height: int, vision: VisionEntry) -> tuple[int, int]:
    """The grid of tiles whose form is nearest to the image's, (columns, rows).

    Of equally near ones, the largest whose tiles have less than twice the image's pixels.
    """
    fewest, most = vision.num_tiles
    counts = range(1, most + 1)
    grids = [(columns, rows) for columns in counts for rows in counts if fewest <= columns * rows <= most]
    grids.sort(key=lambda grid: grid[0] * grid[1])
    best, least = (1, 1), math.inf
    for columns, rows in grids:
        difference = abs(width / height - columns / rows)
        is_filled = width * height > 0.5 * vision.tile_size**2 * columns * rows
        if difference < least or (difference == least and is_filled):
            best, least = (columns, rows), difference
    return best


def _cut(image: Any, rows: int, columns: int, size: int) -> list[Any]:
    """The tiles of an image, row by row."""
    return [
        image.crop((column * size, row * size, (column + 1) * size, (row + 1) * size))
        for row in range(rows)
        for column in range(columns)
    ]


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
        raise RequestError(
            "The image is so narrow that its shorter edge is no pixel wide where the longer one fits. Cut it."
        )
    return width, height


def _resized(image: Any, width: int, height: int, vision: VisionEntry) -> Any:
    return image.resize((width, height), resample=vision.resample)


def _normalised(images: list[Any], vision: VisionEntry) -> NDArray[np.float32]:
    """The pixels of equal images, float32 [n, 3, height, width], rescaled, minus the mean, in standard deviations."""
    pixels = np.stack([np.asarray(image) for image in images]).transpose(0, 3, 1, 2)
    scaled = (pixels.astype(np.float64) * vision.rescale_factor).astype(np.float32)
    mean, std = (np.array(each, dtype=np.float32).reshape(3, 1, 1) for each in (vision.mean, vision.std))
    made: NDArray[np.float32] = np.ascontiguousarray((scaled - mean) / std)
    return made
