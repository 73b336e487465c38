"""Vision encoders in a manifest: an entry for each way in which images are laid out for one, by its `layout`."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias, cast

import msgspec

from outrider.bundle.fields import Name, NonNegative, Positive, Width

_MOST_TILE = 4_096  # pixels along an edge of what a vision encoder reads
_MOST_TILES = 256  # of an image
_MOST_PARTS = 16  # hidden states that a token of an image is read as

ImageLayout: TypeAlias = Literal[
    "gemma3", "gemma4", "idefics3", "internvl", "lfm2", "llava_next", "minicpm", "minicpm4_6", "pixtral", "qwen"
]  # fmt: skip
BothWays: TypeAlias = Literal["none", "windowed", "all"]  # layers in which an image's tokens attend to later ones, too
TileCount = Annotated[int, msgspec.Meta(ge=1, le=_MOST_TILES)]


class VisionEntry(msgspec.Struct, frozen=True, kw_only=True, tag_field="layout"):
    """A main model's vision encoder, and how images are laid out for it; see `outrider.inputs.vision`.

    Fields that are not known are skipped: entries once had those of all layouts.
    """

    folder: Name
    weights: str  # "int8", "fp16" or "fp32"
    tile_size: Annotated[int, msgspec.Meta(ge=1, le=_MOST_TILE)]  # pixels: the encoder reads squares of so many
    tokens_per_tile: Width
    image_token_id: NonNegative  # stands where a tile's embeddings are read
    image_token: Annotated[str, msgspec.Meta(min_length=1)]
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    rescale_factor: float  # of a pixel's value, before `mean` is subtracted
    resample: Annotated[int, msgspec.Meta(ge=0, le=5)]  # Pillow's number of a filter; 1 is Lanczos
    around_token: str = ""  # before the tokens of an image, in Idefics3's layout after them, too
    end_token: str = ""  # after them

    @property
    def layout(self) -> ImageLayout:
        """Its name."""
        return cast("ImageLayout", self.__struct_config__.tag)

    @property
    def numbered(self) -> bool:
        """Whether the number of an image in the prompt stands before it."""
        return False

    @property
    def both_ways(self) -> BothWays:
        """Where an image's tokens attend to later ones, too."""
        return "none"

    @property
    def num_parts(self) -> int:
        """The embedding, and what later layers add."""
        return 1

    @property
    def place_token_id(self) -> int | None:
        """The token whose embeddings by layer are read where an image's are; None: there are none."""
        return None


class PatchesEntry(VisionEntry, frozen=True, kw_only=True):
    """Of images that are whole rows and columns of tiles of one token each (LFM2: of tokens)."""

    patches: Annotated[int, msgspec.Meta(ge=1, le=16)] = 1  # along the edge of a token


class Gemma3Entry(VisionEntry, frozen=True, kw_only=True, tag="gemma3"):
    """An image is one tile, and with pan and scan, crops."""

    splits: bool
    num_tiles: tuple[TileCount, TileCount]  # the fewest and most crops
    least_edge: NonNegative  # pixels, of a crop
    tolerance: float  # an image is cut whose edge is so many times the other
    soft_token: str  # stands where embeddings are read

    @property
    def both_ways(self) -> BothWays:
        """See `VisionEntry`."""
        return "all"


class Gemma4Entry(PatchesEntry, frozen=True, kw_only=True, tag="gemma4"):
    """An image keeps its form."""

    num_pixels: tuple[NonNegative, NonNegative]  # an image's fewest and most
    both_ways: BothWays
    place_token_id: NonNegative | None


class Idefics3Entry(VisionEntry, frozen=True, kw_only=True, tag="idefics3"):
    """Tiles have names."""

    longest_edge: Positive  # pixels: images are resized to it before they are cut into tiles
    splits: bool  # whether they are cut; otherwise one tile is all
    global_token: str  # before the tile that shows the whole image


class InternVLEntry(VisionEntry, frozen=True, kw_only=True, tag="internvl"):
    """Tiles stand in one row."""

    num_tiles: tuple[TileCount, TileCount]  # the fewest and most, without the whole image


class Lfm2Entry(PatchesEntry, frozen=True, kw_only=True, tag="lfm2"):
    """An image keeps its form, or is cut into tiles and the whole."""

    splits: bool
    num_tiles: tuple[TileCount, TileCount]
    num_pixels: tuple[NonNegative, NonNegative]
    tolerance: float  # an image is cut that has so many times the most pixels
    num_places: NonNegative  # along an edge of the grid of learned positions
    global_token: str


class LlavaNextEntry(VisionEntry, frozen=True, kw_only=True, tag="llava_next"):
    """Tiles are put together without padding."""

    sizes: tuple[tuple[Positive, Positive], ...]  # of an image before it is cut: width and height


class MiniCpmEntry(PatchesEntry, frozen=True, kw_only=True, tag="minicpm"):
    """The whole image, and slices in nearly its own form."""

    longest_edge: Positive
    num_tiles: tuple[TileCount, TileCount]
    num_places: NonNegative
    numbered: bool


class MiniCpm46Entry(MiniCpmEntry, frozen=True, kw_only=True, tag="minicpm4_6"):
    """Of 4.6."""


class PixtralEntry(PatchesEntry, frozen=True, kw_only=True, tag="pixtral"):
    """An image keeps its form."""

    longest_edge: Positive
    row_token: str  # after each row of tokens, but the last


class QwenEntry(PatchesEntry, frozen=True, kw_only=True, tag="qwen"):
    """An image keeps its form, and its tokens have positions in rows and columns."""

    num_pixels: tuple[NonNegative, NonNegative]
    window: NonNegative  # patches along the edge of the windows within which some layers attend; 0: there are none
    num_places: NonNegative  # 0: there are no learned positions
    num_parts: Annotated[int, msgspec.Meta(ge=1, le=_MOST_PARTS)]


AnyVisionEntry: TypeAlias = (
    Gemma3Entry
    | Gemma4Entry
    | Idefics3Entry
    | InternVLEntry
    | Lfm2Entry
    | LlavaNextEntry
    | MiniCpmEntry
    | MiniCpm46Entry
    | PixtralEntry
    | QwenEntry
)
