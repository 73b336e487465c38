"""Everything Outrider raises on purpose.

::

    OutriderError                exit code 1
    ├── OptionError              exit code 2   an invalid option, name or value
    ├── RequestError             1             a request that cannot be run: its prompt is empty, or does not fit
    │   ├── EngineClosed         1             the engine is closed, or was while the request ran
    │   ├── NoTokenLeft          1             a request's options leave no token to choose
    │   └── TooLong              1             prompt and answer do not fit in the context or the cache
    ├── DrafterError             1             an app's drafter failed, or gave what breaks its interface's rules
    ├── BundleError              1             a bundle is missing, damaged, too new, or its parts do not fit
    ├── ExportError              1             a checkpoint cannot be turned into a bundle
    │   └── VocabularyMismatch   1             main and draft model have no token in common
    └── DeviceError              1             a device failed to compile or to run a model

`DeviceWarning` is a warning: a requested device is not used, and another one is. `ExactnessWarning` is one, too: with
this model, device and precision, drafts may change the text.

A message names the value, the rule it breaks and the next step, in one line: the command line prints it as it is.
Values from elsewhere may be of any length, so that the middle of a long message is left out. Their line ends, and what
a terminal would obey, are shown as Python writes them: "\\x1b".
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec

_LONGEST = 2000  # characters of a message
_UNSHOWN = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


class OutriderError(Exception):
    """Base of all errors that Outrider raises on purpose."""

    exit_code = 1

    def __init__(self, message: str = "") -> None:
        if len(message) > _LONGEST:  # its end says what to do
            message = f"{message[: _LONGEST // 2]} … {message[-_LONGEST // 2 :]}"
        super().__init__(_UNSHOWN.sub(lambda found: ascii(found[0])[1:-1], message))


class OptionError(OutriderError, ValueError):
    """An invalid option, name or value."""

    exit_code = 2


class RequestError(OutriderError, ValueError):
    """A request that cannot be run: its prompt is empty, or too long for the model's context or for the cache."""


class EngineClosed(RequestError):
    """The engine is closed, or was closed while the request waited or ran."""

    def __init__(self) -> None:
        super().__init__("This engine is closed. Load the bundle again.")


class NoTokenLeft(RequestError):
    """A request's options leave no token to choose. row: of the draft, where they do; 0: before its first token."""

    def __init__(self, message: str, row: int = 0) -> None:
        super().__init__(message)
        self.row = row


class TooLong(RequestError):
    """A request's prompt and answer exceed the model's context, the cache, or what a device was compiled for."""


class DrafterError(OutriderError, ValueError):
    """A drafter failed, or gave a value that breaks a rule of `outrider.types.Drafter`. The request ends, no other."""


class BundleError(OutriderError):
    """A bundle is missing, damaged, made by a newer version, or its parts do not fit together."""


class ExportError(OutriderError):
    """A checkpoint cannot be turned into a bundle."""


class VocabularyMismatch(ExportError):
    """Main and draft model have no token in common."""


class DeviceError(OutriderError):
    """A device failed to compile or to run a model."""


class DeviceWarning(UserWarning):
    """A requested device is not used. The message says why, and which one is used instead."""


class ExactnessWarning(UserWarning):
    """Rows of the main model depend on the batch, so that drafts may change the text."""


_PLACE = re.compile(r"Exception from \S+:\d+:\s")


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the nearest known one if there is any, otherwise all."""
    known = sorted(known)
    close = difflib.get_close_matches(name[:100], known, n=1)
    return f"Did you mean '{close[0]}'?" if close else f"Known: {', '.join(known) or 'none'}."


def quoted(text: str, most: int = 100) -> str:
    """A text that somebody has sent, as Python writes it, cut."""
    return repr(text[:most])


def printable(text: str) -> str:
    """A text with escapes in place of line ends and of what a terminal obeys, as Python writes them."""
    return text if text.isprintable() else "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def one_line(error: BaseException) -> str:
    """The text of another library's error, which may have many lines, for the end of our message.

    Where in its sources OpenVINO raised it is left out.
    """
    try:
        text = str(error)
    except BaseException:  # of an app's own class
        text = ""
    said = " ".join(_PLACE.sub("", text[:2000]).split())[:300].rstrip(".")
    return printable(said) or type(error).__name__


@contextmanager
def needs(what: str, extra: str, kind: type[OutriderError]) -> Iterator[None]:
    """Raise an error of this kind, with the command that helps, where a package that the block imports is missing.

    what: the message's beginning, such as "Images need the package Pillow".
    """
    try:
        yield
    except ImportError as error:
        raise kind(f"{what} ({one_line(error)}). Run: {install(extra)}") from error


def is_installed(package: str) -> bool:
    """Whether a package can be imported, without importing it."""
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False


def install(extra: str) -> str:
    """The command that installs an extra of Outrider: from where Outrider was installed, a clone's folder or PyPI."""
    from importlib.metadata import PackageNotFoundError, distribution  # these two take time, and few need them
    from urllib.parse import urlsplit
    from urllib.request import url2pathname

    with suppress(PackageNotFoundError, ValueError, KeyError):
        origin = json.loads(distribution("outrider").read_text("direct_url.json") or "{}")
        url = urlsplit(origin["url"])
        if url.scheme == "file":
            return f'pip install "{url2pathname(url.path)}[{extra}]"'
    return f'pip install "outrider[{extra}]"'
