"""Writes bodies and events as JSON."""

from __future__ import annotations

import re
from typing import Any

import msgspec

# Ends of lines to readers of streams in Python, JavaScript and Go that JSON may have as they are: U+0085, U+2028 and
# U+2029 in UTF-8. The other ones are control characters below U+0020, which JSON always escapes.
_LINE_ENDS = re.compile(rb"\xc2\x85|\xe2\x80[\xa8\xa9]")


def to_json(body: Any) -> bytes:
    """A body as JSON in one line, whatever characters its reader ends lines at."""
    return _LINE_ENDS.sub(lambda found: b"\\u%04x" % ord(found[0].decode()), msgspec.json.encode(body))
