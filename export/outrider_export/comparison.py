"""Compares a converted model with the one that it was made of, where nobody has tried its architecture before.

    comparison = Comparison(model)      # a torch model, before it is exported
    comparison.check(path_of_ir)        # raises if OpenVINO with a paged cache calculates something else

OpenVINO finds attention by its form in the graph. What it does not know, such as another mask or other distances
between tokens, it may drop without a word.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.errors import ExportError

if TYPE_CHECKING:
    from pathlib import Path

_NUM_TOKENS = 64  # at least
_BEYOND = 16  # tokens behind a sliding window
_LONGEST = 1_024  # longer windows are not passed
_LEAST_COSINE = 0.99  # of the tenth percentile of rows; weights in bf16 give 0.999
_PERCENTILE = 10


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

    def check(self, path: Path) -> None:
        """Compare the model at `path`, which is not compressed yet.

        Raises:
            ExportError: with the cosine of the logits.
        """
        from outrider.backends.openvino_paged import OpenVINOPaged
        from outrider.types import Chunk

        count, width = self._logits.shape
        properties = {"DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
        backend = OpenVINOPaged(path, vocab_size=width, precision="f32", cache_precision="f32", properties=properties)
        backend.allocate(2 * count)
        slot = backend.open(count)
        if slot is None:
            raise AssertionError("no other slot is open")
        step = backend.submit([Chunk(slot, self._token_ids.tolist(), num_rows=count)]).wait()
        found = np.array([step.row(i).full() for i in range(count)])
        lengths = np.linalg.norm(found, axis=1) * np.linalg.norm(self._logits, axis=1)
        cosine = float(np.percentile((found * self._logits).sum(axis=1) / lengths, _PERCENTILE))
        if not cosine >= _LEAST_COSINE:
            raise ExportError(
                f"Nobody has tried the architecture '{self._architecture}', and OpenVINO's paged attention does not run "
                f"it rightly: of {count} tokens' logits, one in ten has a cosine below {cosine:.3f} with Transformers' "
                "own. Choose a model of docs/models.md."
            )
