"""The bytes that single tokens stand for, by a tokenizer's tokenizer.json."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

# How SentencePiece spells a byte, and a space.
BYTE_PIECE, SPACE = re.compile(r"<0x([0-9A-F]{2})>"), "\u2581"
# Byte-level pieces are spelled with these characters. Source: openai/gpt-2, `encoder.py: bytes_to_unicode`.
_PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTE_OF_CHARACTER = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + i): byte for i, byte in enumerate(_OTHERS)}


def read_token_bytes(folder: Path) -> dict[int, bytes]:
    """By token id, without special tokens; empty where the file is missing, or of a kind that is not known.

    Raises:
        OSError, ValueError: when it cannot be read.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = content.get("model", {}).get("vocab")
    if not isinstance(vocabulary, dict):
        return {}
    kinds = {*_types_of(content.get("decoder"))}
    if "ByteLevel" in kinds:
        table = BYTE_OF_CHARACTER
        return {i: bytes(map(table.__getitem__, text)) for text, i in vocabulary.items() if {*text} <= table.keys()}
    if "ByteFallback" in kinds:
        return {i: bytes_of_piece(text) for text, i in vocabulary.items()}
    return {}


def bytes_of_piece(text: str) -> bytes:
    """Of a piece in SentencePiece's spelling."""
    found = BYTE_PIECE.fullmatch(text)
    return bytes.fromhex(found[1]) if found else text.replace(SPACE, " ").encode("utf-8", "surrogatepass")


def _types_of(value: Any) -> list[str]:
    """The types of a decoder and of those in it."""
    if not isinstance(value, dict):
        return []
    return [str(value.get("type")), *(kind for each in value.get("decoders", ()) for kind in _types_of(each))]
