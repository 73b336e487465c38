"""Images as MiniCPM-V reads them: the whole image in its own form, and large ones also as slices of one size.

Source: MiniCPM-V 2.6 to 4.5's `image_processing_minicpmv.py`, `processing_minicpmv.py`, and `SiglipVisionEmbeddings` of
`modeling_navit_siglip.py`; MiniCPM-V 4.6's `MiniCPMV4_6ImageProcessorPil`, `MiniCPMV4_6Processor` and
`get_vision_nearest_position_ids` of Transformers 5.24.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.bundle.vision import MiniCpmEntry
from outrider.inputs.vision.grids import by_tile, patches_of, positions_of, windows_of
from outrider.inputs.vision.processor import ImageProcessor, Tiles, cut_up, normalised, resized


class MiniCpmProcessor(ImageProcessor[MiniCpmEntry]):
    """Of 2.6 to 4.5: each part becomes the same number of tokens. An image that is not cut has 0 rows and columns."""

    joint = "\n"
    edge = 1  # of what a part has whole rows and columns of, in tiles
    patches_of_token = 0  # 0: a part has a fixed number of tokens

    def cut(self, image: Any, vision: MiniCpmEntry) -> Tiles:
        """See `ImageProcessor`."""
        scale, unit, (width, height) = vision.longest_edge, vision.tile_size * self.edge, image.size
        columns, rows = _grid_of(width, height, vision)
        parts = [resized(image, *_fitted(width, height, scale, unit, enlarges=not rows), vision)]
        if rows:
            of_part = _divisible(width, columns) / columns, _divisible(height, rows) / rows
            across, down = _fitted(*of_part, scale, unit, enlarges=True)
            parts += cut_up(resized(image, across * columns, down * rows, vision), rows, columns, across, down)
        grids = [(part.size[1] // vision.tile_size, part.size[0] // vision.tile_size) for part in parts]
        pixels = [patches_of(normalised([part], vision)[0], vision) for part in parts]
        counts = [len(each) for each in pixels]
        pixels = [each[self.order(*grid)] for each, grid in zip(pixels, grids, strict=True)]
        lengths = (vision.tokens_per_tile,) * len(counts)
        if self.patches_of_token:
            lengths = tuple(count // self.patches_of_token for count in counts)
        others = windows_of(np.repeat(np.arange(len(counts)), counts)) | self.others(grids, vision)
        return Tiles(np.concatenate(pixels), rows, columns, lengths, others)

    def order(self, rows: int, columns: int) -> NDArray[np.int64]:
        """The patches of a part, as the encoder reads them. rows, columns: of tiles."""
        return np.arange(rows * columns)

    def others(self, grids: list[tuple[int, int]], vision: MiniCpmEntry) -> dict[str, NDArray[Any]]:
        """The encoder's inputs beside pixels, and which patches a part has. grids: rows and columns of tiles."""
        places = [positions_of(*grid, 1) for grid in grids]
        fractions = []
        for each, grid in zip(places, grids, strict=True):
            along = [_steps(length) for length in grid]
            fractions.append(np.stack([along[i][each[:, i]] for i in range(2)], axis=1))
        return {
            "patch_positions": np.concatenate(places), "learned_places": _learned(np.concatenate(fractions), vision),
        }  # fmt: skip

    def text(self, tiles: Tiles, vision: MiniCpmEntry) -> str:
        """See `ImageProcessor`."""
        whole, *slices = (vision.image_token * length for length in tiles.lengths)
        slices = [f"<slice>{each}</slice>" for each in slices]
        lines = ["".join(slices[row * tiles.columns :][: tiles.columns]) for row in range(tiles.rows)]
        return vision.around_token + whole + vision.end_token + "\n".join(lines)

    def described(self, vision: MiniCpmEntry) -> str:
        """See `ImageProcessor`."""
        cut = f" and {vision.num_tiles[1]} slices at most" if vision.num_tiles[1] > 1 else ""
        return f"the whole{cut}, some {vision.tokens_per_tile} tokens each"


class MiniCpm46Processor(MiniCpmProcessor):
    """Of 4.6: four patches become one inside of the encoder, and four of these a token."""

    joint = ""
    edge = 2
    patches_of_token = 16

    def order(self, rows: int, columns: int) -> NDArray[np.int64]:
        """See `MiniCpmProcessor`: token by token."""
        tiles = by_tile(np.arange(rows * columns).reshape(rows, columns), 2)
        made: NDArray[np.int64] = (tiles[:, None] * 4 + np.arange(4)).reshape(-1)
        return made

    def others(self, grids: list[tuple[int, int]], vision: MiniCpmEntry) -> dict[str, NDArray[Any]]:
        """See `MiniCpmProcessor`. After the first four become one, a part has a quarter of the rows."""
        fractions = [
            positions_of(*grid, vision.patches)[self.order(*grid)].astype(np.float32) / np.float32(of_patches)
            for grid, of_patches in zip(grids, np.array(grids) * vision.patches, strict=True)
        ]
        numbers = np.repeat(np.arange(len(grids)), [rows * columns for rows, columns in grids])
        merged = {f"merged_{name}": each for name, each in windows_of(numbers).items()}
        return merged | {"learned_places": _learned(np.concatenate(fractions), vision)}


def _divisible(length: float, divisor: int) -> int:
    """The nearest multiple, and at least one."""
    return max(round(length / divisor) * divisor, divisor)


def _fitted(width: float, height: float, scale: int, unit: int, *, enlarges: bool) -> tuple[int, int]:
    """The size in whole units of an image with about scale² pixels, or fewer; (width, height)."""
    if enlarges or width * height > scale * scale:
        ratio = width / height
        height = int(scale / math.sqrt(ratio))
        width = int(height * ratio)
    return _divisible(width, unit), _divisible(height, unit)


def _grid_of(width: int, height: int, vision: MiniCpmEntry) -> tuple[int, int]:
    """The grid of slices whose form is nearest to the image's, (columns, rows); zeros for an image that is not cut."""
    most = vision.num_tiles[1]
    wanted = min(math.ceil(width * height / vision.longest_edge**2), most)
    if wanted <= 1:
        return 0, 0
    counts = [count for count in (wanted - 1, wanted, wanted + 1) if 1 < count <= most]
    grids = [(columns, count // columns) for count in counts for columns in range(1, count + 1) if not count % columns]
    form = math.log(width / height)
    return min(grids, key=lambda grid: abs(form - math.log(grid[0] / grid[1])))


def _steps(length: int) -> NDArray[np.float32]:
    """The places along an edge, as PyTorch's `arange(0, 1, 1 / length)` rounds them: eight from the first of each."""
    step, places = np.float64(np.float32(1) / np.float32(length)), np.arange(length)
    apart = places % 8 * (places < length // 8 * 8)
    made: NDArray[np.float32] = (((places - apart) * step).astype(np.float32) + apart * step).astype(np.float32)
    return made


def _learned(fractions: NDArray[np.float32], vision: MiniCpmEntry) -> NDArray[np.int64]:
    """The learned position of each patch. fractions: of the height and width, float32 [n, 2]."""
    side = vision.num_places
    borders = (np.arange(1, side) / side).astype(np.float32)
    rows, columns = np.searchsorted(borders, fractions.T, side="right")
    made: NDArray[np.int64] = (rows * side + columns).astype(np.int64)
    return made
