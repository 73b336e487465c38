"""Limits of one rendering of a chat template: time, the sizes of texts and values, and nesting.

A template comes with a model and is not trusted. Python cannot interrupt an operation on a text or a list, so that
sizes are checked before it. Estimates are upper bounds; beyond a limit the template is refused.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

from jinja2.utils import Namespace

RENDER_SECONDS = 10.0
MAX_TEXT = 4_000_000  # characters of a text or a value that a template makes, and twice those of the messages
MAX_TOTAL = 32  # times MAX_TEXT, of all texts and values of one rendering
MAX_NUMBER_BITS = 4096
MAX_COMPARISONS = 1_000_000_000  # characters of a text times those of another that it is searched for
MAX_VALUE_LEVELS = 120  # messages have up to 100
MAX_CALL_LEVELS = 150  # macros and loops that call themselves

_ITEM = 16  # what an item of a list or an object counts, beside its content, in characters


class TemplateLimit(Exception):
    """A template exceeds a limit."""


class Budget:
    """What is left to one rendering.

    inputs: the values that the template is given, whose sizes are counted once.
    """

    def __init__(self, inputs: Iterable[Any] = (), size: int = 0) -> None:
        self.max_text = MAX_TEXT + 2 * size
        self.level = 0
        self._left = MAX_TOTAL * self.max_text
        self._deadline = time.monotonic() + RENDER_SECONDS
        self._known: dict[int, tuple[int, int]] = {}  # size and levels of a container, by its id
        for value in inputs:
            self._weigh(value, self._known)

    def tick(self) -> None:
        """Raise TemplateLimit when the time is over."""
        if time.monotonic() > self._deadline:
            raise TemplateLimit(f"it takes more than {RENDER_SECONDS:.0f} seconds")

    def charge(self, size: int) -> None:
        """Count a text or a value of `size` characters that is about to be made."""
        self.tick()
        if size > self.max_text:
            raise TemplateLimit(f"it makes a text or a list of more than {self.max_text:,} characters")
        self._left -= size
        if self._left < 0:
            raise TemplateLimit(f"its texts have more than {MAX_TOTAL * self.max_text:,} characters in all")

    def weigh(self, value: Any) -> int:
        """The size of a value as text, each occurrence of a part counted."""
        if isinstance(value, str):
            return len(value)
        return self._weigh(value, {})[0]

    def kept(self, value: Any) -> Any:
        """The value itself, which a variable or a macro is going to hold, if it is within the limits."""
        self.tick()
        if not isinstance(value, str | int):
            self.weigh(value)
        return value

    def _weigh(self, value: Any, found: dict[int, tuple[int, int]], level: int = 1) -> tuple[int, int]:
        """The size and the levels of a value. found: those of its parts; an id is good as long as the value lives."""
        if isinstance(value, str | bytes):
            return len(value), 0
        items = _items_of(value)
        if items is None:
            return (_ITEM + value.bit_length() // 3 if isinstance(value, int) else _ITEM), 0
        if (known := self._known.get(id(value)) or found.get(id(value))) is not None:
            if level + known[1] > MAX_VALUE_LEVELS:
                raise TemplateLimit(f"it nests values in more than {MAX_VALUE_LEVELS} levels")
            return known
        if level > MAX_VALUE_LEVELS:
            raise TemplateLimit(f"it nests values in more than {MAX_VALUE_LEVELS} levels")
        size, levels = _ITEM, 0
        for item in items:
            if isinstance(item, str):
                size += _ITEM + len(item)
            else:
                inner, below = self._weigh(item, found, level + 1)
                size, levels = size + _ITEM + inner, max(levels, below)
            if size > self.max_text and found is not self._known:
                raise TemplateLimit(f"it makes a value of more than {self.max_text:,} characters")
        found[id(value)] = size, levels + 1
        return size, levels + 1


def _items_of(value: Any) -> Iterable[Any] | None:
    """What a container holds; None for other values."""
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, dict):
        return _pairs(value)
    if isinstance(value, _VIEWS):
        return list(cast("Iterable[Any]", value))
    if isinstance(value, Namespace):
        return _pairs(object.__getattribute__(value, "_Namespace__attrs"))
    return None


_VIEWS: tuple[type[Any], ...] = (type({}.items()), type({}.keys()), type({}.values()))


def _pairs(table: dict[Any, Any]) -> Iterator[Any]:
    yield from table
    yield from table.values()


def listed(value: Any) -> Any:
    """A list of what an iterator of Python's has left, to look at it more than once; other values as they are."""
    return list(value) if isinstance(value, Iterator) and type(value).__module__ == "builtins" else value


def check_number(bits: int) -> None:
    """Raise TemplateLimit for an integer of more bits than `MAX_NUMBER_BITS`."""
    if bits > MAX_NUMBER_BITS:
        raise TemplateLimit(f"it computes a number of more than {MAX_NUMBER_BITS:,} bits")


def check_numbers(operator: str, left: Any, right: Any) -> None:
    """The same for the operands of an operator, and for what it makes of them."""
    if isinstance(left, int) and isinstance(right, int):
        first, second = left.bit_length(), right.bit_length()
        check_number(max(first, second))
        if operator in ("*", "**"):
            check_number(first + second if operator == "*" else first * max(right, 0))


def charge_for(budget: Budget, name: str, values: Sequence[Any]) -> None:
    """Count the result of an operator, a filter or a method of a text. values: what it is given, the text first.

    What grows by a number has at most so many times its size; by texts, as often as they are put in.
    """
    size, texts = sum(map(budget.weigh, values)), [each for each in values if isinstance(each, str)]
    numbers = [abs(each) for each in values if isinstance(each, int)]
    if name in ("%", "format") and texts:
        marks = _MARKS.findall(texts[0])
        if any("*" in mark or "{" in mark[1:] for mark in marks):
            raise TemplateLimit("it formats a text with a width from a variable")
        numbers = [int(digits[:9]) for mark in marks for digits in re.findall(r"\d+", mark)]
        budget.charge(size * (1 + len(marks)) + sum(numbers))
    elif name == "replace" and len(texts) >= 3:
        budget.charge(len(texts[0]) + texts[0].count(texts[1]) * len(texts[2]))
    elif name == "join":
        count = sum(len(each) for each in values if isinstance(each, list | tuple | dict))
        budget.charge(size + count * sum(map(len, texts)))
    elif name == "round":
        check_number(4 * max([0, *numbers[1:], *numbers[:1]]))
    else:
        budget.charge(size * (1 + max(numbers, default=0)) if name in _GROWING else size)
    if len(texts) > 1 and len(texts[0]) * max(map(len, texts[1:])) > MAX_COMPARISONS:
        raise TemplateLimit(f"it searches a text of {len(texts[0]):,} characters for a long one")


_MARKS = re.compile(r"%[^%a-zA-Z]*|\{[^{}]*(?:\{|\})")  # in texts that are formatted
_GROWING = ("*", "center", "indent", "ljust", "rjust", "zfill", "batch", "slice", "tojson")
# Others are not needed to lay messages out, and some of them make long texts, or take long, in ways of their own.
FILTERS = (
    "abs", "attr", "batch", "capitalize", "center", "count", "d", "default", "dictsort", "e", "escape", "first",
    "float", "format", "groupby", "indent", "int", "items", "join", "last", "length", "list", "lower", "map", "max",
    "min", "random", "reject", "rejectattr", "replace", "reverse", "round", "safe", "select", "selectattr", "slice",
    "sort", "string", "sum", "title", "tojson", "trim", "truncate", "unique", "upper", "wordcount",
)  # fmt: skip
REFUSED_METHODS = ("encode", "expandtabs", "format_field", "striptags", "translate", "unescape")  # of texts


def filtered(call: Callable[..., Any], name: str, budget: Callable[[], Budget], skip: int) -> Callable[..., Any]:
    """A filter that is called within the limits. skip: how many arguments are the environment, not values."""

    def limited(*args: Any, **options: Any) -> Any:
        now = budget()
        args = (*args[:skip], *map(listed, args[skip:]))
        if name not in ("default", "d"):  # which choose a value
            charge_for(now, name, [*args[skip:], *options.values()])
        return call(*args, **options)

    return limited
