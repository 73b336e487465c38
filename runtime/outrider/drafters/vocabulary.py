"""Converts between a draft model's tokens and the main model's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.bundle.folder import Bundle
from outrider.bundle.manifest import DrafterEntry
from outrider.drafters.draft_state import DraftState
from outrider.drafters.translation import TokenMap, Translation, utf8_decoder
from outrider.tokens.sampling import argmax, probability
from outrider.types import (
    Committed,
    Draft,
    DraftRequest,
    ListedLogits,
    Logits,
    LogitsRow,
    Slot,
    TextTokenizer,
    TokenSequence,
)


class DraftVocabulary:
    """The same vocabulary for draft and main model."""

    def room(self, max_tokens: int) -> int:
        """Draft tokens of room for a sequence of up to `max_tokens` main tokens."""
        return max_tokens

    def context(self, token_ids: Sequence[int]) -> Sequence[int]:
        """A prompt in the draft model's tokens."""
        return token_ids

    def new_state(self, slot: Slot, room: int) -> DraftState:
        """The state of one sequence."""
        return DraftState(slot, room)


class Subset:
    """The draft tokens that a model with a cut output matrix can propose.

        Subset(token_ids, vocab_size).widen(logits)

    token_ids: int32 [n], the draft id of each logit. A token without a logit has probability 0 in draft_probs, so every
    mode stays lossless, for the same vocabulary or another.

    Source: Zhao et al. 2025, "FR-Spec: accelerating large-vocabulary language models via frequency-ranked speculative
    sampling".
    """

    def __init__(self, token_ids: NDArray[np.int32], vocab_size: int) -> None:
        self.token_ids = token_ids.astype(np.int64)
        self._row = np.full(vocab_size, -np.inf, dtype=np.float32)  # every call writes the same elements

    def widen(self, logits: Logits) -> Logits:
        """A row float32 [n] as float32 [vocab_size], −inf for tokens without a logit. Valid until the next call."""
        self._row[self.token_ids] = logits
        return self._row

    def row(self, row: LogitsRow) -> LogitsRow:
        """The model's row as a row over all draft ids, which lists the tokens with a logit."""
        listed = ListedLogits(self.token_ids, row.full())
        return LogitsRow(lambda: self.widen(row.full()), listed)


class _Other(DraftVocabulary):
    def room(self, max_tokens: int) -> int:
        """A quarter more, which is usually enough for the same text.

        SmolLM2's vocabulary, a third as large as Qwen2.5's, takes up to 15 % more on English and code. If the room is
        not enough, nothing is drafted towards the end.
        """
        return max_tokens + max_tokens // 4 + 32


class Intersection(_Other):
    """The draft model proposes only tokens that the main model has, too.

        Intersection(to_main, token_map)

    Its logits are mapped to main ids. Main tokens that it does not have get −inf. Processors and verifier work as
    usual: draft_probs are a distribution over main ids, so every mode stays lossless.

    to_main: int32 [draft vocab], the main id of the same token or −1. token_map: for the context.

    Source: Timor et al. 2025, "Accelerating LLM inference with lossless speculative decoding algorithms for
    heterogeneous vocabularies", algorithm 4 (token-level intersection); Transformers'
    `UniversalSpeculativeDecodingGenerator`.
    """

    def __init__(self, to_main: NDArray[np.int32], token_map: TokenMap) -> None:
        self.token_map = token_map
        self._draft_ids = np.flatnonzero(to_main >= 0)
        self._main_ids = to_main[self._draft_ids]

    def context(self, token_ids: Sequence[int]) -> Sequence[int]:
        """A prompt in the draft model's tokens."""
        translation = Translation(self.token_map)
        translation.extend(token_ids)
        return translation.token_ids

    def new_state(self, slot: Slot, room: int) -> DraftState:
        """The state of one sequence."""
        return _IntersectionState(slot, room, self)

    def to_main(self, logits: Logits) -> Logits:
        """Map a row, float32 [draft vocab], to main ids, float32 [main vocab]."""
        row = np.full(len(self.token_map.to_draft), -np.inf, dtype=np.float32)
        row[self._main_ids] = logits[self._draft_ids]
        return row


class Text(_Other):
    """The draft model drafts in its own tokens. Their text is encoded to main tokens and proposed.

    It takes the likeliest tokens, independently of the request's noise, so a draft without draft_probs is lossless in
    every mode.

    token_bytes: the bytes of each draft token. special_token_ids: the draft model's; a draft ends at one. encode:
    encodes a text that continues another to main token ids. token_map: for the context.

    Source: Transformers' `AssistedCandidateGeneratorDifferentTokenizers`; Timor et al. 2025, algorithm 2.
    """

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        special_token_ids: Sequence[int],
        encode: Callable[[str], list[int]],
        token_map: TokenMap,
    ) -> None:
        self.token_bytes = token_bytes
        self.special_token_ids = frozenset(special_token_ids)
        self.encode = encode
        self.token_map = token_map

    def context(self, token_ids: Sequence[int]) -> Sequence[int]:
        """A prompt in the draft model's tokens."""
        translation = Translation(self.token_map)
        translation.extend_with_bytes(b"".join(self.token_map.token_bytes[i] for i in translation.read(token_ids)))
        return translation.token_ids

    def new_state(self, slot: Slot, room: int) -> DraftState:
        """The state of one sequence."""
        return _TextState(slot, room, self)


def load_vocabulary(
    bundle: Bundle, drafter: DrafterEntry, main: TextTokenizer, draft: TextTokenizer
) -> DraftVocabulary:
    """The conversion for a drafter of the bundle whose vocabulary is not the main model's.

    main, draft: the tokenizers of both.

    Raises:
        BundleError: when a file that it needs is damaged.
    """
    manifest, num_main = bundle.manifest, bundle.manifest.main.vocab_size
    main_bytes = bundle.read_token_bytes(manifest.tokenizer, num_main)
    to_draft = np.full(num_main, -1, dtype=np.int32)
    token_map = TokenMap(main_bytes, draft.encode, to_draft, draft.prefix, manifest.tokenizer.bos_token_id)
    if drafter.vocabulary == "intersection":
        to_main = bundle.read_map(drafter)
        shared = np.flatnonzero(to_main >= 0)
        to_draft[to_main[shared]] = shared
        return Intersection(to_main, token_map)
    if drafter.tokenizer is None:
        raise AssertionError("`read_bundle` checks this")
    token_bytes = bundle.read_token_bytes(drafter.tokenizer, drafter.model.vocab_size)
    return Text(token_bytes, drafter.tokenizer.special_token_ids, main.encode, token_map)


class _Translated(DraftState):
    """A state whose context is translated to the draft model's tokens."""

    can_draft_ahead = False  # committed tokens may be translated to other tokens than those drafted ahead

    def __init__(self, slot: Slot, room: int, token_map: TokenMap) -> None:
        super().__init__(slot, room)
        self._translation = Translation(token_map)

    def begin(self, request: DraftRequest) -> bool:
        return super().begin(request) and self._translation.is_complete


class _IntersectionState(_Translated):
    def __init__(self, slot: Slot, room: int, vocabulary: Intersection) -> None:
        super().__init__(slot, room, vocabulary.token_map)
        self._vocabulary = vocabulary

    def context(self, sequence: TokenSequence) -> list[int]:
        self._translation.extend(sequence.token_ids)
        return self._translation.token_ids

    def choose(self, latest: LogitsRow) -> None:
        super().choose(LogitsRow.of(self._vocabulary.to_main(latest.full())))
        self.unread = [int(self._vocabulary.token_map.to_draft[i]) for i in self.unread]


class _TextState(_Translated):
    def __init__(self, slot: Slot, room: int, vocabulary: Text) -> None:
        super().__init__(slot, room, vocabulary.token_map)
        self._vocabulary = vocabulary
        self._own: list[int] = []  # this round's draft, in draft ids

    def context(self, sequence: TokenSequence) -> list[int]:
        """Take the drafted tokens as far as they spell the committed text, and translate the rest."""
        translation, token_bytes = self._translation, self._vocabulary.token_map.token_bytes
        spelled = b"".join(token_bytes[i] for i in translation.read(sequence.token_ids))
        own, spelled = self._spelling(spelled) if translation.is_complete else ([], spelled)
        translation.token_ids.extend(own)
        if self._own:
            self.slot.trim(len(translation.token_ids))
        translation.extend_with_bytes(spelled)
        self._own = []
        return translation.token_ids

    def _spelling(self, spelled: bytes) -> tuple[list[int], bytes]:
        """The drafted tokens that spell a beginning of `spelled`, in whole characters, and the rest of `spelled`."""
        characters, num_tokens, begin, end = utf8_decoder(), 0, 0, 0
        for i, token_id in enumerate(self._own, 1):
            own = self._vocabulary.token_bytes[token_id]
            if not spelled.startswith(own, end):
                break
            end += len(own)
            characters.decode(own)
            if not characters.getstate()[0]:
                num_tokens, begin = i, end
        return self._own[:num_tokens], spelled[begin:]

    def choose(self, latest: LogitsRow) -> None:
        self._own.append(argmax(latest))
        if self.request.rule:
            self._confidences.append(probability(latest, self._own[-1]))
        self.unread = self._own[-1:]

    @property
    def wants_more(self) -> bool:
        own = self._own
        unfinished = 0 < len(own) < self.request.limit and own[-1] not in self._vocabulary.special_token_ids
        return unfinished and self._may_go_on

    @property
    def draft(self) -> Draft:
        request, vocabulary, own = self.request, self._vocabulary, self._own
        ended = bool(own) and own[-1] in vocabulary.special_token_ids
        token_ids = self._to_main(own[:-1] if ended else own)
        # A special token that the main model lacks would be encoded as its text.
        if ended and len(end := self._to_main(own[-1:])) == 1:
            token_ids += end
        stop = next((i for i, token_id in enumerate(token_ids, 1) if token_id in request.eos_token_ids), request.limit)
        return Draft(token_ids[: min(stop, request.limit)])

    def _to_main(self, token_ids: Sequence[int]) -> list[int]:
        text = utf8_decoder().decode(b"".join(self._vocabulary.token_bytes[i] for i in token_ids))
        return self._vocabulary.encode(text) if text else []

    def observe(self, sequence: TokenSequence, committed: Committed) -> None:
        """Do nothing: `context` compares the draft with the committed text."""
