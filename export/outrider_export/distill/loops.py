"""Texts that repeat themselves: any drafter gets them right, so that they teach nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

_LEAST, _DISTINCT = 64, 0.25  # tokens, and the share of them that are different
_REPEATED, _TIMES = 24, 3


def is_loop(token_ids: Sequence[int]) -> bool:
    """Whether a text has few different tokens, or ends in 24 tokens that were there twice before."""
    count = len(token_ids)
    if count < _LEAST:
        return False
    if len(set(token_ids)) < _DISTINCT * count:
        return True
    array = np.asarray(token_ids)
    windows = np.lib.stride_tricks.sliding_window_view(array, _REPEATED)
    same = np.flatnonzero(windows[:, -1] == array[-1])  # few: the others need not be compared
    return int((windows[same] == array[-_REPEATED:]).all(1).sum()) >= _TIMES
