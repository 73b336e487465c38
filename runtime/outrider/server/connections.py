"""Connections of clients: how many there may be, and how long one may take to send its request and to read."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from outrider.server.errors import ApiError
from outrider.server.settings import Settings


class Connection(H11Protocol):
    """A client's connection. Only one whose request has come whole keeps its place.

    Clients that send the bytes of a request one by one would otherwise take all places and open files for good. The
    queue limits how many whole requests there are.

    Source: uvicorn, protocols/http/h11_impl.py, which has a limit of time between two requests only.
    """

    def __init__(self, *arguments: Any, settings: Settings, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._settings = settings
        self._since = self.loop.time()  # it may have sent a request
        self._head_timer: asyncio.TimerHandle | None = None
        self._read_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """A client has connected: its time begins, and it may take another's place."""
        super().connection_made(transport)
        self._expect_head()
        self._take_place()

    def data_received(self, data: bytes) -> None:
        """A part of a request has come."""
        super().data_received(data)
        self._expect_head()

    def on_response_complete(self) -> None:
        """The next request's time begins."""
        self._since = self.loop.time()
        super().on_response_complete()
        self._expect_head()
        if self._read_timer is None:
            self._expect_reads()

    def pause_writing(self) -> None:
        """More is left to read than the client takes: its time begins."""
        super().pause_writing()
        self._expect_reads()

    def resume_writing(self) -> None:
        """The client has read."""
        super().resume_writing()
        self._read_timer = _cancelled(self._read_timer)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for any more."""
        super().connection_lost(exc)
        self._head_timer, self._read_timer = _cancelled(self._head_timer), _cancelled(self._read_timer)

    @property
    def _has_head(self) -> bool:
        """Whether there is a request that was not answered."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _has_request(self) -> bool:
        return self._has_head and not self.cycle.more_body

    def _take_place(self) -> None:
        """Where all places are taken, hang up on who has sent no whole request for longest."""
        if len(self.connections) <= self._settings.max_connections:
            return
        others = [each for each in self.connections if isinstance(each, Connection) and each is not self]
        if without := [each for each in others if not each._has_request]:
            oldest = min(without, key=lambda each: each._since)
            self.connections.discard(oldest)  # it is lost later: the next client in this turn takes another's place
            oldest.transport.abort()
        else:
            self._refuse(ApiError(503, "The server has too many connections.", type="server_error", code="overloaded"))

    def _expect_head(self) -> None:
        """Limit the time of a request's headers, which begins when the connection does or the answer before ends."""
        if self._has_head or self.transport.is_closing():
            self._head_timer = _cancelled(self._head_timer)
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self._settings.head_seconds, self._give_up)

    def _give_up(self) -> None:
        if self.transport.is_closing():
            return
        seconds = self._settings.head_seconds
        if self.conn.our_state is h11.IDLE and self.conn.trailing_data[0]:
            self._refuse(ApiError(408, f"The headers did not arrive within {seconds:g} s.", code="timeout"))
        else:
            self.transport.abort()

    def _refuse(self, error: ApiError) -> None:
        response = error.response()
        headers = [*response.raw_headers, (b"connection", b"close")]
        reason = STATUS_PHRASES[error.status]
        for event in (
            h11.Response(status_code=error.status, headers=headers, reason=reason),
            h11.Data(data=bytes(response.body)),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _expect_reads(self, before: int | None = None) -> None:
        """Hang up on who has read nothing for `send_seconds`. before: bytes that were left to read then.

        A connection that was closed stays open until all was read.
        """
        left, self._read_timer = self.transport.get_write_buffer_size(), None
        if before is not None and left >= before:
            self.transport.abort()
        elif left:
            self._read_timer = self.loop.call_later(self._settings.send_seconds, self._expect_reads, left)


def limited(settings: Settings) -> Any:
    """What makes the connections of a server: uvicorn's option `http`."""
    return partial(Connection, settings=settings)


def _cancelled(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    """None, in place of a timer that ends."""
    if timer is not None:
        timer.cancel()
    return None
