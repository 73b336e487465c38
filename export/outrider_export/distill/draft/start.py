"""A draft model before training: which layers and tokens, and the same again when training goes on.

head, cut = start_draft(source, counts, batches, num_layers=8, num_tokens=32_768, progress=progress)
head = restore_draft(source, cut.kept, token_ids)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from outrider_export.distill.draft.files import load_torch
from outrider_export.distill.draft.layers import Cut, choose_layers, cut_layers
from outrider_export.distill.draft.model import DraftModel
from outrider_export.distill.draft.vocabulary import choose_vocabulary
from outrider_export.train.fit import find_device

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from outrider_export.distill.data import Batch
    from outrider_export.plan import Plan
    from outrider_export.progress import Progress


def start_draft(
    source: Plan,
    counts: NDArray[np.int64],
    batches: Sequence[Batch],
    *,
    num_layers: int,
    num_tokens: int | None,
    progress: Progress,
    train_embeddings: bool = False,
) -> tuple[DraftModel, Cut]:
    """The source, cut to `num_layers` layers and the tokens that the main model says.

    counts: int64 [n], how often it says each. batches: some thousand tokens of its answers, to choose layers by.
    num_tokens: 0 for all, None for export's default with a corpus.

    Raises:
        OptionError: for more layers than there are, or fewer tokens than are always proposed.
        ExportError: for a source whose layers cannot be taken out, or whose logits are scaled or capped.
    """
    chosen = choose_vocabulary(source, counts, num_tokens, progress)
    token_ids = None if chosen is None else torch.from_numpy(chosen)
    model = load_torch(source)
    device, half = find_device()
    proposed, read = None if token_ids is None else token_ids.to(device), [each.to(device) for each in batches]
    with half():
        cut = choose_layers(model.to(device), read, num_layers, token_ids=proposed, tell=progress.note)
    cut_layers(model.to("cpu"), cut.kept)
    return DraftModel(model, token_ids, train_embeddings=train_embeddings), cut


def restore_draft(
    source: Plan, kept: Sequence[int], token_ids: Sequence[int] | None, *, train_embeddings: bool = False
) -> DraftModel:
    """What `start_draft` has made of the source, with the source's weights."""
    model = load_torch(source)
    cut_layers(model, kept)
    ids = None if token_ids is None else torch.tensor(token_ids)
    return DraftModel(model, ids, train_embeddings=train_embeddings)
