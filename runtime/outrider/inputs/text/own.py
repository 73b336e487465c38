"""Apps' own tokenizers: what they raise and return is checked where it enters."""

from __future__ import annotations

from numbers import Integral
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from outrider.errors import RequestError
from outrider.system.guard import Guarded, Rule

if TYPE_CHECKING:
    from outrider.types import TextTokenizer


class _WithoutTemplate:
    """What a `TextTokenizer` lacks of a `ChatTokenizer`."""

    has_chat_template = False


def guarded(tokenizer: TextTokenizer) -> TextTokenizer:
    """An app's tokenizer, whose errors and wrong values are RequestErrors."""
    what = f"the tokenizer, a {type(tokenizer).__name__},"
    return cast("TextTokenizer", Guarded(tokenizer, what, RULES, RequestError, "Mend it.", _WithoutTemplate()))


def _are_token_ids(values: Any) -> bool:
    return isinstance(values, list) and {*map(type, values)} <= {int}


def _are_integers(values: Any) -> bool:
    if isinstance(values, np.ndarray):
        return values.ndim == 1 and values.dtype.kind in "iu"
    is_list = isinstance(values, list | tuple)
    return is_list and all(issubclass(kind, Integral) and not issubclass(kind, bool) for kind in {*map(type, values)})


def _are_prompt(values: Any) -> bool:
    return _are_integers(values) and len(values) > 0


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


# By member of `TextTokenizer` and `ChatTokenizer`.
RULES = {
    "prefix": Rule("a list of integers", _are_integers),
    "encode": Rule("a list of integers", _are_token_ids, of_call=True),
    "chat_template": Rule("a text", _is_text),
    "encode_prompt": Rule("a list of integers, with one at least", _are_prompt, of_call=True),
    "decode": Rule("a text", _is_text, of_call=True),
    "has_chat_template": Rule("True or False", lambda value: isinstance(value, bool)),
    "render": Rule("a text", _is_text, of_call=True),
    "encode_rendered": Rule("a list of integers", _are_integers, of_call=True),
}
