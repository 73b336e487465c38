"""Images that keep their form: their patches, and the positions of their tokens."""

from typing import Any

import numpy as np
import pytest

from outrider.bundle.vision import Gemma4Entry, QwenEntry
from outrider.errors import RequestError
from outrider.inputs.vision.gemma import largest
from outrider.inputs.vision.grids import patches_of
from outrider.inputs.vision.qwen import inputs_of, resized_to
from outrider.models.backends.embeds import given_grid, grid_offsets
from outrider.types import Prompt, Span, TokenSequence, undivided

COMMON: Any = {
    "folder": "vision", "weights": "fp32", "tile_size": 8, "tokens_per_tile": 1, "image_token_id": 5,
    "image_token": "<i>", "mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5), "rescale_factor": 1 / 255, "resample": 3,
    "num_pixels": (256, 4096), "patches": 2,
}  # fmt: skip
ENTRY = QwenEntry(**COMMON, window=4, num_places=5, num_parts=1)
GEMMA = Gemma4Entry(**COMMON, both_ways="none", place_token_id=None)


def span(begin: int, grid: tuple[int, int]) -> Span:
    return Span(begin, np.zeros((grid[0] * grid[1], 4), np.float32), b"key", grid)


def test_an_image_has_positions_in_rows_and_columns_and_the_text_goes_on_after_its_longer_edge() -> None:
    embeds = span(2, (2, 3)), Span(9, np.zeros((2, 4), np.float32), b"other"), span(12, (2, 1))
    found = np.arange(16)[:, None] + grid_offsets(embeds, 0, 16)
    image = [[2, 2, 2], [2, 2, 3], [2, 2, 4], [2, 3, 2], [2, 3, 3], [2, 3, 4]]
    text = [[each] * 3 for each in (5, 6, 7, 8)]  # with two embeddings that have no grid
    assert found.tolist() == [[0] * 3, [1] * 3, *image, *text, [9, 9, 9], [9, 10, 9], [11] * 3, [12] * 3]
    for begin in range(16):  # in pieces
        assert (grid_offsets(embeds, begin, 16 - begin) == grid_offsets(embeds, 0, 16)[begin:]).all()


def test_rows_of_other_texts_and_of_padding_keep_their_positions() -> None:
    class Slot:
        def __init__(self, *embeds: Span) -> None:
            self.embeds = embeds

    found = given_grid([(Slot(), 0, 2, 7), (Slot(span(1, (2, 2))), 2, 3, 4)], 6)
    assert found.tolist() == [[0] * 3, [0] * 3, [-3, -2, -2], [-2] * 3, [-2] * 3, [0] * 3]


def test_a_grid_has_a_place_for_each_embedding() -> None:
    with pytest.raises(RequestError, match="has 4 of them, and a grid of 2 × 3. Give one for each"):
        Prompt([1] * 9, embeds=(Span(2, np.zeros((4, 4), np.float32), b"key", (2, 3)),))


@pytest.mark.parametrize(
    ("size", "expected"), [((31, 40), (32, 40)), ((4, 4), (16, 16)), ((400, 100), (128, 32)), ((800, 4), (232, 8))]
)
def test_an_image_gets_the_nearest_size_of_whole_tiles(size: tuple[int, int], expected: tuple[int, int]) -> None:
    assert resized_to(*size, ENTRY) == expected  # by `smart_resize` of Transformers


@pytest.mark.parametrize(
    ("size", "expected"), [((31, 40), (56, 72)), ((4, 4), (64, 64)), ((400, 100), (128, 32)), ((8000, 4), (512, 8))]
)
def test_an_image_gets_the_largest_size_of_whole_tiles(size: tuple[int, int], expected: tuple[int, int]) -> None:
    assert largest(*size, GEMMA) == expected  # by `get_aspect_ratio_preserving_size` of Transformers
    assert largest(*size[::-1], GEMMA) == expected[::-1]


def test_a_piece_of_a_prompt_divides_no_span_that_is_whole() -> None:
    embeds = tuple(Span(begin, np.zeros((4, 4), np.float32), b"key", whole=begin != 9) for begin in (2, 9, 13))
    sequence = TokenSequence.of(Prompt([1] * 20, embeds=embeds))
    found = [undivided(embeds, begin, end) for begin, end in ((0, 2), (0, 3), (0, 6), (2, 3), (6, 11), (9, 15))]
    assert found == [2, 2, 6, 6, 11, 13]
    begin, pieces = 0, []
    while begin < len(sequence):
        pieces.append(len(sequence.next_piece(begin, 3)[0]))
        begin += pieces[-1]
    assert pieces == [2, 4, 3, 3, 1, 4, 3]


def test_a_narrow_image_is_refused() -> None:
    with pytest.raises(RequestError, match="has 2,010 × 10 pixels, and one edge is at most 200 times the other"):
        resized_to(2010, 10, ENTRY)


def test_patches_stand_tile_by_tile_and_windows_have_each_once() -> None:
    rows, columns = 3, 4
    marks = np.zeros((3, 24, 32), np.float32)
    marks[:] = np.add.outer(np.arange(24) // 4 * 100, np.arange(32) // 4)  # of a patch its row and column
    patches, given = patches_of(marks, ENTRY, 2), inputs_of(rows, columns, ENTRY)
    positions: Any = given["patch_positions"]
    assert patches.shape == (48, 2 * 3 * 4 * 4)
    assert (patches == (positions @ [100, 1])[:, None]).all()
    assert positions[:4].tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    members, mask, places = (given[f"window_{name}"] for name in ("members", "mask", "places"))
    assert (members.reshape(-1)[places] == np.arange(48)).all()
    assert (mask.reshape(-1)[places] == 0).all()
    assert np.isinf(mask).sum() == mask.size - 48
    for window, among in zip(members, mask[:, 0, 0], strict=True):
        assert len(np.unique(positions[window[among == 0]] // 4, axis=0)) == 1
    assert np.allclose(given["corner_weights"].sum(axis=1), 1)
    assert given["corners"].max() == 24
