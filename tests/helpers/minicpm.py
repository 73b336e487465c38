"""MiniCPM-V's tokenizer and checkpoints, and what its publishers' code made of images.

Facts from modeling_minicpmv.py, modeling_navit_siglip.py and resampler.py in its checkpoints (2.6 to 4.5), and from
modeling_minicpmv4_6.py of Transformers 5.24.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from recorded import RecordedVision
from tiny import SPECIAL, train_tokenizer
from tiny_vision import PARTS_TEMPLATE

AROUND = ("<image>", "</image>", "<slice>", "</slice>", "<image_id>", "</image_id>")
KINDS = {"2.6": "qwen2", "4.0": "llama", "4.5": "qwen3", "4.6": "qwen3_5_text"}  # of text parts, by version
PATCH = 4  # pixels
_OF_TEXT = (
    "{% for message in messages %}<|im_start|>{{message['role'] + '\n' + message['content']}}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_minicpm(folder: Path, version: str) -> Path:
    template = PARTS_TEMPLATE.replace("<image>", "<|image_pad|>") if version == "4.6" else _OF_TEXT
    return RecordedVision.of(f"minicpm {version}").write(folder, minicpm_tokenizer(version), template)


def minicpm_tokenizer(version: str) -> Any:
    """The tests' tokenizer with the tokens around images."""
    place = "<|image_pad|>" if version == "4.6" else "<unk>"
    return train_tokenizer(special=(*SPECIAL, *AROUND, place, *(f"<extra_{i}>" for i in range(5))))


def learned_places(count: int, side: int, *, is_new: bool) -> torch.Tensor:
    """Which learned row, or column, so many patches have."""
    borders = torch.arange(1 / side, 1.0, 1 / side)
    places = (
        torch.arange(count) / count if is_new else torch.arange(0, 1 - 1e-6, 1 / torch.tensor(count, dtype=torch.int32))
    )
    return torch.bucketize(places, borders, right=True)


def _in_fours(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Rows [1, rows · columns, width] as [windows, 4, width]."""
    apart = x.reshape(rows // 2, 2, columns // 2, 2, -1).transpose(1, 2)
    return apart.reshape(-1, 4, x.shape[-1])


def parts_of(pixels: NDArray[np.float32], version: str, sizes: Sequence[tuple[int, int]]) -> list[NDArray[np.float32]]:
    """The parts of an image, each float32 [3, height, width], of `Tiles.pixels`. sizes: rows and columns of patches."""
    parts = []
    for rows, columns in sizes:
        of_part, pixels = pixels[: rows * columns], pixels[rows * columns :]
        ids = torch.arange(rows * columns)[None, :, None]
        if version == "4.6":  # token by token
            ids = _in_fours(_in_fours(ids, rows, columns).reshape(1, -1, 4), rows // 2, columns // 2)
        natural = np.empty_like(of_part)
        natural[ids.flatten().numpy()] = of_part
        apart = natural.reshape(rows, columns, 3, PATCH, PATCH).transpose(2, 0, 3, 1, 4)
        parts.append(np.ascontiguousarray(apart.reshape(3, rows * PATCH, columns * PATCH)))
    assert not len(pixels)
    return parts


# What `MiniCPMVImageProcessor` of MiniCPM-V 2.6, and `MiniCPMV4_6ImageProcessorPil` and `MiniCPMV4_6Processor` of
# Transformers 5.24, make of `noise` by height and width: rows and columns of the patches of each part, the CRC of the
# pixels, and the text, with brackets for the tokens around slices and the number of tokens for each run.
RECORDED: dict[tuple[int, int], list[tuple[list[tuple[int, int]], int, str]]] = {
    (40, 31): [
        ([(9, 7), *[(6, 10)] * 2], 2_247_508_496, "<image>6</image>[6]\n[6]"),
        ([(8, 8), *[(8, 8)] * 2], 628_191_262, "<image>4</image>[4]\n[4]"),
    ],
    (20, 75): [
        ([(4, 15), *[(7, 9)] * 3], 1_626_945_443, "<image>6</image>[6][6][6]"),
        ([(4, 16), *[(8, 8)] * 3], 3_408_683_912, "<image>4</image>[4][4][4]"),
    ],
    (8, 8): [
        ([(8, 8)], 1_541_035_333, "<image>6</image>"),
        ([(8, 8)], 1_541_035_333, "<image>4</image>"),
    ],
    (90, 120): [
        ([(7, 9), *[(7, 9)] * 4], 1_283_957_139, "<image>6</image>[6][6]\n[6][6]"),
        ([(8, 8), *[(8, 8)] * 4], 3_930_945_721, "<image>4</image>[4][4]\n[4][4]"),
    ],
    (64, 17): [
        ([(16, 4), *[(9, 7)] * 3], 2_590_493_282, "<image>6</image>[6]\n[6]\n[6]"),
        ([(16, 4), *[(8, 8)] * 3], 2_857_355_845, "<image>4</image>[4]\n[4]\n[4]"),
    ],
    (200, 20): [
        ([(25, 2), *[(12, 5)] * 4], 2_700_514_027, "<image>6</image>[6]\n[6]\n[6]\n[6]"),
        ([(24, 4), *[(12, 4)] * 4], 3_142_651_294, "<image>6</image>[3]\n[3]\n[3]\n[3]"),
    ],
    (33, 33): [
        ([(8, 8), *[(6, 11)] * 2], 1_010_828_617, "<image>6</image>[6]\n[6]"),
        ([(8, 8), *[(4, 12)] * 2], 4_147_258_323, "<image>4</image>[3]\n[3]"),
    ],
    (32, 32): [
        ([(8, 8)], 316_006_065, "<image>6</image>"),
        ([(8, 8)], 316_006_065, "<image>4</image>"),
    ],
    (45, 46): [
        ([(8, 8), *[(8, 8)] * 4], 47_411_390, "<image>6</image>[6][6]\n[6][6]"),
        ([(8, 8), *[(8, 8)] * 4], 47_411_390, "<image>4</image>[4][4]\n[4][4]"),
    ],
    (64, 64): [
        ([(8, 8), *[(8, 8)] * 4], 1_481_834_102, "<image>6</image>[6][6]\n[6][6]"),
        ([(8, 8), *[(8, 8)] * 4], 1_481_834_102, "<image>4</image>[4][4]\n[4][4]"),
    ],
    (100, 31): [
        ([(14, 4), *[(8, 8)] * 3], 2_253_613_260, "<image>6</image>[6]\n[6]\n[6]"),
        ([(16, 4), *[(8, 8)] * 3], 212_367_876, "<image>4</image>[4]\n[4]\n[4]"),
    ],
    (31, 100): [
        ([(4, 14), *[(8, 8)] * 3], 3_001_609_690, "<image>6</image>[6][6][6]"),
        ([(4, 12), *[(8, 8)] * 3], 795_711_992, "<image>3</image>[4][4][4]"),
    ],
}  # fmt: skip
