"""Answers with a form, and calls of functions, through the official client."""

import json
from typing import Any

import openai
import pytest

from serving import MESSAGES, SCHEMA

pytest.importorskip("llguidance", reason="the extra [structured]")

SAMPLED: dict[str, Any] = {"temperature": 1, "seed": 3}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stop"}},
]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}], ids=["any", "one"])
def test_functions_are_called(caller: Any, choice: Any) -> None:
    asked: dict[str, Any] = {
        "model": "tiny", "messages": MESSAGES, "tools": TOOLS, "tool_choice": choice, "temperature": 1, "seed": 2,
        "max_tokens": 300,
    }  # fmt: skip
    answer = caller.chat.completions.create(**asked)
    calls = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.choices[0].message.content is None
    assert {call.function.name for call in calls} <= {"look", "stop"}
    assert choice == "required" or [call.function.name for call in calls] == ["look"]
    for call in calls:
        arguments = json.loads(call.function.arguments)
        assert call.function.name == "stop" or set(arguments) == {"open", "kind"}
    names, written, ids = [], [""] * len(calls), set()
    for chunk in caller.chat.completions.create(**asked, stream=True):
        for part in chunk.choices[0].delta.tool_calls or ():
            written[part.index] += part.function.arguments
            if part.id:
                names.append(part.function.name)
                ids.add(part.id)
        last = chunk.choices[0].finish_reason
    assert last == "tool_calls"
    assert names == [call.function.name for call in calls]
    assert written == [call.function.arguments for call in calls]
    assert len(ids) == len(calls)


def test_calls_one_at_a_time(caller: Any) -> None:
    """As LangChain's and LlamaIndex's structured output ask for it."""
    asked: dict[str, Any] = {
        "model": "tiny", "messages": MESSAGES, "tools": TOOLS, "tool_choice": "required", "temperature": 1, "seed": 2,
        "max_tokens": 1500,
    }  # fmt: skip
    answers = [caller.chat.completions.create(**asked | {"seed": seed}) for seed in range(8)]
    answer = max(answers, key=lambda answer: answer.usage.completion_tokens)  # with several calls, or a repeated one
    several = answer.choices[0]
    asked |= {"seed": several.seed, "parallel_tool_calls": False}
    one = caller.chat.completions.create(**asked)
    assert one.usage.completion_tokens < answer.usage.completion_tokens
    (call,) = one.choices[0].message.tool_calls
    assert call.function == several.message.tool_calls[0].function
    chunks = list(caller.chat.completions.create(**asked, stream=True))
    parts = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or ()]
    assert "".join(part.function.arguments for part in parts) == call.function.arguments
    assert not any(chunk.choices[0].delta.content for chunk in chunks)


def test_a_model_without_tools_in_its_template_is_told_of_them(client: Any, caller: Any) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "temperature": 1, "seed": 2}
    called = client.chat.completions.create(**asked, tool_choice="required", max_tokens=300).choices[0].message
    assert {call.function.name for call in called.tool_calls} <= {"look", "stop"}
    client.chat.completions.create(model="tiny", messages=MESSAGES, tools=TOOLS, tool_choice="none")
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    assert caller.chat.completions.create(model="tiny", messages=MESSAGES, tools=strict).choices
    wrong = {"type": "function", "function": {"name": "nothing"}}
    with pytest.raises(openai.BadRequestError, match="tool_choice"):
        caller.chat.completions.create(model="tiny", messages=MESSAGES, tools=TOOLS, tool_choice=wrong)


def test_tokens_say_where_they_come_from(client: Any) -> None:
    repeated: list[Any] = [{"role": "user", "content": "abc abc abc abc abc abc abc abc"}]
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 40}
    extra = {"drafter": "suffix", "num_assistant_tokens": 3, "ignore_eos": True, "return_tokens": True}
    answer = client.chat.completions.create(messages=repeated, **asked, extra_body=extra)
    tokens = answer.choices[0].tokens
    assert len(tokens) == 40
    sources = [token["source"] for token in tokens]
    assert sources.count("accepted") == answer.timings["draft_n_accepted"] > 0
    assert {token["drafter"] for token in tokens} == {"suffix", None}
    streamed = client.chat.completions.create(messages=repeated, **asked, extra_body=extra, stream=True)
    pieces = [token for chunk in streamed for token in getattr(chunk.choices[0], "tokens", ())]
    assert [token["id"] for token in pieces] == [token["id"] for token in tokens]
    texts = client.completions.create(prompt="abc abc abc", **asked, extra_body=extra)
    assert len(texts.choices[0].tokens) == 40
    assert "tokens" not in client.completions.create(prompt="abc", **asked).choices[0].model_fields_set
