"""What requests have that has no effect, as the log lists it."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from outrider.errors import quoted

_MOST_AT_ONCE = 20  # names that one call lists
_MOST_LISTED = 200  # names in all, as clients choose them


class ListedOnce:
    """Lists in the log what requests have that has no effect, each name once.

        ignored = ListedOnce(log, "Requests have fields that are ignored: %s.")
        ignored.add(request.keys() - known)

    message: has a %s for each of `of`, and one for the names.
    """

    def __init__(self, log: logging.Logger, message: str) -> None:
        self._log, self._message = log, message
        self._listed: set[tuple[str, ...]] = set()

    def add(self, names: Iterable[str], *of: str) -> None:
        """List those that are new. of: what they belong to; a name may be another's, too."""
        if len(self._listed) >= _MOST_LISTED:
            return
        new = dict[tuple[str, ...], None]()
        for name in names:
            each = (*of, quoted(name))
            if each not in self._listed:
                new[each] = None
                if len(new) == _MOST_AT_ONCE:
                    break
        if new:
            self._listed |= new.keys()
            self._log.warning(self._message, *of, ", ".join(sorted(each[-1] for each in new)))
