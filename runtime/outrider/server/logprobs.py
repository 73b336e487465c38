"""Log-probabilities as OpenAI's API gives them: tokens by their text."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from outrider.server.protocol.responses import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob
from outrider.types import TextTokenizer, TokenLogprobs


class TokenTexts:
    """The texts of single tokens. Each is decoded once.

    A token that is part of a character decodes to U+FFFD, or to nothing, depending on the tokenizer.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def __getitem__(self, token_id: int) -> str:
        text = self._known.get(token_id)
        if text is None:
            text = self._known[token_id] = self._tokenizer.decode([token_id])
        return text


def chat_logprobs(tokens: Seq[TokenLogprobs], texts: TokenTexts) -> ChatLogprobs:
    """As /v1/chat/completions has them."""
    made = []
    for token in tokens:
        text = texts[token.token_id]
        top = [TopLogprob(texts[i], logprob, _bytes(texts[i])) for i, logprob in token.top]
        made.append(TokenLogprob(text, token.logprob, _bytes(text), top))
    return ChatLogprobs(made)


def completion_logprobs(tokens: Seq[TokenLogprobs], texts: TokenTexts, offset: int) -> CompletionLogprobs:
    """As /v1/completions has them. offset: characters before the first of the tokens."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(texts[token.token_id])
    top: list[dict[str, float]] = []
    for token in tokens:
        likely: dict[str, float] = {}
        for i, logprob in token.top:
            likely.setdefault(texts[i], logprob)  # the likelier of two with the same text
        top.append(likely)
    return CompletionLogprobs([texts[t.token_id] for t in tokens], [t.logprob for t in tokens], top, offsets)


def _bytes(text: str) -> list[int] | None:
    return None if not text or "\ufffd" in text else list(text.encode())
