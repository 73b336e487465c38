"""Responses that are streams: server-sent events, or lines of JSON."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from starlette.types import Send

from outrider.server.protocol.writing import to_json

log = logging.getLogger("outrider.server")

_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}  # proxies pass on each piece as it comes


def event_of(body: Any, name: str | None = None) -> bytes:
    """A server-sent event. name: of the event, in APIs that name theirs."""
    return (b"" if name is None else b"event: %s\n" % name.encode()) + b"data: %s\n\n" % to_json(body)


def comment_of(text: str) -> bytes:
    """A comment in a stream of events, which clients skip."""
    return b": %s\n\n" % text.encode()


def line_of(body: Any) -> bytes:
    """A line of JSON."""
    return to_json(body) + b"\n"


async def send_stream(events: AsyncGenerator[bytes, None], send: Send, *, kind: str, seconds: float) -> None:
    """Send a response's headers at once, and each event as it comes.

    kind: the media type. seconds: for the client to take an event; one that does not gets no more of them.
    """
    headers: Mapping[str, str] = _HEADERS | {"Content-Type": f"{kind}; charset=utf-8"}
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    async with aclosing(events):
        try:
            await send({"type": "http.response.start", "status": 200, "headers": raw})
            async for event in events:
                async with asyncio.timeout(seconds):
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            async with asyncio.timeout(seconds):
                await send({"type": "http.response.body", "body": b""})
        except TimeoutError:
            log.warning("A client does not read its answer, which is cancelled.")
