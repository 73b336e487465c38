"""Apps' own drafters: what they raise and return is checked where it enters."""

from __future__ import annotations

from collections.abc import Callable
from inspect import isfunction
from typing import Any, cast

import numpy as np

from outrider.config.checks import is_count, is_finite_number
from outrider.errors import DrafterError
from outrider.system.guard import Guarded, Rule
from outrider.types import Drafter, Guess, Prompt, Proposer, Requirements

REMEDY = "Fix it, or choose another drafter."
_MAX_DRAFT_TOKENS = 64  # draft tokens a round, as of the option


def guarded(drafter: Proposer, name: str) -> Drafter:
    """An app's drafter, whose errors and wrong values are DrafterErrors."""
    return cast("Drafter", Guarded(drafter, f"the drafter {name!r}", RULES, DrafterError, REMEDY, Drafter()))


def inner(drafter: object) -> object:
    """The app's own object after a guarded drafter; any other drafter as it is."""
    return drafter.inner if isinstance(drafter, Guarded) else drafter


def _are_requirements(value: Any) -> bool:
    if not isinstance(value, Requirements):
        return False
    names = isinstance(value.features, tuple) and all(isinstance(name, str) for name in value.features)
    return names and isinstance(value.trees, bool)


def _is_guess(value: Any) -> bool:
    if not isinstance(value, Guess):
        return value is None
    is_known = value.token_id is None or is_count(value.token_id)
    return is_finite_number(value.chance) and 0 <= value.chance <= 1 and is_count(value.num_accepted) and is_known


# By what `Drafter` says that a member is, or returns: a rule's text, and the function that finds whether it holds.
_RULES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "bool": ("True or False", lambda value: isinstance(value, bool | np.bool_)),
    "float": ("a finite number", is_finite_number),
    "int": ("an integer of at least 0", is_count),
    "int | None": ("None or an integer of at least 0", lambda value: value is None or is_count(value)),
    "str": ("a text", lambda value: isinstance(value, str)),
    "None": ("anything", lambda _: True),
    "list[Draft]": ("a list of drafts", lambda value: isinstance(value, list | tuple)),
    "Prompt | None": ("None or a Prompt", lambda value: value is None or isinstance(value, Prompt)),
    "Requirements": ("Requirements, with names of hidden states and a flag", _are_requirements),
    "Guess | None": ("None, or a Guess with a chance from 0 to 1, a count and a token id", _is_guess),
}
_METHODS = {name: each for name, each in vars(Drafter).items() if isfunction(each)}
RULES = {name: Rule(*_RULES[kind]) for name, kind in Drafter.__annotations__.items()}
RULES |= {name: Rule(*_RULES[each.__annotations__["return"]], of_call=True) for name, each in _METHODS.items()}
RULES["num_assistant_tokens"] = Rule(
    f"an integer from 0 to {_MAX_DRAFT_TOKENS}", lambda value: is_count(value) and value <= _MAX_DRAFT_TOKENS
)
