"""Limits how deeply values and JSON are nested, before a library reads them recursively.

Python's own recursion ends in a RecursionError; a library's in C++ or Rust ends the process. All checks are loops.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

MOST_LEVELS = 100  # of tables and lists in each other


class TooDeep(ValueError):
    """A value or a text is nested in more levels than `MOST_LEVELS`."""

    def __init__(self) -> None:
        super().__init__(f"it is nested too deeply, in more than {MOST_LEVELS} levels")


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
    if levels_of_json(text) > MOST_LEVELS + around:
        raise TooDeep


def levels_of_json(text: str | bytes) -> int:
    """The most brackets that are open at the same time. Those in strings do not count."""
    import numpy as np

    written = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    plain = np.frombuffer(written.replace(rb"\\", b"").replace(rb"\"", b""), dtype=np.uint8)
    outside = plain[np.cumsum(plain == ord('"')) % 2 == 0]
    is_open, is_close = (np.isin(outside, np.frombuffer(signs, dtype=np.uint8)) for signs in (b"[{", b"]}"))
    open_now = np.concatenate([[0], np.cumsum(is_open.astype(np.int8) - is_close, dtype=np.int64)])
    return int((open_now - np.minimum.accumulate(open_now)).max())


def _containers(values: Iterable[Any]) -> list[Any]:
    return [value for value in values if isinstance(value, dict | list | tuple | Mapping)]


def _items(container: Any) -> Iterable[Any]:
    return container.values() if isinstance(container, Mapping) else container
