"""Which part of an answer's text comes from which kind of token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from outrider.decoding.results import AnswerToken, Source, TextChunk
from outrider.inputs.text import TextStream


class Look(NamedTuple):
    """How the text of a kind of token is shown. mark: stands before it where there are no colours."""

    style: str
    mark: str
    meaning: str


# Told apart without colours, too, by weight and line.
LOOKS: dict[Source, Look] = {
    "accepted": Look("green", "»", "a draft token that the main model would have chosen"),
    "recovered": Look("underline yellow", "×", "the main model's token in place of a rejected draft token"),
    "bonus": Look("bold cyan", "±", "the main model's token after a completely accepted draft"),
    "plain": Look("default", "·", "the main model's token, without a draft"),
}


class Pieces:
    """Splits an answer's text among its tokens, as it comes.

        pieces = Pieces(tokenizer.decode)
        pieces.push(chunk)    # [(" sky", "accepted"), (" is", "recovered")]

    All pieces make the chunk's text. The bytes of a character may be several tokens': it is that of the last one.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._tokens = TextStream(decode)

    def push(self, chunk: TextChunk) -> list[tuple[str, Source]]:
        """The pieces of the next chunk. Tokens without text, such as the one that ends an answer, have none."""
        pieces: list[tuple[str, Source]] = []
        left = chunk.text
        for token in chunk.tokens:
            before = len(self._tokens.text)
            self._tokens.push([token.token_id])
            length = len(self._tokens.text) - before
            if piece := left[:length]:
                pieces.append((piece, token.source))
            left = left[length:]
        if left:  # an incomplete character, or the beginning of a token that a stop string ends
            last: Source = chunk.tokens[-1].source if chunk.tokens else "plain"
            pieces.append((left, pieces[-1][1] if pieces else last))
        return pieces


def count_sources(tokens: Iterable[AnswerToken]) -> dict[Source, int]:
    """How many tokens are of each kind."""
    counts = Counter(token.source for token in tokens)
    return {source: counts[source] for source in LOOKS}


def drafters_of(tokens: Iterable[AnswerToken]) -> dict[str, int]:
    """How many tokens each drafter had accepted, the most first. Those that drafted in vain are there, too."""
    counts: Counter[str] = Counter()
    for token in tokens:
        if token.drafter is not None:
            counts[token.drafter] += token.source == "accepted"
    return dict(counts.most_common())
