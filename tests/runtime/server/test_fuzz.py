"""Whatever bytes come, in a body or in place of HTTP: an answer, or a refusal that says why, and the server goes on."""

import contextlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bodies import BODIES, OTHERS
from fuzzing import damaged, damaged_json, few_or_many, fuzz
from outrider.server import Settings
from serving import Live, serving, wait_until

pytest.importorskip("llguidance", reason="the extra [structured]")
pytestmark = few_or_many


@pytest.fixture(scope="module")
def told(tiny: Path) -> Iterator[Live]:
    """A server that gives an answer two seconds, of a model that was told of calls."""
    with serving({"tiny": tiny}, Settings(request_seconds=2, body_seconds=0.2), calls=True) as live:
        yield live
        wait_until(lambda: live.is_idle)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(("address", "body"), BODIES + OTHERS)
def test_bodies(told: Live, address: str, body: dict[str, Any], num_examples: int) -> None:
    with httpx.Client(base_url=told.url, timeout=300) as client:

        def send(content: bytes) -> int:
            headers = {"Content-Type": "application/json"}
            answer = client.post(address if address[0] == "/" else f"/v1/{address}", content=content, headers=headers)
            assert answer.status_code < 500 or answer.status_code == 504, answer.text
            if answer.status_code != 200:
                error = answer.json()["error"]  # Ollama's is a text
                assert error if isinstance(error, str) else error["message"]
            return answer.status_code

        whole = json.dumps(body).encode()
        assert any(send(whole) == 200 for _ in range(5))  # a busy machine takes two seconds for some
        fuzz(send, whole, damaged(whole) | damaged_json(body), num_examples, room=128 << 20)


def test_bytes_in_place_of_http(told: Live, num_examples: int) -> None:
    body = b'{"model": "tiny", "prompt": "Hi", "max_tokens": 1}'
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
    )

    def send(content: bytes) -> None:
        connection = socket.create_connection(("127.0.0.1", told.port), timeout=300)
        with connection, contextlib.suppress(ConnectionError):
            connection.sendall(content)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1 << 16):
                pass

    fuzz(send, head + body, damaged(head + body), num_examples, room=64 << 20)
    assert httpx.get(f"{told.url}/health").json() == {"status": "ok"}
