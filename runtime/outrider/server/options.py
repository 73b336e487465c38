"""From a request's fields to prompts and the engine's options."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from outrider.config import without_word
from outrider.errors import quoted
from outrider.server.errors import ApiError
from outrider.server.infill import Infill
from outrider.server.protocol.requests import (
    MOST_CHOICES,
    SERVED,
    Asked,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    Effort,
    Generation,
    ImagePart,
    JsonObject,
    JsonSchema,
    NamedSchema,
    Part,
    ReasoningPart,
    RefusalPart,
    ThinkingPart,
    Tool,
    ToolChoice,
)
from outrider.server.protocol.reshaping import value_of_json
from outrider.tokens.grammar import say_once, widened
from outrider.types import TokenLogprobs

BETWEEN_PARTS = "\n"  # of a message's texts, as in llama.cpp and vLLM
_MOST_OF_REFERENCES = 1_000_000  # characters of all: a token of them takes some 60 bytes


class AnswerLimit:
    """Ends a completion some time after its first text, once it has a whole line: llama.cpp's `t_max_predict_ms`."""

    def __init__(self, milliseconds: float) -> None:
        self._seconds, self._has_line = milliseconds / 1000, False
        self._deadline: float | None = None

    def read(self, text: str) -> None:
        """Read what comes next."""
        self._has_line = self._has_line or "\n" in text
        self._deadline = self._deadline or time.monotonic() + self._seconds

    def is_set(self) -> bool:
        """Whether the answer ends here."""
        return self._has_line and self._deadline is not None and time.monotonic() > self._deadline


@dataclass(frozen=True, slots=True)
class AnswerChoice:
    """One answer to generate: a prompt as `Engine.submit` takes it, and its options.

    is_empty: whether only the prompt is to be read. echoed: how many of the likeliest tokens are wanted in place of
    each of the prompt's; None: those have no log-probabilities. scored: the prompt's tokens, and the log-probabilities
    of all but the first.
    """

    prompt: Any
    options: dict[str, Any]
    limit: AnswerLimit | None = None
    is_empty: bool = False
    echoed: int | None = None
    scored: tuple[Sequence[int], Sequence[TokenLogprobs]] | None = None


def with_adapter(choice: AnswerChoice, adapter: str) -> AnswerChoice:
    """The same answer with the adapter that the model's name has.

    Raises:
        ApiError: with status 400, if the request names another one.
    """
    asked = choice.options.get("adapter", adapter)
    if asked != adapter:
        message = f"The model's name says adapter '{adapter}', and the field says {asked!r}. Leave one out."
        raise ApiError(400, message, param="adapter", code="invalid_value")
    return replace(choice, options=choice.options | {"adapter": adapter})


def choices_of_chat(request: ChatRequest) -> list[AnswerChoice]:
    """The n answers of a chat.

    Raises:
        ApiError: with status 400, for fields that contradict each other.
    """
    options = _options(request)
    _set(options, "max_new_tokens", _one_of(request, "max_tokens", "max_completion_tokens"))
    _set_reasoning(options, request)
    if request.reasoning_format == "none":  # all is content
        options.setdefault("stop_in_reasoning", True)
    if request.logprobs:
        options["logprobs"] = request.top_logprobs or 0
    elif request.top_logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: set it to true.", param="top_logprobs", code="invalid_value")
    if request.prediction is not None:
        predicted = _text(request.prediction.content, "")
        options["references"] = ([predicted] if predicted else []) + options.get("references", [])
    if request.tools or request.tool_choice is not None:
        options |= _tools(request.tools or [], request.tool_choice)
        _set(options, "parallel_tool_calls", request.parallel_tool_calls)
    messages = [_turn(message, i) for i, message in enumerate(request.messages)]
    messages = _continued(messages, options, request.continue_final_message, request.add_generation_prompt)
    return _repeat([(messages, True)], request, options)


def choices_of_completion(request: CompletionRequest) -> list[AnswerChoice]:
    """The n answers of each prompt, those of one prompt in a row."""
    options = _options(request)
    is_empty = request.max_tokens == 0
    _set(options, "max_new_tokens", 1 if is_empty else request.max_tokens)
    _set(options, "logprobs", request.logprobs)
    prompts: list[Any] = _prompts(request.prompt)
    if request.suffix:
        if not all(isinstance(prompt, str) for prompt in prompts):
            message = "suffix needs a prompt that is a text. Give it as text, or leave suffix out."
            raise ApiError(400, message, param="suffix", code="invalid_value")
        prompts = [Infill(prompt, request.suffix) for prompt in prompts]
    choices = _repeat([(prompt, False) for prompt in prompts], request, options)
    choices = [replace(choice, is_empty=is_empty) for choice in choices]
    if request.echo and request.logprobs is not None:
        if request.suffix or request.logprobs_of == "processed":
            message = (
                "echo gives log-probabilities of the prompt's tokens without suffix, and unprocessed. Leave it out."
            )
            raise ApiError(400, message, param="echo", code="unsupported_field")
        return [replace(choice, echoed=request.logprobs) for choice in choices]
    return choices


def _repeat(prompts: list[tuple[Any, bool]], request: Generation, options: dict[str, Any]) -> list[AnswerChoice]:
    """Each prompt n times, with seeds one after the other."""
    made = []
    for prompt, chat_template in prompts:
        for i in range(request.n or 1):
            seed = {} if request.seed is None else {"seed": (request.seed + i) % 2**64}
            made.append(AnswerChoice(prompt, options | seed | {"chat_template": chat_template}))
    return made


def _prompts(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    token_ids = [item for item in prompt if isinstance(item, int)]
    if token_ids and len(token_ids) == len(prompt):
        return [token_ids]
    if len(prompt) > MOST_CHOICES:
        message = f"{len(prompt):,} prompts are more than a request may have, {MOST_CHOICES}. Send several requests."
        raise ApiError(400, message, param="prompt", code="invalid_value")
    made = [item for item in prompt if not isinstance(item, int)]
    if token_ids or not made:
        message = "The prompt is a text, a list of texts, a list of token ids, or a list of such lists, and not empty."
        raise ApiError(400, message, param="prompt", code="invalid_type")
    return made


def _options_of_all(request: Asked) -> dict[str, Any]:
    """The engine's options that all requests have.

    Raises:
        ApiError: with status 400, for two names of one option with different values, and for references that are long.
    """
    given = {name: getattr(request, name) for name in SERVED} | {"drafter": _one_of(request, "drafter", "draft_model")}
    options = {name: without_word(name, value) for name, value in given.items() if value is not None}
    options["fits"] = True  # clients ask for more tokens than there is room for
    if (length := sum(map(len, options.get("references", ())))) > _MOST_OF_REFERENCES:
        raise ApiError(
            400,
            f"references have {length:,} characters, and at most {_MOST_OF_REFERENCES:,} are read. Send the parts that "
            "the answer may repeat.",
            param="references",
            code="invalid_value",
        )
    if request.seed is not None:
        options["seed"] = request.seed % 2**64  # OpenAI's may be negative
    return options


def _options(request: Generation) -> dict[str, Any]:
    options = _options_of_all(request)
    _set(options, "logprobs_of", request.logprobs_of)
    form = request.response_format
    if isinstance(form, JsonSchema):
        options["json_schema"] = _schema_of(form.json_schema, "response_format.json_schema.schema")
    elif isinstance(form, JsonObject):
        named = None if form.schema is None else NamedSchema(form.schema)
        options["json_schema"] = True if named is None else _schema_of(named, "response_format.schema")
    return options


def _schema_of(named: NamedSchema, place: str) -> Any:
    """A JSON schema that can be followed: what cannot is left out, and listed in the log, unless it is strict.

    Raises:
        ApiError: with status 400, naming the place of what cannot be followed of a strict one.
    """
    try:
        made, left_out = widened(named.schema, strict=bool(named.strict))
    except ValueError as error:
        message = f"{place}: {error}."
        raise ApiError(400, message, param=place, code="invalid_value") from error
    say_once("response_format" if named.name is None else quoted(named.name), left_out)
    return made


def _one_of(request: Asked, name: str, other: str) -> Any:
    """The value of a field that has two names.

    Raises:
        ApiError: with status 400, if both are given and differ.
    """
    one, two = getattr(request, name), getattr(request, other)
    if one is not None and two is not None and one != two:
        message = f"{name}={one!r} and {other}={two!r} are two names for one option. Leave one out."
        raise ApiError(400, message, param=other, code="invalid_value")
    return two if one is None else one


def _set(options: dict[str, Any], name: str, value: object) -> None:
    if value is not None:
        options[name] = value


def _tools(tools: list[Tool], choice: str | ToolChoice | None) -> dict[str, Any]:
    chosen = choice or "auto"
    if not isinstance(chosen, str):
        chosen = chosen.function.name
    described = [{"type": tool.type, "function": msgspec.to_builtins(tool.function)} for tool in tools]  # as templates
    return {"tools": described, "tool_choice": chosen}  # write them, and models know them


def _set_reasoning(options: dict[str, Any], request: ChatRequest) -> None:
    """Add the variables of the chat template that a request names, and its limit of reasoning."""
    variables: dict[str, Any] = {}
    for name in ("documents", "verbosity", "enable_thinking"):
        _set(variables, name, getattr(request, name))
    for effort in filter(None, (Effort(request.reasoning_effort), request.reasoning, request.thinking)):
        _set(variables, "reasoning_effort", effort.effort)
        if effort.enabled is not None or effort.type in ("enabled", "disabled"):
            variables["enable_thinking"] = bool(effort.enabled) or effort.type == "enabled"
        most = effort.budget_tokens if effort.max_tokens is None else effort.max_tokens
        if most is not None:
            options.setdefault("reasoning_budget", most)
    if variables.get("reasoning_effort") == "none":
        variables["enable_thinking"] = False
    if "enable_thinking" in variables:
        variables["thinking"] = variables["enable_thinking"]  # as DeepSeek's and Granite's templates call it
    variables |= request.chat_template_kwargs or {}
    if variables:
        options["chat_template_kwargs"] = variables


def _continued(
    messages: list[dict[str, Any]], options: dict[str, Any], asked: bool | None, begins: bool | None
) -> list[dict[str, Any]]:
    """The messages, the last of which is gone on with if it is the assistant's, as in llama.cpp and Anthropic's API.

    asked: `continue_final_message`. begins: `add_generation_prompt`.

    Raises:
        ApiError: with status 400, if there is nothing to go on with, or both are asked for.
    """
    if asked and begins:
        message = "continue_final_message and add_generation_prompt cannot both be true. Leave one out."
        raise ApiError(400, message, param="add_generation_prompt", code="invalid_value")
    last = messages[-1]
    is_open = last["role"] == "assistant" and not last.get("tool_calls")
    if asked and not is_open:
        message = "continue_final_message goes on with an assistant's text, and the last message is none."
        raise ApiError(400, f"{message} End with one.", param="continue_final_message", code="invalid_value")
    if not is_open or asked is False or begins:
        return messages
    if len(messages) > 1 and last["content"] in ("", []) and not last.get("reasoning_content"):
        return messages[:-1]  # an answer that has not begun
    options["continue_final_message"] = True
    return messages


def _turn(message: ChatMessage, place: int) -> dict[str, Any]:
    thoughts = message.reasoning_content or message.reasoning or message.thinking or _thoughts(message.content)
    turn: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,  # templates know the older word
        "content": _content(message.content or ""),
    }
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "id": call.id or f"call_{place}_{i}",
                "type": "function",
                "function": _called(call.function.name, call.function.arguments),
            }
            for i, call in enumerate(message.tool_calls)
        ]
    others = {"name": message.name, "tool_call_id": message.tool_call_id, "reasoning_content": thoughts or None}
    return turn | {name: value for name, value in others.items() if value is not None}


def _thoughts(content: str | list[Part] | None) -> str:
    """The reasoning among a content's parts."""
    parts = content if isinstance(content, list) else []
    given = [part.thinking if isinstance(part, ThinkingPart) else part.text for part in parts
             if isinstance(part, ThinkingPart | ReasoningPart)]  # fmt: skip
    return "".join(each if isinstance(each, str) else _text(each) for each in given)


def _called(name: str, arguments: str | dict[str, Any] | None) -> dict[str, Any]:
    """A call for the chat template, which writes its arguments as JSON itself; a text that is cut, as it is."""
    given = arguments or {}
    return {"name": name, "arguments": value_of_json(given) if isinstance(given, str) else given}


def _content(content: str | list[Part]) -> str | list[dict[str, Any]]:
    """A message's content: a text, or its parts if there is an image among them."""
    if not isinstance(content, str) and any(isinstance(part, ImagePart) for part in content):
        return [
            msgspec.to_builtins(part) if isinstance(part, ImagePart) else {"type": "text", "text": _text([part])}
            for part in content
        ]
    return _text(content)


def _text(content: str | Sequence[Part], between: str = BETWEEN_PARTS) -> str:
    if isinstance(content, str):
        return content
    texts = [part.refusal if isinstance(part, RefusalPart) else getattr(part, "text", "") for part in content
             if not isinstance(part, ReasoningPart)]  # fmt: skip
    return between.join(filter(None, texts))
