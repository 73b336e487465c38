"""Images as LFM2-VL reads them: in their own form, and large ones as named tiles with the whole image after them.

Source: `Lfm2VlImageProcessor` and `Lfm2VlProcessor` of Transformers 5.5, whose images are resized with torchvision;
`resize_positional_embeddings` of modeling_siglip2.py.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.bundle.vision import Lfm2Entry
from outrider.inputs.vision.grids import by_tile, fitted, windows_of
from outrider.inputs.vision.internvl import grid_of
from outrider.inputs.vision.processor import ImageProcessor, Tiles, cut_up, resized


class Lfm2Processor(ImageProcessor[Lfm2Entry]):
    """Tiles are of one size, and the whole image of another; each attends to itself."""

    def cut(self, image: Any, vision: Lfm2Entry) -> Tiles:
        """See `ImageProcessor`."""
        size, token, (width, height) = vision.tile_size, _pixels_of_token(vision), image.size
        patch = token // vision.patches
        nearest = [max(patch, round(edge / token) * token) for edge in (width, height)]
        columns, rows = 1, 1
        if vision.splits and nearest[0] * nearest[1] > vision.num_pixels[1] * vision.tolerance:
            columns, rows = grid_of(width, height, size, vision.num_tiles)
        is_cut = rows * columns > 1
        parts = cut_up(resized(image, columns * size, rows * size, vision), rows, columns, size) if is_cut else []
        if not is_cut or vision.global_token:
            parts.append(resized(image, *fitted(width, height, token, vision.num_pixels, least=token), vision))
        grids = [(part.size[1] // patch, part.size[0] // patch) for part in parts]
        pixels = np.concatenate([_patches(part, patch, vision) for part in parts])
        lengths = tuple(height * width // vision.patches**2 for height, width in grids)
        return Tiles(pixels, rows, columns, lengths, _inputs(grids, vision))

    def text(self, tiles: Tiles, vision: Lfm2Entry) -> str:
        """See `ImageProcessor`."""
        runs = [vision.image_token * length for length in tiles.lengths]
        count = tiles.rows * tiles.columns
        if count > 1:
            names = [f"<|img_row_{i // tiles.columns + 1}_col_{i % tiles.columns + 1}|>" for i in range(count)]
            runs = [name + run for name, run in zip([*names, vision.global_token], runs, strict=False)]
        return vision.around_token + "".join(runs) + vision.end_token

    def described(self, vision: Lfm2Entry) -> str:
        """See `ImageProcessor`."""
        fewest, most = (count // _pixels_of_token(vision) ** 2 for count in vision.num_pixels)
        whole = f"{fewest:,} to {most:,} tokens"
        if not vision.splits:
            return whole
        return f"{whole}, or cut into {vision.num_tiles[1]} tiles of {vision.tokens_per_tile} at most, and the whole"


def _pixels_of_token(vision: Lfm2Entry) -> int:
    """Along the edge of what becomes one token."""
    return vision.tile_size // math.isqrt(vision.tokens_per_tile)


def _patches(image: Any, edge: int, vision: Lfm2Entry) -> NDArray[np.float32]:
    """An image's patches, token by token, float32 [n, edge · edge · 3]: the three colours of a pixel stand together.

    Rescaling and normalising are one step, as in Transformers' processors with torchvision.
    """
    factor = np.float32(1 / vision.rescale_factor)
    mean, std = (np.array(each, dtype=np.float32) * factor for each in (vision.mean, vision.std))
    pixels = (np.asarray(image).astype(np.float32) - mean) / std
    count, (rows, columns) = vision.patches, (length // edge // vision.patches for length in pixels.shape[:2])
    apart = pixels.reshape(rows, count, edge, columns, count, edge, 3).transpose(0, 3, 1, 4, 2, 5, 6)
    made: NDArray[np.float32] = np.ascontiguousarray(apart.reshape(-1, edge * edge * 3))
    return made


def _inputs(grids: list[tuple[int, int]], vision: Lfm2Entry) -> dict[str, NDArray[Any]]:
    """The encoder's other inputs. grids: rows and columns of patches, of each part."""
    down, along, parts = [], [], []
    for i, (height, width) in enumerate(grids):
        places = by_tile(np.arange(height * width).reshape(height, width), vision.patches)
        down.append(_weights(height, vision.num_places)[places // width])
        along.append(_weights(width, vision.num_places)[places % width])
        parts.append(np.full(len(places), i))
    numbers = np.concatenate(parts)
    weights = {"down_weights": np.concatenate(down), "along_weights": np.concatenate(along)}
    return weights | windows_of(numbers)


def _weights(length: int, side: int) -> NDArray[np.float32]:
    """How much of each learned position a place along an edge has, float32 [length, side].

    Source: PyTorch's `interpolate` with mode="bilinear", antialias=True and align_corners=False.
    """
    scale = side / length
    support = max(scale, 1.0)  # of a triangle, in learned positions: half of its base
    made = np.zeros((length, side), dtype=np.float64)
    for i in range(length):
        centre = scale * (i + 0.5)
        begin, end = max(int(centre - support + 0.5), 0), min(int(centre + support + 0.5), side)
        weights = np.maximum(1 - np.abs((np.arange(begin, end) - centre + 0.5) / support), 0)
        made[i, begin:end] = weights / weights.sum()
    return made.astype(np.float32)
