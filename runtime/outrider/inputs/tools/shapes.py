"""Calls in other shapes than a format's own, as small models write them, and in syntaxes that are read whole."""

from __future__ import annotations

import ast
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
        return ToolCall(without_halves(names[0]), _as_json(arguments))
    except ValueError:
        return None


PYTHON_NAME = re.compile(r"""[^\s()\[\]{},:='"]+""")  # get-weather, too
_IN_PYTHON = re.compile(
    rf"""([rR]?("{{3}}|'{{3}}|["'])(?:[^\\]|\\.)*?(?:\2|\\?\Z))|({PYTHON_NAME.pattern}+)(\s*[(=])?""", re.DOTALL
)  # a string, which may not end, or a name, and what follows it
_CONSTANTS = {"true": "True", "false": "False", "null": "None"}
_ESCAPE = re.compile(r"""\\([\\'"abfnrtv0-7]|x[\da-fA-F]{2}|u[\da-fA-F]{4}|U00(?:0[\da-fA-F]|10)[\da-fA-F]{4}|/|)""")


def python_calls(text: str) -> tuple[ToolCall, ...]:
    """Calls as Python writes them, [f(a="x"), g()], with Python's values or JSON's: LFM2, Llama 4.

    Names need not be Python's, as others stand for them while it reads the calls: get-weather(from="Oslo").
    """
    names = dict[str, str]()  # by what stands for them

    def in_python(found: re.Match[str]) -> str:
        string, _, name, mark = found.groups()
        if string:
            return string if string[0] in "rR" else _string_in_python(string)
        if not mark:
            return _CONSTANTS.get(name, name)
        names[other := f"n{len(names)}"] = name
        return other + mark

    try:
        parsed = ast.parse(_IN_PYTHON.sub(in_python, text.strip()), mode="eval").body
        nodes = parsed.elts if isinstance(parsed, ast.List) else [parsed]
        return tuple(_python_call(node, names) for node in nodes)
    except (SyntaxError, ValueError, TypeError, KeyError, RecursionError, MemoryError):
        return ()


def _string_in_python(text: str) -> str:
    """A string as models write it: with line breaks, JSON's escapes, and backslashes that escape nothing."""
    escaped = _ESCAPE.sub(lambda found: {"/": "/", "": r"\\"}.get(found[1], found[0]), text)
    return escaped.replace("\n", r"\n").replace("\r", r"\r")


def _python_call(node: ast.expr, names: Mapping[str, str]) -> ToolCall:
    """One call. Raises ValueError, TypeError or KeyError for anything else."""
    if not isinstance(node, ast.Call) or node.args or not isinstance(node.func, ast.Name):
        raise ValueError("no call by names alone")
    given = {names[str(each.arg)]: ast.literal_eval(each.value) for each in node.keywords}
    return ToolCall(names[node.func.id], _as_json(given))


def _as_json(value: Any) -> str:
    """JSON of a value. Raises ValueError for what JSON does not have, such as 1e999."""
    return without_halves(json.dumps(value, ensure_ascii=False, allow_nan=False))


def without_halves(text: str) -> str:
    """A text in which halves of a character that escapes make are U+FFFD, as no response can have them."""
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
