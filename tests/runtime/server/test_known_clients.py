"""What clients of others ask of the API, recorded from them: openai 3.57, langchain-openai 1.7.4, llama-index-core
0.14.25, llm 0.36, Continue's command line 1.5.47 and Open WebUI 0.12.4; of Zed and n8n as their sources send them."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

import serving
from serving import Live

FILE = Path(serving.__file__).with_name("known_clients.json")
ASKED = {row["client"]: row for row in json.loads(FILE.read_text(encoding="utf-8"))}


@pytest.mark.parametrize("client", ASKED)
def test_what_clients_ask_is_answered(caller: Any, client: str) -> None:
    path, body = ASKED[client]["path"], ASKED[client]["body"]
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
    if path == "responses":
        (message,) = found["output"]
        text = message["content"][0]["text"]
    else:
        (choice,) = found["choices"]
        said = choice.get("message", {})
        text = choice["text"] if path == "completions" else said.get("tool_calls") or said["content"]
    assert text
    if "response_format" in body or "text" in body:
        assert set(json.loads(text)) == {"name", "people"}


REFUSED: dict[str, tuple[str, dict[str, Any], int, str | None, str]] = {
    "embeddings": ("embeddings", {"model": "tiny", "input": "Hi"}, 404, "model", "No embedding model is served"),
    "moderations": ("moderations", {"input": "Hi"}, 404, None, "/openapi.json describes the addresses"),
    "no body": ("chat/completions", {}, 400, None, "Object missing required field `messages`."),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_offered_is_said(live: Live, case: str) -> None:
    path, body, status, param, message = REFUSED[case]
    answer = httpx.post(f"{live.url}/v1/{path}", json=body, timeout=300)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param)
    assert message in error["message"]
