"""/v1/responses."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from outrider.decoding.results import Result, TextChunk
from outrider.inputs.reasoning import Thought
from outrider.server.answers import AnswerHead, SingleAnswer
from outrider.server.conversations import Conversations
from outrider.server.errors import ApiError
from outrider.server.logprobs import LocatedLogprobs
from outrider.server.options import BETWEEN_PARTS, AnswerChoice, called, continued, options_of, schema_of, set_reasoning
from outrider.server.protocol.items import (
    IncompleteDetails,
    InputImagePart,
    InputItem,
    InputPart,
    InputTextItemPart,
    OutputCall,
    OutputMessage,
    OutputReasoning,
    OutputText,
    ReasoningText,
    ReasoningTextPart,
    RefusalItemPart,
    ResponseEvent,
    ResponseObject,
    ResponseRequest,
    SchemaFormat,
    Status,
    listed,
)
from outrider.server.protocol.requests import Function, JsonObject
from outrider.server.protocol.responses import TokenLogprob
from outrider.server.reader import AnswerReading
from outrider.server.usage import response_usage_of, timings_of
from outrider.types import TokenLogprobs

Output: TypeAlias = OutputMessage | OutputCall | OutputReasoning


class Responses(SingleAnswer[ResponseRequest]):
    """The answer to a text or to items: a message, and calls of functions."""

    kind = ResponseRequest
    prefix = "resp_"

    def __init__(self, request: ResponseRequest, head: AnswerHead, choices: Sequence[AnswerChoice]) -> None:
        tools = _tools(request)
        reading = AnswerReading(
            reasoning=head.reasoning_format,
            calls=head.tool_format if tools and request.tool_choice != "none" else None,
            max_calls=1 if request.parallel_tool_calls is False else None,
            tools=tools,
            loose=head.loose_calls,
            once=request.tool_choice == "required",
        )
        self._hides_thoughts = bool(request.reasoning and request.reasoning.exclude)
        super().__init__(request, head, choices, reading)
        self._output: list[Output] = []  # the last one may grow still
        self._num_events = 0
        self._turns, self._given = choices[0].turns, choices[0].given
        self._logprobs = LocatedLogprobs(head.texts, reading.markers(head.texts)) if _wants_logprobs(request) else None

    @staticmethod
    def choices(request: ResponseRequest, conversations: Conversations) -> list[AnswerChoice]:
        """The one answer."""
        options = options_of(request) | {"chat_template": True}
        set_reasoning(options, request)
        if request.max_output_tokens is not None:
            options["max_new_tokens"] = request.max_output_tokens
        if _wants_logprobs(request):
            options["logprobs"] = request.top_logprobs or 0
        form = request.text.format if request.text else None
        if isinstance(form, SchemaFormat):
            options["json_schema"] = schema_of(form, "text.format.schema")
        elif isinstance(form, JsonObject):
            options["json_schema"] = True
        tools, choice = _tools(request), request.tool_choice or "auto"
        if tools or request.tool_choice is not None:
            options |= {"tools": tools, "tool_choice": choice if isinstance(choice, str) else choice.name}
            options["parallel_tool_calls"] = request.parallel_tool_calls is not False
        system = [] if request.instructions is None else [{"role": "system", "content": request.instructions}]
        turns, given = _turns(request, conversations)
        prompt = continued(_with_one_system([*system, *turns]), options, None, None)
        return [AnswerChoice(prompt, options, turns, given)]

    def whole(self, results: Sequence[Result]) -> ResponseObject:
        """The answer in one body."""
        (result,) = results
        self._locate(result.text, result.logprobs)
        for _ in self._read(result.text, result, thinks=result.thinks):
            pass
        return self._ended(result)

    def begin(self) -> Iterator[ResponseEvent]:
        """That the answer has begun."""
        yield self._event("response.created", response=self._response("in_progress"))
        yield self._event("response.in_progress", response=self._response("in_progress"))

    def events(self, number: int, chunk: TextChunk) -> Iterator[ResponseEvent]:  # noqa: ARG002
        """What a piece adds."""
        self._locate(chunk.text, chunk.logprobs)
        yield from self._read(chunk.text, chunk.result, thinks=chunk.thinks)
        if chunk.result:
            response = self._ended(chunk.result)
            kind = "response.incomplete" if response.status == "incomplete" else "response.completed"
            yield self._event(kind, response=response)

    def failure(self, error: ApiError) -> ResponseEvent:
        """The event that ends a stream which fails."""
        body = error.body.error
        return self._event("error", code=body.code, message=body.message, param=body.param)

    def _read(self, text: str, result: Result | None, *, thinks: bool) -> Iterator[ResponseEvent]:
        """Add text to the output. result: with the last of it."""
        for piece in self._pieces(text, result, thinks=thinks):
            if isinstance(piece, Thought):
                self._located(piece.text)
                if not self._hides_thoughts:
                    yield from self._add_thought(piece.text)
            elif isinstance(piece, str):
                yield from self._add_text(piece)
            else:
                if piece.name is not None:
                    yield from self._begin_call(piece.name)
                if piece.arguments:
                    self._located(piece.arguments)
                    yield from self._add_arguments(piece.arguments)
        if result:
            if not self._output or isinstance(self._output[-1], OutputReasoning):
                yield from self._add_text("")
            yield from self._end_item(_status(result))

    def _add_text(self, text: str) -> Iterator[ResponseEvent]:
        yield from self._begin_parts(OutputMessage, "msg_", OutputText(""))
        if text:
            item: Any = self._output[-1]
            part, logprobs = item.content[0], self._located(text)
            item.content[0] = OutputText(part.text + text, logprobs=[*part.logprobs, *logprobs])
            yield self._of_part("response.output_text.delta", delta=text, logprobs=logprobs)

    def _add_thought(self, text: str) -> Iterator[ResponseEvent]:
        yield from self._begin_parts(OutputReasoning, "rs_", ReasoningText(""))
        item: Any = self._output[-1]
        item.content[0] = ReasoningText(item.content[0].text + text)
        yield self._of_part("response.reasoning_text.delta", delta=text)

    def _begin_parts(self, kind: type[Any], prefix: str, part: OutputText | ReasoningText) -> Iterator[ResponseEvent]:
        """Begin an item of this kind, with an empty part, unless the last one is of it and grows."""
        if self._output and isinstance(self._output[-1], kind):
            return
        yield from self._end_item("completed")
        item = kind(_new_id(prefix), "in_progress", [])
        self._output.append(item)
        yield self._of_item("response.output_item.added", item=item)
        item.content.append(part)
        yield self._of_part("response.content_part.added", part=part)

    def _begin_call(self, name: str) -> Iterator[ResponseEvent]:
        yield from self._end_item("completed")
        item = OutputCall(_new_id("fc_"), "in_progress", _new_id("call_"), name, "")
        self._output.append(item)
        yield self._of_item("response.output_item.added", item=item)

    def _add_arguments(self, text: str) -> Iterator[ResponseEvent]:
        item: Any = self._output[-1]
        self._output[-1] = msgspec.structs.replace(item, arguments=item.arguments + text)
        yield self._of_item("response.function_call_arguments.delta", item_id=item.id, delta=text)

    def _end_item(self, status: Status) -> Iterator[ResponseEvent]:
        """Complete the item that grows, if there is one."""
        if not self._output:
            return
        item = self._output[-1] = msgspec.structs.replace(self._output[-1], status=status)
        if isinstance(item, OutputMessage):
            (part,) = item.content
            yield self._of_part("response.output_text.done", text=part.text, logprobs=part.logprobs)
            yield self._of_part("response.content_part.done", part=part)
        elif isinstance(item, OutputReasoning):
            yield self._of_part("response.reasoning_text.done", text=item.content[0].text)
            yield self._of_part("response.content_part.done", part=item.content[0])
        else:
            of_call = {"item_id": item.id, "name": item.name, "arguments": item.arguments}
            yield self._of_item("response.function_call_arguments.done", **of_call)
        yield self._of_item("response.output_item.done", item=item)

    def _ended(self, result: Result) -> ResponseObject:
        """The complete answer, which is stored."""
        status = _status(result)
        num_reasoning = self._reading.count(result, self.head.texts)
        response = self._response(
            status,
            output=[*self._output],
            usage=response_usage_of(result.stats, num_reasoning),
            timings=timings_of([result.stats]),
            seed=result.seed,
            incomplete_details=IncompleteDetails() if status == "incomplete" else None,
        )
        if self.request.store is not False:
            turns, previous = [*self._turns, turn_of_output(self._output)], self.request.previous_response_id
            self.head.conversations.add(self.head.id, turns, previous, response, self._given)
        return response

    def _response(self, status: Status, output: Sequence[Any] = (), **more: Any) -> ResponseObject:
        asked, head = self.request, self.head
        return ResponseObject(
            id=head.id,
            created_at=head.created,
            status=status,
            model=head.model,
            output=[*output],
            instructions=asked.instructions,
            max_output_tokens=asked.max_output_tokens,
            parallel_tool_calls=asked.parallel_tool_calls is not False,
            previous_response_id=asked.previous_response_id,
            store=asked.store is not False,
            text={"format": (asked.text and asked.text.format) or {"type": "text"}},
            tool_choice=asked.tool_choice or "auto",
            tools=list(asked.tools or ()),
            reasoning=asked.reasoning,
            **{name: getattr(asked, name) for name in ("temperature", "top_p", "top_logprobs")},
            **more,
        )

    def _locate(self, text: str, tokens: Sequence[TokenLogprobs] | None) -> None:
        if self._logprobs is not None:
            self._logprobs.read(text, tokens or ())

    def _located(self, text: str) -> list[TokenLogprob]:
        """The log-probabilities of the next piece of the answer, if they are wanted."""
        return [] if self._logprobs is None else self._logprobs.of(text)

    def _of_part(self, kind: Any, **fields: Any) -> ResponseEvent:
        return self._of_item(kind, item_id=self._output[-1].id, content_index=0, **fields)

    def _of_item(self, kind: Any, **fields: Any) -> ResponseEvent:
        return self._event(kind, output_index=len(self._output) - 1, **fields)

    def _event(self, kind: Any, **fields: Any) -> ResponseEvent:
        self._num_events += 1
        return ResponseEvent(type=kind, sequence_number=self._num_events - 1, **fields)


def _turns(request: ResponseRequest, conversations: Conversations) -> tuple[list[Any], list[dict[str, Any]]]:
    """The conversation up to the answer, without instructions; and the items of this request's input."""
    previous, given = request.previous_response_id, request.input
    before = [] if previous is None else conversations.turns(previous)
    if isinstance(given, str):
        given = [InputItem(role="user", content=[InputTextItemPart(given)])]
    given = [_resolved(item, f"input[{i}]", conversations) for i, item in enumerate(given)]
    turns = [*before, *turns_of_input(given, before)]
    return turns, [listed(item, _new_id(_PREFIXES[item.type])) for item in given]


def _wants_logprobs(request: ResponseRequest) -> bool:
    return "message.output_text.logprobs" in (request.include or ())


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


def _tools(request: ResponseRequest) -> list[dict[str, Any]]:
    """The functions as the engine has them."""
    functions = [Function(tool.name, tool.description, tool.parameters, tool.strict) for tool in request.tools or ()]
    return [{"type": "function", "function": msgspec.to_builtins(function)} for function in functions]


def _status(result: Result) -> Status:
    return "incomplete" if result.finish_reason == "length" else "completed"


def _new_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(12)}"


Turn = dict[str, Any]


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
            _add_call(turns, item)
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
        if isinstance(item, OutputMessage):
            turns[0]["content"] += item.content[0].text
        elif isinstance(item, OutputReasoning):
            turns[0]["reasoning_content"] = turns[0].get("reasoning_content", "") + item.content[0].text
        else:
            _add_call(turns, item)
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


def _add_call(turns: list[Turn], call: InputItem | OutputCall) -> None:
    """Add a call to the answer that it is part of: text and calls are one turn for a chat template."""
    if not turns or turns[-1]["role"] != "assistant":
        turns.append({"role": "assistant", "content": ""})
    function = called(call.name, call.arguments)
    turns[-1].setdefault("tool_calls", []).append({"id": call.call_id, "type": "function", "function": function})


def _content(content: str | Sequence[InputPart], place: str) -> str | list[dict[str, Any]]:
    """A turn's content: a text, or its parts if there is an image among them, as those of a chat."""
    if isinstance(content, str):
        return content
    parts = [_part(part, f"{place}[{i}]") for i, part in enumerate(content)]
    if any(part["type"] == "image_url" for part in parts):
        return parts
    return BETWEEN_PARTS.join(filter(None, (part["text"] for part in parts)))


def _part(part: InputPart, place: str) -> dict[str, Any]:
    if isinstance(part, RefusalItemPart):
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
