"""Calls in other shapes than a format's own, as small models write them, and in syntaxes that are read whole."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from outrider.inputs.tools.arguments import JsonArguments


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function. arguments: JSON, as the model wrote it; incomplete if the answer was cut."""

    name: str
    arguments: str


ReadWhole: TypeAlias = Callable[[str], tuple[ToolCall, ...]]

_NAMES = ("name", "function", "tool_name", "tool", "function_name", "action")
_ARGUMENTS = ("arguments", "parameters", "args", "params", "input", "tool_input", "action_input")
_AROUND = ("tool_calls", "tool_call", "function_call")  # what an object with nothing but calls has
CALL_KEYS = (*_NAMES, *_ARGUMENTS, *_AROUND, "type", "id", "index")
_FIRST_KEY = re.compile(r"""\s*\[?\s*\{{1,2}\s*(["'])([^"'\\]*)\1\s*:""")
_BEFORE_KEY = re.compile(r"""\s*\[?\s*(?:\{{1,2}\s*(?:["'][^"'\\]*["']?\s*)?)?""")
_NAME_KEY = re.compile(rf'"(?:{"|".join(_NAMES)})"\s*:\s*"([^"\\]+)"')


def may_be_call(text: str) -> bool:
    """Whether a text may be the beginning of a call in JSON, or of a list of them."""
    found = _FIRST_KEY.match(text)
    return found[2] in CALL_KEYS if found else _BEFORE_KEY.fullmatch(text) is not None and bool(text.strip())


def name_in(text: str) -> str | None:
    """The name in the beginning of a call in JSON, once it is complete."""
    found = _NAME_KEY.search(text)
    return found[1] if found else None


def calls_of(text: str, *, needs_arguments: bool = False) -> tuple[ToolCall, ...]:
    """The calls that a JSON value is, whatever the order of its keys; none if it is something else.

    Arguments may be a text that is JSON, and missing unless `needs_arguments`.
    """
    made, rest = JsonArguments().take(text)
    try:
        value = json.loads(made + rest, strict=False)
    except (ValueError, RecursionError):
        return ()
    if isinstance(value, Mapping) and len(value) == 1:
        value = next((value[key] for key in _AROUND if key in value), value)
    found = [_call_of(each, needs_arguments) for each in (value if isinstance(value, list) else [value])]
    calls = tuple(call for call in found if call is not None)
    return calls if len(calls) == len(found) else ()


def _call_of(value: Any, needs_arguments: bool) -> ToolCall | None:
    if isinstance(value, Mapping) and isinstance(value.get("function"), Mapping):
        value = value["function"]
    if not isinstance(value, Mapping):
        return None
    names = [value[key] for key in _NAMES if isinstance(value.get(key), str)]
    if not names or not {*value} <= {*CALL_KEYS}:
        return None
    if needs_arguments and value.keys().isdisjoint(_ARGUMENTS):
        return None
    arguments: Any = next((value[key] for key in _ARGUMENTS if value.get(key) is not None), {})
    if arguments == []:  # PHP's empty table, and that of some models
        arguments = {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, strict=False) if arguments.strip() else {}
        except (ValueError, RecursionError):
            return None
    if not isinstance(arguments, Mapping):
        return None
    try:
        return ToolCall(names[0], _as_json(arguments))
    except ValueError:
        return None


PYTHON_NAME = re.compile(r"""[^\s()\[\]{},:='"]+""")  # get-weather, too
_IN_PYTHON = re.compile(
    rf"""("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|({PYTHON_NAME.pattern})\s*([(=])|[()]""", re.DOTALL
)  # fmt: skip


def python_calls(text: str) -> tuple[ToolCall, ...]:
    """Calls as Python writes them, [f(a="x"), g()], with Python's values or JSON's: LFM2, Llama 4."""
    ends = list[str]()  # of the brackets that are open

    def in_json(found: re.Match[str]) -> str:
        string, name, mark = found.groups()
        if string:
            return string
        if mark == "=":
            return f"{json.dumps(name)}:"
        if found[0] == ")":
            return ends.pop() if ends else ")"
        ends.append("}}" if name else "]")
        return f'{{"name": {json.dumps(name)}, "arguments": {{' if name else "["

    return calls_of(_IN_PYTHON.sub(in_json, text))


def _as_json(value: Any) -> str:
    """JSON, in which halves of a character that escapes make are U+FFFD, as no response can have them.

    Raises ValueError for what JSON does not have, such as 1e999.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


_GEMMA_HEAD = re.compile(r"\s*call:([^\s{]+)\s*(\{.*\})\s*", re.DOTALL)
_GEMMA_STRING = '<|"|>'


def gemma_calls(text: str) -> tuple[ToolCall, ...]:
    """A call as Gemma 4 writes it: call:f{a:<|"|>x<|"|>,b:[1,true]}, with keys that have no quotes."""
    found = _GEMMA_HEAD.fullmatch(text)
    arguments = "".join(_gemma_parts(found[2])) if found else ""
    return calls_of(f'{{"name": {json.dumps(found[1])}, "arguments": {arguments}}}') if found else ()


def _gemma_parts(text: str) -> Iterator[str]:
    for i, part in enumerate(text.split(_GEMMA_STRING)):
        if i % 2:
            yield json.dumps(part, ensure_ascii=False)
        else:
            yield re.sub(r"([{,]\s*)([A-Za-z_][\w.-]*)(\s*:)", r'\1"\2"\3', part)
