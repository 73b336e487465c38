"""Each API's words as data: what its bodies ask for, and how it gives the same answer, whole and streamed."""

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

import serving
from outrider.server.chat import CHAT
from outrider.server.completions import COMPLETIONS
from outrider.server.conversations import Conversations
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
DIALECTS = {
    "CHAT": CHAT, "COMPLETION": COMPLETION, "COMPLETIONS": COMPLETIONS, "INFILL": INFILL, "MESSAGES": MESSAGES,
    "OLLAMA_CHAT": OLLAMA_CHAT, "OLLAMA_TEXT": OLLAMA_TEXT, "RESPONSES": RESPONSES,
}  # fmt: skip
# asked: of an API, a body's fields, and the prompt and some of the options that they ask for.
# refused: fields, and what is said of them.
# given: a request; what is kept of its body and events, by keys; both for `TEXT`.
WORDS: Any = json.loads(Path(serving.__file__).with_name("dialects.json").read_text(encoding="utf-8"))
# As llama.vim sends it.
VIM = {
    "id_slot": 0, "input_prefix": "def f():\n", "input_suffix": "\nf()", "prompt": "    ret", "n_predict": 128,
    "input_extra": [{"filename": "a.py", "text": "x = 1\n"}], "stop": [], "n_indent": 4, "top_k": 40, "top_p": 0.9,
    "samplers": ["top_k", "top_p", "infill"], "stream": False, "cache_prompt": True, "t_max_prompt_ms": 500,
    "t_max_predict_ms": 1000, "response_fields": ["content"],
}  # fmt: skip


@pytest.mark.parametrize("row", WORDS["asked"], ids=lambda row: row["api"])
def test_what_a_body_asks_for(row: dict[str, Any]) -> None:
    choice = choice_of(DIALECTS[row["api"]], **row["fields"])
    assert choice.prompt == row.get("prompt", choice.prompt)
    assert {name: choice.options.get(name) for name in row["options"]} == row["options"]


def test_what_llama_vim_asks_for() -> None:
    choice = choice_of(INFILL, **VIM)
    assert choice.prompt == Infill("def f():\n", "\nf()", "    ret", [("a.py", "x = 1\n")], "input_suffix")
    expected = {"max_new_tokens": 128, "top_k": 40, "temperature": 0.0}
    assert {name: choice.options.get(name) for name in expected} == expected


@pytest.mark.parametrize("row", WORDS["refused"], ids=lambda row: row["says"])
def test_what_cannot_be_done_is_refused(row: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match=row["says"]) as refused:
        choice_of(DIALECTS[row["api"]], **row["fields"])
    assert refused.value.status == 400


TEXT = '<think>Hm.</think>So.\n<tool_call>\n{"name": "look", "arguments": {"a": 1}}\n</tool_call>'
TEMPLATE = "<tool_call><think>"


@pytest.mark.parametrize("name", WORDS["given"])
def test_the_same_answer_in_each_api_s_words(name: str) -> None:
    row = WORDS["given"][name]
    dialect, fields = DIALECTS[row["api"]], row["fields"]

    def kept(value: Any) -> Any:
        made = json.loads(re.sub("_[0-9a-f]{24}", "_ID", msgspec.json.encode(value).decode()))
        return {key: made[key] for key in row["keys"] if key in made}

    assert kept(body_of(dialect, answer_of(dialect, TEMPLATE, **fields), TEXT)) == row["body"]
    given = streamed(dialect, answer_of(dialect, TEMPLATE, **fields), chunks_of(TEXT, len(TEXT)))
    assert [kept(event) for event in given] == row["events"]
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
