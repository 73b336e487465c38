"""Compares a converted model with the one that it was made of, where nobody has tried its architecture before.

    comparison = Comparison(model)               # a torch model, before it is exported
    comparison.check_openvino(path_of_ir)        # raises if another model was made of it

Converters and libraries know attention by its form. What they do not know, such as another mask, another norm or other
distances between tokens, they may drop without a word.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.errors import ExportError

_NUM_TOKENS = 64  # at least
_BEYOND = 16  # tokens after a sliding window
_LONGEST = 1_024  # longer windows are not passed
_MIN_COSINE = 0.99  # cosine of the tenth percentile of rows; weights in bf16 give 0.999
_PERCENTILE = 10


def cosine(ours: NDArray[np.float32], theirs: NDArray[np.float32]) -> NDArray[np.float64]:
    """The cosine of the angle between rows, float64 [rows], of two float32 [rows, width]."""
    a, b = ours.astype(np.float64), theirs.astype(np.float64)
    made: NDArray[np.float64] = np.einsum("ij,ij->i", a, b) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))
    return made


class Comparison:
    """A torch model's logits of a random text, float32 [n, vocab]; longer than its sliding window, if that is short."""

    def __init__(self, model: Any) -> None:
        import torch

        self._architecture = model.config.model_type
        window = getattr(model.config, "sliding_window", None) or 0
        count = max(_NUM_TOKENS, window + _BEYOND if window + _BEYOND <= _LONGEST else 0)
        self._token_ids = np.random.default_rng(0).integers(model.config.vocab_size, size=count)
        with torch.no_grad():
            self._logits = model(torch.from_numpy(self._token_ids)[None]).logits[0].float().numpy()

    def check_openvino(self, path: Path) -> None:
        """Compare the IR at `path`, which is not compressed yet.

        Raises:
            ExportError: with the cosine of the logits.
        """
        from outrider.models.backends.openvino_paged import OpenVINOPaged
        from outrider.types import Chunk

        properties = {"DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
        width = self._logits.shape[1]
        backend = OpenVINOPaged(path, vocab_size=width, precision="f32", cache_precision="f32", properties=properties)
        count = len(self._token_ids)
        backend.allocate(2 * count)
        slot = backend.open(count)
        if slot is None:
            raise AssertionError("no other slot is open")
        chunk = Chunk(slot, self._token_ids.tolist(), num_rows=count)
        found = np.array([row.full() for row in backend.submit([chunk]).wait().rows(chunk)])
        slot.close()
        least = float(np.percentile(cosine(found, self._logits), _PERCENTILE))
        if not least >= _MIN_COSINE:
            raise ExportError(
                f"The architecture '{self._architecture}' was not tried, and OpenVINO's paged attention does not run "
                f"it correctly: of the logits of {count} tokens, one row in ten has a cosine below {least:.3f} with "
                "Transformers' own. Choose a model of docs/models.md."
            )
