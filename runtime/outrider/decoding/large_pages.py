"""Moves weights to pages of 2 MB, a piece at a time, while an engine has nothing else to do.

A call reads all weights, and with pages of 4 KB also a hundred thousand entries of page tables for each gigabyte, which
a processor keeps no more than the weights. Where the system gives large pages only to those who ask, libraries that
pack weights do not ask.
"""

from __future__ import annotations

import errno
from collections.abc import Callable

from outrider.decoding.idle import IdleJob, harmless
from outrider.system.memory import full_regions, use_large_pages
from outrider.types import Backend

_LEAST_WEIGHTS = 256 << 20  # bytes: a call of a smaller model takes as long with either
_LEAST_REGION = 2 << 20  # bytes
_PIECE = 16 << 20  # bytes: a request that comes meanwhile waits for one, which takes 5 to 40 ms


class LargePages(IdleJob):
    """Memory of this process that is yet to be moved. num_bytes: of the weights of its models.

    Weights stay where they are, but a library packs some in the first call that needs them. So they are looked up when
    an engine is idle for the first time, and again after its first answers. Ends where the system has no large pages
    left.
    """

    def __init__(self, num_bytes: int = 0) -> None:
        self._pieces: list[range] = []
        self._looks_left = 2 if num_bytes >= _LEAST_WEIGHTS else 0
        self._may_look = True

    @property
    def is_due(self) -> bool:
        """Whether there may be something to move."""
        return bool(self._pieces) or (self._may_look and self._looks_left > 0)

    @property
    def has_begun(self) -> bool:
        """Whether something is moved already, and something is not."""
        return bool(self._pieces)

    def go_on(self, main: Backend, is_cancelled: Callable[[], bool]) -> None:  # noqa: ARG002
        """Find the memory, or move the next piece."""
        if self._pieces:
            piece = self._pieces.pop()
            try:
                use_large_pages(piece)
            except OSError as error:
                if error.errno in (errno.ENOMEM, errno.EBUSY):
                    self._pieces, self._looks_left = [], 0
            return
        self._looks_left, self._may_look = self._looks_left - 1, False
        with harmless("Weights could not be looked up"):
            regions = full_regions(_LEAST_REGION)
            self._pieces = [each[at : at + _PIECE] for each in regions for at in range(0, len(each), _PIECE)]

    def pause(self) -> None:
        """A request has come, in which more may be packed. Nothing is open: the rest is moved when there is time."""
        self._may_look = True
