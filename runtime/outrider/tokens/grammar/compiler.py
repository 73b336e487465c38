"""Compiles one grammar within the limits."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from outrider.errors import OptionError
from outrider.system.children import ChildPool, ClientLeft, NoChild
from outrider.system.guard import is_interrupt
from outrider.tokens.grammar.child import GrammarTrial, GrammarVerdict
from outrider.tokens.grammar.limits import GrammarLimits, check_length
from outrider.tokens.grammar.matcher import new_matcher
from outrider.tokens.grammar.state import first_line

if TYPE_CHECKING:
    from threading import Event

    from llguidance import LLMatcher, LLTokenizer

    from outrider.tokens.grammar.kinds import GrammarSource

_LONGEST_CHARACTERS = 80  # characters of a grammar in a message
_SIMPLIFY = "Simplify it: intersect fewer patterns, and repeat fewer times."

log = logging.getLogger("outrider")


class CompiledGrammar(NamedTuple):
    """A compiled grammar, and what its trial has found."""

    base: LLMatcher
    memory: int = 0  # bytes that it takes; 0 for a cheap one


class GrammarCompiler:
    """Compiles a grammar at once if it is certain to be cheap; else after a trial in another process.

    The trial ends at a limit. What passes is compiled again here: llguidance has no compiled form that can be sent.
    """

    def __init__(self, trials: ChildPool, limits: GrammarLimits) -> None:
        self._trials, self._limits = trials, limits

    def compile(self, tokenizer: LLTokenizer, source: GrammarSource, gone: Event | None) -> CompiledGrammar:
        """Compile a grammar. gone: is set when nobody waits for it any more.

        Raises:
            OptionError: when llguidance does not take it, or it passes a limit. Of tools, with the function's name.
            ClientLeft: when `gone` is set, or the engine is closed.
        """
        try:
            return self._checked(tokenizer, source, gone)
        except OptionError as found:
            raise (self._named(tokenizer, source, gone) or found) from found

    def _checked(self, tokenizer: LLTokenizer, source: GrammarSource, gone: Event | None) -> CompiledGrammar:
        try:
            check_length(len(source.text))
        except ValueError as error:
            raise refusal(source, str(error)) from error
        if source.is_cheap:
            return CompiledGrammar(_compile(tokenizer, source))
        return self._try(tokenizer, source, gone)

    def _named(self, tokenizer: LLTokenizer, source: GrammarSource, gone: Event | None) -> OptionError | None:
        """The error of a grammar for tools that names the first function whose schema is refused."""
        for name, schema in source.parts:
            part = replace(source, option="json_schema", text=schema, before="", parts=())
            try:
                self._checked(tokenizer, part, gone)
            except OptionError as error:
                wrong = str(error).partition(" cannot be followed: ")[2] or str(error)
                return OptionError(f"tools cannot be followed: in {name!r}, {wrong}")
            except ClientLeft:
                return None
        return None

    def _try(self, tokenizer: LLTokenizer, source: GrammarSource, gone: Event | None) -> CompiledGrammar:
        limits = self._limits
        trial = GrammarTrial(
            option=source.option, text=source.text, seconds=limits.compile_seconds, memory=limits.compile_memory
        )
        try:
            verdict = self._trials.ask(trial, GrammarVerdict, gone)
        except NoChild as error:
            log.warning("Grammars are compiled without limits of time and memory: %s.", error)
            return CompiledGrammar(_compile(tokenizer, source))
        if reason := beyond(verdict, limits):
            raise refusal(source, reason, _SIMPLIFY)
        if verdict.error:
            raise refusal(source, verdict.error)
        return CompiledGrammar(_compile(tokenizer, source, verdict.made), verdict.memory)


def beyond(verdict: GrammarVerdict, limits: GrammarLimits) -> str:
    """Which limit a trial has passed, in words; "" for none."""
    if verdict.beyond == "memory":
        return f"compiling it takes more than {limits.compile_memory >> 20:,} MB of memory, the limit"
    if verdict.beyond == "process":
        return "the process that compiles it ends, as one does that has no memory left"
    if verdict.beyond:
        return f"compiling it takes more than {limits.compile_seconds:g} seconds, the limit"
    if verdict.mask_seconds > limits.mask_seconds:
        return (
            f"finding the tokens that may come next takes {verdict.mask_seconds:.1f} seconds, and the limit is "
            f"{limits.mask_seconds:g}"
        )
    return ""


def refusal(source: GrammarSource, reason: str, next_step: str = "") -> OptionError:
    """The error for a grammar that cannot be followed."""
    text = source.text
    shown = text if len(text) <= _LONGEST_CHARACTERS else f"{text[:_LONGEST_CHARACTERS]}…"
    step = next_step or source.kind.remedy
    given = f"{source.option}={' '.join(shown.split())}" if source.kind.is_shown else source.option
    return OptionError(f"{given} cannot be followed: {first_line(reason)}. {step}")


def _compile(tokenizer: LLTokenizer, source: GrammarSource, in_own_form: str = "") -> LLMatcher:
    try:
        matcher = new_matcher(tokenizer, source, in_own_form)
        wrong = matcher.get_error()
    except BaseException as error:  # too deep, say; a panic in llguidance is no Exception
        if is_interrupt(error):
            raise
        wrong = str(error) or type(error).__name__
    if wrong:
        raise refusal(source, wrong)
    return matcher
