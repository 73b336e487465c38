"""Files and folders that a user names: whatever is wrong with one, an error of ours names it.

with reading(f"Config {shown(path)}"):
    tables = tomllib.loads(path.read_text(encoding="utf-8-sig"))
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from outrider.errors import OptionError, OutriderError, one_line

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# What readers raise at a file that is missing, damaged, or made to do harm. Before its version 0.20, msgspec's errors
# are no ValueErrors.
FAULTS = (OSError, ValueError, EOFError, OverflowError, RecursionError, MemoryError, msgspec.MsgspecError)
_LONGEST = 300  # characters of a name that a message has room for


@contextmanager
def reading(what: str, instead: str = "", raises: type[OutriderError] = OptionError) -> Iterator[None]:
    """What goes wrong while the block reads and parses a file becomes an error that names it.

    what: the file, as the message begins with it. instead: the next step, a sentence. raises: the error's type. Errors
    of ours pass as they are.
    """
    try:
        yield
    except OutriderError:
        raise
    except FAULTS as error:
        raise raises(f"{shown(what)} cannot be read: {why(error)}.{instead and ' '}{instead}") from error


def why(error: BaseException) -> str:
    """What is wrong with a file, for a message that names it: without the path, which may be long, and in our words."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return "it is not in UTF-8"
    if isinstance(error, json.JSONDecodeError):
        where = f"character {error.pos + 1:,}" if error.lineno == 1 else f"line {error.lineno:,}"
        return f"it is no JSON: {error.msg}, at {where}"
    if "integer string conversion" in str(error):  # Python's limit, with advice for those who write Python
        return "a number in it has too many digits"
    return one_line(error)


def usable(path: Path) -> Path:
    """The path, where something could be; it need not be there.

    Raises:
        OptionError: when nothing could, as the name is too long.
    """
    try:
        path.exists()
    except (OSError, ValueError) as error:
        raise OptionError(f"{shown(path)} cannot be used: {why(error)}. Name another path.") from error
    return path


def shown(path: object) -> str:
    """A name for a message, cut where it is too long to be one."""
    text = str(path)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
