"""Log-probabilities as OpenAI's API gives them: tokens by their text."""

from __future__ import annotations

import codecs
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from outrider.errors import one_line
from outrider.inputs.text.special_tokens import read_special_tokens
from outrider.inputs.text.token_bytes import read_token_bytes
from outrider.inputs.tools import dropped_markers, keep_markers
from outrider.types import TextTokenizer, TokenLogprobs

log = logging.getLogger("outrider.server")


class TokenTexts:
    """The texts of single tokens. Each is decoded once.

    A token that is part of a character decodes to U+FFFD, or to nothing, depending on the tokenizer; the
    tokenizer's files in `folder` say what it stands for.
    """

    def __init__(self, tokenizer: TextTokenizer, folder: Path | None = None) -> None:
        self._tokenizer, self._folder = tokenizer, folder
        self._known: dict[int, str] = {}
        self._markers: dict[tuple[str, ...], dict[int, str]] = {}

    def __getitem__(self, token_id: int) -> str:
        text = self._known.get(token_id)
        if text is None:
            text = self._known[token_id] = self._tokenizer.decode([token_id])
        return text

    def markers(self, markers: tuple[str, ...]) -> dict[int, str]:
        """Those of the markers that are tokens without a text, by token id."""
        if markers not in self._markers:
            self._markers[markers] = dropped_markers(markers, self._tokenizer)
        return self._markers[markers]

    def text_of(self, token_ids: Sequence[int]) -> str:
        """The text of several tokens."""
        return self._tokenizer.decode(token_ids)

    def spelled(self, token_ids: Sequence[int]) -> str:
        """The text of several tokens, in which special tokens are spelled."""
        return keep_markers(self._special, self._tokenizer)(token_ids)

    @cached_property
    def _special(self) -> tuple[str, ...]:
        try:
            return () if self._folder is None else read_special_tokens(self._folder)
        except (OSError, ValueError) as error:
            log.warning("The special tokens are not known: %s.", one_line(error))
            return ()

    def bytes_of(self, token_id: int) -> list[int] | None:
        """A token's bytes; None for one that has no text."""
        text = self[token_id]
        if text and "\ufffd" not in text:
            return list(text.encode())
        return list(self._token_bytes.get(token_id, b"")) or None

    @cached_property
    def _token_bytes(self) -> dict[int, bytes]:
        try:
            return {} if self._folder is None else read_token_bytes(self._folder)
        except (OSError, ValueError) as error:
            log.warning("The bytes of tokens are not known: %s.", one_line(error))
            return {}


def chat_logprobs(tokens: Sequence[TokenLogprobs], texts: TokenTexts) -> list[dict[str, Any]]:
    """As /v1/chat/completions has them. bytes: of a token's text in UTF-8, also of one that is part of a character."""
    return [_of_token(token, texts, None) for token in tokens]


def _of_token(token: TokenLogprobs, texts: TokenTexts, without: list[int] | None) -> dict[str, Any]:
    """without: the bytes of tokens that have no text."""
    made, *top = [
        {"token": texts[i], "logprob": logprob, "bytes": texts.bytes_of(i) or without}
        for i, logprob in ((token.token_id, token.logprob), *token.top)
    ]
    return made | {"top_logprobs": top}


class LocatedLogprobs:
    """Log-probabilities of an answer's tokens, by the text that they make.

        located.read(chunk.text, chunk.logprobs)
        located.of("What is said ")                                  # after the reasoning, whose tokens are left out

    markers: texts of tokens that have none of their own, by token id. A token is of all text that it has a part of.
    """

    def __init__(self, texts: TokenTexts, markers: Mapping[int, str]) -> None:
        self._texts, self._markers = texts, markers
        self._text = ""
        self._at = 0  # where the last piece has ended in it
        self._tokens = deque[tuple[int, int, TokenLogprobs]]()  # not given out, with their begin and end
        self._end: int | None = None  # of the last token
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # tokens may be parts of a character

    def read(self, text: str, tokens: Sequence[TokenLogprobs]) -> None:
        """Add text, and its tokens."""
        self._text += text
        for token in tokens:
            marker = self._markers.get(token.token_id, "")
            made = marker.encode() or bytes(self._texts.bytes_of(token.token_id) or ())
            if self._end is None:  # some tokenizers leave out the blank before the first word
                self._end = -(made.startswith(b" ") and not self._text.startswith(" "))
            begin, self._end = self._end, self._end + len(self._decoder.decode(made))
            if made:
                self._tokens.append((begin, self._end, token))

    def of(self, piece: str) -> list[dict[str, Any]]:
        """Those of a piece of the text, which is somewhere after the pieces before it."""
        found = self._text.find(piece, self._at)
        if found < 0 or not piece:
            return []
        self._at = found + len(piece)
        made = []
        while self._tokens and self._tokens[0][0] < self._at:
            begin, end, token = self._tokens.popleft()
            if end > found or begin == found:
                made.append(_of_token(token, self._texts, []))
        return made


class TextOffsets:
    """Where tokens begin in the text that they make, in characters. Those of one character begin where it does."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts, self._end = texts, 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def of(self, token_id: int) -> int:
        """The next token's."""
        begin = self._end
        self._end += len(self._decoder.decode(bytes(self._texts.bytes_of(token_id) or ())))
        return begin


def completion_logprobs(
    tokens: Sequence[TokenLogprobs], texts: TokenTexts, offsets: TextOffsets, first: int | None = None
) -> dict[str, Any]:
    """As /v1/completions has them, in lists with one entry for each token. offsets: of the tokens before these.

    first: a token before these, which has no log-probability as nothing precedes it.
    """
    token_ids = [*([] if first is None else [first]), *(token.token_id for token in tokens)]
    logprobs: list[float | None] = [] if first is None else [None]
    top: list[dict[str, float] | None] = [] if first is None else [None]
    for token in tokens:
        likely: dict[str, float] = {}
        for i, logprob in token.top:
            likely.setdefault(texts[i], logprob)  # the likelier of two with the same text
        logprobs.append(token.logprob)
        top.append(likely)
    tokens_and_places = {"tokens": [texts[i] for i in token_ids], "text_offset": [offsets.of(i) for i in token_ids]}
    return tokens_and_places | {"token_logprobs": logprobs, "top_logprobs": top}
