"""What clients of others ask of the API, recorded from them: openai 3.54, langchain-openai, llama-index and llm."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from serving import Live, serving

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

ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "openai": (CHAT, {"messages": HELLO, "max_tokens": 8}),
    "openai, parse": (CHAT, {"stream": False, "messages": HELLO, "max_tokens": 90, "response_format": STRICT}),
    "openai, responses": (RESPONSES, {"input": "Say hi.", "max_output_tokens": 8}),
    "openai, responses.parse": (RESPONSES, {"input": "A city", "max_output_tokens": 90, "text": STRICT_TEXT}),
    "langchain, invoke": (CHAT, {"stream": False, "messages": HELLO, "max_completion_tokens": 12}),
    "langchain, stream": (CHAT, {"messages": HELLO, "max_completion_tokens": 12, **USAGE}),
    "langchain, structured": (
        CHAT,
        {"stream": False, "messages": HELLO, "max_completion_tokens": 90, "response_format": STRICT},
    ),
    "langchain, responses": (RESPONSES, {"stream": False, "input": [ITEM], "max_output_tokens": 12}),
    "llama-index, chat": (CHAT, {"stream": True, "messages": HELLO, "max_tokens": 12, "temperature": 0.1}),
    "llama-index, text": (COMPLETIONS, {"stream": False, "prompt": "Say hi", "max_tokens": 8, "temperature": 0.1}),
    "llm": (CHAT, {"messages": [BRIEF, *HELLO], "max_tokens": 8, **USAGE}),
    "llm, completion": (COMPLETIONS, {"prompt": "Say hi", "max_tokens": 8, **USAGE}),
}


@pytest.fixture(scope="module")
def live(tiny: Path) -> Iterator[Live]:
    with serving({"tiny": tiny}) as live:
        yield live


@pytest.mark.parametrize("client", ASKED)
def test_what_clients_ask_is_answered(live: Live, client: str) -> None:
    path, body = ASKED[client]
    answer = httpx.post(f"{live.url}/v1/{path}", json={"model": "tiny", **body}, timeout=60)
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
        text = choice["message"]["content"] if path == CHAT else choice["text"]
    assert text
    if "response_format" in body or "text" in body:
        assert set(json.loads(text)) == {"name", "people"}


def test_tools_are_refused_in_words_where_the_template_knows_none(live: Live) -> None:
    """As LangChain asks for them; what a model with tools answers is in test_client."""
    tool = {"name": "weather", "description": "The weather.", "parameters": {"properties": {}, "type": "object"}}
    body = {
        "model": "tiny",
        "messages": HELLO,
        "tool_choice": "required",
        "tools": [{"type": "function", "function": tool}],
    }
    answer = httpx.post(f"{live.url}/v1/{CHAT}", json=body, timeout=60)
    assert answer.status_code == 400
    assert "tools need a chat template" in answer.json()["error"]["message"]
