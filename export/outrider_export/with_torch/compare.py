"""Child process: compares a bundle's logits with those of the checkpoint that it came from.

Job: `bundle`, its folder; `role`, "main" or a drafter's name; `scheduler` and `device`, options of these sections of
`outrider.Config`, where `main_device` is the model's; `model`, the checkpoint folder or GGUF file, which Transformers
reads in float32; `gguf`, whether it is one; `scratch`, a folder for a copy of it; `trust_remote_code`; `texts`, lists
of token ids.

Both read the same texts in the same pieces, so that only one piece's logits are in memory; a checkpoint whose layers
keep states reads a text at once, as Transformers forgets the states between pieces of several tokens. The result: for
each text the `cosines` and whether the `top` tokens are the same, row by row, and the bundle's `setting`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from outrider.bundle.folder import Bundle, read_bundle
from outrider.config import Config
from outrider.engine.engine import Engine
from outrider.errors import ExportError
from outrider.types import Backend, Chunk
from outrider_export.progress import Progress
from outrider_export.with_torch.comparison import cosine
from outrider_export.with_torch.convert import load_model

PIECE = 64  # rows; at 152,000 logits, 40 MB each side


def compare(job: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Compare the models that `job` describes; `progress` advances by one per text."""
    import torch

    bundle = read_bundle(job["bundle"])
    alone, columns = _alone(bundle, job["role"])
    config = Config().replace(**job["scheduler"], **job["device"], drafter=None)
    engine = Engine(alone, config)
    progress.phase("read")
    reference = load_model(job | {"weights": "fp32"}).eval()
    progress.phase("compare")
    made: dict[str, Any] = {"setting": engine.setting["main_device"], "cosines": [], "top": []}
    with torch.inference_mode():
        for token_ids in job["texts"]:
            at_once = any(alone.manifest.main.geometry.layer_states)
            theirs = _Whole(reference, token_ids) if at_once else _InPieces(reference, token_ids)
            cosines, same = _compare_text(engine.main, theirs, token_ids, columns)
            made["cosines"].append(cosines)
            made["top"].append(same)
            progress.advance(1)
    return made


def _alone(bundle: Bundle, role: str) -> tuple[Bundle, NDArray[np.int32] | None]:
    """A bundle with only the model for `role`, and the token id of each logit if its output matrix was cut."""
    entry = next((drafter for drafter in bundle.manifest.drafters if drafter.name == role), None)
    main = entry.model if entry else bundle.manifest.main
    columns = bundle.read_proposed(entry) if entry and entry.num_proposed_tokens else None
    return Bundle(bundle.folder, msgspec.structs.replace(bundle.manifest, main=main, drafters=())), columns


class _InPieces:
    """A checkpoint's logits for a text's tokens, read piece by piece."""

    def __init__(self, reference: Any, token_ids: Sequence[int]) -> None:
        self._reference, self._token_ids, self._cache = reference, token_ids, None

    def rows(self, begin: int, end: int) -> NDArray[np.float32]:
        """Those of the next piece, float32 [end − begin, width]."""
        import torch

        piece = torch.tensor([[*self._token_ids[begin:end]]])
        done = self._reference(input_ids=piece, past_key_values=self._cache, use_cache=True)
        self._cache = done.past_key_values
        found: NDArray[np.float32] = done.logits[0].float().numpy()
        return found


class _Whole:
    """The same, of a text that is read at once."""

    def __init__(self, reference: Any, token_ids: Sequence[int]) -> None:
        import torch

        self._logits = reference(input_ids=torch.tensor([[*token_ids]]), use_cache=False).logits[0]

    def rows(self, begin: int, end: int) -> NDArray[np.float32]:
        """As `_InPieces`."""
        found: NDArray[np.float32] = self._logits[begin:end].float().numpy()
        return found


def _compare_text(
    backend: Backend, reference: _InPieces | _Whole, token_ids: Sequence[int], columns: NDArray[np.int32] | None
) -> tuple[list[float], list[bool]]:
    slot = backend.open(len(token_ids))
    if slot is None:
        raise ExportError(f"The cache has no room for {len(token_ids):,} tokens. Raise --cache-size.")
    cosines: list[float] = []
    same: list[bool] = []
    try:
        for begin in range(0, len(token_ids), PIECE):
            piece = list(token_ids[begin : begin + PIECE])
            chunk = Chunk(slot, piece, num_rows=len(piece))
            ours = np.array([row.full() for row in backend.submit([chunk]).wait().rows(chunk)])
            theirs = _same_columns(reference.rows(begin, begin + len(piece)), ours.shape[1], columns)
            cosines += cosine(ours, theirs).tolist()
            same += (ours.argmax(-1) == theirs.argmax(-1)).tolist()
    finally:
        slot.close()
    return cosines, same


def _same_columns(logits: NDArray[np.float32], width: int, columns: NDArray[np.int32] | None) -> NDArray[np.float32]:
    """The checkpoint's logits for those tokens that the bundle has logits for, without padding."""
    needed = width if columns is None else int(columns.max()) + 1
    if logits.shape[1] < needed:
        raise ExportError(
            f"It gives {logits.shape[1]:,} logits and the bundle's model has {needed:,} tokens. Name the checkpoint "
            "that the bundle was made of."
        )
    return logits[:, :width] if columns is None else logits[:, columns]
