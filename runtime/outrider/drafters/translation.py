"""Translates main tokens to a draft model's own tokens."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


def utf8_decoder() -> codecs.IncrementalDecoder:
    """A decoder that returns whole characters, and holds the bytes of an incomplete one. Skips what is not UTF-8."""
    return codecs.getincrementaldecoder("utf-8")("ignore")


@dataclass(frozen=True, eq=False)
class TokenMap:
    """Maps main tokens to draft tokens: by id if both vocabularies have the token, otherwise by its text.

    token_bytes: the bytes of each main token. encode: encodes a text that continues another to draft token ids.
    to_draft: int32 [main vocab], the draft id of the same bytes or −1. prefix: the draft ids that the draft model
    expects at the beginning of every text, instead of the main model's `bos_token_id`.
    """

    token_bytes: Sequence[bytes]
    encode: Callable[[str], list[int]]
    to_draft: NDArray[np.int32]
    prefix: Sequence[int] = ()
    bos_token_id: int | None = None


class Translation:
    """A growing sequence in draft tokens. Tokens that were translated do not change.

        translation = Translation(token_map)
        translation.extend(sequence.token_ids)
        translation.token_ids

    Tokens of both vocabularies are mapped one by one. Runs of other tokens are mapped through their text, in whole
    characters.
    """

    def __init__(self, token_map: TokenMap) -> None:
        self.token_ids = list(token_map.prefix)
        self.num_read = 0  # main tokens
        self._token_map = token_map
        self._characters = utf8_decoder()

    @property
    def is_complete(self) -> bool:
        """Whether the text is translated to its end: no incomplete character is held."""
        return not self._characters.getstate()[0]

    def read(self, token_ids: Sequence[int]) -> Sequence[int]:
        """The new tokens since the last call, without the `bos_token_id` that `prefix` replaces."""
        new = token_ids[self.num_read :]
        begins = not self.num_read and self._token_map.prefix and token_ids[0] == self._token_map.bos_token_id
        self.num_read = len(token_ids)
        return new[1:] if begins else new

    def extend(self, token_ids: Sequence[int]) -> None:
        """Translate the new committed tokens, in whole characters."""
        token_map, text = self._token_map, ""
        for token_id in self.read(token_ids):
            shared = int(token_map.to_draft[token_id])
            if shared >= 0 and self.is_complete:
                self._append(text)
                text = ""
                self.token_ids.append(shared)
            else:
                text += self._characters.decode(token_map.token_bytes[token_id])
        self._append(text)

    def extend_with_bytes(self, spelled: bytes) -> None:
        """Translate the bytes that follow, in whole characters."""
        self._append(self._characters.decode(spelled))

    def _append(self, text: str) -> None:
        if text:
            self.token_ids.extend(self._token_map.encode(text))
