"""Completions that fill in the middle of a text, for models that have tokens for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outrider.inputs.tools.markers import token_of
from outrider.server.errors import ApiError

if TYPE_CHECKING:
    from outrider.types import TextTokenizer

# What stands before the text's beginning, between it and its end, and after that.
_FORMS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder 2, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM-4
    ("<PRE>", "<SUF>", "<MID>"),
    ("<|prefix|>", "<|suffix|>", "<|middle|>"),  # Falcon-H1-Tiny-Coder
)
# Tokens that such an answer ends with, besides the model's own: the next file begins, or there is nothing to fill in.
_ENDS = (
    "<|fim_pad|>", "<|file_sep|>", "<|repo_name|>", "<|cursor|>", "<|endoftext|>", "<fim_pad>", "<file_sep>",
    "<filename>", "<|end_of_text|>", "<|EOT|>", "▁<EOT>",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Infill:
    """The beginning and the end of a text whose middle is asked for."""

    before: str
    after: str

    def laid_out(
        self, tokenizer: TextTokenizer, named: tuple[str, str, str] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """The prompt, and the options that it needs. named: the tokens between which the model fills in, if known.

        Raises:
            ApiError: with status 400, for a model that has no tokens for it.
        """
        for form in (named, *_FORMS) if named else _FORMS:
            token_ids = [token_of(marker, tokenizer) for marker in form]
            if None not in token_ids:
                first, between, last = form
                ends = (token_of(marker, tokenizer) for marker in _ENDS)
                stops = [token_id for token_id in (*token_ids, *ends) if token_id is not None]
                return f"{first}{self.before}{between}{self.after}{last}", {"stop_token_ids": stops}
        message = (
            "suffix needs a model with tokens to fill in the middle, such as <|fim_prefix|>, and this one has none."
        )
        raise ApiError(400, f"{message} Leave it out.", param="suffix", code="unsupported_field")
