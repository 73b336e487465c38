"""Moves weights to pages of 2 MB, a piece at a time, while an engine has nothing else to do.

A call reads all weights, and with pages of 4 KB also a hundred thousand entries of page tables for each gigabyte, which
a processor keeps no more than the weights. Where the system gives large pages only to those who ask, libraries that
pack weights do not ask.
"""

from __future__ import annotations

from collections.abc import Callable

from outrider.system.memory import full_regions, use_large_pages
from outrider.types import Backend

_LEAST_WEIGHTS = 256 << 20  # bytes: a call of a smaller model takes as long with either
_LEAST_REGION = 2 << 20  # bytes
_PIECE = 16 << 20  # bytes: a request that comes meanwhile waits for one, which takes 5 to 40 ms


class LargePages:
    """Memory of this process that is yet to be moved: an `IdleJob`. num_bytes: of the weights of its models.

    It is looked up once, as weights stay where they are. Ends where the system has no large pages left.
    """

    def __init__(self, num_bytes: int = 0) -> None:
        self._pieces: list[range] | None = None if num_bytes >= _LEAST_WEIGHTS else []

    @property
    def is_due(self) -> bool:
        """Whether there may be something to move."""
        return self._pieces is None or bool(self._pieces)

    @property
    def has_begun(self) -> bool:
        """Whether something is moved already, and something is not."""
        return bool(self._pieces)

    def go_on(self, main: Backend, is_cancelled: Callable[[], bool]) -> None:  # noqa: ARG002
        """Find the memory, or move the next piece."""
        if self._pieces is None:
            regions = full_regions(_LEAST_REGION)
            self._pieces = [each[at : at + _PIECE] for each in regions for at in range(0, len(each), _PIECE)]
        elif self._pieces and not use_large_pages(self._pieces.pop()):
            self._pieces = []

    def pause(self) -> None:
        """Nothing is open: the rest is moved when there is time again."""
