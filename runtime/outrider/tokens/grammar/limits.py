"""Limits of a grammar: of its size, its time and its memory, and which grammars need no trial within these.

llguidance itself limits the steps of its lexer and the size of what it makes; neither bounds its time or its memory. It
compiles recursively, so that what leads too deep ends the process: that of the trial. A cheap grammar has no room for
so many levels.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

# llguidance's own limits, half of which no usual schema reaches
MAX_LEXER_STATES = 100_000  # of one answer, of 0.1 to 2 kB each
STEP_LEXER_FUEL = 50_000  # of one mask
MOST_CHARACTERS = 500_000  # which take up to some seconds; tens of seconds more


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """What one grammar may take.

    compile_seconds: of processor time, to compile it and compute its first masks. compile_memory: bytes for that.
    mask_seconds: for one mask, which is the tokens that may follow: other answers wait for it. answer_seconds: for all
    masks of an answer.
    """

    compile_seconds: float = 10.0
    compile_memory: int = 128 << 20
    mask_seconds: float = 0.25
    answer_seconds: float = 30.0


def check_length(num_characters: int) -> None:
    """Raise ValueError for a grammar that is longer than `MOST_CHARACTERS`."""
    if num_characters > MOST_CHARACTERS:
        raise ValueError(f"it has {num_characters:,} characters, and {MOST_CHARACTERS:,} can be followed")


_CHEAP_COPIES = 2_000  # of a part that counts repeat, one of them within another
_COUNT = re.compile(r"\{\s*(\d*)\s*(?:,\s*(\d*)\s*)?\}")


def is_cheap(text: str, most_characters: int, dear: re.Pattern[str]) -> bool:
    """Whether a grammar is certain, from its text alone, to compile at once and in little memory.

    It is short, and repeats and intersects little. Measured with 49,152 tokens: it takes at most some tens of
    milliseconds. Others are tried in a process of their own first.
    """
    if len(text) > most_characters or dear.search(text):
        return False
    counts = (digits.lstrip("0")[:9] for found in _COUNT.finditer(text) for digits in found.groups(""))
    return math.prod(int(count or 1) for count in counts) <= _CHEAP_COPIES
