"""Jinja2 as Transformers sets it up for chat templates, within the limits of `template_limits`.

Source: `_cached_compile_jinja_template` in Transformers' `utils/chat_template_utils.py`.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from types import BuiltinMethodType, MethodType
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, TemplateReference, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Joiner, Namespace, pass_eval_context

from outrider.inputs.text.template_limits import (
    FILTERS,
    MAX_CALL_LEVELS,
    REFUSED_METHODS,
    Budget,
    TemplateLimit,
    charge_for,
    check_number,
    check_numbers,
    filtered,
    listed,
)

MAX_SOURCE = 200_000  # characters of a template
MAX_SOURCE_LEVELS = 200  # of its statements and expressions

_READABLE = (str, list, tuple, dict, range, Namespace, LoopContext, Macro, BlockReference, TemplateReference, Cycler)
_now = threading.local()


def render(template: jinja2.Template, variables: Mapping[str, Any], size: int) -> str:
    """The text of a compiled template. size: characters of its variables.

    Raises:
        TemplateLimit: when it exceeds a limit.
        Exception: whatever else a template or Python raises.
    """
    with _budget(Budget(variables.values(), size)):
        return template.render(**variables)


@functools.lru_cache(maxsize=32)
def compiled(source: str) -> jinja2.Template:
    """Compile a template, once. Raises as `render`."""
    if len(source) > MAX_SOURCE:
        raise TemplateLimit(f"it has {len(source):,} characters, and {MAX_SOURCE:,} are allowed")
    with _budget(Budget()):
        return _environment().from_string(source)


@contextmanager
def _budget(budget: Budget) -> Iterator[None]:
    before = getattr(_now, "budget", None)
    _now.budget = budget
    try:
        yield
    finally:
        _now.budget = before


def _current() -> Budget:
    return cast("Budget", _now.budget)


@functools.cache
def _environment() -> _Environment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.filters["sum"] = _sum
    filters, environment.filters = environment.filters, {}
    for name in FILTERS:
        wrapped = filtered(filters[name], name, _current, 1 if hasattr(filters[name], "jinja_pass_arg") else 0)
        environment.filters[name] = _as(filters[name], wrapped)
    tests: dict[str, Any] = environment.tests
    for name, call in tests.items():
        environment.tests[name] = _as(call, _ticking(call))
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    del environment.globals["lipsum"]
    return environment


def _as(call: Any, limited: Callable[..., Any]) -> Any:
    """A function with the marks of another, which say what Jinja passes to it."""
    return functools.wraps(call)(limited) if hasattr(call, "__dict__") else limited


def _tojson(
    x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@jinja2.pass_environment
def _sum(environment: _Environment, iterable: Iterable[Any], attribute: Any = None, start: Any = 0) -> Any:
    """Jinja2's, with the operator that is limited."""
    value_of: Any = None if attribute is None else make_attrgetter(environment, attribute)
    total = start
    for item in iterable:
        total = environment.call_binop(cast("Any", None), "+", total, value_of(item) if value_of else item)
    return total


def _raise_exception(message: Any) -> None:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:  # noqa: A002
    if len(format) > 1000:
        raise TemplateLimit("it formats a date with more than 1,000 characters")
    return datetime.now().strftime(format)  # noqa: DTZ005 - local time, as Transformers'


def _ticking(call: Callable[..., Any]) -> Callable[..., Any]:
    def limited(*args: Any, **options: Any) -> Any:
        _current().tick()
        check_number(max([0, *(each.bit_length() for each in args if isinstance(each, int))]))
        return call(*args, **options)

    return limited


class _Generation(Extension):
    """`{% generation %}`: its body. It marks what training learns."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    @pass_eval_context
    def _body(self, context: nodes.EvalContext, caller: Macro) -> str:  # noqa: ARG002
        return caller()


class _Parser(Parser):
    """Refuses what is nested too deeply, before Python's recursion limit, which an app can change."""

    _level = 0

    def _deeper(self, parse: Callable[..., Any], *args: Any, **options: Any) -> Any:
        self._level += 1
        if self._level > MAX_SOURCE_LEVELS:
            raise _too_deep()
        try:
            return parse(*args, **options)
        finally:
            self._level -= 1

    def parse_statement(self) -> Any:
        return self._deeper(super().parse_statement)

    def parse_not(self) -> Any:
        return self._deeper(super().parse_not)

    def parse_condexpr(self) -> Any:
        return self._deeper(super().parse_condexpr)

    def parse_unary(self, with_filter: bool = True) -> Any:
        return self._deeper(super().parse_unary, with_filter)


class _Generator(CodeGenerator):
    """Writes calls of the environment's own methods directly, and joins texts within the limits."""

    def visit_Call(self, node: nodes.Call, frame: Frame, forward_caller: bool = False) -> None:  # noqa: N802
        if not isinstance(node.node, nodes.EnvironmentAttribute):
            return super().visit_Call(node, frame, forward_caller=forward_caller)
        self.visit(node.node, frame)
        self.write("(")
        for each in node.args:
            self.visit(each, frame)
        return self.write(")")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        self.write("environment.joined((")
        for each in node.nodes:
            self.visit(each, frame)
            self.write(", ")
        self.write("))")


class _Environment(ImmutableSandboxedEnvironment):
    code_generator_class = _Generator
    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=self._shown, **options)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Parser(self, source, name, filename).parse()

    def _generate(self, source: nodes.Template, *args: Any, **options: Any) -> Any:
        """Python's code of a template, with what counts its time in loops and its values in variables."""
        _check_levels(source)
        for loop in [*source.find_all(nodes.For)]:
            loop.body.insert(0, nodes.ExprStmt(_call("tick"), lineno=loop.lineno))
            if loop.test is not None:
                loop.test = _call("kept", loop.test)
            loop.iter = _call("kept", loop.iter)
        for assigned in [*source.find_all(nodes.Assign)]:
            assigned.node = _call("kept", assigned.node)
        for scope in [*source.find_all(nodes.With)]:
            scope.values = [_call("kept", value) for value in scope.values]
        return super()._generate(source, *args, **options)

    def tick(self) -> None:
        """Called in every round of a loop."""
        _current().tick()

    def kept(self, value: Any) -> Any:
        """Called with every value that a variable gets."""
        return _current().kept(listed(value))

    def joined(self, values: Iterable[Any]) -> str:
        """The operator `~`."""
        return self.concat([str(self._shown(value)) for value in values])

    def concat(self, pieces: Iterable[str]) -> str:
        """The text of a template, a macro or a block."""
        budget, found, size = _current(), [], 0
        for piece in pieces:
            size += len(piece)
            if size > budget.max_text:
                break
            found.append(piece)
        budget.charge(size)
        return "".join(found)

    def _shown(self, value: Any) -> Any:
        """A value that is about to become text."""
        if not isinstance(value, str):
            budget = _current()
            if isinstance(value, int):
                return value
            budget.charge(budget.weigh(value))
        return value

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = _current()
        budget.tick()
        check_numbers(operator, left, right)
        if not isinstance(left, int | float) or not isinstance(right, int | float):
            charge_for(budget, operator, [left, right])
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        is_data = isinstance(obj, (*_READABLE, Undefined, Joiner))
        return is_data and attr not in REFUSED_METHODS and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        call = super().wrap_str_format(value)
        if call is None:
            return None

        def limited(*args: Any, **options: Any) -> str:
            charge_for(_current(), "format", [value.__self__, *args, *options.values()])
            return call(*args, **options)

        return limited

    def call(self, context: Context, obj: Any, /, *args: Any, **options: Any) -> Any:
        budget = _current()
        budget.tick()
        args = tuple(map(listed, args))
        values = [*args, *(value for name, value in options.items() if not name.startswith("_"))]
        for value in values:
            budget.kept(value)
        if isinstance(obj, BuiltinMethodType | MethodType) and isinstance(obj.__self__, str):
            charge_for(budget, obj.__name__, [obj.__self__, *values])
        budget.level += 1
        try:
            if budget.level > MAX_CALL_LEVELS:
                raise TemplateLimit(f"its macros call themselves in more than {MAX_CALL_LEVELS} levels")
            return super().call(context, obj, *args, **options)
        finally:
            budget.level -= 1


def _call(name: str, *args: Any) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), [*args], [], None, None)


def _check_levels(template: nodes.Template) -> None:
    """Raise for a long chain of operators or filters, which is parsed in a loop and compiled recursively."""
    level: list[nodes.Node] = [template]
    for _ in range(MAX_SOURCE_LEVELS):
        level = [child for node in level for child in node.iter_child_nodes()]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> TemplateLimit:
    return TemplateLimit(f"its source is nested in more than {MAX_SOURCE_LEVELS} levels")
