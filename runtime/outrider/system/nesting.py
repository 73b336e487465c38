"""Limits how deeply values and JSON are nested, before a library reads them recursively, and of how much JSON is made.

Python's own recursion ends in a RecursionError; a library's in C++ or Rust ends the process. All checks are loops.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MOST_LEVELS = 100  # of tables and lists in each other
# Of one JSON text: by what it is counted, and how many there may be. Python takes up to 300, 150 and 60 bytes for each.
_MOST = {"lists and objects": (b"[{", 25_000), "names": (b":", 225_000), "values": (b",", 1_200_000)}


class TooDeep(ValueError):
    """A value or a text is nested in more levels than `MOST_LEVELS`."""

    def __init__(self) -> None:
        super().__init__(f"it is nested too deeply, in more than {MOST_LEVELS} levels")


class TooMany(ValueError):
    """A JSON text has more values than are read."""


def check_levels(value: object) -> None:
    """Raise TooDeep for a value of tables and lists that is nested too deeply. It may hold itself."""
    if levels_of(value) > MOST_LEVELS:
        raise TooDeep


def levels_of(value: object) -> int:
    """How many tables and lists are in each other, up to MOST_LEVELS + 1."""
    count, containers = 0, _containers([value])
    while containers and count <= MOST_LEVELS:
        count += 1
        containers = [inner for outer in containers for inner in _containers(_items(outer))]
    return count


def check_json(text: str | bytes, around: int = 0) -> None:
    """Raise TooDeep for JSON that is nested too deeply, whether it is complete or not.

    around: levels of a file's own, around values that were checked.
    """
    if _num_opened(text) > MOST_LEVELS + around and levels_of_json(text) > MOST_LEVELS + around:
        raise TooDeep


def check_num_values(text: bytes) -> None:
    """Raise TooMany for JSON of more lists, objects, names or values than Python has some 50 MB for."""
    outside = None
    for what, (signs, most) in _MOST.items():
        if sum(map(text.count, signs)) > most:
            outside = _outside_of_strings(text) if outside is None else outside
            if (count := sum(int((outside == sign).sum()) for sign in signs)) > most:
                raise TooMany(f"it has {count:,} {what}, and {most:,} are read")


def _num_opened(text: str | bytes) -> int:
    return text.count("[") + text.count("{") if isinstance(text, str) else text.count(b"[") + text.count(b"{")


def _outside_of_strings(text: bytes) -> NDArray[np.uint8]:
    import numpy as np

    plain = np.frombuffer(text.replace(rb"\\", b"").replace(rb"\"", b""), dtype=np.uint8)
    is_outside = np.cumsum(plain == ord('"'), dtype=np.uint8) & 1 == 0  # a count that overflows is odd or even still
    outside: NDArray[np.uint8] = plain[is_outside]
    return outside


def levels_of_json(text: str | bytes) -> int:
    """The most brackets that are open at the same time. Those in strings do not count."""
    import numpy as np

    outside = _outside_of_strings(text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text)
    is_open, is_close = ((outside == signs[0]) | (outside == signs[1]) for signs in (b"[{", b"]}"))
    steps = (is_open.astype(np.int8) - is_close)[is_open | is_close]
    open_now = np.cumsum(np.concatenate([np.zeros(1, np.int8), steps]), dtype=np.int32)
    return int((open_now - np.minimum.accumulate(open_now)).max())


def _containers(values: Iterable[Any]) -> list[Any]:
    return [value for value in values if isinstance(value, dict | list | tuple | Mapping)]


def _items(container: Any) -> Iterable[Any]:
    return container.values() if isinstance(container, Mapping) else container
