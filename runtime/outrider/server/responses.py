"""/v1/responses."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from outrider.decoding.metrics import Stats
from outrider.decoding.results import Result
from outrider.server.conversations import Conversations
from outrider.server.dialect import ChoicePiece, Dialect, News, Part, ServedAnswer, ServedChoice, Wanted, first_choice
from outrider.server.errors import ApiError
from outrider.server.options import BETWEEN_PARTS, AnswerChoice
from outrider.server.protocol.items import (
    InputImagePart,
    InputItem,
    InputPart,
    ReasoningTextPart,
    ResponseRequest,
    SchemaFormat,
    Status,
    listed,
)
from outrider.server.protocol.reading import read_request
from outrider.server.protocol.requests import (
    Asked,
    ChatMessage,
    ChatRequest,
    Function,
    FunctionName,
    InputTextPart,
    JsonSchema,
    RefusalPart,
    Tool,
    ToolChoice,
)

Output: TypeAlias = dict[str, Any]  # an item
Turn: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Items:
    """What an answer repeats and stores of its request."""

    request: ResponseRequest
    turns: Sequence[Turn]  # of the conversation up to the answer, without instructions
    given: Sequence[dict[str, Any]]  # items of this request's input


def to_chat(body: bytes, conversations: Conversations) -> Wanted:
    """The chat that a body of /v1/responses asks for."""
    return chat_of_items(read_request(body, ResponseRequest), conversations)


def chat_of_items(asked: ResponseRequest, conversations: Conversations) -> Wanted:
    """The chat that a text or items are, after the stored answer that they follow."""
    turns, given = _turns(asked, conversations)
    system = [] if asked.instructions is None else [{"role": "system", "content": asked.instructions}]
    form: Any = asked.text and asked.text.format
    if isinstance(form, SchemaFormat):
        form = JsonSchema(form)
    choice = asked.tool_choice
    has_logprobs = "message.output_text.logprobs" in (asked.include or ())
    chat = ChatRequest(
        **{name: getattr(asked, name) for name in _SHARED},
        messages=msgspec.convert(_with_one_system([*system, *turns]), list[ChatMessage]),
        max_tokens=asked.max_output_tokens,
        response_format=form,
        tools=[Tool(Function(t.name, t.description, t.parameters, t.strict)) for t in asked.tools or ()] or None,
        tool_choice=choice if isinstance(choice, str | None) else ToolChoice(FunctionName(choice.name)),
        logprobs=has_logprobs or None,
        top_logprobs=asked.top_logprobs if has_logprobs else None,
    )
    return Wanted(chat, Items(asked, turns, given))


_SHARED = (*Asked.__struct_fields__, "parallel_tool_calls", "chat_template_kwargs", "reasoning", "thinking")


def _begin(answer: ServedAnswer) -> Iterator[dict[str, Any]]:
    yield _event(answer, "response.created", response=_response(answer, "in_progress"))
    yield _event(answer, "response.in_progress", response=_response(answer, "in_progress"))


def _events(answer: ServedAnswer, step: ChoicePiece) -> Iterator[dict[str, Any]]:
    for news in step.news:
        yield from _of_news(answer, step.said, news)
    if step.chunk.result:
        response = _body(answer)
        yield _event(answer, f"response.{response['status']}", response=response)


def _of_news(answer: ServedAnswer, said: ServedChoice, news: News) -> Iterator[dict[str, Any]]:
    """The events of a part, which is an item of the output."""
    part, is_call = news.part, news.part.kind == "call"
    item = _item(part, _status_of(part, said) if news.kind == "ended" else "in_progress")
    place = {"output_index": part.index}
    inner = place | {"item_id": item["id"]} | ({} if is_call else {"content_index": 0})
    kind = {"thought": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}[part.kind]
    logprobs = {"logprobs": [*news.logprobs]} if part.kind == "text" else {}
    if news.kind == "begun":
        yield _event(answer, "response.output_item.added", **place, item=item | ({} if is_call else {"content": []}))
        if not is_call:
            yield _event(answer, "response.content_part.added", **inner, part=item["content"][0])
    elif news.kind == "grown":
        yield _event(answer, f"response.{kind}.delta", **inner, delta=news.text, **logprobs)
    else:
        ended: dict[str, Any] = {"name": part.name, "arguments": part.text} if is_call else {"text": part.text}
        if part.kind == "text":
            ended["logprobs"] = [*part.logprobs]
        yield _event(answer, f"response.{kind}.done", **inner, **ended)
        if not is_call:
            yield _event(answer, "response.content_part.done", **inner, part=item["content"][0])
        yield _event(answer, "response.output_item.done", **place, item=item)


def _status_of(part: Part, said: ServedChoice) -> Status:
    """Of a part that has ended: the last one may have been cut."""
    is_last = part.index == len(said.parts) - 1
    return _status(said.result) if said.result is not None and is_last else "completed"


def _item(part: Part, status: Status) -> Output:
    """A part as an item."""
    if part.kind == "call":
        call = {"call_id": f"call_{part.id}", "name": part.name, "arguments": part.text}
        return {"type": "function_call", "id": f"fc_{part.id}", "status": status, **call}
    if part.kind == "thought":
        content = [{"type": "reasoning_text", "text": part.text}]
        return {"type": "reasoning", "id": f"rs_{part.id}", "status": status, "content": content, "summary": []}
    text = {"type": "output_text", "text": part.text, "annotations": [], "logprobs": [*part.logprobs]}
    return {"type": "message", "id": f"msg_{part.id}", "status": status, "role": "assistant", "content": [text]}


def _body(answer: ServedAnswer) -> dict[str, Any]:
    """The complete answer, which is stored."""
    (said,), (result,) = answer.choices, answer.results
    status, output, items = _status(result), [_item(part, _status_of(part, said)) for part in said.parts], answer.own
    response = _response(
        answer,
        status,
        output=output,
        usage=_usage(result.stats, answer.num_reasoning),
        seed=result.seed,
        incomplete_details={"reason": "max_output_tokens"} if status == "incomplete" else None,
        **answer.timings,
    )
    if items.request.store is not False:
        turns = [*items.turns, turn_of_output(output)]
        previous = items.request.previous_response_id
        answer.head.conversations.add(answer.head.id, turns, previous, response, items.given)
    return response


def _response(answer: ServedAnswer, status: Status, output: Sequence[Output] = (), **more: Any) -> dict[str, Any]:
    """A response. seed, timings: as with chats. Other fields are the request's."""
    asked, head = answer.own.request, answer.head
    made = {
        "object": "response", "id": head.id, "created_at": head.created, "status": status, "model": head.model,
        "output": [*output], "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "store": asked.store is not False, "text": {"format": (asked.text and asked.text.format) or {"type": "text"}},
        "tool_choice": asked.tool_choice or "auto", "tools": list(asked.tools or ()), "usage": None, "error": None,
        "incomplete_details": None, "metadata": None, "background": False, "truncation": "disabled", "seed": None,
    }  # fmt: skip
    return made | {name: getattr(asked, name) for name in _REPEATED} | more


def _usage(stats: Stats, num_reasoning: int) -> dict[str, Any]:
    """Tokens of the prompt, of which some were in the prefix cache, of the answer, and both."""
    return {
        "input_tokens": stats.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": stats.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": stats.num_generated_tokens,
        "output_tokens_details": {"reasoning_tokens": num_reasoning},
        "total_tokens": stats.num_prompt_tokens + stats.num_generated_tokens,
    }


_REPEATED = (
    "instructions", "max_output_tokens", "previous_response_id", "reasoning", "temperature", "top_p", "top_logprobs"
)  # fmt: skip


def _event(answer: ServedAnswer, kind: str, **fields: Any) -> dict[str, Any]:
    answer.num_events += 1
    return {"type": kind, "sequence_number": answer.num_events - 1, **fields}


def _failure(error: ApiError, num_events: int) -> dict[str, Any]:
    body = error.body.error
    said = {"code": body.code, "message": body.message, "param": body.param}
    return {"type": "error", "sequence_number": num_events, **said}


def _choices(wanted: Wanted) -> list[AnswerChoice]:
    try:
        return first_choice(wanted)
    except ApiError as error:  # which names a chat's field
        chat_s, own = "response_format.json_schema.schema", "text.format.schema"
        if error.body.error.param != chat_s:
            raise
        raise ApiError(400, str(error).replace(chat_s, own), param=own, code=error.body.error.code) from error


RESPONSES = Dialect(
    "/v1/responses", "resp_", to_chat, _events, _body, begin=_begin, failure=_failure, choices=_choices,
    locates=True, named=True,
)  # fmt: skip


def _turns(request: ResponseRequest, conversations: Conversations) -> tuple[list[Any], list[dict[str, Any]]]:
    """The conversation up to the answer, without instructions; and the items of this request's input."""
    previous, given = request.previous_response_id, request.input
    before = [] if previous is None else conversations.turns(previous)
    if isinstance(given, str):
        given = [InputItem(role="user", content=[InputTextPart(given)])]
    given = [_resolved(item, f"input[{i}]", conversations) for i, item in enumerate(given)]
    turns = [*before, *turns_of_input(given, before)]
    return turns, [listed(item, f"{_PREFIXES[item.type]}{secrets.token_hex(12)}") for item in given]


def _resolved(item: InputItem, place: str, conversations: Conversations) -> InputItem:
    """An item, or the one of a stored answer that it refers to."""
    if item.type != "item_reference":
        return item
    found = conversations.item(item.id or "", f"{place}.id")
    return msgspec.convert(msgspec.to_builtins(found), InputItem)


def _with_one_system(turns: list[Turn]) -> list[Turn]:
    """The turns with one system message at the beginning, as templates take it: Codex sends several."""
    count = next((i for i, turn in enumerate(turns) if turn["role"] != "system"), len(turns))
    if count < 2 or not all(isinstance(turn["content"], str) for turn in turns[:count]):
        return turns
    return [{"role": "system", "content": "\n\n".join(turn["content"] for turn in turns[:count])}, *turns[count:]]


def _status(result: Result) -> Status:
    return "incomplete" if result.finish_reason == "length" else "completed"


def turns_of_input(given: Sequence[InputItem], before: Sequence[Mapping[str, Any]]) -> list[Turn]:
    """The turns of a request's input, for the chat template. before: the turns that they follow.

    Raises:
        ApiError: with status 400, for items that lack something, and outputs of calls that were not made.
    """
    turns, thoughts = list[Turn](), ""
    calls = {call["id"]: call["function"]["name"] for turn in before for call in turn.get("tool_calls", ())}
    for i, item in enumerate(given):
        _check(item, i)
        if item.type == "reasoning":
            parts = item.content if isinstance(item.content, list) else []
            thoughts += "".join(part.text for part in parts if isinstance(part, ReasoningTextPart))
            continue
        if item.type == "message":
            role = "system" if item.role == "developer" else item.role
            turns.append({"role": role, "content": _content(item.content or "", f"input[{i}].content")})
        elif item.type == "function_call":
            _add_call(turns, item.call_id, item.name, item.arguments)
            calls[item.call_id] = item.name
        elif item.call_id in calls:
            content = _content(item.output or "", f"input[{i}].output")
            turns.append({
                "role": "tool", "tool_call_id": item.call_id, "name": calls[item.call_id], "content": content
            })  # fmt: skip
        else:
            message = (
                f"No call before this output has the call_id '{str(item.call_id)[:100]}'. Send its function_call too."
            )
            raise ApiError(400, message, param=f"input[{i}].call_id", code="invalid_value")
        if thoughts and turns[-1]["role"] == "assistant":
            turns[-1]["reasoning_content"], thoughts = thoughts, ""
    if thoughts:  # which the answer goes on with
        turns.append({"role": "assistant", "content": "", "reasoning_content": thoughts})
    return turns


def turn_of_output(items: Sequence[Output]) -> Turn:
    """The turn that an answer is."""
    turns: list[Turn] = [{"role": "assistant", "content": ""}]
    for item in items:
        if item["type"] == "message":
            turns[0]["content"] += item["content"][0]["text"]
        elif item["type"] == "reasoning":
            turns[0]["reasoning_content"] = turns[0].get("reasoning_content", "") + item["content"][0]["text"]
        else:
            _add_call(turns, item["call_id"], item["name"], item["arguments"])
    return turns[0]


_NEEDED = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}
_PREFIXES = {"message": "msg_", "function_call": "fc_", "function_call_output": "fco_", "reasoning": "rs_"}
_POSSIBLE = {"function_call": "arguments", "reasoning": "content"}


def _check(item: InputItem, place: int) -> None:
    fields = {name for names in _NEEDED.values() for name in names}
    for name in sorted(fields | {*_POSSIBLE.values()}):
        is_needed, is_given = name in _NEEDED[item.type], getattr(item, name) is not None
        if is_needed and not is_given:
            raise ApiError(400, f"A {item.type} needs {name}.", param=f"input[{place}].{name}", code="invalid_type")
        if is_given and not is_needed and name not in ("name", _POSSIBLE.get(item.type)):
            raise ApiError(400, f"A {item.type} has no {name}.", param=f"input[{place}].{name}", code="unknown_field")


def _add_call(turns: list[Turn], call_id: Any, name: Any, arguments: Any) -> None:
    """Add a call to the answer that it is part of: text and calls are one turn for a chat template."""
    if not turns or turns[-1]["role"] != "assistant":
        turns.append({"role": "assistant", "content": ""})
    function = {"name": name, "arguments": arguments or None}
    turns[-1].setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})


def _content(content: str | Sequence[InputPart], place: str) -> str | list[dict[str, Any]]:
    """A turn's content: a text, or its parts if there is an image among them, as those of a chat."""
    if isinstance(content, str):
        return content
    parts = [_part(part, f"{place}[{i}]") for i, part in enumerate(content)]
    if any(part["type"] == "image_url" for part in parts):
        return parts
    return BETWEEN_PARTS.join(filter(None, (part["text"] for part in parts)))


def _part(part: InputPart, place: str) -> dict[str, Any]:
    if isinstance(part, RefusalPart):
        return {"type": "text", "text": part.refusal}
    if not isinstance(part, InputImagePart):
        return {"type": "text", "text": part.text}
    if part.file_id is not None:
        message = "No files are stored here. Send the image itself as image_url, data:image/…;base64,…"
        raise ApiError(400, message, param=f"{place}.file_id", code="unsupported_field")
    if part.image_url is None:
        message = "An input_image needs image_url: data:image/…;base64,…"
        raise ApiError(400, message, param=f"{place}.image_url", code="invalid_type")
    return {"type": "image_url", "image_url": {"url": part.image_url}}
