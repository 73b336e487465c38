"""llguidance's messages, as a part of ours."""

from __future__ import annotations

import re

_LONGEST = 160  # characters


def first_line(message: str) -> str:
    """The gist of a message: its first line without the position, and what a parser of regular expressions adds."""
    lines = [line.strip() for line in message.splitlines() if line.strip()] or ["it gives no reason"]
    told = re.sub(r"^at \d+\(\d+\): ", "", lines[0]).rstrip(":")
    added = next((line for line in lines[1:] if line.startswith("error: ")), "")
    return " ".join(filter(None, (told, added)))[:_LONGEST].rstrip(". ")
