"""What clients of others ask of the API, recorded from them: openai 3.57, langchain-openai 1.7.4, llama-index-core
0.14.25, llm 0.36, Continue's command line 1.5.47 and Open WebUI 0.12.4; of Zed and n8n as their sources send them."""

import json
from typing import Any

import httpx
import pytest

from serving import Live

CHAT, COMPLETIONS, RESPONSES = "chat/completions", "completions", "responses"
HELLO = [{"role": "user", "content": "Say hi."}]
CITY = {
    "properties": {
        "name": {"title": "Name", "type": "string", "maxLength": 8},
        "people": {"title": "People", "type": "integer", "maximum": 99},
    },
    "required": ["name", "people"],
    "title": "City",
    "type": "object",
    "additionalProperties": False,
}
STRICT = {"type": "json_schema", "json_schema": {"schema": CITY, "name": "City", "strict": True}}
STRICT_TEXT = {"format": {"type": "json_schema", "strict": True, "name": "City", "schema": CITY}}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
ITEM = {"content": "Say hi.", "role": "user", "type": "message"}
BRIEF = {"role": "system", "content": "Be brief"}
BACK = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "tool_calls"))  # with a message's dump
PLACE = {"type": "object", "properties": {"open": {"type": "boolean"}}, "required": ["open"]}
TOOLS = [{"type": "function", "function": {"name": "visit", "description": "Visit it.", "parameters": PLACE}}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "visit", "arguments": '{"open": true}'}}
CALLED = [
    *HELLO,
    {"role": "assistant", "content": None, **BACK, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "Closed."}]},
]
ZED = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [CALL]},
       {"role": "tool", "content": "Closed.", "tool_call_id": "call_1"}]  # fmt: skip
N8N = [*HELLO, {"role": "assistant", "content": "", "tool_calls": [CALL]},
       {"role": "tool", "content": "Closed.", "name": "visit", "tool_call_id": "call_1"}]  # fmt: skip
N8N_DEFAULTS = {"n": 1, "frequency_penalty": 0, "presence_penalty": 0, "top_p": 1, "temperature": 0.7}
SLIDERS = {
    "temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.05, "frequency_penalty": 0.1, "presence_penalty": 0.1,
}  # fmt: skip

ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "openai": (CHAT, {"messages": HELLO, "max_tokens": 8}),
    "openai, its answer back": (CHAT, {"messages": [*HELLO, {"role": "assistant", "content": "Hi", **BACK}, *HELLO]}),
    "openai, its call back": (CHAT, {"messages": CALLED, "tools": TOOLS, "max_tokens": 8}),
    "openai, parse": (CHAT, {"stream": False, "messages": HELLO, "max_tokens": 90, "response_format": STRICT}),
    "openai, responses": (RESPONSES, {"input": "Say hi.", "max_output_tokens": 8}),
    "openai, responses.parse": (RESPONSES, {"input": "A city", "max_output_tokens": 90, "text": STRICT_TEXT}),
    "langchain, invoke": (CHAT, {"stream": False, "messages": HELLO, "max_completion_tokens": 12}),
    "langchain, stream": (CHAT, {"messages": HELLO, "max_completion_tokens": 12, **USAGE}),
    "langchain, structured": (
        CHAT,
        {"stream": False, "messages": HELLO, "max_completion_tokens": 90, "response_format": STRICT},
    ),
    "langchain, functions": (
        CHAT,
        {"stream": False, "messages": HELLO, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
    ),
    "langchain, responses": (RESPONSES, {"stream": False, "input": [ITEM], "max_output_tokens": 12}),
    "llama-index, chat": (CHAT, {"stream": True, "messages": HELLO, "max_tokens": 12, "temperature": 0.1}),
    "llama-index, functions": (
        CHAT,
        {"stream": True, "messages": HELLO, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
    ),
    "llama-index, text": (COMPLETIONS, {"stream": False, "prompt": "Say hi", "max_tokens": 8, "temperature": 0.1}),
    "llm": (CHAT, {"messages": [BRIEF, *HELLO], "max_tokens": 8, **USAGE}),
    "llm, completion": (COMPLETIONS, {"prompt": "Say hi", "max_tokens": 8, **USAGE}),
    "continue": (CHAT, {"messages": [BRIEF, *HELLO], "tools": TOOLS, **USAGE}),
    "open-webui": (CHAT, {"messages": HELLO, **USAGE}),
    "open-webui, title": (CHAT, {"stream": False, "messages": HELLO, "max_tokens": 1000}),
    "open-webui, sliders": (CHAT, {"stream": False, "messages": HELLO, "seed": 1, "stop": ["."], **SLIDERS}),
    "zed": (CHAT, {"messages": ZED, "tools": TOOLS, "max_completion_tokens": 8, "temperature": 1.0, **USAGE}),
    "n8n": (CHAT, {"stream": False, "messages": HELLO, "max_tokens": 12, **N8N_DEFAULTS}),
    "n8n, agent": (CHAT, {"messages": N8N, "tools": TOOLS, "n": 1, "temperature": 0.7, **USAGE}),
}


@pytest.mark.parametrize("client", ASKED)
def test_what_clients_ask_is_answered(caller: Any, client: str) -> None:
    path, body = ASKED[client]
    answer = httpx.post(f"{caller.base_url}{path}", json={"model": "tiny", "seed": 1, **body}, timeout=300)
    assert answer.status_code == 200, answer.text
    if body.get("stream"):
        events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        parts = [json.loads(event) for event in events[:-1]]
        assert any(choice["finish_reason"] for part in parts for choice in part["choices"])
        assert bool(parts[-1].get("usage")) == ("stream_options" in body)
        return
    found = answer.json()
    assert found["usage"]["total_tokens"] > 0
    if path == RESPONSES:
        (message,) = found["output"]
        text = message["content"][0]["text"]
    else:
        (choice,) = found["choices"]
        text = choice["message"].get("tool_calls") or choice["message"]["content"] if path == CHAT else choice["text"]
    assert text
    if "response_format" in body or "text" in body:
        assert set(json.loads(text)) == {"name", "people"}


REFUSED: dict[str, tuple[str, dict[str, Any], int, str | None, str]] = {
    "embeddings": ("embeddings", {"model": "tiny", "input": "Hi"}, 404, "model", "No embedding model is served"),
    "moderations": ("moderations", {"input": "Hi"}, 404, None, "/openapi.json describes the addresses"),
    "no body": (CHAT, {}, 400, None, "Object missing required field `messages`."),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_offered_is_said(live: Live, case: str) -> None:
    path, body, status, param, message = REFUSED[case]
    answer = httpx.post(f"{live.url}/v1/{path}", json=body, timeout=300)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param)
    assert message in error["message"]
