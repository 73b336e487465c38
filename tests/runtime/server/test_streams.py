"""Streams: what comes before the first token, how failures end them, and how they are written."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from outrider.server import Settings, endpoint
from outrider.server.errors import ApiError
from outrider.server.protocol.writing import to_json
from serving import MESSAGES, Live, events_of, serving, wait_until

CHAT: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 2}
PROMPT = {"model": "tiny", "prompt": "Hi", "max_tokens": 2}
BUSY = PROMPT | {"max_tokens": 6000, "ignore_eos": True, "drafter": "none", "stream": True}
# Of each API that streams: a request, what comes before the first token, and what a failure ends with.
STREAMS: list[tuple[str, dict[str, Any], str, str]] = [
    ("/v1/chat/completions", CHAT, "^: waiting\n\n", r'^data: \{"error":\{"message":'),
    ("/v1/completions", PROMPT, "^: waiting\n\n", r'^data: \{"error":\{"message":'),
    ("/completion", PROMPT, "^: waiting\n\n", r'^data: \{"error":\{"message":'),
    ("/v1/responses", {"model": "tiny", "input": "Hi", "max_output_tokens": 2},
     r'^event: response.created\ndata: \{"type":"response.created","sequence_number":0,',
     r'^event: error\ndata: \{"type":"error","sequence_number":0,'),
    ("/v1/messages", CHAT, r'^event: message_start\ndata: [^\n]*"input_tokens":[1-9][\s\S]*event: ping\ndata: ',
     r'^event: error\ndata: \{"type":"error","error":\{"type":"invalid_request_error",'),
    ("/api/chat", {"model": "tiny", "messages": MESSAGES}, r'^\{"model":"tiny",.*"content":""\},"done":false\}\n',
     r'^\{"error":"'),
    ("/api/generate", {"model": "tiny", "prompt": "Hi"}, r'^\{"model":"tiny",.*"response":"","done":false\}\n',
     r'^\{"error":"'),
]  # fmt: skip
ONE = Settings(max_running=1, max_waiting=1)


@pytest.fixture(scope="module")
def one(tiny: Path) -> Iterator[Live]:
    """A place, and one in the queue."""
    with serving({"tiny": tiny}, ONE) as live:
        live.client().completions.create(**PROMPT)
        yield live


@pytest.fixture
def busy(one: Live) -> Iterator[Live]:
    """The same while an answer takes the place."""
    with httpx.stream("POST", f"{one.url}/v1/completions", json=BUSY):
        yield one
    wait_until(lambda: one.is_idle)


@pytest.mark.parametrize(("path", "body", "first", "failure"), STREAMS, ids=[path for path, *_ in STREAMS])
def test_a_stream_says_at_once_that_its_request_was_accepted(
    busy: Live, path: str, body: dict[str, Any], first: str, failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while it waits in the queue. What is found later to be wrong is said as the API says it in a stream."""
    monkeypatch.setattr(endpoint, "PING_SECONDS", 0.01)
    with httpx.stream("POST", busy.url + path, json=body | {"stream": True}, timeout=60) as answer:
        assert answer.status_code == 200
        wait_until(lambda: busy.service.queue.waiting == 1)
        got = ""
        for piece in answer.iter_text():
            got += piece
            if re.search(first, got, re.MULTILINE):
                break
        assert re.search(first, got, re.MULTILINE), got
    wait_until(lambda: not busy.service.queue.waiting)
    monkeypatch.setattr(endpoint, "CHECK_SECONDS", -1.0)  # nothing is known when the headers go out
    with httpx.stream("POST", busy.url + path, json=body | {"regex": "(", "stream": True}, timeout=60) as answer:
        assert answer.status_code == 200
        assert re.search(failure, answer.read().decode(), re.MULTILINE)


@pytest.mark.parametrize(("fields", "status", "code"), [
    ({"prompt": "word " * 20_000}, 400, "context_length_exceeded"),
    ({"regex": "("}, 400, "invalid_value"),
    ({"drafter": "nobody"}, 400, "invalid_value"),
    ({"n": 2}, 400, "invalid_value"),
    ({"model": "tiny:nobody"}, 404, "model_not_found"),
])  # fmt: skip
def test_what_is_wrong_is_refused_before_the_place_is_free(
    busy: Live, fields: dict[str, Any], status: int, code: str
) -> None:
    answer = httpx.post(f"{busy.url}/v1/completions", json=PROMPT | fields | {"stream": True}, timeout=60)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/completion"])
def test_a_prompt_shows_how_far_it_is_read(live: Live, path: str) -> None:
    """As llama-server does, where `return_progress` asks for it."""
    text = f"{path} " + "word " * 300
    asked = CHAT | {"messages": [{"role": "user", "content": text}]} if "chat" in path else PROMPT | {"prompt": text}
    events = events_of(httpx.post(live.url + path, json=asked | {"stream": True, "return_progress": True}, timeout=60))
    progress = [event["prompt_progress"] for event in events if "prompt_progress" in event]
    assert [event for event in events if "prompt_progress" in event] == events[: len(progress)]
    assert len(progress) >= 2
    assert progress[-1]["processed"] == progress[-1]["total"] > 300
    assert [each["processed"] for each in progress] == sorted(each["processed"] for each in progress)
    plain = events_of(httpx.post(live.url + path, json=asked | {"stream": True}, timeout=60))
    assert not any("prompt_progress" in event for event in plain)


def test_bodies_have_no_character_that_ends_a_line() -> None:
    """In Python, JavaScript or Go."""
    text = "".join(map(chr, [*range(0x20), 0x7F, 0x85, 0xE9, 0x2028, 0x2029, 0x1F600]))
    written = to_json({"a": [text]}).decode()
    assert written.splitlines() == [written]
    assert json.loads(written) == {"a": [text]}
    error = bytes(ApiError(400, text).response().body).decode()
    assert error.splitlines() == [error]
