"""A model's vocabulary, token string by token string.

Padding is left out. Checkpoints and GGUF files pad their output matrices to round widths, GGUF files with entries such
as [PAD151665]. Ids above the last real token are cut off. Gaps below it are None.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.bundle.hashes import vocabulary_sha256
from outrider.errors import ExportError
from outrider.inputs.text.token_bytes import BYTE_OF_CHARACTER, bytes_of_piece
from outrider.system.files import FAULTS, why
from outrider_export.sources.gguf_file import GGUFHeader
from outrider_export.tokenizers.gguf_tokenizer import (
    CONTROL,
    UNKNOWN,
    USER_DEFINED,
    check_tokenizer,
    is_padding,
    is_sentencepiece,
)
from outrider_export.tokenizers.marian_tokenizer import is_marian, tokenizer_of

_MOST_GAPS = 1000  # ids without a token, beside as many as there are tokens


@dataclass(frozen=True)
class Vocabulary:
    """Token strings in id order, byte-level pieces in their raw spelling ("Ġthe")."""

    tokens: tuple[str | None, ...]  # None: no token has this id
    special_token_ids: tuple[int, ...]
    added_token_ids: frozenset[int] = frozenset()  # added tokens, whose strings are plain text
    spelling: str = "text"  # of the others: "byte level", "sentencepiece", or plain "text"

    @classmethod
    def of_gguf(cls, header: GGUFHeader) -> Vocabulary:
        """The vocabulary of a GGUF file.

        Raises:
            ExportError: if the tokenizer is one that cannot be rebuilt.
        """
        check_tokenizer(header)
        tokens, types = header.texts("tokenizer.ggml.tokens"), header.integers("tokenizer.ggml.token_type")
        pairs = enumerate(zip(tokens, types, strict=True))
        real = {token_id: token for token_id, (token, kind) in pairs if not is_padding(token, kind, token_id)}
        special = [token_id for token_id in real if types[token_id] in (CONTROL, UNKNOWN)]
        added = frozenset(token_id for token_id in real if types[token_id] in (CONTROL, UNKNOWN, USER_DEFINED))
        return cls(
            _in_order(real), tuple(special), added, "sentencepiece" if is_sentencepiece(header) else "byte level"
        )

    @classmethod
    def of_folder(cls, folder: Path) -> Vocabulary:
        """The vocabulary of a checkpoint folder, from its `tokenizer.json` or MarianMT's files.

        Raises:
            ExportError: if it is missing or damaged.
        """
        path = folder / "tokenizer.json"
        is_built = is_marian(folder)
        if not is_built and not path.is_file():
            raise ExportError(
                f"{folder} has no tokenizer.json. Save one with transformers: "
                "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)."
            )
        try:
            content = tokenizer_of(folder) if is_built else json.loads(path.read_text(encoding="utf-8"))
            model = content["model"]["vocab"]
            pieces = model.items() if isinstance(model, dict) else ((row[0], i) for i, row in enumerate(model))
            real = {int(token_id): str(token) for token, token_id in pieces}
            added: list[dict[str, Any]] = content.get("added_tokens") or []
            real |= {int(token["id"]): str(token["content"]) for token in added}
            special = sorted(int(token["id"]) for token in added if token["special"])
            spelling = _spelling(content)
            if not all(0 <= token_id < 2 * len(real) + _MOST_GAPS for token_id in real):  # they are filled below
                raise ValueError(f"its {len(real):,} tokens have ids from {min(real):,} to {max(real):,}")
        except (*FAULTS, AttributeError, LookupError, TypeError) as error:
            raise ExportError(
                f"{path} is not a tokenizer that can be read: {why(error)}. Download the checkpoint again."
            ) from error
        return cls(_in_order(real), tuple(special), frozenset(int(token["id"]) for token in added), spelling)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def sha256(self) -> str:
        """The hash that a bundle's manifest holds; an id without a token counts as an empty string."""
        return vocabulary_sha256(token or "" for token in self.tokens)

    @property
    def token_bytes(self) -> list[bytes]:
        """The bytes of each token id; none for a gap."""
        spell = {"byte level": _of_byte_level, "sentencepiece": bytes_of_piece, "text": _of_text}[self.spelling]
        return [
            (_of_text if token_id in self.added_token_ids else spell)(token or "")
            for token_id, token in enumerate(self.tokens)
        ]

    def find(self, token: str) -> int | None:
        """The id of a token string, if it is in the vocabulary."""
        try:
            return self.tokens.index(token)
        except ValueError:
            return None


def _in_order(tokens: dict[int, str]) -> tuple[str | None, ...]:
    return tuple(tokens.get(i) for i in range(max(tokens, default=-1) + 1))


def _spelling(tokenizer: dict[str, Any]) -> str:
    """The spelling of a `tokenizer.json`'s pieces, from its decoder."""
    decoder = tokenizer.get("decoder") or {}
    steps = {step["type"]: step for step in decoder.get("decoders", [decoder]) if step}
    if "ByteLevel" in steps:
        return "byte level"
    if "Metaspace" in steps or "ByteFallback" in steps or steps.get("Replace", {}).get("content") == " ":
        return "sentencepiece"
    return "text"


def _of_byte_level(token: str) -> bytes:
    try:
        return bytes([BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:  # it is listed among the pieces, but is not byte-level
        return _of_text(token)


def _of_text(token: str) -> bytes:
    return token.encode("utf-8", "surrogatepass")
