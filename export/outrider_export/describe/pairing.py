"""Compares two vocabularies, and chooses how a draft model's tokens become main tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from outrider.bundle.manifest import BYTES_NAME, MAP_NAME
from outrider.errors import VocabularyMismatch
from outrider.inputs.text.token_bytes import BYTE_PIECE
from outrider_export.describe.plan import Plan
from outrider_export.progress import Progress
from outrider_export.tokenizers.vocabulary import Vocabulary

# From this share of the main model's tokens on, the intersection is used.
# Measured with drafts of 3, six prompts, tokens per round greedy / coupled / rejection:
# SmolLM2-135M for Qwen2.5-Coder-1.5B has 26 % of its tokens (few of those that indent code): intersection
# 2.13/2.01/2.14, text 2.30/2.11/2.21. Qwen2.5-Coder-0.5B for SmolLM2 has 80 %: 2.12/1.99/1.98 and 2.14/1.87/1.77.
MOST = 0.5


@dataclass(frozen=True, eq=False)
class Pairing:
    """How a draft model proposes tokens to a main model; see `outrider.bundle.DrafterEntry`.

    to_main: int32 [draft vocab], the main id of the same token, or −1.
    """

    main: Vocabulary
    draft: Vocabulary
    vocabulary: Literal["same", "intersection", "text"]
    to_main: NDArray[np.int32]

    @classmethod
    def same(cls, vocabulary: Vocabulary) -> Pairing:
        """Of two models with one vocabulary."""
        return cls(vocabulary, vocabulary, "same", np.arange(len(vocabulary), dtype=np.int32))

    @property
    def num_shared_tokens(self) -> int:
        """Draft tokens that the main model has, too."""
        return int((self.to_main >= 0).sum())

    def write(self, main_tokenizer: Path, model: Path, tokenizer: Path) -> None:
        """Write the files for the runtime to the folders of main tokenizer, draft model and draft tokenizer."""
        _write_bytes(main_tokenizer / BYTES_NAME, self.main)
        if self.vocabulary == "intersection":
            np.save(model / MAP_NAME, self.to_main)
        else:
            _write_bytes(tokenizer / BYTES_NAME, self.draft)


def pair_vocabularies(main: Plan, draft: Plan, progress: Progress) -> Pairing:
    """Compare two vocabularies and choose the conversion. Notes the choice if they differ.

    Raises:
        VocabularyMismatch: if they have no token in common.
    """
    if main.vocabulary.tokens == draft.vocabulary.tokens:
        return Pairing.same(main.vocabulary)
    to_main = map_tokens(main.vocabulary, draft.vocabulary)
    num_shared = int((to_main >= 0).sum())
    if not num_shared:
        raise VocabularyMismatch(
            f"{draft.source.id} cannot draft for {main.source.id}: none of its {len(to_main):,} tokens is one of the "
            f"main model's {len(main.vocabulary):,}. Choose another draft model, or export without --draft."
        )
    share = num_shared / len(main.vocabulary)
    way: Literal["intersection", "text"] = "intersection" if share >= MOST else "text"
    what = {"intersection": "it proposes only these", "text": "its text is tokenized again for the main model"}[way]
    progress.note(f"{draft.source.id} has {share:.1%} of {main.source.id}'s tokens: {what} ({way}).")
    return Pairing(main.vocabulary, draft.vocabulary, way, to_main)


def map_tokens(main: Vocabulary, draft: Vocabulary) -> NDArray[np.int32]:
    """int32 [draft vocab]: the main id of the same token, or −1. No main id appears twice.

    Tokens are the same if they have the same bytes; special tokens if they have the same name.
    """
    to_main = np.full(len(draft), -1, dtype=np.int32)
    main_ids = _by_bytes(main)
    for key, token_id in _by_bytes(draft).items():
        to_main[token_id] = main_ids.get(key, -1)
    return to_main


def _by_bytes(vocabulary: Vocabulary) -> dict[tuple[bool, bytes], int]:
    """Token ids by (is special, bytes). Among equal tokens, a piece wins over a byte token, then the first."""
    special, token_bytes = set(vocabulary.special_token_ids), vocabulary.token_bytes
    is_byte = [bool(BYTE_PIECE.fullmatch(token or "")) for token in vocabulary.tokens]
    found: dict[tuple[bool, bytes], int] = {}
    for token_id in sorted(range(len(vocabulary)), key=is_byte.__getitem__):
        if token_bytes[token_id]:
            found.setdefault((token_id in special, token_bytes[token_id]), token_id)
    return found


def _write_bytes(path: Path, vocabulary: Vocabulary) -> None:
    path.write_bytes(msgspec.msgpack.encode(vocabulary.token_bytes))
