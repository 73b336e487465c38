"""Clients that send their requests byte by byte, do not read, or hold connections: by a clock that the tests set."""

import asyncio
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
    """A transport. unread: bytes that the client has not taken."""

    def __init__(self) -> None:
        self.sent, self.is_closed, self.is_aborted, self.unread = b"", False, False, 0

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

    def get_write_buffer_size(self) -> int:
        return self.unread

    def pause_reading(self) -> None:
        pass

    resume_reading = pause_reading


class Server:
    """Answers a request once it has its body; those to /early before, and those to /long never."""

    def __init__(self) -> None:
        self.clock, self._state = Clock(), ServerState()
        settings = Settings(head_seconds=20, send_seconds=60, max_connections=3)
        options: dict[str, Any] = {"interface": "asgi3", "log_config": None, "timeout_keep_alive": 5}
        self._config = uvicorn.Config(self._answer, http=limited(settings), **options)
        self._config.load()

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        while scope["path"] != "/early" and (await receive()).get("more_body"):
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


def test_headers_that_do_not_end_get_408_however_often_a_byte_comes(server: Server) -> None:
    slow, wire = server.connect()
    for byte in HEAD[:3]:
        server.send(slow, bytes([byte]))
        server.clock.wait(6)
    assert not wire.is_closed
    server.clock.wait(1)
    assert wire.is_closed
    assert wire.sent.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
    assert b"\r\nconnection: close\r\n" in wire.sent
    assert b'"message":"The headers did not arrive within 20 s."' in wire.sent


def test_a_connection_without_a_byte_is_closed_without_a_word(server: Server) -> None:
    _, wire = server.connect()
    server.clock.wait(19)
    assert (wire.is_aborted, wire.sent) == (True, b"")


def test_an_answer_may_take_longer_and_the_next_request_has_its_own_time(server: Server) -> None:
    long, wire = server.connect()
    server.send(long, LONG)
    server.clock.wait(300)
    assert not wire.is_closed
    next_one, wire = server.connect()
    for _ in range(3):
        server.clock.wait(4)
        server.send(next_one, WHOLE)
    assert wire.sent.count(ANSWERED) == 3
    server.send(next_one, HEAD[:9])  # which ends the wait between two requests, of 5 s
    server.clock.wait(19)
    assert not wire.is_closed
    server.clock.wait(1)
    assert wire.is_closed
    assert wire.sent.count(b"HTTP/1.1 408") == 1


def test_a_body_that_nobody_reads_does_not_hold_its_connection(server: Server) -> None:
    early, wire = server.connect()
    server.send(early, HEAD.replace(b"/v1/completions", b"/early").replace(b"Length: 2", b"Length: 9"))
    assert ANSWERED in wire.sent
    for _ in range(7):
        server.send(early, b"x")
        server.clock.wait(3)
    assert wire.is_closed


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
    assert b'"code":"overloaded"' in wire.sent


def test_of_connections_that_come_at_once_each_takes_the_place_of_another(server: Server) -> None:
    """Those that are hung up on are lost after all have come."""
    wires = [server.connect()[1] for _ in range(9)]
    assert [wire.is_aborted for wire in wires] == [True] * 6 + [False] * 3


def test_a_short_answer_that_nobody_reads_does_not_hold_its_connection(server: Server) -> None:
    """Nor after the wait for the next request has ended."""
    idle, wire = server.connect()
    wire.unread = 10
    server.send(idle, WHOLE)
    server.clock.wait(59)
    assert (wire.is_closed, wire.is_aborted) == (True, False)
    server.clock.wait(1)
    assert wire.is_aborted


@pytest.mark.parametrize("reads", [False, True])
def test_who_reads_nothing_of_an_answer_is_hung_up_on(server: Server, reads: bool) -> None:
    long, wire = server.connect()
    server.send(long, LONG)
    wire.unread = 100_000
    long.pause_writing()
    for _ in range(10):
        server.clock.wait(20)
        wire.unread -= 1000 * reads
    assert wire.is_aborted != reads
    long.resume_writing()
