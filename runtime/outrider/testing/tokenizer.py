"""A tokenizer that needs no files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

TOY_ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789 .é\0"


class ToyTokenizer:
    """A tokenizer for `tokens`, by default the characters of `TOY_ALPHABET` in id order.

    "é" has two bytes, and "\\0" ends an answer. A text is encoded from left to right, with the longest token that fits.
    Other text is an error, or is skipped if `tokens` are given. chat: has a chat template, "u hello\\0a " for a user's
    message and the beginning of an answer.
    """

    chat_template = ""
    eos_token_id = len(TOY_ALPHABET) - 1
    prefix = ()

    def __init__(self, tokens: Sequence[bytes] | None = None, *, chat: bool = False) -> None:
        self.has_chat_template = chat
        self._strict = tokens is None
        self._tokens = toy_tokens() if tokens is None else list(tokens)
        self._longest_first = sorted(range(len(self._tokens)), key=lambda i: -len(self._tokens[i]))

    def encode_prompt(
        self,
        prompt: str | Sequence[Mapping[str, Any]] | Sequence[int],
        *,
        chat_template: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        continuing: bool = False,
    ) -> list[int]:
        """Token ids of a text or, with a chat template, of messages; other prompts must be token ids already."""
        items: Any = prompt
        if isinstance(prompt, str):
            if not (chat_template and self.has_chat_template):
                return self.encode(prompt)
            items = [{"role": "user", "content": prompt}]
        items = list(items)
        if self.has_chat_template and items and isinstance(items[0], Mapping):
            return self.encode_rendered(self.render(items, tools=tools, variables=variables, continuing=continuing))
        return [int(item) for item in items]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        answering: bool = True,
        variables: Mapping[str, Any] | None = None,  # noqa: ARG002 - this template has none
        continuing: bool = False,
    ) -> str:
        """The text of messages: of each the first letter of its role, its content, and the end token."""
        described = [{"role": "t", "content": tool.get("function", tool)["name"]} for tool in tools]
        text = "".join(f"{each['role'][0]} {each['content']}\0" for each in (*described, *messages))
        if continuing:
            return text.removesuffix("\0")
        return text + "a " if answering else text

    def encode_rendered(self, text: str) -> list[int]:
        """Token ids of a rendered text."""
        return self.encode(text)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        left, token_ids = text.encode(), []
        while left:
            fitting = (i for i in self._longest_first if self._tokens[i] and left.startswith(self._tokens[i]))
            if (token_id := next(fitting, None)) is not None:
                token_ids.append(token_id)
            elif self._strict:
                raise ValueError(f"{text!r} is not in the toy alphabet")
            left = left[1 if token_id is None else len(self._tokens[token_id]) :]
        return token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, without the end token."""
        return b"".join(self._tokens[i] for i in token_ids).decode(errors="replace").replace("\0", "")


def toy_tokens() -> list[bytes]:
    """The tokens of `TOY_ALPHABET`, as bytes."""
    return [character.encode() for character in TOY_ALPHABET]
