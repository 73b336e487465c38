"""Log-probabilities as OpenAI's API gives them: tokens by their text."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from outrider.errors import one_line
from outrider.inputs.text.special_tokens import read_special_tokens
from outrider.inputs.text.token_bytes import read_token_bytes
from outrider.inputs.tools import dropped_markers, keep_markers
from outrider.server.protocol.responses import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob
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


def chat_logprobs(tokens: Sequence[TokenLogprobs], texts: TokenTexts) -> ChatLogprobs:
    """As /v1/chat/completions has them."""
    made = []
    for token in tokens:
        top = [TopLogprob(texts[i], logprob, texts.bytes_of(i)) for i, logprob in token.top]
        made.append(TokenLogprob(texts[token.token_id], token.logprob, texts.bytes_of(token.token_id), top))
    return ChatLogprobs(made)


def completion_logprobs(
    tokens: Sequence[TokenLogprobs], texts: TokenTexts, offset: int, first: int | None = None
) -> CompletionLogprobs:
    """As /v1/completions has them. offset: characters before the first of the tokens.

    first: a token before these, which has no log-probability as nothing precedes it.
    """
    token_ids = [*([] if first is None else [first]), *(token.token_id for token in tokens)]
    offsets = []
    for token_id in token_ids:
        offsets.append(offset)
        offset += len(texts[token_id])
    logprobs: list[float | None] = [] if first is None else [None]
    top: list[dict[str, float] | None] = [] if first is None else [None]
    for token in tokens:
        likely: dict[str, float] = {}
        for i, logprob in token.top:
            likely.setdefault(texts[i], logprob)  # the likelier of two with the same text
        logprobs.append(token.logprob)
        top.append(likely)
    return CompletionLogprobs([texts[i] for i in token_ids], logprobs, top, offsets)
