"""A model's reasoning in one request: whether the prompt has begun it, its limit, and its place before a grammar."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from outrider.inputs.reasoning import ReasoningFormat
from outrider.inputs.tools.markers import keep_markers, token_of
from outrider.tokens.sampling.reasoning_budget import ReasoningBudget

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from outrider.tokens.grammar import Source
    from outrider.types import TextTokenizer

_TAIL = 24  # tokens of a prompt, in which its last marker is looked for


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The reasoning that an answer may have.

    is_open: the prompt has begun it. is_closed: the prompt has ended it, so that there is none.
    """

    form: ReasoningFormat
    tokenizer: TextTokenizer
    is_open: bool
    is_closed: bool

    @classmethod
    def of(cls, tokenizer: TextTokenizer, prompt_token_ids: Seq[int]) -> Reasoning | None:
        """Of a request; None for a model whose chat template has no known form."""
        form = ReasoningFormat.of_tokenizer(tokenizer)
        if form is None:
            return None
        tail = keep_markers(form.markers, tokenizer)(prompt_token_ids[-_TAIL:])
        return cls(form, tokenizer, form.is_opened_by(tail), form.is_closed_by(tail))

    def budget(self, num_tokens: int | None) -> ReasoningBudget | None:
        """What ends the reasoning after so many tokens."""
        form, encode = self.form, self.tokenizer.encode
        if num_tokens is None or self.is_closed:
            return None
        begin, end, forced = encode(form.begin), encode(form.end), encode(form.forced or form.end)
        return ReasoningBudget(num_tokens, begin, end, forced, opened=self.is_open, again=form.channels)

    def before(self, source: Source) -> Source:
        """A grammar that the answer follows, and the reasoning before it does not.

        It needs an end marker that is a token of its own. A model without one follows the grammar from its first token.
        """
        begin, end = (token_of(marker, self.tokenizer) for marker in (self.form.begin, self.form.end))
        if self.is_closed or end is None or self.form.channels:
            return source
        thought = f"TEXT <[{end}]> BLANK"
        if not self.is_open:
            if begin is None:
                return source
            thought = f"(<[{begin}]> {thought})?"
        rule = f"start: {thought} @answer\nTEXT: /(?s:.*)/\nBLANK: /[ \\n]{{0,3}}/"
        return replace(source, before=rule)
