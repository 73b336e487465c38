"""What the main model last said behind the same tokens, in all answers so far."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

LONGEST_CONTEXT = 3  # tokens; a longer one hardly ever comes back in another text
_NUM_PLACES = 1 << 16  # 1 MB
_DOUBT = 12.0  # a context of n tokens counts as much as _DOUBT / n contradictions


class NextTokens:
    """A table of the main model's latest next tokens, by the last one to three tokens before them.

        table = NextTokens()
        table.add([4, 7], 9)
        table.guess([1, 4, 7])    # 9, and its chance

    Contexts share a table of fixed size by their hashes; a newer one takes the place of an older. It is kept in memory
    only.

    Source: Luo et al. 2024, "Turning trash into treasure: accelerating inference of large language models with token
    recycling". There the table has several candidates behind each single token, also behind rejected ones. Here longer
    contexts come first, which are right more often, and one candidate is kept: more did not pay for their rows.
    """

    def __init__(self) -> None:
        self._hashes = np.zeros(_NUM_PLACES, dtype=np.int64)
        self._token_ids = np.zeros(_NUM_PLACES, dtype=np.int32)
        self._times = np.zeros(_NUM_PLACES, dtype=np.int32)  # in a row; 0: the place is free

    def forget(self) -> None:
        """Begin with an empty table."""
        self._times[:] = 0

    def add(self, context: Seq[int], token_id: int) -> None:
        """Take in that `token_id` came behind these tokens, of which the last ones count."""
        for length in range(1, min(len(context), LONGEST_CONTEXT) + 1):
            at, key = _place(context, length)
            is_same = self._hashes[at] == key and self._token_ids[at] == token_id
            self._times[at] = self._times[at] + 1 if is_same else 1
            self._hashes[at], self._token_ids[at] = key, token_id

    def guess(self, context: Seq[int]) -> tuple[int, float]:
        """The latest token behind the longest known end of the context, and its chance; chance 0 if none is known."""
        for length in range(min(len(context), LONGEST_CONTEXT), 0, -1):
            at, key = _place(context, length)
            times = int(self._times[at])
            if times and self._hashes[at] == key:
                return int(self._token_ids[at]), times / (times + _DOUBT / length)
        return 0, 0.0


def _place(context: Seq[int], length: int) -> tuple[int, int]:
    """Where the last `length` tokens are in the table, and their hash, which does not depend on the process."""
    key = hash(tuple(context[-length:]))
    return key % _NUM_PLACES, key
