"""Apps' own drafters: what they raise and return is checked where it enters."""

from __future__ import annotations

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


_FLAG = ("True or False", lambda value: isinstance(value, bool | np.bool_))
_NUMBER = ("a finite number", is_finite_number)
_COUNT = ("an integer of at least 0", is_count)
_IGNORED = ("anything", lambda _: True)
# By member of `Drafter`.
RULES = {
    "num_assistant_tokens": Rule(
        f"an integer from 0 to {_MAX_DRAFT_TOKENS}", lambda value: is_count(value) and value <= _MAX_DRAFT_TOKENS
    ),
    "seconds": Rule(*_NUMBER),
    "prompt_of": Rule("None or a Prompt", lambda value: value is None or isinstance(value, Prompt), of_call=True),
    "reserve": Rule(*_FLAG, of_call=True),
    "propose": Rule("a list of drafts", lambda value: isinstance(value, list | tuple), of_call=True),
    "observe": Rule(*_IGNORED, of_call=True),
    "release": Rule(*_IGNORED, of_call=True),
    "requirements": Rule("Requirements, with names of hidden states and a flag", _are_requirements),
    "takes_rules": Rule(*_FLAG),
    "replays": Rule(*_FLAG),
    "name": Rule("a text", lambda value: isinstance(value, str)),
    "goes_ahead": Rule(*_FLAG),
    "ahead_seconds": Rule(*_NUMBER),
    "draft_ahead": Rule(*_IGNORED, of_call=True),
    "is_priced": Rule(*_FLAG),
    "is_free": Rule(*_FLAG),
    "at_once": Rule(*_FLAG),
    "most_tokens": Rule("None or an integer of at least 0", lambda value: value is None or is_count(value)),
    "first_seconds": Rule(*_NUMBER),
    "can_draft": Rule(*_FLAG, of_call=True),
    "seconds_for": Rule(*_NUMBER, of_call=True),
    "num_unread": Rule(*_COUNT, of_call=True),
    "num_ahead": Rule(*_COUNT, of_call=True),
    "guess": Rule("None, or a Guess with a chance from 0 to 1, a count and a token id", _is_guess, of_call=True),
}
