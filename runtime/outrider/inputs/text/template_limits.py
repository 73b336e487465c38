"""Limits of one rendering of a chat template: time, the sizes of texts and values, and nesting.

A template comes with a model and is not trusted. Python cannot interrupt an operation on a text or a list, so that
sizes are checked before it. Estimates are upper bounds; beyond a limit the template is refused.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from string import Formatter
from typing import Any, cast

from jinja2.utils import Namespace

RENDER_SECONDS = 10.0
MAX_TEXT = 4_000_000  # characters of a text or a value that a template makes, and twice those of the messages
MAX_TOTAL = 32  # times MAX_TEXT, of all texts and values of one rendering
MAX_NUMBER_BITS = 4096
MAX_ARGUMENT = 1_000_000  # a width or a count
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

    def levels(self, value: Any) -> int:
        """How many containers are in each other."""
        return self._weigh(value, {})[1]

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


def check_arguments(values: Iterable[Any]) -> None:
    """Raise TemplateLimit for a width or a count that is too large."""
    if any(isinstance(value, int) and abs(value) > MAX_ARGUMENT for value in values):
        raise TemplateLimit(f"it uses a width or a count of more than {MAX_ARGUMENT:,}")


def size_of_binop(budget: Budget, operator: str, left: Any, right: Any) -> int:
    """At most how many characters the result of an operator has. 0: a number, which is checked."""
    if isinstance(left, int) and isinstance(right, int):
        first, second = left.bit_length(), right.bit_length()
        check_number(max(first, second))
        if operator == "*":
            check_number(first + second)
        elif operator == "**" and right > 0:
            check_number(first * right)
        return 0
    if operator == "*" and isinstance(left, int):
        left, right = right, left
    if operator == "*" and isinstance(right, int):
        return budget.weigh(left) * max(right, 0)
    if operator == "+":
        return budget.weigh(left) + budget.weigh(right)
    if operator == "%" and isinstance(left, str):
        return size_of_printf(budget, left, right)
    return 0


def size_of_printf(budget: Budget, pattern: str, values: Any) -> int:
    """The same for `pattern % values`."""
    marks = re.findall(r"%[^%a-zA-Z]*", pattern)
    if any("*" in mark for mark in marks):
        raise TemplateLimit("it formats a text with a width from a variable")
    return len(pattern) + _widths(marks) + len(marks) * (budget.weigh(values) + 400)


def size_of_format(budget: Budget, pattern: str, values: Any) -> int:
    """The same for `pattern.format(*values)`."""
    marks = [spec for _, name, spec, _ in Formatter().parse(pattern) if name is not None]
    if any("{" in (spec or "") for spec in marks):
        raise TemplateLimit("it formats a text with a width from a variable")
    return len(pattern) + _widths(map(str, marks)) + len(marks) * (budget.weigh(values) + 400)


def _widths(marks: Iterable[str]) -> int:
    numbers = [number for mark in marks for number in re.findall(r"\d+", mark)]
    if any(len(number) > 7 for number in numbers):
        raise TemplateLimit(f"it uses a width or a count of more than {MAX_ARGUMENT:,}")
    values = [int(number) for number in numbers]
    check_arguments(values)
    return sum(values)


def size_of_replace(text: str, old: str, new: str) -> int:
    """The same for `text.replace(old, new)`."""
    return len(text) + text.count(old) * len(new)


def size_of_method(budget: Budget, text: str, name: str, values: Sequence[Any]) -> int:
    """The same for a text's method, called with these values."""
    check_arguments(values if name not in _COUNTED else ())
    texts, numbers = [v for v in values if isinstance(v, str)], [v for v in values if isinstance(v, int)]
    if name == "replace" and len(texts) == 2:
        return size_of_replace(text, *texts)
    if name == "join":
        return budget.weigh(values[0]) + len(text) * _count(values[0]) if values else 0
    if name in ("center", "ljust", "rjust", "zfill"):
        return len(text) + sum(numbers)
    if name == "expandtabs":
        return len(text) + text.count("\t") * (sum(numbers) or 8)
    if name == "translate":
        return (len(text) + 1) * (budget.weigh(values) + 1)
    if name not in _FORWARD and len(text) * sum(map(len, texts)) > MAX_COMPARISONS:
        raise TemplateLimit(f"it searches a text of {len(text):,} characters for a long one")
    return len(text)


_COUNTED = ("split", "rsplit", "replace", "find", "rfind", "index", "rindex", "count", "startswith", "endswith")
_FORWARD = ("find", "index", "count", "split", "partition", "startswith", "endswith", "removeprefix", "removesuffix")


def _count(value: Any) -> int:
    return len(value) if hasattr(value, "__len__") else 0


def size_of_filter(budget: Budget, name: str, values: Sequence[Any]) -> int:
    """At most how many characters the result of a filter has. values: what it is given, first the value itself."""
    value, rest = (values[0], values[1:]) if values else (None, ())
    if name in ("default", "d"):  # chooses one
        return 0
    check_arguments(each for each in rest if name not in _LENGTHS)
    size, texts = budget.weigh(value), [each for each in rest if isinstance(each, str)]
    if name in _WEB and size > MAX_TEXT_OF_WEB:
        raise TemplateLimit(f"it uses the filter '{name}' on more than {MAX_TEXT_OF_WEB:,} characters")
    if name == "format" and isinstance(value, str):
        return size_of_printf(budget, value, list(rest))
    if name == "replace" and isinstance(value, str) and len(texts) == 2:
        return size_of_replace(value, *texts)
    if name == "join":
        return size + sum(map(len, texts)) * _count(value)
    if name == "round":
        check_number(4 * max([0, *(abs(each) for each in rest if isinstance(each, int))]))
    if name == "tojson":
        levels = budget.levels(value)
        indents = [each for each in rest if isinstance(each, int)]
        return size + size // _ITEM * (levels * max(0, *indents, 0) + (levels + 1) * budget.weigh(list(rest)))
    if name in _GROWING:
        factor = sum(max(each, 0) for each in rest if isinstance(each, int)) + sum(map(len, texts))
        return size * (1 + factor) + factor + budget.weigh(list(rest))
    return size


MAX_TEXT_OF_WEB = 10_000
_WEB = ("urlize", "striptags", "xmlattr", "wordwrap", "pprint", "urlencode", "e", "escape", "forceescape")
_GROWING = ("center", "indent", "wordwrap", "urlize", "batch", "slice", "replace")
_LENGTHS = ("truncate", "int", "float", "attr", "map", "select", "reject", "selectattr", "rejectattr", "sum")


def filtered(call: Callable[..., Any], name: str, budget: Callable[[], Budget], skip: int) -> Callable[..., Any]:
    """A filter that is called within the limits. skip: how many arguments are the environment, not values."""

    def limited(*args: Any, **options: Any) -> Any:
        now = budget()
        args = (*args[:skip], *map(listed, args[skip:]))
        now.charge(size_of_filter(now, name, [*args[skip:], *options.values()]))
        return call(*args, **options)

    return limited
