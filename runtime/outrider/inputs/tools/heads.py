"""Patterns for the head of a call, up to its arguments: for all of it, and for any part that may become it."""

from __future__ import annotations

import re

_BLANK = [r"\s*"]


def head_in_json(opener: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Patterns for the head of a call in JSON: for all of it, whose group 1 is the name as JSON, and for any part.

    opener: what may come before the call. The bracket may be doubled, as Qwen2.5-Coder's template shows it.
    """
    name = [r'(?:[^"\\]|\\.)*\\?']
    first = [*_BLANK, f"(?:{re.escape(opener)})?", *_BLANK] if opener else _BLANK
    keys = "(?:arguments|parameters)"
    whole = rf'{"".join(first)}\{{{{1,2}}\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"{keys}"\s*:\s*(?=\{{)'
    parts = []
    for key in ("arguments", "parameters"):
        rest = [*first, r"\{{1,2}", *_BLANK, *'"name"', *_BLANK, ":", *_BLANK, '"', *name, '"']
        rest += [*_BLANK, ",", *_BLANK, *f'"{key}"', *_BLANK, ":", *_BLANK]
        parts.append(_part(rest))
    return re.compile(whole), re.compile("|".join(parts))


def head_by_name(
    before: str, after: str, *ahead: str, optional: bool = False
) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Patterns for a name between two texts, before one of those ahead: for all of it, and for any part.

    Group 1 is the name. Mistral's models may write "[CALL_ID]…" after it. optional: the text after may be missing.
    """
    name, call_id = r"[^\s<>\[\]{}]+", [*map(re.escape, "[CALL_ID]"), r"[^\[\]]*"]
    ends, mark = "|".join(map(re.escape, ahead)), "?" if optional else ""
    whole = rf"\s*{re.escape(before)}({name})(?:{''.join(call_id)})?\s*(?:{re.escape(after)}){mark}\s*(?={ends})"
    head = [*_BLANK, *map(re.escape, before), name]
    parts = [
        _part([*head, *middle, *_BLANK, *map(re.escape, after), *_BLANK, *map(re.escape, end)])
        for end in ahead
        for middle in ([], call_id)
    ]
    return re.compile(whole), re.compile("|".join(parts))


def _part(atoms: list[str]) -> str:
    """A pattern for any beginning of what these match one after the other."""
    part = ""
    for atom in reversed(atoms):
        part = f"(?:{atom}{part})?"
    return part
