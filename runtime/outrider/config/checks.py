"""Normalises the values of options and checks them against their rules."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

from outrider.errors import OptionError, one_line
from outrider.system.nesting import TooDeep, check_json, check_levels

GRAMMAR_OPTIONS = ("json_schema", "regex", "grammar")  # of which an answer may follow one
_MOST_SHOWN = 200  # characters of a value, in a message
_MOST_DIGITS = 100  # of a token id; Python reads no integer of more than 4,300


def is_temperature(value: float) -> bool:
    """0 for greedy, or a number that logits can be divided by."""
    return value == 0 or 1e-3 <= value <= 1e3


def plain(value: Any) -> Any:
    """A value with NumPy's numbers and fractions as Python's int and float.

    Sums of NumPy's integers overflow or become floats. Fractions are slow, and NumPy may not accept them.
    """
    if hasattr(value, "tolist"):  # a scalar or an array, of NumPy's or others
        value = value.tolist()
    if isinstance(value, bool):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        with contextlib.suppress(OverflowError):  # too large for any option
            return float(value)
    return value


def is_finite_number(value: Any) -> bool:
    """Whether this is a number, of Python's or NumPy's, that is neither infinite nor a truth value."""
    is_real = type(value) is float or (isinstance(value, Real) and not isinstance(value, bool))
    return is_real and math.isfinite(value)


def is_count(value: Any) -> bool:
    """Whether this is an integer of at least 0, and no truth value."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0


def as_tuple(value: Any) -> Any:
    """A list or set as a tuple with plain numbers; anything else as it is."""
    return tuple(map(plain, value)) if isinstance(value, list | tuple | set | frozenset) else value


def as_texts(value: Any) -> Any:
    """A text as a tuple of it; a list as a tuple; anything else as it is."""
    return (value,) if isinstance(value, str) else as_tuple(value)


def as_biases(value: Any) -> Any:
    """A copy with plain numbers, whose keys are integers: those of TOML and JSON are strings."""
    if not isinstance(value, Mapping):
        return value
    biases = {int(k) if _is_integer(k) else plain(k): plain(v) for k, v in value.items()}
    return biases if len(biases) == len(value) else value  # an id that occurs twice, as "7" and 7, is refused


def _is_integer(key: Any) -> bool:
    """Whether this is the text of an integer. No token id has more digits than these."""
    return isinstance(key, str) and key.isdecimal() and len(key) <= _MOST_DIGITS


def as_schema(value: Any) -> Any:
    """A JSON schema from its text; anything else as it is.

    Raises:
        OptionError: for a text that is not JSON, or a table that cannot be written as JSON, or is nested too deeply.
    """
    try:
        if isinstance(value, Mapping):
            check_levels(value)
            json.dumps(value)
        if isinstance(value, str):
            check_json(value)
            return json.loads(value)
        return value
    except TooDeep as error:
        raise OptionError(f"json_schema cannot be used: {one_line(error)}. Make it flatter, with '$defs'.") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise OptionError(
            f"json_schema={shown_value(value)} is not JSON: {one_line(error)}. Give a JSON schema."
        ) from error


def as_tool_choice(value: Any) -> Any:
    """The name of the function that OpenAI's form of a choice is for; anything else as it is."""
    function = value.get("function") if isinstance(value, Mapping) else None
    return function.get("name", value) if isinstance(function, Mapping) else value


def are_tools(values: tuple[Any, ...]) -> bool:
    """Whether these are functions as in OpenAI's API, each with a name of its own.

    Raises:
        OptionError: when they are nested too deeply.
    """
    try:
        check_levels(values)
    except TooDeep as error:
        raise OptionError(f"tools cannot be used: {one_line(error)}. Make their parameters flatter.") from error
    given = [value.get("function") if isinstance(value, Mapping) else None for value in values]
    functions = [function for function in given if isinstance(function, Mapping)]
    if len(functions) < len(values):
        return False
    names = [function.get("name") for function in functions]
    schemas = [function.get("parameters") for function in functions]
    known = ("auto", "none", "required")
    return (
        all(isinstance(name, str) and name and name not in known for name in names)
        and len({*names}) == len(names)
        and all(isinstance(schema, Mapping | None) for schema in schemas)
        and _is_json(values)
    )


RESERVED_VARIABLES = ("messages", "tools", "add_generation_prompt", "continue_final_message")


def as_variables(value: Any) -> Any:
    """A copy of a table of template variables as plain JSON values; anything else as it is."""
    if not isinstance(value, Mapping) or not _is_json(value):
        return value
    made: dict[str, Any] = json.loads(json.dumps(dict(value)))
    return made


def are_variables(values: Mapping[Any, Any]) -> bool:
    """Whether these are variables that a chat template may be given."""
    try:
        check_levels(values)
    except TooDeep as error:
        raise OptionError(f"chat_template_kwargs cannot be used: {one_line(error)}. Make them flatter.") from error
    return are_named(values) and not {*values} & {*RESERVED_VARIABLES} and _is_json(values)


def value_of(text: str) -> Any:
    """The JSON value that a text is; the text itself if it is none."""
    try:
        check_json(text)
        return json.loads(text)
    except (TooDeep, ValueError, RecursionError):
        return text


def _is_json(value: object) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def are_biases(values: Mapping[Any, Any]) -> bool:
    """Whether these are biases by token id."""
    numbers = all(isinstance(value, Real) and not isinstance(value, bool) for value in values.values())
    return are_ids(tuple(values)) and numbers and all(-100 <= value <= 100 for value in values.values())


def are_ids(values: tuple[Any, ...]) -> bool:
    """Whether these are token ids."""
    return all(map(is_count, values))


def are_named(values: Mapping[Any, Any]) -> bool:
    """Whether all keys are names."""
    return all(isinstance(name, str) and name for name in values)


def are_texts(values: tuple[object, ...]) -> bool:
    """Whether these are texts, none of them empty."""
    return all(isinstance(value, str) and value for value in values)


def check_grammar(config: Any) -> None:
    """Raise OptionError for two grammars, or for an answer that follows one and may not end."""
    given = [name for name in GRAMMAR_OPTIONS if getattr(config, name) is not None]
    if config.tool_choice == "required" and not config.tools:
        raise OptionError("tool_choice='required' needs tools, and none are given. Give tools, or leave it out.")
    if config.tools and config.tool_choice != "none":
        if others := [name for name in given if name != "json_schema"]:
            raise OptionError(f"{others[0]} cannot be combined with tools. Leave it out, or set tool_choice='none'.")
        free = ["tools"] if config.has_strict_tools or given else []
        given = free if config.tool_choice == "auto" else ["tool_choice"]
    if len(given) > 1:
        raise OptionError(f"{given[0]} and {given[1]} are both set, and an answer can follow only one. Leave one out.")
    if given and config.ignore_eos:
        raise OptionError(f"ignore_eos=True continues after the end, and {given[0]} defines the end. Leave one out.")


def shown_value(value: object) -> str:
    """A value for a message, cut if it is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # Python writes no integer of more than 4,300 digits, and no deep nesting
        return f"<{type(value).__name__}>"
    return text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + "…"
