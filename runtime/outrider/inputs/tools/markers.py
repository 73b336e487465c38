"""Keeps markers of calls and reasoning in decoded texts, where they are special tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence

from outrider.types import TextTokenizer


def dropped_markers(markers: Iterable[str], tokenizer: TextTokenizer) -> dict[int, str]:
    """The markers that are special tokens, which the tokenizer's `decode` leaves out, by token id."""
    found = {token_of(marker, tokenizer): marker for marker in markers}
    return {token: marker for token, marker in found.items() if token is not None and not tokenizer.decode([token])}


def keep_markers(markers: Iterable[str], tokenizer: TextTokenizer) -> Callable[[Sequence[int]], str]:
    """The tokenizer's `decode`; if it leaves out the token of a marker, one that does not."""
    dropped = dropped_markers(markers, tokenizer)
    if not dropped:
        return tokenizer.decode

    def decode(token_ids: Sequence[int]) -> str:
        text, begin = "", 0
        for i, token_id in enumerate(token_ids):
            if token_id in dropped:
                text += tokenizer.decode(token_ids[begin:i]) + dropped[token_id]
                begin = i + 1
        return text + tokenizer.decode(token_ids[begin:])

    return decode


def token_of(marker: str, tokenizer: TextTokenizer) -> int | None:
    """The token that stands for a marker; None if it is written in several."""
    token_ids = tokenizer.encode(marker)
    return token_ids[0] if len(token_ids) == 1 else None


def literal(text: str) -> str:
    """A text in a Lark grammar; nothing for no text."""
    return json.dumps(text) if text else ""


def marker_in_lark(marker: str, tokenizer: TextTokenizer) -> str:
    """A marker in a Lark grammar: its token, if it has one of its own, which no text can spell.

    One that consists of tags and text, such as "<|channel|>commentary to=", has the tags' tokens.
    """
    token_id = token_of(marker, tokenizer) if marker else None
    if token_id is not None:
        return f"<[{token_id}]>"
    parts = _tags_of(marker)
    return literal(marker) if len(parts) < 2 else tags_in_lark(marker, tokenizer)


def tags_in_lark(text: str, tokenizer: TextTokenizer) -> str:
    """A text in a Lark grammar, in which each <tag> is a marker."""
    made, plain = list[str](), ""
    for part in _tags_of(text):
        token_id = token_of(part, tokenizer) if part[0] == "<" else None
        if token_id is None:
            plain += part
            continue
        made += [*filter(None, [literal(plain)]), f"<[{token_id}]>"]
        plain = ""
    return " ".join([*made, *filter(None, [literal(plain)])])


def _tags_of(text: str) -> list[str]:
    return [*filter(None, re.split("(<[^<>]*>)", text))]


def in_regex(text: str) -> str:
    """A text in a regular expression of a Lark grammar."""
    return re.escape(text).replace("/", r"\/")
