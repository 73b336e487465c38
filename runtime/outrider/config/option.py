"""The description of an option: one entry in a section, from which its check, its forms on the command line and in the
server's requests, its row in the docs, and its use by the benchmark's peers follow.

    class GenerationConfig(Section):
        min_p: float = option(0.0, number(0, 1), "sample from tokens with …", means="off", peers=("genai",))
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, TypeVar

from outrider.config.checks import are_ids, are_named, are_texts, as_texts, as_tuple, plain, shown_value
from outrider.errors import OptionError

T = TypeVar("T")


def _anything(_: Any) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Values:
    """The values that an option takes, besides None and "auto" where those are allowed.

    kind: their type: bool, int, float, str, tuple or Mapping. says: the rule, for the error. read: normalises a value,
    before `allows` checks it. item: the type of a tuple's or a table's values. low, high: limits of a number; `above`:
    `low` itself is not allowed.
    """

    kind: Any  # a type
    says: str
    allows: Callable[[Any], bool] = _anything
    read: Callable[[Any], Any] = lambda value: value
    item: Any = str  # a type, or what reads a text
    choices: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    above: bool = False

    def include(self, value: Any) -> bool:
        """Whether this is one of the values."""
        kind: Any = {int: Integral, float: Real}.get(self.kind, self.kind)
        if not isinstance(value, kind) or (isinstance(value, bool) and self.kind in (int, float)):
            return False
        if self.low is not None and (value <= self.low if self.above else not value >= self.low):
            return False
        return (self.high is None or value <= self.high) and self.allows(value)


def number(
    low: float, high: float, kind: type = float, *, above: bool = False, says: str = "", allows: Any = _anything
) -> Values:
    """Numbers from `low`, or above it, to `high`."""
    limits = f"above {low} and at most {high}" if above else f"from {low} to {high}"
    noun = "an integer" if kind is int else "a number"
    return Values(kind, says or f"{noun} {limits}", allows, low=low, high=high, above=above)


def integer(low: int, high: int | None = None, says: str = "") -> Values:
    """Integers of at least `low`, or from `low` to `high`."""
    if high is None:
        return Values(int, f"an integer of at least {low}", low=low)
    return number(low, high, int, says=says)


def text(says: str) -> Values:
    """Texts that are not empty."""
    return Values(str, says, bool)


def path(says: str) -> Values:
    """Paths, as texts that are not empty."""
    return Values(str, says, bool, lambda value: os.fspath(value) if isinstance(value, os.PathLike) else value)


def one_of(choices: Iterable[str]) -> Values:
    """A text from a list."""
    known = tuple(choices)
    return Values(str, f"one of {', '.join(known)}", known.__contains__, choices=known)


switch = Values(bool, "true or false")
texts = Values(tuple, "a text or a list of texts, none of them empty", are_texts, as_texts)
token_ids = Values(tuple, "a list of token ids", are_ids, as_tuple, int)
property_table = Values(Mapping, "a table of properties, by their names", are_named)


@dataclass(frozen=True, slots=True)
class Option:
    """What there is to say about an option besides its name, type and default.

    meaning: a phrase, and sentences after it. means: what the default stands for. none_word: None is allowed, and
    written "none" where there is no null: in TOML, on the command line, in requests. flag: its name on the command
    line; None: the option's own; empty: it is not offered there. metavar: of its value there. server: whether requests
    have this field. aliases: its names in other servers' requests. peers: modules of `outrider_bench.modes.peers` that
    follow it; None: the text does not depend on it alone.
    """

    default: Any
    values: Values
    meaning: str
    means: str = ""
    none_word: bool = False
    flag: str | None = None
    metavar: str | None = None
    server: bool = False
    aliases: tuple[str, ...] = ()
    peers: tuple[str, ...] | None = None

    @property
    def says(self) -> str:
        """The rule for its values."""
        says = self.values.says
        if self.default == "auto" and self.values.kind is not str:
            says = f"'auto', {says}" if self.values.kind is bool else f"'auto', or {says}"
        if self.default is None or self.none_word:
            says += ", or None"
        return f"{says} ({self.default:g} is off)" if self.means == "off" and self.default is not None else says

    def describe(self, default: str) -> str:
        """Its meaning and what its default stands for, in sentences. default: how the default is written."""
        said = self.meaning[:1].upper() + self.meaning[1:]
        if self.means:
            phrase, _, sentences = said.partition(". ")
            said = f"{phrase}; {default}: {self.means}" + (f". {sentences}" if sentences else "")
        return said.rstrip(".") + "."

    def read(self, name: str, value: Any) -> Any:
        """The value in its normal form.

        Raises:
            OptionError: when the option does not take it.
        """
        value = self.values.read(plain(value))
        if value is None and (self.default is None or self.none_word):
            return value
        if isinstance(value, str) and value == self.default:
            return value
        if not self.values.include(value):
            raise OptionError(f"{name}={shown_value(value)} is not {self.says}.")
        return value


def option(default: T, values: Values, meaning: str, **more: Any) -> T:
    """A field of a section, with its `Option`; `more` are that class's fields."""
    described = Option(default, values, meaning, **more)
    given: dict[str, Any] = {"default_factory": dict} if default == {} else {"default": default}
    made: T = field(**given, metadata={"option": described})
    return made


def options_of(section: type) -> dict[str, Option]:
    """The descriptions of a section's options, by name."""
    return {each.name: each.metadata["option"] for each in dataclasses.fields(section)}


class Section:
    """Options that are checked when they are set: the base of frozen dataclasses whose fields are made by `option`."""

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):  # type: ignore[arg-type]  # its subclasses are dataclasses
            described: Option = each.metadata["option"]
            object.__setattr__(self, each.name, described.read(each.name, getattr(self, each.name)))
