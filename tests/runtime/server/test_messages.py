"""/v1/messages, as Anthropic's client and Claude Code ask it, and Ollama's API, as its clients do."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from outrider.server.errors import ApiError
from outrider.server.messages import Messages, read_messages
from outrider.server.ollama import OllamaChat, OllamaText
from outrider.server.options import AnswerChoice, choices_of_chat
from serving import chunks_of, events_of, head_of, result_of, serving

if TYPE_CHECKING:
    from pathlib import Path


HELLO = [{"role": "user", "content": "Say hi."}]
ASKED = {"model": "tiny", "max_tokens": 6, "messages": HELLO}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
LOOK = {"name": "look", "description": "Look.", "input_schema": SCHEMA}
FUNCTION = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
# What Claude Code sends besides: blocks with cache_control, betas, a context's management, thinking, its own tools.
CLAUDE_CODE = {
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


def test_a_message_is_the_chat_s_answer(http: httpx.Client) -> None:
    chat = http.post("/v1/chat/completions", json=ASKED).json()
    answer = http.post("/v1/messages", json=ASKED).json()
    assert answer["content"] == [{"type": "text", "text": chat["choices"][0]["message"]["content"]}]
    assert (answer["type"], answer["role"], answer["stop_reason"]) == ("message", "assistant", "max_tokens")
    used = answer["usage"]
    assert used["input_tokens"] + used["cache_read_input_tokens"] == chat["usage"]["prompt_tokens"]
    assert used["output_tokens"] == 6
    streamed = http.post("/v1/messages", json=ASKED | {"stream": True})
    events = events_of(streamed)
    assert [line[7:] for line in streamed.text.splitlines() if line.startswith("event: ")] == [
        e["type"] for e in events
    ]
    assert [events[0]["type"], events[1]["type"]] == ["message_start", "content_block_start"]
    assert [e["type"] for e in events[-3:]] == ["content_block_stop", "message_delta", "message_stop"]
    text = "".join(e["delta"]["text"] for e in events if e["type"] == "content_block_delta")
    assert text == chat["choices"][0]["message"]["content"]
    assert events[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == 6


def test_a_stop_sequence_is_named(http: httpx.Client) -> None:
    asked = ASKED | {"max_tokens": 40, "logit_bias": {"21": 100}, "repetition_penalty": 1.5}
    whole = http.post("/v1/messages", json=asked).json()["content"][0]["text"]
    (stop, *_) = re.findall("[ -~]", whole[1:])
    answer = http.post("/v1/messages", json=asked | {"stop_sequences": ["never", stop]}).json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", stop)
    assert answer["content"][0]["text"] == whole[: whole.index(stop)]


def test_tokens_are_counted(http: httpx.Client) -> None:
    answer = http.post("/v1/messages", json=ASKED).json()["usage"]
    counted = http.post("/v1/messages/count_tokens", json={"model": "tiny", "messages": HELLO}).json()
    assert counted == {"input_tokens": answer["input_tokens"] + answer["cache_read_input_tokens"]}


@pytest.mark.parametrize(("path", "body", "status", "kind", "says"), [
    ("/v1/messages", {"model": "tiny"}, 400, "invalid_request_error", "messages"),
    ("/v1/messages", ASKED | {"temprature": 1}, 400, "invalid_request_error", "Did you mean 'temperature'?"),
    ("/v1/messages", ASKED | {"mcp_servers": [{}]}, 400, "invalid_request_error", "mcp_servers"),
    ("/v1/messages/count_tokens", {"messages": HELLO}, 400, "invalid_request_error", "model"),
    ("/v1/messages/nothing", {}, 404, "not_found_error", "nothing at this address"),
])  # fmt: skip
def test_errors_have_anthropic_s_shape(
    http: httpx.Client, path: str, body: dict[str, Any], status: int, kind: str, says: str
) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == status
    error = answer.json()
    assert (error["type"], error["error"]["type"]) == ("error", kind)
    assert says in error["error"]["message"]


def test_claude_code_s_requests_are_chats() -> None:
    asked = read_messages(json.dumps({"model": "m"} | CLAUDE_CODE).encode())
    (choice,) = choices_of_chat(asked)
    assert choice.prompt == [
        {"role": "system", "content": "You are brief."},
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "So.", "reasoning_content": "I look.", "tool_calls": [
            {"id": "toolu_1", "type": "function", "function": {"name": "look", "arguments": {"a": 1}}}]},
        {"role": "tool", "content": "open", "tool_call_id": "toolu_1"},
        {"role": "user", "content": "And now?"},
    ]  # fmt: skip
    assert [tool["function"]["name"] for tool in choice.options["tools"]] == ["look"]
    assert choice.options["reasoning_budget"] == 31_999
    assert choice.options["chat_template_kwargs"] == {
        "reasoning_effort": "medium", "enable_thinking": True, "thinking": True
    }  # fmt: skip
    for given, chosen in (({"type": "any"}, "required"), ({"type": "tool", "name": "look"}, "look")):
        asked = read_messages(json.dumps({"model": "m"} | CLAUDE_CODE | {"tool_choice": given}).encode())
        assert choices_of_chat(asked)[0].options["tool_choice"] == chosen
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/jpeg", "data": "AA=="}}
    asked = read_messages(json.dumps(ASKED | {"messages": [{"role": "user", "content": [image]}]}).encode())
    assert choices_of_chat(asked)[0].prompt[0]["content"][0]["image_url"]["url"] == "data:image/jpeg;base64,AA=="
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AA=="}}
    with pytest.raises(ApiError, match="Only documents of text"):
        read_messages(json.dumps(ASKED | {"messages": [{"role": "user", "content": [pdf]}]}).encode())


TEXT = '<think>I look.</think>So.\n<tool_call>\n{"name": "look", "arguments": {"a": 1}}\n</tool_call>'


def test_thinking_and_calls_are_blocks() -> None:
    asked = read_messages(json.dumps({"model": "m"} | CLAUDE_CODE).encode())
    whole = Messages(asked, head_of("<tool_call><think>"), [AnswerChoice([], {})]).whole([result_of(TEXT)])
    thought, text, call = whole.content
    assert thought == {"type": "thinking", "thinking": "I look.", "signature": ""}
    assert text == {"type": "text", "text": "So."}
    assert (call["name"], call["input"], call["id"][:6]) == ("look", {"a": 1}, "toolu_")
    assert whole.stop_reason == "tool_use"
    answer = Messages(asked, head_of("<tool_call><think>"), [AnswerChoice([], {})])
    events = [event for chunk in chunks_of(TEXT) for event in answer.events(0, chunk)]
    blocks: list[Any] = [event.content_block for event in events if event.type == "content_block_start"]
    started = [block["type"] for block in blocks]
    assert started == ["thinking", "text", "tool_use"]
    deltas: list[Any] = [event.delta for event in events if event.type == "content_block_delta"]
    written = [delta["partial_json"] for delta in deltas if "partial_json" in delta]
    assert json.loads("".join(written)) == {"a": 1}
    assert [event.index for event in events if event.type == "content_block_stop"] == [0, 1, 2]


def test_ollama_s_chat_is_the_same_answer(http: httpx.Client) -> None:
    chat = http.post("/v1/chat/completions", json=ASKED).json()["choices"][0]["message"]["content"]
    asked = {
        "model": "tiny:latest", "messages": HELLO, "keep_alive": "5m", "options": {"num_predict": 6, "num_ctx": 2048},
    }  # fmt: skip
    lines = [json.loads(line) for line in http.post("/api/chat", json=asked).text.splitlines()]
    assert "".join(line["message"]["content"] for line in lines) == chat
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert (lines[-1]["done_reason"], lines[-1]["eval_count"]) == ("length", 6)
    whole = http.post("/api/chat", json=asked | {"stream": False}).json()
    assert whole["message"] == {"role": "assistant", "content": chat}
    text = {"model": "tiny", "prompt": "Say hi.", "stream": False, "options": {"num_predict": 6}}
    assert http.post("/api/generate", json=text).json()["response"] == chat
    raw = http.post("/api/generate", json=text | {"raw": True}).json()["response"]
    plain = http.post("/v1/completions", json={"model": "tiny", "prompt": "Say hi.", "max_tokens": 6}).json()
    assert raw == plain["choices"][0]["text"]


def test_ollama_s_clients_see_the_models(http: httpx.Client) -> None:
    assert http.get("/api/version").json()["version"]
    for path in ("/api/tags", "/api/ps"):
        (model,) = http.get(path).json()["models"]
        assert model["name"] == "tiny"
        assert model["size"] > 0
    assert (model["size_vram"], model["expires_at"][:4], model["context_length"]) == (0, "9999", 8192)  # on the CPU
    shown = http.post("/api/show", json={"model": "tiny"}).json()
    assert shown["capabilities"] == ["completion"]
    assert shown["model_info"]["qwen2.context_length"] == 8192
    (listed,) = http.get("/v1/models").json()["data"]
    assert (listed["architecture"], listed["tools"], listed["reasoning"], listed["vision"]) == (
        "qwen2", False, False, False
    )  # fmt: skip


@pytest.mark.parametrize(("body", "says"), [
    ({"model": "tiny", "messages": HELLO, "system": "Be brief."}, "Send a message of the role system"),
    ({"model": "tiny", "messages": HELLO, "options": {"temprature": 1}}, "Did you mean 'temperature'?"),
    ({"model": "tiny", "messages": HELLO, "options": {"mirostat": 1}}, "not supported"),
    ({"model": "tiny", "messages": HELLO, "options": {"repeat_last_n": 64, "repeat_penalty": 1.1}}, "repeat_last_n"),
    ({"model": "tiny", "messages": 1}, "'messages'"),
    ({"model": "tiny", "messages": HELLO, "context": [1]}, "Send the conversation to /api/chat"),
])  # fmt: skip
def test_ollama_s_errors_are_texts(http: httpx.Client, body: dict[str, Any], says: str) -> None:
    answer = http.post("/api/chat", json=body)
    assert answer.status_code == 400
    assert says in answer.json()["error"]


def test_ollama_s_requests_without_a_prompt_load_the_model(tiny: Path) -> None:
    with serving({"tiny": tiny}) as live, httpx.Client(base_url=live.url, timeout=300) as http:
        for path, reason in (("/api/generate", "load"), ("/api/chat", "load"), ("/api/generate", "unload")):
            body = {"model": "tiny", "messages": []} if path == "/api/chat" else {"model": "tiny"}
            answer = http.post(path, json=body | {"keep_alive": 0 if reason == "unload" else "5m"}).json()
            assert (answer["done"], answer["done_reason"], answer["response"]) == (True, reason, "")
            assert http.get("/v1/models/tiny").json()["loaded"] == (reason == "load")


def test_ollama_s_prompt_is_a_text(http: httpx.Client) -> None:
    error = http.post("/api/generate", json={"model": "tiny", "prompt": 5}).json()["error"]
    assert error == "'prompt' is not a text. Send a text."


def test_ollama_has_log_probabilities(http: httpx.Client) -> None:
    body = {"model": "tiny", "messages": HELLO, "format": {"enum": ["sun"]}, "logprobs": True, "top_logprobs": 2}
    whole = http.post("/api/chat", json=body | {"stream": False}).json()
    lines = [json.loads(line) for line in http.post("/api/chat", json=body).text.splitlines()]
    assert [each for line in lines for each in line.get("logprobs", ())] == whole["logprobs"]
    assert "".join(each["token"] for each in whole["logprobs"]) == whole["message"]["content"]
    assert {len(each["top_logprobs"]) for each in whole["logprobs"]} == {2}
    raw: dict[str, Any] = {"model": "tiny", "prompt": "Hi", "raw": True, "logprobs": True, "stream": False}
    raw["options"] = {"num_predict": 2}
    assert len(http.post("/api/generate", json=raw).json()["logprobs"]) == 2


def test_ollama_has_thinking_and_whole_calls() -> None:
    asked = OllamaChat.read(json.dumps({"model": "m", "messages": HELLO, "tools": [FUNCTION], "think": True}).encode())
    assert choices_of_chat(asked)[0].options["chat_template_kwargs"]["enable_thinking"] is True
    whole = OllamaChat(asked, head_of("<tool_call><think>"), [AnswerChoice([], {})]).whole([result_of(TEXT)])
    called = {"function": {"name": "look", "arguments": {"a": 1}}}
    expected = {"role": "assistant", "content": "So.", "thinking": "I look.", "tool_calls": [called]}
    assert whole["message"] == expected
    answer = OllamaChat(asked, head_of("<tool_call><think>"), [AnswerChoice([], {})])
    lines = [line["message"] for chunk in chunks_of(TEXT) for line in answer.events(0, chunk)]
    assert [line["tool_calls"] for line in lines if "tool_calls" in line] == [[called]]
    assert "".join(line.get("thinking", "") for line in lines) == "I look."


def test_ollama_s_turns_are_read() -> None:
    turns = [
        {"role": "user", "content": "See", "images": ["AA=="]},
        {"role": "assistant", "content": "", "thinking": "Hm.",
         "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
        {"role": "tool", "tool_name": "f", "content": "3"},
    ]  # fmt: skip
    body: dict[str, Any] = {"model": "m", "messages": turns, "format": {"type": "object"}}
    body["options"] = {"temperature": 0.5, "stop": ["x"]}
    (choice,) = choices_of_chat(OllamaChat.read(json.dumps(body).encode()))
    user, called, result = choice.prompt
    assert user["content"][1]["image_url"]["url"] == "data:image/png;base64,AA=="
    assert (called["reasoning_content"], called["tool_calls"][0]["function"]["name"]) == ("Hm.", "f")
    assert result == {"role": "tool", "content": "3", "name": "f"}
    assert choice.options["json_schema"] == {"type": "object"}
    assert choice.options["temperature"] == 0.5
    with pytest.raises(ApiError, match="template"):
        OllamaText.read(b'{"model": "m", "prompt": "a", "template": "x"}')


def test_blocks_of_hosted_tools_are_skipped() -> None:
    result = {"type": "search_result", "source": "u", "title": "t", "content": [{"type": "text", "text": "x"}]}
    blocks = [
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
        {"type": "text", "text": "So."},
    ]
    given = [*HELLO, {"role": "assistant", "content": blocks}, {"role": "user", "content": [result]}]
    asked = read_messages(json.dumps(ASKED | {"messages": given}).encode())
    (choice,) = choices_of_chat(asked)
    assert [turn["content"] for turn in choice.prompt] == ["Say hi.", "So.", "t\nu\nx"]
