"""The texts of single tokens, where a tokenizer's text is made of these: then no detokenizer is called."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# The layers of a detokenizer that joins its tokens' bytes, and does nothing else.
_JOINS = {"Parameter", "Const", "Convert", "VocabDecoder", "FuzeRagged", "UTF8Validate", "StringTensorPack", "Result"}
_MAX_NEW_TOKENS = 8  # of one text: more of them are not decoded one by one


class JoinableTexts(dict[int, str]):
    """By token its text; empty for special tokens, and for bytes that are no text alone.

        texts = JoinableTexts(tokenizer) if joins_bytes(folder) else None
        texts.join([12, 7, 901])    # None: call the detokenizer

    Where bytes are joined, so are texts without U+FFFD. That takes microseconds, and a detokenizer's call a hundred.
    tokenizer: openvino-genai's.
    """

    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def join(self, token_ids: Sequence[int]) -> str | None:
        """The text of tokens, if all of them are text alone, and nearly all were met before."""
        if [*map(self.get, token_ids)].count(None) > _MAX_NEW_TOKENS:
            return None
        texts = [*map(self.__getitem__, token_ids)]
        return "".join(texts) if all(texts) else None

    def __missing__(self, token_id: int) -> str:
        text: str = self._tokenizer.decode([token_id])
        self[token_id] = text = "" if "\ufffd" in text else text
        return text


def joins_bytes(folder: Path) -> bool:
    """Whether a folder's detokenizer joins the bytes of tokens, and writes U+FFFD for those that are no text."""
    graph = (folder / "openvino_detokenizer.xml").read_text(encoding="utf-8")
    return {*re.findall(r'<layer [^>]*type="([^"]*)"', graph)} <= _JOINS and 'replace_mode="true"' in graph
