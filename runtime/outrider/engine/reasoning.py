"""A model's reasoning in one request: whether the prompt has begun it, its limit, and its place before a grammar."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from outrider.inputs.reasoning import ReasoningFormat
from outrider.inputs.reasoning.stream import Splitter
from outrider.inputs.tools import ToolFormat
from outrider.inputs.tools.markers import keep_markers, marker_in_lark, token_of
from outrider.tokens.grammar import GrammarSource
from outrider.tokens.sampling.reasoning_budget import ReasoningBudget
from outrider.types import TextTokenizer

NEXT_MESSAGE = "<|end|><|start|>assistant"  # of gpt-oss
TYPED = " <|constrain|>json"  # in the header of a message in JSON
_TAIL_TOKENS = 24  # tokens that a template writes at most to begin an answer
_MOST_TOKENS_PER_CHARACTER = 4  # one for each byte


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The reasoning that an answer may have."""

    form: ReasoningFormat
    tokenizer: TextTokenizer
    is_open: bool  # the prompt has begun it
    is_closed: bool  # there is none: the prompt has ended it, or begun the answer itself

    @classmethod
    def of(
        cls, tokenizer: TextTokenizer, prompt_token_ids: Sequence[int], written: str | Sequence[int] = ""
    ) -> Reasoning | None:
        """Of a request; None for a model whose chat template has no known form.

        written: what the prompt's end has of the answer already, as text or tokens. The last marker in it counts; if it
        has none, the one that the template has written before it.
        """
        form = ReasoningFormat.of_tokenizer(tokenizer)
        if form is None:
            return None
        decode = keep_markers(form.markers, tokenizer)
        written = (written if isinstance(written, str) else decode(written)).strip()
        tail = decode(prompt_token_ids[-_TAIL_TOKENS - _MOST_TOKENS_PER_CHARACTER * len(written) :])
        last = form.last_marker(tail, len(written))
        return cls(form, tokenizer, last == form.begin, last == form.end or (not last and bool(written)))

    @property
    def splitter(self) -> Splitter | None:
        """Tells the reasoning of the answer from the rest; None if it has none."""
        return None if self.is_closed else self.form.splitter(opened=self.is_open)

    def budget(
        self, num_tokens: int | None, eos_token_ids: Sequence[int], calls: ToolFormat | None, *, forced: bool = False
    ) -> ReasoningBudget | None:
        """What ends the reasoning after so many tokens. calls: how they are written. forced: a grammar forces them."""
        form, encode = self.form, self.tokenizer.encode
        if num_tokens is None or self.is_closed:
            return None
        written = NEXT_MESSAGE if forced and form.channels else form.forced or form.end
        call = None if calls is None else (encode(calls.bare_begin), encode(calls.end))
        return ReasoningBudget(
            num_tokens, encode(form.begin), encode(form.end), encode(written), opened=self.is_open, again=form.channels,
            eos_token_ids=eos_token_ids, call=call,
        )  # fmt: skip

    def before(self, source: GrammarSource, calls: ToolFormat | None = None) -> GrammarSource:
        """A grammar that the answer follows, and the reasoning before it does not.

        calls: how calls are written, where the answer has some: their marker ends the reasoning, too, if it is a token.
        Of gpt-oss, whose answers are messages, the last one follows the grammar. Without tokens for their marks, the
        answer follows it from its first token.
        """
        if self.is_closed:
            return source
        rules = self._messages(source.option == "tools") if self.form.channels else self._marked(calls)
        return replace(source, before="\n".join(rules)) if rules else source

    def _marked(self, calls: ToolFormat | None) -> list[str]:
        begin, end = (marker_in_lark(marker, self.tokenizer) for marker in (self.form.begin, self.form.end))
        thought = f"TEXT {end} BLANK" if end.startswith("<[") else "thought BLANK"
        if calls is not None and not calls.bare and marker_in_lark(calls.begin, self.tokenizer).startswith("<["):
            thought = f"({thought} | TEXT)"
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
