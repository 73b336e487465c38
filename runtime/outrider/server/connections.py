"""Connections of clients: how many there may be, and how large the headers of a request."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from outrider.server.settings import Settings

_MOST_HEAD = 1 << 16  # bytes of a request's first line and headers
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class Connection(HttpToolsProtocol):
    """A client's connection. Where all places are taken, only one whose request has come whole keeps its own.

    Clients that send the bytes of a request one by one, or do not read, could otherwise take all places for good. The
    queue limits how many whole requests there are. llhttp, which reads requests, refuses those that two servers could
    read in two ways (RFC 9112, 6.3), and a body in chunks of one byte costs it a microsecond for each.
    """

    def __init__(self, *arguments: Any, settings: Settings, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._most = settings.max_connections
        self._since = self.loop.time()  # it may have sent a request
        self._is_in_head, self._num_head = False, 0  # bytes of headers that have not ended

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """A client has connected: it may take the place of who has sent no whole request for longest."""
        super().connection_made(transport)
        if len(self.connections) <= self._most:
            return
        others = [each for each in self.connections if isinstance(each, Connection) and each is not self]
        if idle := [each for each in others if not each.is_served]:
            oldest = min(idle, key=lambda each: each._since)
            self.connections.discard(oldest)  # it is lost later: the next client in this turn takes another's place
            oldest.transport.abort()
        else:
            transport.write(_FULL)
            transport.close()

    def data_received(self, data: bytes) -> None:
        """A part of a request has come."""
        super().data_received(data)
        self._num_head = self._num_head + len(data) if self._is_in_head else 0
        if self._num_head > _MOST_HEAD and not self.transport.is_closing():
            self.send_400_response(f"The headers are larger than {_MOST_HEAD:,} bytes.")

    def on_message_begin(self) -> None:
        """The first byte of a request has come."""
        super().on_message_begin()
        self._is_in_head = True

    def on_headers_complete(self) -> None:
        """Its headers have ended."""
        self._is_in_head = False
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        """The next request's time begins."""
        self._since = self.loop.time()
        super().on_response_complete()

    @property
    def is_served(self) -> bool:
        """Whether there is a whole request that was not answered, whose client reads."""
        cycle = self.cycle
        return cycle is not None and not (cycle.response_complete or cycle.more_body or self.flow.write_paused)


def limited(settings: Settings) -> Any:
    """What makes the connections of a server: uvicorn's option `http`."""
    return partial(Connection, settings=settings)
