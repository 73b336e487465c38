"""The chat templates of a model: where they are read, which is used, and how messages are laid out with it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from outrider.errors import RequestError, one_line
from outrider.inputs.text.special_tokens import text_of
from outrider.inputs.text.template_use import TemplateLimit, TemplateRefusal, render
from outrider.inputs.text.turns import TOLD, TOLD_OF_TOOLS, joined_turns, told_of_tools, without_system

TEMPLATE_FILE, TEMPLATE_FOLDER = "chat_template.jinja", "additional_chat_templates"
DEFAULT, TOOL_USE = "default", "tool_use"
_ROLES = ("system", "user", "assistant", "tool")
_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class RefusedMessages(RequestError):
    """What a chat template says of messages that it does not lay out, such as two of the user's in a row."""


@dataclass(frozen=True)
class ChatTemplates:
    """A model's chat templates by name, and the special tokens that they write.

        templates = ChatTemplates.read(folder)
        text = templates.render(messages, tools=tools, answering=True)

    Source: `get_chat_template` and `apply_chat_template` in Transformers' `tokenization_utils_base.py`.
    """

    by_name: Mapping[str, str] = field(default_factory=dict)
    special_tokens: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> ChatTemplates:
        """Read a tokenizer's folder: chat_template.jinja and additional_chat_templates/*.jinja before JSON files.

        Raises:
            OSError, ValueError: when a file cannot be read.
        """
        config = _read_json(folder / "tokenizer_config.json")
        tokens = _read_json(folder / "special_tokens_map.json") | config
        special = {name: token for name in _TOKENS if (token := text_of(tokens.get(name))) is not None}
        return cls(_templates_of_files(folder) or _templates_of_json(folder, config), special)

    @property
    def default(self) -> str:
        """The template of a request without tools; empty if there is none."""
        return self.by_name.get(DEFAULT, "")

    @property
    def own_with_tools(self) -> str:
        """The model's own template of a request with tools; empty if there is none."""
        return self.by_name.get(TOOL_USE, self.default)

    @property
    def with_tools(self) -> str:
        """The same, with a sign that the model is told of tools in messages if the template has none."""
        own = self.own_with_tools
        return own if "tools" in own or not own else TOLD_OF_TOOLS + own

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        *,
        answering: bool,
        variables: Mapping[str, Any] | None = None,
        continuing: bool = False,
    ) -> str:
        """The text of messages, which are JSON values.

        variables: of the template. continuing: the text ends within the last message, with its content, or
        with its reasoning where it has no content.

        Arguments of calls that are text become objects for a template that writes these as JSON, and vice versa.

        Raises:
            RequestError: when the template refuses them, is no template, or exceeds a limit.
        """
        source = self.with_tools if tools else self.default
        if not source:
            names = ", ".join(sorted(self.by_name))
            raise RequestError(
                f"The model has no default chat template, but one for other requests: {names}. Give the prompt as text "
                "with chat_template=False."
            )
        if source.startswith(TOLD_OF_TOOLS):
            messages, tools = told_of_tools(_with_arguments(messages, dict), tools), ()
        if any(message.get("tool_calls") for message in messages):
            messages = _with_arguments(messages, self._form_of_arguments(source))
            messages = _with_short_ids(messages) if _SHORT_IDS.search(source) else messages
        messages = [_with_reasoning(message, source) for message in messages]
        if not continuing:
            return self._accepted(source, messages, tools, answering, variables)
        *before, last = messages
        if last["content"] or not last.get("reasoning_content"):
            marked = {**last, "content": _marked(last["content"])}
        else:  # within the reasoning
            marked = _with_reasoning({**last, "reasoning_content": _marked(last["reasoning_content"])}, source)
        text, mark, _ = self._accepted(source, [*before, marked], tools, False, variables).rpartition(_CONTINUED)
        if not mark:
            raise RequestError(
                "The last message cannot be continued: the model's chat template leaves its text out. End with "
                "another message."
            )
        return text

    def _accepted(self, source: str, messages: Any, tools: Any, answering: bool, given: Any) -> str:
        """The text of messages, which are joined where the template refuses them otherwise, as in llama.cpp and Ollama.

        Raises:
            RequestError: also when the template leaves out messages of a role that it does not know.
        """
        try:
            text = self._rendered(source, messages, tools, answering, given)
            if source.startswith(TOLD_OF_TOOLS) and TOLD not in text:  # system messages are left out
                text = self._rendered(source, joined_turns(without_system(messages)), tools, answering, given)
        except RefusedMessages as refused:
            joined = joined_turns(messages)
            for other in (joined, joined_turns(without_system(joined))):
                if other != messages:
                    with suppress(RefusedMessages):
                        return self._rendered(source, other, tools, answering, given)
            raise refused
        for message in messages:
            content = message.get("content")
            if message["role"] not in _ROLES and isinstance(content, str) and content.strip() not in text:
                raise RequestError(
                    f"The model's chat template leaves out messages of the role {message['role'][:60]!r}. Use the "
                    f"roles {', '.join(_ROLES)}."
                )
        return text

    def _rendered(
        self, source: str, messages: Any, tools: Any, answering: bool, given: Mapping[str, Any] | None = None
    ) -> str:
        given = _as_known(source, given or {})
        variables = {
            "messages": messages,
            "tools": list(tools) or None,
            "documents": None,
            "add_generation_prompt": answering,
            **self.special_tokens,
            **given,
        }
        try:
            return render(source, variables)
        except TemplateLimit as error:
            raise RequestError(
                f"The model's chat template exceeds a limit: {one_line(error)}. Check where the model comes from, or "
                "give the prompt as text with chat_template=False."
            ) from error
        except (TemplateRefusal, TypeError, ValueError) as error:
            if given.get(_EFFORT) == _NO_EFFORT:  # of a template that knows degrees alone
                others = {name: value for name, value in given.items() if name != _EFFORT}
                return self._rendered(source, messages, tools, answering, others)
            raise RefusedMessages(f"The model's chat template refuses these messages: {one_line(error)}.") from error

    @cached_property
    def _forms(self) -> dict[str, type | None]:
        return {}

    def _form_of_arguments(self, source: str) -> type | None:
        """`dict` or `str`: the form in which a template needs a call's arguments; None: it takes either.

        Transformers leaves this to the caller. OpenAI's clients always send text, and a template that applies `tojson`
        to it writes a JSON string.
        """
        if source not in self._forms:
            as_text, as_object = (self._writes_arguments(source, given) for given in (_ARGUMENTS_TEXT, _ARGUMENTS))
            self._forms[source] = (None if as_object else str) if as_text else dict
        return self._forms[source]

    def _writes_arguments(self, source: str, arguments: Any) -> bool:
        """Whether a template writes a call's arguments, as JSON, when they are given like this."""
        call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": arguments}}
        asking = {"role": "user", "content": "a"}
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        result = {"role": "tool", "content": "a", "name": "f", "tool_call_id": "call00000"}
        for messages in ([asking, answer, result, asking], [asking, answer]):
            try:
                text = self._rendered(source, messages, (), False)
            except RequestError:
                continue
            return _KEY in text and f'\\"{_KEY}' not in text
        return False


_EFFORT, _NO_EFFORT = "reasoning_effort", "none"  # OpenAI's word for no reasoning
_OTHER_WORDS = ("no_think", "off", "disabled")  # of templates: the first is Hy3's
_TAGS = re.compile(r"\{[%{][^{}]*\breasoning_effort\b[^{}]*[%}]\}")
_QUOTED = re.compile(r"""['"](\w+)['"]""")


def _as_known(source: str, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Variables in which no reasoning has the template's own word, if it has one."""
    if given.get(_EFFORT) != _NO_EFFORT:
        return given
    words = [word for tag in _TAGS.findall(source) for word in _QUOTED.findall(tag)]
    other = next((word for word in words if word in _OTHER_WORDS), None)
    return given if _NO_EFFORT in words or other is None else {**given, _EFFORT: other}


_CONTINUED = "\ufdd1"  # a noncharacter of Unicode, which texts do not contain: the end of a message to continue
_REASONING = re.compile(r"""(?:\.|\[['"]|get\(['"]|['"])(reasoning|thinking)\b""")


def _marked(content: Any) -> Any:
    """A content, which may be in parts the last of which is a text, with a mark at its end."""
    if isinstance(content, str):
        return content + _CONTINUED
    return [*content[:-1], {**content[-1], "text": content[-1]["text"] + _CONTINUED}]


def _with_reasoning(message: Mapping[str, Any], source: str) -> dict[str, Any]:
    """A message with its reasoning under the name that a template reads besides `reasoning_content`."""
    reasoning = message.get("reasoning_content")
    if not reasoning or "reasoning_content" in source:
        return dict(message)
    others = dict.fromkeys(_REASONING.findall(source), reasoning)
    if "thinking" in others and message.get("tool_calls"):  # gpt-oss: a call has either
        return {**message, **others, "content": ""}
    return {**message, **others}


_KEY = "argument_key"
_ARGUMENTS = {_KEY: "value"}
_ARGUMENTS_TEXT = json.dumps(_ARGUMENTS)


def _with_arguments(messages: Sequence[Mapping[str, Any]], form: type | None) -> list[dict[str, Any]]:
    """A copy of messages whose calls have their arguments in a form."""
    return [
        {**message, "tool_calls": [_call_with(call, form) for call in calls]}
        if isinstance(calls := message.get("tool_calls"), list)
        else dict(message)
        for message in messages
    ]


_SHORT_IDS = re.compile(r"id\s*\|\s*length\s*!=\s*9\b")  # Mistral's templates refuse other ids of calls
_SHORT_ID = 9  # characters, of which vLLM's template takes the last ones of a longer id


def _with_short_ids(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A copy of messages whose calls and results have ids of nine letters and digits. Missing ones are numbered."""
    made, num_calls, num_results = list[dict[str, Any]](), 0, 0
    for message in messages:
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            named = [
                {**call, "id": _short_id(call.get("id"), num_calls + i)} for i, call in enumerate(calls)
                if isinstance(call, Mapping)
            ]  # fmt: skip
            num_results, num_calls = num_calls, num_calls + len(named)
            message = {**message, "tool_calls": named}
        elif message.get("role") == "tool":
            message = {**message, "tool_call_id": _short_id(message.get("tool_call_id"), num_results)}
            num_results += 1
        made.append(dict(message))
    return made


def _short_id(given: Any, number: int) -> str:
    letters = re.sub("[^A-Za-z0-9]", "", given if isinstance(given, str) else f"call{number}")
    return letters[-_SHORT_ID:].rjust(_SHORT_ID, "0")


def _call_with(call: Any, form: type | None) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    if form is dict and isinstance(arguments, str):
        try:
            value = json.loads(arguments)
        except (ValueError, RecursionError):
            return call
        arguments = value if isinstance(value, dict) else arguments
    elif form is str and isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _templates_of_files(folder: Path) -> dict[str, str]:
    found = {}
    if (folder / TEMPLATE_FILE).is_file():
        found[DEFAULT] = (folder / TEMPLATE_FILE).read_text(encoding="utf-8")
    for path in sorted((folder / TEMPLATE_FOLDER).glob("*.jinja")):
        found[path.stem] = path.read_text(encoding="utf-8")
    return found


def _templates_of_json(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """chat_template.json is a processor's, of models that read images, and stands before the tokenizer's."""
    for value in (_read_json(folder / "chat_template.json").get("chat_template"), config.get("chat_template")):
        if isinstance(value, str):
            return {DEFAULT: value}
        if isinstance(value, dict):
            return {name: text for name, text in value.items() if isinstance(text, str)}
        if isinstance(value, list):
            named = [(each.get("name"), each.get("template")) for each in value if isinstance(each, dict)]
            return {name: text for name, text in named if isinstance(name, str) and isinstance(text, str)}
    return {}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return content if isinstance(content, dict) else {}
