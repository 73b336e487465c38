"""A model's reasoning in one request: whether the prompt has begun it, its limit, and its place before a grammar."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from outrider.inputs.reasoning import ReasoningFormat
from outrider.inputs.tools.markers import keep_markers, marker_in_lark, token_of
from outrider.tokens.grammar import GrammarSource
from outrider.tokens.sampling.reasoning_budget import ReasoningBudget
from outrider.types import TextTokenizer

NEXT_MESSAGE = "<|end|><|start|>assistant"  # of gpt-oss
TYPED = " <|constrain|>json"  # in the header of a message in JSON
_TAIL_TOKENS = 24  # tokens of a prompt, in which its last marker is looked for


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
    def of(cls, tokenizer: TextTokenizer, prompt_token_ids: Sequence[int]) -> Reasoning | None:
        """Of a request; None for a model whose chat template has no known form."""
        form = ReasoningFormat.of_tokenizer(tokenizer)
        if form is None:
            return None
        tail = keep_markers(form.markers, tokenizer)(prompt_token_ids[-_TAIL_TOKENS:])
        return cls(form, tokenizer, form.is_opened_by(tail), form.is_closed_by(tail))

    def budget(self, num_tokens: int | None, *, calls: bool = False) -> ReasoningBudget | None:
        """What ends the reasoning after so many tokens. calls: the answer is calls of functions, by a grammar."""
        form, encode = self.form, self.tokenizer.encode
        if num_tokens is None or self.is_closed:
            return None
        forced = NEXT_MESSAGE if calls and form.channels else form.forced or form.end
        begin, end, forced_ids = encode(form.begin), encode(form.end), encode(forced)
        return ReasoningBudget(num_tokens, begin, end, forced_ids, opened=self.is_open, again=form.channels)

    def before(self, source: GrammarSource) -> GrammarSource:
        """A grammar that the answer follows, and the reasoning before it does not.

        Of gpt-oss, whose answers are messages, the last one follows it. Without tokens for their marks, the answer
        follows it from its first token.
        """
        if self.is_closed:
            return source
        rules = self._messages(source.option == "tools") if self.form.channels else self._marked()
        return replace(source, before="\n".join(rules)) if rules else source

    def _marked(self) -> list[str]:
        begin, end = (marker_in_lark(marker, self.tokenizer) for marker in (self.form.begin, self.form.end))
        thought = f"TEXT {end} BLANK" if end.startswith("<[") else "thought BLANK"
        if not self.is_open:
            thought = f"({begin} {thought})?"
        rules = [f"start: {thought} @answer", "TEXT: /(?s:.*)/", "BLANK: /[ \\n]{0,3}/"]
        return rules if end.startswith("<[") else [*rules, f"thought[suffix={end}]: TEXT"]

    def _messages(self, calls: bool) -> list[str]:
        """Analyses, then the header of the answer; calls have headers of their own."""
        tokens = {name: token_of(f"<|{name}|>", self.tokenizer) for name in ("channel", "message", "start", "end")}
        if None in tokens.values():
            return []
        channel, message, start, end = (f"<[{token_id}]>" for token_id in tokens.values())
        ended = f'TEXT {end} {start} "assistant"'
        header = "" if calls else f'{channel} "final" ({marker_in_lark(TYPED, self.tokenizer)})? {message}'
        thought = f'({channel} "analysis" {message} {ended})*'
        return [f"start: {ended if self.is_open else ''} {thought} {header} @answer", "TEXT: /(?s:.*)/"]
