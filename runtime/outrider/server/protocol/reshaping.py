"""Requests in the shapes that others write: of tools, choices, schemas and items, made into this server's."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from outrider.server.errors import ApiError
from outrider.server.protocol.histories import content_of_others, messages_of_others
from outrider.system.nesting import TooDeep, check_json

_CHOICES = {"any": "required", "auto": "auto", "none": "none", "required": "required"}
# Hosted tools' items, which have no text for the model.
_SKIPPED_ITEMS = {
    "code_interpreter_call", "computer_call", "computer_call_output", "file_search_call", "image_generation_call",
    "mcp_approval_request", "mcp_approval_response", "mcp_call", "mcp_list_tools", "tool_search_call",
    "tool_search_output", "web_search_call",
}  # fmt: skip
_AS_CALLS = {
    "apply_patch_call": "operation", "custom_tool_call": "input", "local_shell_call": "action", "shell_call": "action",
}  # fmt: skip
_AS_OUTPUTS = {f"{kind}_output" for kind in _AS_CALLS}


def reshape(fields: dict[str, Any], known: set[str]) -> list[str]:
    """Change a request's fields in place. known: this server's fields. Returns what was skipped.

    Raises:
        ApiError: with status 400, for an item that only another server can read.
    """
    think = fields.pop("think", None) if "messages" in known else None  # Ollama's
    if think is not None:
        name = "reasoning_effort" if isinstance(think, str) else "enable_thinking"
        if fields.get(name) is None:
            fields[name] = think
    if fields.pop("do_sample", None) is False:  # Transformers'
        fields["temperature"] = 0
    if isinstance(fields.get("thinking"), bool):
        fields["thinking"] = {"enabled": fields["thinking"]}
    if isinstance(fields.get("reasoning"), str):  # LM Studio's
        effort = fields["reasoning"]
        fields["reasoning"] = {"enabled": effort == "on"} if effort in ("on", "off") else {"effort": effort}
    if "messages" in known:
        fields |= _of_chat(fields)
        if isinstance(fields.get("messages"), list):
            fields["messages"] = messages_of_others(fields["messages"])
    _read_bias(fields)
    if "response_format" in known:
        fields |= _form_of_others(fields.get("response_format"))
        if fields.get("response_format") is None:
            fields |= _schema_of_others(fields)
    skipped = _skip_items(fields) if "input" in known else []
    _choose(fields, is_chat="messages" in known)
    return skipped


def _read_bias(fields: dict[str, Any]) -> None:
    """`logit_bias` as llama.cpp takes it, too: pairs of a token and its bias, which is false where it is banned."""
    pairs = fields.get("logit_bias")
    if not isinstance(pairs, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and type(pair[0]) is int for pair in pairs
    ):
        return
    fields["logit_bias"] = {str(token_id): bias for token_id, bias in pairs if bias is not False} or None
    if banned := [token_id for token_id, bias in pairs if bias is False]:
        fields["banned_token_ids"] = [*(fields.get("banned_token_ids") or []), *banned]


def _of_chat(fields: dict[str, Any]) -> dict[str, Any]:
    """Tools as /v1/responses writes them."""
    made: dict[str, Any] = {}
    tools = fields.get("tools")
    if isinstance(tools, list):
        made["tools"] = [_tool(tool) for tool in tools]
    return made


def _form_of_others(form: Any) -> dict[str, Any]:
    """`response_format` as a word, or with a schema and no object around it; TGI's `value`; Fireworks' grammars."""
    if form in ("json", "json_object", "text", {}, {"type": "json"}):
        return {"response_format": {"type": "json_object"} if "json" in str(form) else None}
    if not isinstance(form, dict):
        return {}
    kind = form.get("type")
    value = form.get("value", form.get(kind)) if isinstance(kind, str) else None
    if kind in ("regex", "grammar") and isinstance(value, str):
        return {"response_format": None, kind: value}
    if kind in ("json", "json_object") and isinstance(value, dict):
        return {"response_format": {"type": "json_schema", "json_schema": {"schema": value}}}
    if kind == "json_schema" and form.get("json_schema") is None and isinstance(form.get("schema"), dict):
        named = {key: value for key, value in form.items() if key in ("schema", "name", "strict")}
        return {"response_format": {"type": "json_schema", "json_schema": named}}
    return {}


def _tool(tool: Any) -> Any:
    """A function without the object around it, also as Anthropic's API has it."""
    if not isinstance(tool, dict) or "function" in tool or not isinstance(tool.get("name"), str):
        return tool
    kind, schema = tool.get("type"), tool.get("input_schema")
    if kind != "function" and (kind is not None or "parameters" not in tool) and not isinstance(schema, dict):
        return tool
    function = {key: value for key, value in tool.items() if key not in ("type", "input_schema")}
    return {"type": "function", "function": function | ({} if schema is None else {"parameters": schema})}


def _schema_of_others(fields: dict[str, Any]) -> dict[str, Any]:
    """`json_schema` of llama.cpp; `guided_json`, `guided_choice` and `structured_outputs` of vLLM."""
    asked = fields.get("structured_outputs")
    names = {"json", "json_object", "regex", "choice", "grammar"}
    if isinstance(asked, dict) and {key for key, value in asked.items() if value is not None} <= names:
        fields.pop("structured_outputs")
        found = {key: asked.get(key) for key in names}
    else:
        schemas = [fields.pop("json_schema", None), fields.pop("guided_json", None)]
        schema = next((each for each in schemas if each is not None), None)
        found = {"json": schema, "choice": fields.pop("guided_choice", None)}
        found["json_object"] = fields.pop("guided_json_object", None)
    choice = found.get("choice")
    if isinstance(choice, list) and choice and all(isinstance(each, str) for each in choice):
        return {"regex": "|".join(map(re.escape, choice))}
    if choice is not None:
        return {"guided_choice": choice}  # which is refused by this name
    for name in ("regex", "grammar"):
        if found.get(name) is not None:
            return {name: found[name]}
    schema = found.get("json")
    if isinstance(schema, str):  # vLLM reads it
        schema = value_of_json(schema)
    if schema is None:
        return {"response_format": {"type": "json_object"}} if found.get("json_object") is True else {}
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


def value_of_json(text: str) -> Any:
    """The value that a text is in JSON; the text where it is none, or is nested too deeply."""
    try:
        check_json(text)
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, TooDeep):
        return text


def _choose(fields: dict[str, Any], *, is_chat: bool) -> None:
    """Choices of tools by other names, and those that allow some of the tools."""
    choice = fields.get("tool_choice")
    if isinstance(choice, str):
        choice = fields["tool_choice"] = _CHOICES.get(choice, choice)
        if choice in map(_name_of, fields.get("tools") or []):
            choice = {"name": choice}
    if not isinstance(choice, dict):
        return
    kind, name = str(choice.get("type", "function")), choice.get("name")
    if kind in _CHOICES and len(choice) == 1:
        fields["tool_choice"] = _CHOICES[kind]
    elif kind in ("function", "tool") and isinstance(name, str) and "function" not in choice:
        named = {"function": {"name": name}} if is_chat else {"name": name}
        fields["tool_choice"] = {"type": "function", **named}
    elif kind == "allowed_tools":
        allowed = choice.get("allowed_tools", choice)
        tools, mode = (allowed.get("tools"), allowed.get("mode")) if isinstance(allowed, dict) else (None, None)
        if isinstance(tools, list) and isinstance(fields.get("tools"), list) and mode in ("auto", "required"):
            names = {_name_of(tool) for tool in tools} - {None}
            fields["tools"] = [tool for tool in fields["tools"] if _name_of(tool) in names] or None
            fields["tool_choice"] = mode if fields["tools"] else None


def _name_of(tool: Any) -> str | None:
    inner = tool.get("function", tool) if isinstance(tool, dict) else None
    name = inner.get("name") if isinstance(inner, dict) else None
    return name if isinstance(name, str) else None


def _skip_items(fields: dict[str, Any]) -> list[str]:
    """Calls of tools that were no functions become calls of functions; those of hosted tools are skipped."""
    items = fields.get("input")
    if not isinstance(items, list):
        return []
    kinds = [str(item.get("type")) if isinstance(item, dict) else "" for item in items]
    if "compaction" in kinds:
        place = f"input[{kinds.index('compaction')}]"
        message = f"'{place}' is a compaction, which only the server that wrote it can read. Send the items themselves."
        raise ApiError(400, message, param=place, code="unsupported_item")
    pairs = [(item, kind) for item, kind in zip(items, kinds, strict=True) if kind not in _SKIPPED_ITEMS]
    fields["input"] = [_item(item, kind) for item, kind in pairs]
    return [f"items of type {kind}" for kind in _SKIPPED_ITEMS & {*kinds}]


def _item(item: Any, kind: str) -> Any:
    if isinstance(item, dict) and item.get("type") is None and item.keys() <= {"id", "type"}:
        return {"type": "item_reference", "id": item.get("id")}
    if kind in _AS_CALLS:
        key = _AS_CALLS[kind]
        name, arguments = item.get("name") or kind.removesuffix("_call"), json.dumps({key: item.get(key)})
        return {"type": "function_call", "call_id": item.get("call_id"), "name": name, "arguments": arguments}
    if kind in _AS_OUTPUTS or kind == "function_call_output":
        output = content_of_others(item.get("output"), is_result=True)
        return {"type": "function_call_output", "call_id": item.get("call_id"), "output": output}
    return item
