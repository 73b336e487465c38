"""What a layout of images has to say: how an image is cut for the encoder, and which tokens stand for it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from outrider.bundle.vision import VisionEntry
from outrider.errors import RequestError


@dataclass(frozen=True, slots=True)
class Tiles:
    """An image as the encoder reads it.

    pixels: float32 [n, 3, size, size], row by row, or float32 [patches, n] where images keep their form. rows, columns:
    of the tiles without the one that shows the whole image, or of tokens. lengths: how many embeddings each run of
    image tokens has. others: the encoder's other inputs, by name.
    """

    pixels: NDArray[np.float32]
    rows: int
    columns: int
    lengths: tuple[int, ...]
    others: dict[str, NDArray[Any]] = field(default_factory=dict)


Entry = TypeVar("Entry", bound=VisionEntry)


class ImageProcessor(ABC, Generic[Entry]):
    """One layout, which an entry of the manifest has.

    has_grid: tokens have positions in rows and columns. joint: between the parts of a message, where the template takes
    a text.
    """

    has_grid = False
    joint = ""

    @abstractmethod
    def cut(self, image: Any, vision: Entry) -> Tiles:
        """An image of Pillow's in RGB, resized, cut and normalised. Raises RequestError when it is too narrow."""

    def text(self, tiles: Tiles, vision: Entry) -> str:
        """The tokens that stand for an image in a prompt, as text: here one run of them."""
        return vision.around_token + vision.image_token * sum(tiles.lengths) + vision.end_token

    @abstractmethod
    def described(self, vision: Entry) -> str:
        """How images are cut, for `outrider inspect`."""


def too_narrow() -> RequestError:
    """What an image is refused with that has no pixels left along one edge."""
    return RequestError(
        "The image is so narrow that its shorter edge is no pixel wide where the longer one fits. Cut it."
    )


def resized(image: Any, width: int, height: int, vision: VisionEntry) -> Any:
    """An image of Pillow's in another size."""
    return image.resize((width, height), resample=vision.resample)


def cut_up(image: Any, rows: int, columns: int, width: int, height: int = 0) -> list[Any]:
    """The tiles of an image, row by row. height: 0 for square ones."""
    height = height or width
    return [
        image.crop((column * width, row * height, (column + 1) * width, (row + 1) * height))
        for row in range(rows)
        for column in range(columns)
    ]


def normalised(images: list[Any], vision: VisionEntry) -> NDArray[np.float32]:
    """The pixels of equal images, float32 [n, 3, height, width], rescaled, minus the mean, in standard deviations."""
    pixels = np.stack([np.asarray(image) for image in images]).transpose(0, 3, 1, 2)
    scaled = (pixels.astype(np.float64) * vision.rescale_factor).astype(np.float32)
    mean, std = (np.array(each, dtype=np.float32).reshape(3, 1, 1) for each in (vision.mean, vision.std))
    made: NDArray[np.float32] = np.ascontiguousarray((scaled - mean) / std)
    return made
