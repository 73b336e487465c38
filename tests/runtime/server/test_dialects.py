"""Each API's words as data: what its bodies ask for, and how it gives the same answer, whole and streamed."""

import json
import re
from typing import Any

import msgspec
import pytest

from outrider.server.chat import CHAT
from outrider.server.completions import COMPLETIONS
from outrider.server.conversations import Conversations
from outrider.server.dialect import Dialect
from outrider.server.errors import ApiError
from outrider.server.infill import Infill
from outrider.server.llamacpp import COMPLETION, INFILL
from outrider.server.messages import MESSAGES
from outrider.server.ollama import OLLAMA_CHAT, OLLAMA_TEXT
from outrider.server.responses import RESPONSES
from serving import answer_of, body_of, choice_of, chunks_of, result_of, streamed

HELLO = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"name": "look", "description": "Look.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
LOOK = {"name": "look", "description": "Look.", "input_schema": SCHEMA}
PNG = "data:image/png;base64,AA=="
# What Claude Code sends besides: blocks with cache_control, betas, a context's management, thinking, its own tools.
CLAUDE_CODE: dict[str, Any] = {
    "system": [{"type": "text", "text": "You are brief.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Look.", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "I look.", "signature": "x"}, {"type": "redacted_thinking", "data": "y"},
            {"type": "text", "text": "So."}, {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"a": 1}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "open"}]},
            {"type": "text", "text": "And now?"},
        ]},
    ],
    "tools": [LOOK, {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}],
    "metadata": {"user_id": "me"}, "context_management": {"edits": [{"type": "clear_thinking_20251015"}]},
    "thinking": {"type": "enabled", "budget_tokens": 31_999}, "betas": ["interleaved-thinking-2025-05-14"],
    "stop_sequences": [], "temperature": 1, "output_config": {"effort": "medium"}, "max_tokens": 32_000,
}  # fmt: skip
CALL = {"id": "toolu_1", "type": "function", "function": {"name": "look", "arguments": {"a": 1}}}
WRITTEN_CALL = CALL | {"function": {"name": "look", "arguments": '{"a": 1}'}}
HOSTED = [
    {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
    {"type": "web_search_tool_result", "tool_use_id": "s", "content": []}, {"type": "text", "text": "So."},
]  # fmt: skip
FOUND = {"type": "search_result", "source": "u", "title": "t", "content": [{"type": "text", "text": "x"}]}
# As llama.vim sends it.
VIM = {
    "id_slot": 0, "input_prefix": "def f():\n", "input_suffix": "\nf()", "prompt": "    ret", "n_predict": 128,
    "input_extra": [{"filename": "a.py", "text": "x = 1\n"}], "stop": [], "n_indent": 4, "top_k": 40, "top_p": 0.9,
    "samplers": ["top_k", "top_p", "infill"], "stream": False, "cache_prompt": True, "t_max_prompt_ms": 500,
    "t_max_predict_ms": 1000, "response_fields": ["content"],
}  # fmt: skip
ITEMS: list[Any] = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "input_text", "text": "Why is"}, {"type": "input_text", "text": "it?"}]},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "I look."}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "So.", "annotations": []}]},
    {"type": "function_call", "call_id": "toolu_1", "name": "look", "arguments": '{"a": 1}'},
    {"type": "function_call_output", "call_id": "toolu_1", "output": "open"},
    {"role": "user", "content": [{"type": "input_image", "image_url": PNG}]},
]
IMAGE = {"type": "image_url", "image_url": {"url": PNG, "detail": None}}
# By API: a last turn that has only a thought.
HM: list[tuple[Dialect, dict[str, Any]]] = [
    (CHAT, {"role": "assistant", "content": "", "reasoning_content": "Hm. It"}),
    (RESPONSES, {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm. It"}]}),
    (MESSAGES, {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm. It", "signature": ""}]}),
    (OLLAMA_CHAT, {"role": "assistant", "content": "", "thinking": "Hm. It"}),
]
# Of an API: a body's fields, and the prompt and some of the options that they ask for.
ASKED: list[tuple[Dialect, dict[str, Any], Any, dict[str, Any]]] = [
    (CHAT, {"messages": HELLO, "response_format": {"type": "json_object"}}, HELLO, {"json_schema": True}),
    (CHAT, {"messages": HELLO, "response_format": {"type": "text"}, "regex": "a"}, HELLO, {"regex": "a"}),
    (CHAT, {"messages": [*HELLO, {"role": "assistant", "content": None, "tool_calls": [WRITTEN_CALL]}]},
     [*HELLO, {"role": "assistant", "content": "", "tool_calls": [CALL]}], {}),
    (MESSAGES, CLAUDE_CODE, [
        {"role": "system", "content": "You are brief."}, {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "So.", "reasoning_content": "I look.", "tool_calls": [CALL]},
        {"role": "tool", "content": "open", "tool_call_id": "toolu_1"}, {"role": "user", "content": "And now?"},
    ], {"max_new_tokens": 32_000, "tools": [TOOL], "reasoning_budget": 31_999, "temperature": 1, "chat_template_kwargs":
        {"reasoning_effort": "medium", "enable_thinking": True, "thinking": True}}),
    (MESSAGES, CLAUDE_CODE | {"tool_choice": {"type": "any"}}, ..., {"tool_choice": "required"}),
    (MESSAGES, CLAUDE_CODE | {"tool_choice": {"type": "tool", "name": "look", "disable_parallel_tool_use": True}}, ...,
     {"tool_choice": "look", "parallel_tool_calls": False}),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image", "source": {
        "type": "base64", "media_type": "image/png", "data": "AA=="}}]}]}, [{"role": "user", "content": [IMAGE]}], {}),
    (MESSAGES, {"messages": [*HELLO, {"role": "assistant", "content": HOSTED}, {"role": "user", "content": [FOUND]}]},
     [*HELLO, {"role": "assistant", "content": "So."}, {"role": "user", "content": "t\nu\nx"}], {}),
    (RESPONSES, {"input": "Hi", "instructions": "Be brief.", "max_output_tokens": 9, "text": {"format": {
        "type": "json_schema", "name": "n", "schema": SCHEMA}}, "include": ["message.output_text.logprobs"]},
     [{"role": "system", "content": "Be brief."}, *HELLO],
     {"max_new_tokens": 9, "json_schema": SCHEMA, "logprobs": 0, "chat_template": True}),
    (RESPONSES, {"input": "Hi", "text": {"format": {"type": "json_object"}}}, HELLO, {"json_schema": True}),
    (RESPONSES, {"input": ITEMS, "instructions": "Be kind.", "tools": [{"type": "function", **FUNCTION}], "top_k": 9,
                 "tool_choice": {"type": "function", "name": "look"}, "seed": -2, "top_logprobs": 2}, [
        {"role": "system", "content": "Be kind.\n\nBe brief."}, {"role": "user", "content": "Why is\nit?"},
        {"role": "assistant", "content": "So.", "reasoning_content": "I look.", "tool_calls": [CALL]},
        {"role": "tool", "content": "open", "name": "look", "tool_call_id": "toolu_1"},
        {"role": "user", "content": [IMAGE]},
    ], {"tools": [TOOL], "tool_choice": "look", "top_k": 9, "seed": 2**64 - 2, "logprobs": None}),
    (OLLAMA_CHAT, {"messages": [
        {"role": "user", "content": "See", "images": ["AA=="]},
        {"role": "assistant", "content": "", "thinking": "Hm.",
         "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
        {"role": "tool", "tool_name": "f", "content": "3"},
    ], "format": {"type": "object"}, "options": {"temperature": 0.5, "stop": ["x"], "num_predict": 3}, "think": "low"},
    [
        {"role": "user", "content": [{"type": "text", "text": "See"}, IMAGE]},
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [
            {"id": "call_1_0", "type": "function", "function": {"name": "f", "arguments": {}}}]},
        {"role": "tool", "content": "3", "name": "f"},
    ], {"json_schema": {"type": "object"}, "temperature": 0.5, "stop": ["x"], "max_new_tokens": 3,
        "chat_template_kwargs": {"reasoning_effort": "low"}}),
    (OLLAMA_TEXT, {"prompt": "Hi", "system": "Be brief.", "think": False},
     [{"role": "system", "content": "Be brief."}, *HELLO],
     {"chat_template_kwargs": {"enable_thinking": False, "thinking": False}}),
    (OLLAMA_TEXT, {"prompt": "Hi", "raw": True, "logprobs": True, "think": True}, "Hi",
     {"logprobs": 0, "chat_template": False}),
    (COMPLETION, {"prompt": {"prompt_string": "Hi"}, "n_predict": 3, "cache_prompt": True, "id_slot": -1}, "Hi",
     {"max_new_tokens": 3}),
    (INFILL, VIM, Infill("def f():\n", "\nf()", "    ret", [("a.py", "x = 1\n")], "input_suffix"),
     {"max_new_tokens": 128, "top_k": 40, "temperature": 0.0}),
    *((dialect, {"input" if dialect is RESPONSES else "messages": [*HELLO, turn]}, [*HELLO, HM[0][1]],
       {"continue_final_message": True, "chat_template": True}) for dialect, turn in HM),
]  # fmt: skip


@pytest.mark.parametrize(("dialect", "fields", "prompt", "options"), ASKED)
def test_what_a_body_asks_for(dialect: Dialect, fields: dict[str, Any], prompt: Any, options: dict[str, Any]) -> None:
    choice = choice_of(dialect, **fields)
    assert prompt is ... or choice.prompt == prompt
    assert {name: choice.options.get(name) for name in options} == options


PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AA=="}}


@pytest.mark.parametrize(("dialect", "fields", "says"), [
    (MESSAGES, {"messages": [{"role": "user", "content": [PDF]}]}, "Only documents of text"),
    (MESSAGES, {"messages": HELLO, "temprature": 1}, r"Did you mean 'temperature'\?"),
    (MESSAGES, {"messages": HELLO, "mcp_servers": [{}]}, "mcp_servers"),
    (MESSAGES, {}, "messages"),
    (RESPONSES, {"input": "Hi", "previous_response_id": "resp_x"}, "no longer stored"),
    (OLLAMA_CHAT, {"messages": HELLO, "system": "Be brief."}, "Send a message of the role system"),
    (OLLAMA_CHAT, {"messages": HELLO, "options": {"temprature": 1}}, r"Did you mean 'temperature'\?"),
    (OLLAMA_CHAT, {"messages": HELLO, "options": {"mirostat": 1}}, "not supported"),
    (OLLAMA_CHAT, {"messages": HELLO, "options": {"repeat_last_n": 64, "repeat_penalty": 1.1}}, "repeat_last_n"),
    (OLLAMA_CHAT, {"messages": 1}, "'messages'"),
    (OLLAMA_CHAT, {"messages": HELLO, "context": [1]}, "Send the conversation to /api/chat"),
    (OLLAMA_TEXT, {"prompt": "Hi", "template": "x"}, "'template' is not supported"),
    (OLLAMA_TEXT, {"prompt": 5}, "'prompt' is not a text. Send a text."),
    (COMPLETION, {"prompt": [1, "x"]}, "A prompt of texts and token ids in one"),
    (COMPLETION, {"prompt": {"prompt_string": "x", "multimodal_data": ["y"]}}, "Send them to /v1/chat"),
    (COMPLETION, {"prompt": "x", "samplers": ["top_k", "mirostat"]}, "'samplers' is not supported"),
    (COMPLETION, {"prompt": "x", "samplers": ["top_k"], "temperature": 1}, "'samplers' is not supported"),
    (COMPLETION, {"prompt": "x", "t_max_predict_ms": "4"}, "'t_max_predict_ms' is not a number"),
    (COMPLETION, {"prompt": "x", "n_predictt": 4}, "There is no field 'n_predictt'"),
    (COMPLETION, {"prompt": "x", "n_probs": 3}, "Send logprobs to /v1/completions"),
    (COMPLETION, {"n_predict": 4}, "'prompt'"),
    (INFILL, {"input_prefix": 5}, "'input_prefix' is not a text"),
    (INFILL, {"input_extra": [{"text": 5}]}, r"'input_extra\[0\].text' is not a text"),
])  # fmt: skip
def test_what_cannot_be_done_is_refused(dialect: Dialect, fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ApiError, match=says) as refused:
        choice_of(dialect, **fields)
    assert refused.value.status == 400


TEXT = '<think>Hm.</think>So.\n<tool_call>\n{"name": "look", "arguments": {"a": 1}}\n</tool_call>'
TEMPLATE = "<tool_call><think>"
CALLED = {"function": {"name": "look", "arguments": {"a": 1}}}
WRITTEN = '{"a": 1}'
OUTPUT: list[dict[str, Any]] = [
    {"id": "rs_ID", "type": "reasoning", "status": "completed", "summary": [],
     "content": [{"type": "reasoning_text", "text": "Hm."}]},
    {"id": "msg_ID", "type": "message", "status": "completed", "role": "assistant",
     "content": [{"type": "output_text", "text": "So.", "annotations": [], "logprobs": []}]},
    {"id": "fc_ID", "type": "function_call", "status": "completed", "call_id": "call_ID", "name": "look",
     "arguments": WRITTEN},
]  # fmt: skip
# Of an API: a request with a tool; what is kept of its body and events, by keys; both for `TEXT`.
GIVEN: dict[str, tuple[Dialect, dict[str, Any], tuple[str, ...], Any, list[Any]]] = {
    "chat": (CHAT, {"messages": HELLO, "tools": [TOOL]}, ("choices",),
        {"choices": [{"index": 0, "message": {
            "role": "assistant", "content": "So.", "refusal": None, "reasoning_content": "Hm.", "reasoning": "Hm.",
            "tool_calls": [{"id": "call_ID", "type": "function", "function": {"name": "look", "arguments": WRITTEN}}],
        }, "finish_reason": "tool_calls", "logprobs": None, "seed": None}]},
        [{"choices": [{"index": 0, "delta": delta, "finish_reason": None, "logprobs": None}]} for delta in (
            {"role": "assistant", "content": ""}, {"reasoning_content": "Hm.", "reasoning": "Hm."}, {"content": "So."},
            {"tool_calls": [{"index": 0, "id": "call_ID", "type": "function",
                             "function": {"name": "look", "arguments": ""}}]},
            {"tool_calls": [{"index": 0, "function": {"arguments": WRITTEN}}]},
        )] + [{"choices": [
            {"index": 0, "delta": {}, "finish_reason": "tool_calls", "logprobs": None, "seed": None}]}]),
    "responses": (RESPONSES, {"input": "Hi", "tools": [{"type": "function", **FUNCTION}]},
        ("type", "output_index", "status", "item", "delta", "text", "arguments", "output"),
        {"status": "completed", "text": {"format": {"type": "text"}}, "output": OUTPUT},
        [{"type": f"response.{kind}", **fields} for kind, fields in (
            ("created", {}), ("in_progress", {}),
            ("output_item.added", {"item": OUTPUT[0] | {"status": "in_progress", "content": []}, "output_index": 0}),
            ("content_part.added", {"output_index": 0}),
            ("reasoning_text.delta", {"delta": "Hm.", "output_index": 0}),
            ("reasoning_text.done", {"text": "Hm.", "output_index": 0}),
            ("content_part.done", {"output_index": 0}),
            ("output_item.done", {"item": OUTPUT[0], "output_index": 0}),
            ("output_item.added", {"item": OUTPUT[1] | {"status": "in_progress", "content": []}, "output_index": 1}),
            ("content_part.added", {"output_index": 1}),
            ("output_text.delta", {"delta": "So.", "output_index": 1}),
            ("output_text.done", {"text": "So.", "output_index": 1}),
            ("content_part.done", {"output_index": 1}),
            ("output_item.done", {"item": OUTPUT[1], "output_index": 1}),
            ("output_item.added", {"item": OUTPUT[2] | {"status": "in_progress", "arguments": ""}, "output_index": 2}),
            ("function_call_arguments.delta", {"delta": WRITTEN, "output_index": 2}),
            ("function_call_arguments.done", {"arguments": WRITTEN, "output_index": 2}),
            ("output_item.done", {"item": OUTPUT[2], "output_index": 2}),
            ("completed", {}),
        )]),
    "messages": (MESSAGES, {"messages": HELLO, "tools": [LOOK]},
        ("type", "role", "content", "index", "content_block", "delta", "stop_reason"),
        {"type": "message", "role": "assistant", "stop_reason": "tool_use", "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "text", "text": "So."},
            {"type": "tool_use", "id": "toolu_ID", "name": "look", "input": {"a": 1}},
        ]},
        [{"type": kind, **fields} for kind, fields in (
            ("message_start", {}),
            ("content_block_start", {"index": 0,
                                     "content_block": {"type": "thinking", "thinking": "", "signature": ""}}),
            ("content_block_delta", {"index": 0, "delta": {"type": "thinking_delta", "thinking": "Hm."}}),
            ("content_block_stop", {"index": 0}),
            ("content_block_start", {"index": 1, "content_block": {"type": "text", "text": ""}}),
            ("content_block_delta", {"index": 1, "delta": {"type": "text_delta", "text": "So."}}),
            ("content_block_stop", {"index": 1}),
            ("content_block_start", {"index": 2, "content_block": {
                "type": "tool_use", "id": "toolu_ID", "name": "look", "input": {}}}),
            ("content_block_delta", {"index": 2, "delta": {"type": "input_json_delta", "partial_json": WRITTEN}}),
            ("content_block_stop", {"index": 2}),
            ("message_delta", {"delta": {"stop_reason": "tool_use", "stop_sequence": None}}),
            ("message_stop", {}),
        )]),
    "ollama": (OLLAMA_CHAT, {"messages": HELLO, "tools": [TOOL]}, ("message", "done", "done_reason"),
        {"message": {"role": "assistant", "content": "So.", "thinking": "Hm.", "tool_calls": [CALLED]}, "done": True,
         "done_reason": "stop"},
        [{"message": {"role": "assistant", "content": "", **said}, "done": False} for said in (
            {"thinking": "Hm."}, {"content": "So."}, {"tool_calls": [CALLED]},
        )] + [{"message": {"role": "assistant", "content": ""}, "done": True, "done_reason": "stop"}]),
    "ollama's texts": (OLLAMA_TEXT, {"prompt": "Hi"}, ("response", "thinking", "done"),
        {"response": TEXT[18:], "thinking": "Hm.", "done": True},
        [{"response": "", "thinking": "Hm.", "done": False}, {"response": TEXT[18:], "done": False},
         {"response": "", "done": True}]),
    "completions": (COMPLETIONS, {"prompt": "Hi", "echo": True}, ("choices",),
        {"choices": [{"index": 0, "text": f"Hi{TEXT}", "finish_reason": "stop", "logprobs": None, "seed": None}]},
        [{"choices": [{"index": 0, "text": f"Hi{TEXT}", "finish_reason": None, "logprobs": None}]},
         {"choices": [{"index": 0, "text": "", "finish_reason": "stop", "logprobs": None, "seed": None}]}]),
    "llama.cpp": (COMPLETION, {"prompt": "Hi"}, ("content", "stop", "stop_type", "prompt"),
        {"content": TEXT, "stop": True, "stop_type": "eos", "prompt": "Hi"},
        [{"content": TEXT, "stop": False}, {"content": "", "stop": True, "stop_type": "eos", "prompt": "Hi"}]),
}  # fmt: skip


@pytest.mark.parametrize("name", GIVEN)
def test_the_same_answer_in_each_api_s_words(name: str) -> None:
    dialect, fields, keys, body, events = GIVEN[name]

    def kept(value: Any) -> Any:
        made = json.loads(re.sub("_[0-9a-f]{24}", "_ID", msgspec.json.encode(value).decode()))
        return {key: made[key] for key in keys if key in made}

    assert kept(body_of(dialect, answer_of(dialect, TEMPLATE, **fields), TEXT)) == body
    given = streamed(dialect, answer_of(dialect, TEMPLATE, **fields), chunks_of(TEXT, len(TEXT)))
    assert [kept(event) for event in given] == events
    whole, cut = answer_of(dialect, TEMPLATE, **fields), answer_of(dialect, TEMPLATE, **fields)
    streamed(dialect, whole, chunks_of(TEXT, len(TEXT)))
    streamed(dialect, cut, chunks_of(TEXT))
    said = [[(part.kind, part.name, part.text) for part in answer.choices[0].parts] for answer in (whole, cut)]
    assert said[0] == said[1]


@pytest.mark.parametrize(("fields", "content", "reasoning"), [
    ({}, "So.", "Hm."), ({"reasoning_format": "none"}, "<think>Hm.</think>So.", None),
    ({"include_reasoning": False}, "So.", None), ({"reasoning": {"exclude": True}}, "So.", None),
])  # fmt: skip
def test_reasoning_is_left_in_the_text_or_out_of_the_answer(
    fields: dict[str, Any], content: str, reasoning: str | None
) -> None:
    whole = body_of(CHAT, answer_of(CHAT, TEMPLATE, messages=HELLO, **fields), "<think>Hm.</think>So.")
    message = whole["choices"][0]["message"]
    assert (message["content"], message.get("reasoning_content")) == (content, reasoning)


def test_a_call_that_is_required_is_not_repeated() -> None:
    text = "".join(f'<tool_call>{{"name": "look", "arguments": {{"a": {i}}}}}</tool_call>' for i in (1, 1, 2, 1))
    for choice, count in (("required", 2), ("auto", 4)):
        answer = answer_of(CHAT, "<tool_call>", messages=HELLO, tools=[TOOL], tool_choice=choice)
        streamed(CHAT, answer, chunks_of(text))
        assert [call.call_index for call in answer.choices[0].calls] == [*range(count)]


@pytest.mark.parametrize(("reason", "count"), [("stop", 0), ("length", 1)])
def test_a_stop_string_within_a_call_leaves_none(reason: str, count: int) -> None:
    text = '<tool_call>{"name": "look", "arguments": {"a": '
    whole = body_of(CHAT, answer_of(CHAT, "<tool_call>", messages=HELLO, tools=[TOOL]), text, reason)["choices"][0]
    assert (whole["finish_reason"], len(whole["message"].get("tool_calls", ()))) == (reason, count)


def test_a_text_without_tools_is_content() -> None:
    answer = answer_of(CHAT, "<tool_call>", messages=HELLO)
    assert body_of(CHAT, answer, "A <tool_call>")["choices"][0]["message"]["content"] == "A <tool_call>"


def test_an_answer_is_stored_with_what_it_follows() -> None:
    stored = Conversations(10_000)
    call = '<tool_call>{"name": "look", "arguments": {"a": [1]}}</tool_call>'
    asked = {"input": "Hi", "tools": [{"type": "function", **FUNCTION}]}
    whole = body_of(RESPONSES, answer_of(RESPONSES, TEMPLATE, stored, **asked), f"Let me see.\n{call}\n{call} Done.")
    assert [item["type"] for item in whole["output"]] == ["message", "function_call", "function_call", "message"]
    first, last = stored.turns("resp_1")
    assert (first, last["content"]) == (HELLO[0], "Let me see.Done.")
    assert [json.loads(made["function"]["arguments"]) for made in last["tool_calls"]] == [{"a": [1]}] * 2
    given = {"type": "function_call_output", "call_id": last["tool_calls"][1]["id"], "output": "open"}
    after = answer_of(RESPONSES, TEMPLATE, stored, input=[given], previous_response_id="resp_1")
    prompt: Any = after.choices[0].choice.prompt
    assert [turn["role"] for turn in prompt] == ["user", "assistant", "tool"]
    assert prompt[1]["tool_calls"][1]["function"] == {"name": "look", "arguments": {"a": [1]}}


def test_an_answer_without_text_is_an_empty_message() -> None:
    whole = body_of(RESPONSES, answer_of(RESPONSES, input="Hi"), "", "length")
    assert [(item["content"][0]["text"], item["status"]) for item in whole["output"]] == [("", "incomplete")]
    assert whole["incomplete_details"]
    assert body_of(MESSAGES, answer_of(MESSAGES, messages=HELLO), "")["content"] == [{"type": "text", "text": ""}]


def test_llama_cpp_answers_several_prompts() -> None:
    several = answer_of(COMPLETION, prompt=["Hi", "Ho"])
    assert [each["index"] for each in COMPLETION.whole(several, [result_of("a"), result_of("b")])] == [0, 1]
