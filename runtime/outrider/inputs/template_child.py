"""The process that lays chat templates out: `python -m outrider.inputs.template_child`, started by `ChatTemplates`.

A template comes with a model and is not trusted. Jinja2's sandbox keeps it to what it is given, and the limits of the
process keep it from taking any time and memory: Python cannot interrupt an operation on a text or a list.

Source: `_cached_compile_jinja_template` in Transformers' `utils/chat_template_utils.py`.
"""

from __future__ import annotations

import functools
import json
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, LoopContext, Macro, TemplateReference, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Joiner, Namespace, pass_eval_context

from outrider.errors import one_line
from outrider.system.children import ChildOutcome, Question, answer

_READABLE = (
    str, list, tuple, dict, range, Namespace, LoopContext, Macro, BlockReference, TemplateReference, Cycler, Undefined,
    Joiner,
)  # fmt: skip


class TemplateUse(Question, frozen=True, kw_only=True):
    """A template to lay out. variables: as JSON. longest: characters that its text may have."""

    source: str
    variables: str
    longest: int


class LaidOutText(ChildOutcome, kw_only=True):
    """The text, or the error that the template or Python raised. beyond: also "levels", or "text" if it is too long."""

    text: str = ""
    error: str = ""


def lay_out(use: TemplateUse) -> LaidOutText:
    """The text of a template, in this process. Raises MemoryError."""
    try:
        text = _compiled(use.source).render(**json.loads(use.variables))
    except (RecursionError, SyntaxError):  # Python's own: of what Jinja2 makes of it
        return LaidOutText(beyond="levels")
    except MemoryError:
        raise
    except Exception as error:
        return LaidOutText(error=one_line(error))
    return LaidOutText(text=text) if len(text) <= use.longest else LaidOutText(beyond="text")


@functools.lru_cache(maxsize=32)
def _compiled(source: str) -> jinja2.Template:
    return _environment().from_string(source)


@functools.cache
def _environment() -> jinja2.Environment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _Environment(ImmutableSandboxedEnvironment):
    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Of data alone."""
        return isinstance(obj, _READABLE) and super().is_safe_attribute(obj, attr, value)


def _tojson(
    x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: Any) -> None:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:  # noqa: A002
    return datetime.now().strftime(format)  # noqa: DTZ005 - local time, as Transformers'


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


if __name__ == "__main__":
    answer(TemplateUse, LaidOutText, lay_out)
