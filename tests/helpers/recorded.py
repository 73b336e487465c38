"""Architectures that the tests' Transformers does not have: `recorded.jsonl` has logits of its later classes.

    model = Recorded.of("exaone", {})
    model.save_pretrained(folder)          # published config.json and names of tensors, with weights by their names
    model.logits                           # float32 [48, 448] of `TOKENS`; NaN where nothing is recorded

One a line: the configuration, each tensor's shape (of a vector also what its numbers are around), and logits of `ROWS`
and `COLUMNS`. Facts from Transformers 5.24 and, of Ling, from the code in its checkpoints.
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
_LINES = [json.loads(line) for line in Path(__file__).with_suffix(".jsonl").read_text(encoding="utf-8").splitlines()]
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


def weights_of(tensors: dict[str, list[int]]) -> dict[str, NDArray[np.float32]]:
    """Random weights, each by its name. tensors: shapes, of a vector also what its numbers are around, 0 or 1."""
    return {name: _weights(name, sizes) for name, sizes in tensors.items()}


def _weights(name: str, sizes: list[int]) -> NDArray[np.float32]:
    *shape, base = sizes if len(sizes) == 2 and sizes[1] < 2 else [*sizes, 0]
    drawn = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
    if name.endswith(("expert_bias", "correction_bias")):
        return np.float32(0.3) * np.abs(drawn).astype(np.float32)
    return (0.15 * drawn if len(shape) > 1 else base + 0.1 * drawn).astype(np.float32)
