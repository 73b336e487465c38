"""A grammar as it was given."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.config import GRAMMAR_OPTIONS, GenerationConfig
from outrider.tokens.grammar.kinds import CHEAP_CHARACTERS, KINDS, GrammarKind


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """A grammar as it was given.

    option: of `KINDS`, "tools" for a Lark grammar that was made for them. text: a JSON schema as JSON, a regular
    expression, or a grammar in Lark or GBNF. before: a Lark rule for what comes before it, which refers to it
    as @answer; empty if nothing does. parts: of one for tools, the JSON schema of each function's arguments by its
    name, to say which one is wrong.
    """

    option: str
    text: str
    before: str = ""
    parts: tuple[tuple[str, str], ...] = field(default=(), compare=False)

    @classmethod
    def of(cls, config: GenerationConfig) -> GrammarSource | None:
        """The grammar that a request's options ask for."""
        values = ((option, getattr(config, option)) for option in GRAMMAR_OPTIONS)
        return next((cls(option, KINDS[option].read(value)) for option, value in values if value is not None), None)

    @property
    def kind(self) -> GrammarKind:
        """How it is compiled."""
        return KINDS[self.option]

    @property
    def is_cheap(self) -> bool:
        """Whether it is certain, from its text alone, to compile at once and in little memory.

        Those are grammars of a usual size without intersections, nested counts or many patterns.
        """
        return len(self.text) <= CHEAP_CHARACTERS and self.kind.is_cheap(self.text)
