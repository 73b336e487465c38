"""A tokenizer that needs no files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Sequence as Seq

TOY_ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789 .é\0"


class ToyTokenizer:
    """A tokenizer for `tokens`, by default the characters of `TOY_ALPHABET` in id order.

    "é" has two bytes, and "\\0" ends an answer. A text is encoded from left to right, with the longest token that fits.
    Other text is an error, or is skipped if `tokens` are given.
    """

    has_chat_template = False
    eos_token_id = len(TOY_ALPHABET) - 1
    prefix = ()

    def __init__(self, tokens: Seq[bytes] | None = None) -> None:
        self._strict = tokens is None
        self._tokens = toy_tokens() if tokens is None else list(tokens)
        self._longest_first = sorted(range(len(self._tokens)), key=lambda i: -len(self._tokens[i]))

    def encode_prompt(
        self,
        prompt: str | Seq[Mapping[str, Any]] | Seq[int],
        *,
        chat_template: bool = True,  # noqa: ARG002
    ) -> list[int]:
        """Token ids of a text; other prompts must be token ids already."""
        items: Any = self.encode(prompt) if isinstance(prompt, str) else prompt
        return [int(item) for item in items]

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

    def decode(self, token_ids: Seq[int]) -> str:
        """The text of tokens, without the end token."""
        return b"".join(self._tokens[i] for i in token_ids).decode(errors="replace").replace("\0", "")


def toy_tokens() -> list[bytes]:
    """The tokens of `TOY_ALPHABET`, as bytes."""
    return [character.encode() for character in TOY_ALPHABET]
