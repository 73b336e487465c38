"""/v1/messages, as Anthropic's client and Claude Code ask it, and Ollama's API, as its clients do."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from serving import events_of, serving

HELLO = [{"role": "user", "content": "Say hi."}]
ASKED = {"model": "tiny", "max_tokens": 6, "messages": HELLO}


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


def test_ollama_s_requests_without_a_prompt_load_the_model(tiny: Path) -> None:
    with serving({"tiny": tiny}) as live, httpx.Client(base_url=live.url, timeout=300) as http:
        for path, reason in (("/api/generate", "load"), ("/api/chat", "load"), ("/api/generate", "unload")):
            body = {"model": "tiny", "messages": []} if path == "/api/chat" else {"model": "tiny"}
            answer = http.post(path, json=body | {"keep_alive": 0 if reason == "unload" else "5m"}).json()
            assert (answer["done"], answer["done_reason"], answer["response"]) == (True, reason, "")
            assert http.get("/v1/models/tiny").json()["loaded"] == (reason == "load")


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
