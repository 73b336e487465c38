"""Completions that fill in the middle of a text, for models that have tokens for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.inputs.tools.markers import token_of
from outrider.server.errors import ApiError
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
# What stands before the name of a repository, and of a file in it.
_REPOSITORIES = (("<|repo_name|>", "<|file_sep|>"), ("<repo_name>", "<file_sep>"), ("<reponame>", "<filename>"))
_SNIPPET = "\n\n--- snippet ---\n\n"  # llama.cpp's, before a file for a model without such tokens
# Tokens that such an answer ends with, besides the model's own: the next file begins, or there is nothing to fill in.
_ENDS = (
    "<|fim_pad|>", "<|file_sep|>", "<|repo_name|>", "<|cursor|>", "<|endoftext|>", "<fim_pad>", "<file_sep>",
    "<filename>", "<|end_of_text|>", "<|EOT|>", "▁<EOT>",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Infill:
    """The beginning and the end of a text whose middle is asked for.

    begun: what the middle begins with. files: names and texts of others of the same repository; None: the text is no
    file of one. field: of the request, for the error.
    """

    before: str
    after: str
    begun: str = ""
    files: Sequence[tuple[str, str]] | None = None
    field: str = "suffix"

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
                text = f"{self._others(tokenizer)}{first}{self.before}{between}{self.after}{last}{self.begun}"
                return text, {"stop_token_ids": stops}
        message = f"{self.field} needs a model with tokens to fill in the middle, such as <|fim_prefix|>"
        raise ApiError(
            400, f"{message}, and this one has none. Leave it out.", param=self.field, code="unsupported_field"
        )

    def _others(self, tokenizer: TextTokenizer) -> str:
        """The files before this one, as llama.cpp's /infill writes them."""
        if self.files is None:
            return ""
        for repository, file in _REPOSITORIES:
            if None not in (token_of(repository, tokenizer), token_of(file, tokenizer)):
                shown = "".join(f"{file}{name}\n{text}" for name, text in self.files)
                return f"{repository}myproject\n{shown}{file}filename\n"
        return "".join(f"{_SNIPPET}{text}" for _, text in self.files)
