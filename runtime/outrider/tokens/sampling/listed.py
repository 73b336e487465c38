"""Rows of which only some logits are finite, such as those of a cut output matrix."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from outrider.types import Logits, LogitsRow


def without(row: LogitsRow, token_id: int) -> LogitsRow:
    """The row with a logit of −inf for one token."""

    def full() -> Logits:
        logits = row.full().copy()
        logits[token_id] = -np.inf
        return logits

    listed = row.listed
    if listed is None or not (kept := listed.token_ids != token_id).any():
        return LogitsRow(full)
    return LogitsRow(full, replace(listed, token_ids=listed.token_ids[kept], logits=listed.logits[kept]))


def argmax(row: LogitsRow) -> int:
    """The token with the highest unprocessed logit; the lowest id among equals."""
    token_ids, logits = row.finite()
    best = int(logits.argmax())
    return best if token_ids is None else int(token_ids[best])


def probability(row: LogitsRow, token_id: int) -> float:
    """The softmax of the row at one token, in single precision."""
    token_ids, logits = row.finite()
    index = token_id if token_ids is None else int(token_ids.searchsorted(token_id))
    if token_ids is not None and (index == len(token_ids) or token_ids[index] != token_id):
        return 0.0
    highest = logits.max()
    return float(np.exp(logits[index] - highest) / np.exp(logits - highest).sum())
