"""Architectures that the tests' Transformers does not have: what its later classes or publishers' code made, recorded.

    model = Recorded.of("exaone", {})
    model.save_pretrained(folder)          # published config.json and names of tensors, with weights by their names
    model.logits                           # float32 [48, 448] of `TOKENS`; NaN where nothing is recorded

One a line of `recorded.jsonl`: the configuration, each tensor's shape (of a vector also what its numbers are around),
and logits of `ROWS` and `COLUMNS`. `recorded_vision.jsonl` has models that read images, with the content of their
processor's file. Facts from Transformers 5.24, and from the code in the checkpoints of Ling and of MiniCPM-V up to 4.5.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

TOKENS: list[int] = np.random.default_rng(3).integers(0, 400, size=48).tolist()
ROWS, COLUMNS = (0, 17, 29, 30, 40, 47), range(3, 448, 11)


def _lines(name: str) -> list[dict[str, Any]]:
    path = Path(__file__).with_name(name)
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


_LINES = _lines("recorded.jsonl")
NAMES = {line["architecture"] for line in _LINES}


@dataclass(frozen=True)
class Recorded:
    """logits: by `ROWS` and `COLUMNS`. largest: of all logits."""

    architecture: str
    changes: dict[str, Any]
    config: dict[str, Any]
    tensors: dict[str, list[int]]
    largest: float
    logits: list[list[float]]

    @classmethod
    def of(cls, architecture: str, changes: dict[str, Any]) -> Recorded:
        return next(
            cls(**line) for line in _LINES if (line["architecture"], line["changes"]) == (architecture, changes)
        )

    def save_pretrained(self, folder: Path, **_: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config), encoding="utf-8")
        save_file(weights_of(self.tensors), folder / "model.safetensors")

    def error_of(self, found: NDArray[np.float32]) -> float:
        """The largest difference from what is recorded, as a share of the largest logit."""
        return float(np.abs(found[np.ix_(ROWS, COLUMNS)] - np.array(self.logits)).max() / self.largest)


@dataclass(frozen=True)
class RecordedVision:
    """A model that reads images. file: of its processor, with `images`.

    embeds: by pictures' sizes, every third row and 16th number of embeddings, the largest of which is `largest`.
    answers: 40 tokens, of a question about pictures of these sizes.
    """

    family: str
    config: dict[str, Any]
    file: str
    images: dict[str, Any]
    tensors: dict[str, list[int]]
    largest: float
    embeds: dict[str, list[list[float]]]
    answers: dict[str, list[int]]

    @classmethod
    def of(cls, family: str) -> RecordedVision:
        return next(cls(**line) for line in _lines("recorded_vision.jsonl") if line["family"] == family)

    def write(self, folder: Path, tokenizer: Any, template: str) -> Path:
        """Write a checkpoint. template: of chats."""
        from transformers import PreTrainedTokenizerFast

        folder.mkdir(parents=True)
        save_file(weights_of(self.tensors), folder / "model.safetensors")
        for file, content in (("config.json", self.config), (self.file, self.images)):
            (folder / file).write_text(json.dumps(content), encoding="utf-8")
        special = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": template}
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
        return folder


def weights_of(tensors: dict[str, list[int]]) -> dict[str, NDArray[np.float32]]:
    """Random weights, each by its name. tensors: shapes, of a vector also what its numbers are around, 0 or 1."""
    return {name: _weights(name, sizes) for name, sizes in tensors.items()}


def _weights(name: str, sizes: list[int]) -> NDArray[np.float32]:
    *shape, base = sizes if len(sizes) == 2 and sizes[1] < 2 else [*sizes, 0]
    drawn = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
    if name.endswith(("expert_bias", "correction_bias")):
        return np.float32(0.3) * np.abs(drawn).astype(np.float32)
    return (0.15 * drawn if len(shape) > 1 else base + 0.1 * drawn).astype(np.float32)
