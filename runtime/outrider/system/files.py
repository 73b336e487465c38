"""Files and folders that a user names. Every fault becomes one of our errors, which names the file.

with reading(f"Config {shown(path)}"):
    tables = tomllib.loads(path.read_text(encoding="utf-8-sig"))
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from outrider.errors import OptionError, OutriderError, one_line

# Errors from reading a file that is missing, damaged or malicious. Before msgspec 0.20, its errors are no ValueErrors.
FAULTS = (OSError, ValueError, EOFError, OverflowError, RecursionError, MemoryError, msgspec.MsgspecError)
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)  # numbers of errors that say that a disk is full
_LONGEST = 300  # most characters of a name in a message


@contextmanager
def reading(what: str, instead: str = "", raises: type[OutriderError] = OptionError) -> Iterator[None]:
    """Turn errors of the block, which reads and parses a file, into one that names the file.

    what: the beginning of the message, with the file. instead: the next step, a sentence. raises: the error's type. Our
    own errors pass unchanged.
    """
    try:
        yield
    except OutriderError:
        raise
    except FAULTS as error:
        raise raises(f"{shown(what)} cannot be read: {why(error)}.{instead and ' '}{instead}") from error


def why(error: BaseException) -> str:
    """What is wrong with a file, for a message that already names it."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, UnicodeDecodeError) or str(error).startswith("Invalid UTF-8"):  # msgspec's, from 0.23 on
        return "it is not in UTF-8"
    if isinstance(error, json.JSONDecodeError):
        where = f"character {error.pos + 1:,}" if error.lineno == 1 else f"line {error.lineno:,}"
        return f"it is no JSON: {error.msg}, at {where}"
    if "integer string conversion" in str(error):  # Python's own message has advice for programmers
        return "a number in it has too many digits"
    return one_line(error)


def write_whole(path: Path, content: bytes, *, private: bool = False) -> None:
    """Write a file whole or not at all: readers see the one before or this one, also after a kill.

    A link stays, and the file that it leads to is replaced. A file keeps its permissions. private: whether a new one is
    its owner's alone.

    Raises:
        OSError: when it cannot be written, or is a folder, a pipe or a device; nothing is left behind then.
    """
    target = Path(os.path.realpath(path))
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        mode = None
    if mode is not None and not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is no regular file")
    temporary = target.with_name(f".{target.name}.{os.getpid()}.{threading.get_ident()}")
    permissions = 0o600 if private or mode is not None else 0o666
    try:
        os.close(os.open(temporary, os.O_CREAT | os.O_WRONLY, permissions))
        temporary.write_bytes(content)
        if mode is not None:
            temporary.chmod(stat.S_IMODE(mode))
        temporary.replace(target)
    except BaseException:  # Ctrl-C, too
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def sealed(content: Mapping[str, Any]) -> bytes:
    """An object in JSON with its checksum, for `check_seal`. `content` is data as JSON has it."""
    return msgspec.json.encode({**content, "checksum": _checksum_of(content)})


def check_seal(content: Mapping[str, Any], *, is_sealed: bool = False) -> None:
    """Raise ValueError if an object is not what `sealed` wrote, as after a flipped bit. White space does not count.

    is_sealed: whether one without a checksum is refused, too.
    """
    if "checksum" not in content and not is_sealed:
        return
    if content.get("checksum") != _checksum_of(content):
        raise ValueError("it is not what was written, as its checksum says")


def _checksum_of(content: Mapping[str, Any]) -> str:
    others = {name: value for name, value in content.items() if name != "checksum"}
    return hashlib.sha256(msgspec.json.encode(others)).hexdigest()


def usable(path: Path) -> Path:
    """The path, if a file or folder could have it. It need not exist.

    Raises:
        OptionError: when no file can have it, such as a name that is too long.
    """
    try:
        path.exists()
    except (OSError, ValueError) as error:
        raise OptionError(f"{shown(path)} cannot be used: {why(error)}. Name another path.") from error
    return path


def shown(path: object) -> str:
    """A name for a message, cut if it is too long."""
    text = str(path)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def as_text(name: str) -> str:
    """A file's name for a manifest: bytes that are not in UTF-8, as names on Linux may have, become question marks."""
    return name.encode("utf-8", "replace").decode("utf-8")
