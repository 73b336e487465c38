"""A model's vocabulary, token string by token string, and whether two are the same.

    main, draft = Vocabulary.of_gguf(header), Vocabulary.of_folder(folder)
    check_same(main, draft, "Qwen2.5-7B", "Qwen2.5-0.5B")

Only real tokens count. Checkpoints and GGUF files pad their output matrices to round widths, GGUF files with entries
such as [PAD151665]; what is above the last real token is cut off, gaps below it are None.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outrider.bundle import vocabulary_sha256
from outrider.errors import ExportError, VocabularyMismatch
from outrider_export.gguf_tokenizer import CONTROL, UNKNOWN, check_tokenizer, is_padding

if TYPE_CHECKING:
    from pathlib import Path

    from outrider_export.gguf_file import GGUFHeader

_SHOWN = 3  # differing ids named in a message


@dataclass(frozen=True)
class Vocabulary:
    """Token strings in id order, byte-level pieces in their raw spelling ("Ġthe")."""

    tokens: tuple[str | None, ...]  # None: no token has this id
    special_token_ids: tuple[int, ...]

    @classmethod
    def of_gguf(cls, header: GGUFHeader) -> Vocabulary:
        """The vocabulary of a GGUF file.

        Raises:
            ExportError: if the tokenizer is one that cannot be rebuilt.
        """
        check_tokenizer(header)
        tokens, types = header.metadata["tokenizer.ggml.tokens"], header.metadata["tokenizer.ggml.token_type"]
        pairs = enumerate(zip(tokens, types, strict=True))
        real = {token_id: token for token_id, (token, kind) in pairs if not is_padding(token, kind, token_id)}
        special = [token_id for token_id in real if types[token_id] in (CONTROL, UNKNOWN)]
        return cls(_in_order(real), tuple(special))

    @classmethod
    def of_folder(cls, folder: Path) -> Vocabulary:
        """The vocabulary of a checkpoint folder, from its `tokenizer.json`.

        Raises:
            ExportError: if there is none, or it is not one.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ExportError(
                f"{folder} has no tokenizer.json. Save one with transformers: "
                "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)."
            )
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            model = content["model"]["vocab"]
            pieces = model.items() if isinstance(model, dict) else ((row[0], i) for i, row in enumerate(model))
            real = {int(token_id): str(token) for token, token_id in pieces}
            added: list[dict[str, Any]] = content.get("added_tokens") or []
            real |= {int(token["id"]): str(token["content"]) for token in added}
            special = sorted(int(token["id"]) for token in added if token["special"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ExportError(f"{path} is not a tokenizer that can be read: {error!r}.") from error
        return cls(_in_order(real), tuple(special))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def sha256(self) -> str:
        """The hash that a bundle's manifest holds; an id without a token counts as an empty string."""
        return vocabulary_sha256(token or "" for token in self.tokens)

    def find(self, token: str) -> int | None:
        """The id of a token string, if it is in the vocabulary."""
        try:
            return self.tokens.index(token)
        except ValueError:
            return None


def check_same(main: Vocabulary, draft: Vocabulary, main_name: str, draft_name: str) -> None:
    """Whether a draft model may propose tokens for a main model.

    Raises:
        VocabularyMismatch: naming the first ids that differ, with both strings.
    """
    if main.tokens == draft.tokens:
        return
    longest = max(len(main), len(draft))
    pairs = ((i, _at(main, i), _at(draft, i)) for i in range(longest))
    differing = [(i, a, b) for i, a, b in pairs if a != b]
    shown = "; ".join(f"{i}: {_show(a)} and {_show(b)}" for i, a, b in differing[:_SHOWN])
    raise VocabularyMismatch(
        f"{draft_name} cannot draft for {main_name}: of {longest:,} token ids {len(differing):,} differ, first "
        f"{shown}. Choose a draft model of the same family as the main model, or export without --draft."
    )


def _in_order(tokens: dict[int, str]) -> tuple[str | None, ...]:
    return tuple(tokens.get(i) for i in range(max(tokens, default=-1) + 1))


def _at(vocabulary: Vocabulary, token_id: int) -> str | None:
    return vocabulary.tokens[token_id] if token_id < len(vocabulary) else None


def _show(token: str | None) -> str:
    return "no token" if token is None else repr(token)
