"""Clients that send their requests byte by byte, do not read, or hold connections: by a clock that the tests set."""

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from outrider.server import Settings
from outrider.server.connections import Connection, limited

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n"
WHOLE = HEAD + b"{}"
LONG = HEAD.replace(b"/v1/completions", b"/long") + b"{}"
ANSWERED = b"HTTP/1.1 200 OK\r\n"


class Clock(asyncio.SelectorEventLoop):
    """An event loop whose time passes when it is told so."""

    seconds = 0.0

    def time(self) -> float:
        return self.seconds

    def wait(self, seconds: int) -> None:
        for _ in range(seconds):
            self.seconds += 1
            self.settle()

    def settle(self) -> None:
        """Let tasks run until all of them wait."""
        for _ in range(8):
            self.run_until_complete(asyncio.sleep(0))


class Wire:
    """A transport."""

    def __init__(self) -> None:
        self.sent, self.is_closed, self.is_aborted = b"", False, False

    def get_extra_info(self, _: str) -> None:
        return None

    def write(self, data: bytes) -> None:
        self.sent += data

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = self.is_aborted = True

    def pause_reading(self) -> None:
        pass

    resume_reading = pause_reading


class Server:
    """Answers a request once it has its body, and those to /long never."""

    def __init__(self) -> None:
        self.clock, self._state = Clock(), ServerState()
        settings = Settings(max_connections=3)
        options: dict[str, Any] = {"interface": "asgi3", "log_config": None, "timeout_keep_alive": 5}
        self._config = uvicorn.Config(self._answer, http=limited(settings), **options)
        self._config.load()

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        if scope["path"] == "/long":
            await self.clock.create_future()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"{}"})

    def connect(self) -> tuple[Connection, Wire]:
        """A new connection, a second after the one before."""
        made: Any = self._config.http_protocol_class
        made = made(config=self._config, server_state=self._state, app_state={}, _loop=self.clock)
        wire = Wire()
        made.connection_made(wire)
        self.clock.wait(1)
        return made, wire

    def send(self, connection: Connection, data: bytes) -> None:
        connection.data_received(data)
        self.clock.settle()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    asyncio.set_event_loop(server.clock)
    yield server
    for task in asyncio.all_tasks(server.clock):
        task.cancel()
    server.clock.settle()
    asyncio.set_event_loop(None)
    server.clock.close()


CHUNKED = HEAD.replace(b"Content-Length: 2", b"Transfer-Encoding: chunked")


@pytest.mark.parametrize(("sent", "status"), [
    (CHUNKED + b"1\r\n{\r\n1\r\n}\r\n0\r\n\r\n", b"200"),
    (WHOLE.replace(b"POST ", b"POST http://other.example"), b"200"),  # as a proxy is asked
    (HEAD[:-2] + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + WHOLE, b"400"),  # which is a second request?
    (HEAD[:-2] + b"Content-Length: 0\r\n\r\n" + WHOLE, b"400"),
    (HEAD[:-2] + b"X: " + b"a" * 70_000, b"400"),
    (HEAD[:-2] + b"X: a\r\n" * 12_000, b"400"),
    (b"GET /" + b"a" * 70_000, b"400"),
    (b"{}\r\n\r\n", b"400"),
])  # fmt: skip
def test_one_answer_to_a_request_and_none_to_what_may_be_two(server: Server, sent: bytes, status: bytes) -> None:
    connection, wire = server.connect()
    for at in range(0, len(sent), 8192):
        if not wire.is_closed:
            server.send(connection, sent[at : at + 8192])
    assert wire.sent.startswith(b"HTTP/1.1 " + status)
    assert wire.sent.count(b"HTTP/1.1") == 1
    assert wire.is_closed == (status == b"400")


def test_a_body_in_chunks_of_one_byte_takes_little_time(server: Server) -> None:
    """Of processor time, for what a client sends at once at most."""
    connection, wire = server.connect()
    server.send(connection, CHUNKED)
    began = time.process_time()
    connection.data_received(b"1\r\n \r\n" * 43_000)
    assert time.process_time() - began < 0.5
    server.send(connection, b"0\r\n\r\n")
    assert wire.sent.startswith(ANSWERED)


def test_where_all_places_are_taken_the_oldest_without_a_whole_request_goes(server: Server) -> None:
    long, kept = server.connect()
    server.send(long, LONG)
    slow, slow_wire = server.connect()
    server.send(slow, HEAD)  # without its body
    idle, idle_wire = server.connect()
    server.send(idle, WHOLE)
    new, wire = server.connect()
    server.send(new, WHOLE)
    assert (kept.is_closed, slow_wire.is_aborted, idle_wire.is_closed, wire.is_closed) == (False, True, False, False)
    assert ANSWERED in wire.sent


def test_a_connection_beyond_the_places_of_whole_requests_gets_503(server: Server) -> None:
    for _ in range(3):
        connection, _ = server.connect()
        server.send(connection, LONG)
    _, wire = server.connect()
    assert wire.is_closed
    assert wire.sent.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")


def test_of_connections_that_come_at_once_each_takes_the_place_of_another(server: Server) -> None:
    """Those that are hung up on are lost after all have come."""
    wires = [server.connect()[1] for _ in range(9)]
    assert [wire.is_aborted for wire in wires] == [True] * 6 + [False] * 3


def test_who_does_not_read_loses_its_place_to_others(server: Server) -> None:
    unread, wire = server.connect()
    server.send(unread, LONG)
    unread.pause_writing()
    for _ in range(2):
        server.send(server.connect()[0], LONG)
    server.connect()
    assert wire.is_aborted
