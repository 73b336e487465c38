"""Normalises the values of options and checks them against their rules."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any

from outrider.errors import OptionError

_MOST_SHOWN = 200  # characters of a value, in a message


def is_temperature(value: float) -> bool:
    """0 for greedy, or a number that logits can be divided by."""
    return value == 0 or 1e-3 <= value <= 1e3


def make_plain(config: Any) -> None:
    """Replace NumPy's numbers and arrays among the options by Python's."""
    for option in dataclasses.fields(config):
        object.__setattr__(config, option.name, _plain(getattr(config, option.name)))


def _plain(value: Any) -> Any:
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


def as_tuple(value: Any) -> Any:
    """A list or set as a tuple with plain numbers; anything else as it is."""
    return tuple(map(_plain, value)) if isinstance(value, list | tuple | set | frozenset) else value


def as_biases(value: Any) -> Any:
    """A copy with plain numbers, whose keys are integers: those of TOML and JSON are strings."""
    if not isinstance(value, Mapping):
        return value
    biases = {int(k) if isinstance(k, str) and k.isdecimal() else _plain(k): _plain(v) for k, v in value.items()}
    return biases if len(biases) == len(value) else value  # an id that occurs twice, as "7" and 7, is refused


def are_biases(values: Mapping[Any, Any]) -> bool:
    """Whether these are biases by token id."""
    numbers = all(isinstance(value, Real) and not isinstance(value, bool) for value in values.values())
    return are_ids(tuple(values)) and numbers and all(-100 <= value <= 100 for value in values.values())


def are_ids(values: tuple[Any, ...]) -> bool:
    """Whether these are token ids."""
    return all(isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0 for value in values)


def are_named(values: Mapping[Any, Any]) -> bool:
    """Whether all keys are names."""
    return all(isinstance(name, str) and name for name in values)


def are_texts(values: tuple[object, ...]) -> bool:
    """Whether these are texts, none of them empty."""
    return all(isinstance(value, str) and value for value in values)


def check(config: Any, name: str, absent: object, kind: Any, rule: Callable[[Any], bool], says: str) -> None:
    """Raise OptionError unless the option is `absent` (...: never), or of this kind and within its rule."""
    value = getattr(config, name)
    if value is absent or (isinstance(absent, str) and value == absent):
        return
    numeric_bool = isinstance(value, bool) and kind is not bool
    if numeric_bool or not isinstance(value, kind) or not rule(value):
        raise OptionError(f"{name}={shown_value(value)} is not {says}.")


def shown_value(value: object) -> str:
    """A value for a message, cut if it is long."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no integer of more than 4,300 digits
        return f"<{type(value).__name__}>"
    return text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + "…"
