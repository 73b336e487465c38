"""Grammars as llama.cpp writes them, in GBNF, made into Lark's."""

from __future__ import annotations

import re
from functools import lru_cache

_RULE = re.compile(r"^[ \t]*root[ \t]*::=", re.MULTILINE)
_MOST_CHARACTERS = 20_000  # which take up to 0.2 seconds: reading them is quadratic in the number of rules
_HEADER = "%llguidance {}\n"  # which changes nothing


@lru_cache(32)
def lark_of(grammar: str) -> str:
    """A grammar in Lark's form. One that is not GBNF, or cannot be read, is given back as it is, to be refused."""
    if len(grammar) > _MOST_CHARACTERS or not _RULE.search(grammar):
        return grammar
    try:
        from llguidance.gbnf_to_lark import gbnf_to_lark
    except ImportError:  # compiling it says what is missing
        return grammar
    try:
        return gbnf_to_lark(grammar).removeprefix(_HEADER).strip()
    except (Exception, RecursionError):  # its own errors, and others for odd texts
        return grammar
