"""The tokenizers that the runtime asks of an app."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class TextTokenizer(Protocol):
    """Text to tokens and back."""

    @property
    def prefix(self) -> Sequence[int]:
        """The special tokens that every text begins with."""

    def encode(self, text: str) -> list[int]:
        """The token ids of a text that continues another: no prefix is added. Special tokens are recognised."""

    @property
    def chat_template(self) -> str:
        """The template that messages are laid out with; empty if there is none."""

    def encode_prompt(
        self,
        prompt: str | Sequence[Mapping[str, Any]] | Sequence[int],
        *,
        chat_template: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        """The token ids of a prompt: text, chat messages, or token ids.

        tools: functions that messages may call. A request with `chat_template_kwargs` also gives `variables`, and one
        that continues a message `continuing=True`, which other tokenizers need not take.
        """

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, without special tokens."""


class ChatTokenizer(TextTokenizer, Protocol):
    """A tokenizer with a chat template."""

    has_chat_template: bool

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] = (), answering: bool = True
    ) -> str:
        """The text of chat messages. It ends where an answer begins, if `answering`. tools: as JSON schemas."""

    def encode_rendered(self, text: str) -> list[int]:
        """The token ids of a rendered text, from its beginning on."""
