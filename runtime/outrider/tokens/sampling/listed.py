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
    if row.listed is None:
        return int(row.full().argmax())
    return int(row.listed.token_ids[row.listed.logits.argmax()])


def probability(row: LogitsRow, token_id: int) -> float:
    """The softmax of the row at one token, in single precision."""
    if row.listed is None:
        logits, index = row.full(), token_id
    else:
        logits = row.listed.logits
        index = int(row.listed.token_ids.searchsorted(token_id))
        if index == len(logits) or row.listed.token_ids[index] != token_id:
            return 0.0
    highest = logits.max()
    return float(np.exp(logits[index] - highest) / np.exp(logits - highest).sum())
