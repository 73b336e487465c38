"""MiniCPM-V's tokenizer and checkpoints, and what its publishers' code made of images.

Facts from modeling_minicpmv.py, modeling_navit_siglip.py and resampler.py in its checkpoints (2.6 to 4.5), and from
modeling_minicpmv4_6.py of Transformers 5.24.
"""

import json
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
RECORDED = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
