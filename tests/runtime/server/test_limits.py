"""Limits, keys, hosts, and clients that leave."""

import asyncio
import ipaddress
import json
import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette

import outrider
from outrider.server import Settings
from outrider.server.errors import ApiError
from outrider.server.security import AccessGuard
from serving import CONFIG, MESSAGES, Live, serving, wait_until

EXTRA: dict[str, Any] = {"ignore_eos": True, "drafter": "none"}
ASKED: dict[str, Any] = {"model": "tiny", "prompt": "The quick", "max_tokens": 6000}
LONG = ASKED | EXTRA  # takes seconds
BUSY = LONG | {"stream": True}


@pytest.fixture(scope="module")
def narrow(tiny: Path) -> Iterator[Live]:
    """Two places, and two in the queue."""
    with serving({"tiny": tiny}, Settings(max_running=2, max_waiting=2)) as live:
        live.client().completions.create(model="tiny", prompt="Hi", max_tokens=1)
        yield live


def begin(live: Live, body: dict[str, Any], buffer: int = 1 << 16, path: str = "/v1/completions") -> socket.socket:
    """Send a request and read nothing of its answer."""
    text = json.dumps(body)
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    made.connect(("127.0.0.1", live.port))
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(text)}\r\n"
    made.sendall(f"{head}Content-Type: application/json\r\n\r\n{text}".encode())
    return made


def successes(live: Live) -> list[str]:
    """The metrics that count answers that came to their end."""
    return re.findall("vllm:request_success_total.*", httpx.get(f"{live.url}/metrics").text)


def read(connection: socket.socket) -> bytes:
    """All that comes, until the answer ends."""
    got = b""
    while not got.endswith(b"0\r\n\r\n"):
        got += (piece := connection.recv(4096))
        assert piece, got
    connection.close()
    return got


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_client_that_leaves_cancels_its_answer(live: Live, stream: bool) -> None:
    before, ended = live.engine().generate(MESSAGES).token_ids, successes(live)
    connection = begin(live, LONG | {"stream": stream})
    wait_until(lambda: live.engine().cache["main"].num_used_tokens > 0)
    if stream:
        assert b"200 OK" in connection.recv(100)
    connection.close()
    wait_until(lambda: live.is_idle)
    assert successes(live) == ended
    assert live.engine().generate(MESSAGES).token_ids == before
    text = httpx.get(f"{live.url}/metrics").text
    assert 'vllm:num_requests_running{model_name="tiny"} 0.0' in text


def test_a_client_that_leaves_the_queue_gives_its_place_to_the_next(narrow: Live) -> None:
    running = [begin(narrow, BUSY) for _ in range(2)]
    wait_until(lambda: narrow.service.queue.running == 2)
    waiting = [begin(narrow, BUSY | {"max_tokens": 2}) for _ in range(2)]
    wait_until(lambda: narrow.service.queue.waiting == 2)
    waiting[0].close()
    wait_until(lambda: narrow.service.queue.waiting == 1)
    running[0].close()
    assert b"[DONE]" in read(waiting[1])
    running[1].close()
    wait_until(lambda: narrow.is_idle)


def test_a_full_queue_refuses_with_the_time_to_come_back(narrow: Live) -> None:
    connections = [begin(narrow, BUSY) for _ in range(2)]
    wait_until(lambda: narrow.service.queue.running == 2)
    connections += [begin(narrow, BUSY | {"max_tokens": 2}) for _ in range(2)]
    wait_until(lambda: narrow.service.queue.waiting == 2)
    assert 'vllm:num_requests_waiting{model_name="tiny"} 2.0' in httpx.get(f"{narrow.url}/metrics").text
    with pytest.raises(openai.RateLimitError) as refused:
        narrow.client().completions.create(model="tiny", prompt="Hi", max_tokens=1)
    assert refused.value.code == "queue_full"
    assert 1 <= int(refused.value.response.headers["retry-after"]) <= 60
    for connection in connections:
        connection.close()
    wait_until(lambda: narrow.is_idle)
    assert narrow.client().completions.create(model="tiny", prompt="Hi", max_tokens=1).choices


def test_a_request_needs_a_place_for_each_of_its_answers(narrow: Live) -> None:
    connection = begin(narrow, BUSY | {"n": 2, "max_tokens": 3000})
    wait_until(lambda: narrow.service.queue.running == 2)
    later = begin(narrow, BUSY | {"max_tokens": 2})
    wait_until(lambda: narrow.service.queue.waiting == 1)
    connection.close()
    later.close()
    wait_until(lambda: narrow.is_idle)
    with pytest.raises(openai.BadRequestError, match="more than this server generates at a time, 2"):
        narrow.client().completions.create(model="tiny", prompt="Hi", n=3)


def test_a_body_may_not_be_too_large(tiny: Path) -> None:
    with serving({"tiny": tiny}, Settings(max_body=1000, body_seconds=0.3)) as live:
        url = f"{live.url}/v1/chat/completions"
        body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "x" * 1000}]}).encode()
        headers = {"Content-Type": "application/json"}
        declared = httpx.post(url, content=body, headers=headers)
        chunked = httpx.post(url, content=iter([body[:600], body[600:]]), headers=headers)
        for refused in (declared, chunked):
            assert refused.status_code == 413
            assert refused.json()["error"]["code"] == "too_large"
        connection = socket.create_connection(("127.0.0.1", live.port))
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n"
        connection.sendall(head + b"Content-Type: application/json\r\n\r\n{")
        assert b"408 Request Timeout" in connection.recv(4096)
        connection.close()


def test_bodies_that_are_not_json_are_refused(live: Live) -> None:
    url = f"{live.url}/v1/completions"
    for headers, code in (  # of a page, which may send such types without asking
        ({"Content-Type": "text/plain", "Origin": "https://evil.example"}, "not_json"),
        ({"Content-Type": "text/plain", "Sec-Fetch-Site": "cross-site"}, "not_json"),
        ({"Referer": "https://evil.example/"}, "not_json"), ({"Content-Encoding": "gzip"}, "compressed"),
    ):  # fmt: skip
        plain = httpx.post(url, content=b'{"prompt": "a", "max_tokens": 1}', headers=headers)
        assert (plain.status_code, plain.json()["error"]["code"]) == (415, code)
    for kind in ({"Content-Type": "application/x-www-form-urlencoded"}, {"Content-Type": "text/plain"}, {}):  # curl -d
        assert httpx.post(url, content=b'{"prompt": "a", "max_tokens": 1}', headers=kind).status_code == 200
    wrong = (b"", b"{", b"[]", b"\xff", b"[" * 100_000)
    for body in (*wrong, b'{"model": "tiny", "prompt": "\xff"}', b'{"\xff": 1}'):
        refused = httpx.post(url, content=body, headers={"Content-Type": "application/json"})
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] in ("invalid_json", "invalid_type")
    # Half of a surrogate pair, as texts have that were cut within a character.
    half = b'{"model": "tiny", "prompt": "a\\ud800", "max_tokens": 1, "echo": true}'
    read = httpx.post(url, content=half, headers={"Content-Type": "application/json"})
    assert read.json()["choices"][0]["text"].startswith("a\ufffd")


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_answers_have_a_time_limit(tiny: Path, stream: bool) -> None:
    with serving({"tiny": tiny}, Settings(request_seconds=0.5)) as live:
        live.service.models.find("tiny").load()
        with pytest.raises(openai.APIError, match="not complete after 0.5 s") as late:
            for _ in live.client().completions.create(**ASKED, extra_body=EXTRA, stream=stream):
                pass
        assert stream or late.value.status_code == 504  # type: ignore[attr-defined]
        wait_until(lambda: live.is_idle)


OLLAMA = {"model": "tiny", "prompt": "Hi", "logprobs": True, "top_logprobs": 20}
UNREAD: dict[str, dict[str, Any]] = {
    "/v1/completions": BUSY | {"n": 8, "logprobs": 20, "temperature": 1},
    "/api/generate": OLLAMA | {"options": {"num_predict": 6000, "temperature": 1} | EXTRA},
}


@pytest.mark.slow
@pytest.mark.parametrize("path", UNREAD)
def test_a_reader_that_stops_reading_is_given_up(tiny: Path, path: str) -> None:
    with serving({"tiny": tiny}, Settings(send_seconds=0.3)) as live:
        live.service.models.find("tiny").load()
        connection = begin(live, UNREAD[path], buffer=2048, path=path)
        wait_until(lambda: live.service.queue.running > 0)
        wait_until(lambda: live.is_idle)
        connection.close()


def test_an_api_key_is_needed_where_there_is_one(tiny: Path) -> None:
    with serving({"tiny": tiny}, Settings(api_key="Schlüssel")) as live:
        for path in ("/v1/models", "/metrics", "/openapi.json"):
            refused = httpx.get(f"{live.url}{path}")
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
            assert refused.headers["www-authenticate"] == "Bearer"
            given = {"Authorization": "Bearer Schlüssel".encode()}
            assert httpx.get(f"{live.url}{path}", headers=given).status_code == 200  # type: ignore[arg-type]
        assert httpx.get(f"{live.url}/health").json() == {"status": "ok"}
        for wrong in ("Schlüsse", "Schlüssel2", "x"):
            headers = {"Authorization": f"Bearer {wrong}".encode()}
            assert httpx.get(f"{live.url}/v1/models", headers=headers).status_code == 401  # type: ignore[arg-type]
        with pytest.raises(openai.AuthenticationError):
            live.client(api_key="Schluessel").models.list()
        assert not live.service.models.find("tiny").engine


@pytest.mark.fast_cases(12)
@pytest.mark.parametrize(("host", "status"), [
    ("localhost", 200),
    ("LOCALHOST:8000", 200),
    ("127.0.0.1:1", 200),
    ("[::1]:8000", 200),
    ("192.168.1.7:8000", 200),
    ("evil.example", 403),
    ("127.0.0.1.evil.example", 403),
    ("localhost.", 200),  # the same name, to browsers too
    ("127.0.0.1.", 200),
    ("[0:0::1]", 200),
    ("localhost.evil.example:8000", 403),
    ("", 403),
    *((host, 403) for host in ("[::1].evil.example", "[::1]evil.example", "[::1]:80:80", "[::1]:80.evil.example",
     "[::1", "::1", "[]", "[", "[127.0.0.1]", "[localhost]", "[::1%evil.example]", "x[::1]", "localhost:80:80",
     "localhost:x", "localhost..", ".localhost", "local host", "localhost evil.example", "localhost,evil.example",
     "localhost@evil.example", "evil.example@localhost", "localhost:80@evil.example", "localhost/evil.example",
     "localhost#evil.example", "127.0.0.1:80.evil.example", "127.1", "0x7f000001", "2130706433", ":80", ".",
     "localhost:123456")),
])  # fmt: skip
def test_a_name_that_is_not_ours_is_refused(live: Live, host: str, status: int) -> None:
    answer = httpx.get(f"{live.url}/v1/models", headers={"Host": host})
    assert answer.status_code == status
    assert status == 200 or answer.json()["error"]["code"] == "host_not_allowed"


PARTS = ["localhost", "LOCALHOST", "evil.example", "127.0.0.1", "[::1]", "[", "]", "::", *":.@/, %", "80", "f"]


@given(parts=st.lists(st.sampled_from(PARTS), max_size=4))
@settings(max_examples=150)
def test_what_is_let_in_is_an_address_or_localhost(parts: list[str]) -> None:
    host = "".join(parts)
    try:
        AccessGuard(Starlette(), Settings())._check_host(host)
    except ApiError:
        return
    url = httpx.URL(f"http://{host}/")  # as a browser takes it apart
    assert not url.userinfo
    assert url.host.rstrip(".") == "localhost" or ipaddress.ip_address(url.host.rstrip("."))


@pytest.mark.parametrize("hosts", [(b"localhost", b"evil.example"), (b"evil.example", b"localhost"), ()])
def test_every_host_of_a_request_is_looked_at(hosts: tuple[bytes, ...]) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "path": "/v1/models", "headers": [(b"host", host) for host in hosts]}
    asyncio.run(AccessGuard(Starlette(), Settings())(scope, send, send))  # type: ignore[arg-type]
    assert sent[0]["status"] == 403


def test_names_can_be_allowed(tiny: Path) -> None:
    with serving({"tiny": tiny}, Settings(allowed_hosts=("Box.lan",))) as live:
        assert httpx.get(f"{live.url}/health", headers={"Host": "box.lan:80"}).status_code == 200
        assert httpx.get(f"{live.url}/health", headers={"Host": "other.lan"}).status_code == 403
    with serving({"tiny": tiny}, Settings(api_key="k")) as live:  # which such a page does not have
        assert httpx.get(f"{live.url}/health", headers={"Host": "other.lan"}).status_code == 200


def test_browsers_may_neither_read_nor_run_responses(live: Live) -> None:
    answer = httpx.get(f"{live.url}/v1/models", headers={"Origin": "https://evil.example"})
    assert "access-control-allow-origin" not in answer.headers
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    asked = httpx.options(f"{live.url}/v1/chat/completions", headers={"Origin": "https://evil.example"})
    assert asked.status_code == 405
    assert "access-control-allow-origin" not in asked.headers


def test_other_addresses_fail_as_the_api_does(live: Live) -> None:
    missing = httpx.post(f"{live.url}/v1/chat/completion")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "unknown_url")
    assert missing.json()["error"]["message"].endswith("Did you mean /v1/chat/completions?")
    wrong = httpx.get(f"{live.url}/v1/completions")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"
    assert wrong.json()["error"]["message"].endswith("This address takes POST.")


@pytest.mark.slow
def test_models_are_loaded_when_asked_for_and_unloaded_when_idle(tiny: Path, engine: outrider.Engine) -> None:
    with serving({"one": tiny, "two": tiny}, Settings(idle_seconds=0.2)) as live:
        assert [model.engine for model in live.service.models.all] == [None, None]
        with ThreadPoolExecutor(4) as pool:
            ask = live.client().chat.completions.create
            made = [pool.submit(ask, model="two", messages=MESSAGES, max_tokens=20) for _ in range(4)]
        texts = {each.result().choices[0].message.content for each in made}
        assert texts == {engine.generate(MESSAGES, max_new_tokens=20).text}
        assert [bool(model.loaded) for model in live.client().models.list()] in ([False, True], [False, False])
        wait_until(lambda: not live.service.models.find("two").engine)
        assert ask(model="two", messages=MESSAGES, max_tokens=20).choices[0].message.content in texts


def test_a_model_that_cannot_be_loaded_says_why(tiny: Path) -> None:
    with serving({"tiny": tiny}, config=CONFIG.replace(cache_size=1e-7)) as live:
        for _ in range(2):
            with pytest.raises(openai.BadRequestError, match="cache_size"):
                live.client().completions.create(model="tiny", prompt="Hi")
        assert live.is_idle
