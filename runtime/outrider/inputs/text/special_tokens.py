"""Contents of messages without special tokens: their texts are cut, so that the tokenizer reads them as text."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

# A noncharacter of Unicode. Where it stands alone, a text is cut before it is encoded; a text's own one is doubled.
_CUT = "\ufdd0"
_ALONE = re.compile(f"(?<!{_CUT}){_CUT}(?!{_CUT})")


def read_special_tokens(folder: Path) -> tuple[str, ...]:
    """The texts of a tokenizer's special tokens, which may be control tokens of a chat template.

    Raises:
        OSError, ValueError: when a file cannot be read.
    """
    found: set[str] = set()
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        if not (folder / name).is_file():
            continue
        content = json.loads((folder / name).read_text(encoding="utf-8"))
        decoder = content.get("added_tokens_decoder")
        added = [*(content.get("added_tokens") or ()), *(decoder.values() if isinstance(decoder, dict) else ())]
        found.update(str(token["content"]) for token in added if isinstance(token, dict) and token.get("special"))
        for key, value in content.items():
            if key.endswith("_token") and (text := text_of(value)) is not None:
                found.add(text)
    return tuple(sorted(text for text in found if len(text) > 1))


def text_of(token: Any) -> str | None:
    """The text of a token in one of these files, which have it as it is or in a table; None for something else."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def without_special(value: Any, special: Collection[str]) -> Any:
    """A JSON value in whose texts each special token is cut in two. Roles and types stay as they are."""
    pattern = re.compile("(?=(" + "|".join(map(re.escape, special)) + "))")
    return _cut(value, pattern)


def parts_of(text: str) -> list[str]:
    """The parts of a text that `without_special` has cut. Together they are what was given."""
    return [part.replace(2 * _CUT, _CUT) for part in _ALONE.split(text)]


def _cut(value: Any, pattern: re.Pattern[str]) -> Any:
    if isinstance(value, str):
        return _cut_text(value, pattern)
    if isinstance(value, list | tuple):
        return [_cut(each, pattern) for each in value]
    if isinstance(value, dict):
        return {
            _cut_text(key, pattern): each if key in ("role", "type") and isinstance(each, str) else _cut(each, pattern)
            for key, each in value.items()
        }
    return value


def _cut_text(text: str, pattern: re.Pattern[str]) -> str:
    """Every occurrence is cut after its first character, overlapping ones included."""
    text = text.replace(_CUT, 2 * _CUT)
    places = [found.start() + 1 for found in pattern.finditer(text)]
    return _CUT.join(text[begin:end] for begin, end in zip([0, *places], [*places, len(text)], strict=True))
