"""Runs an app until a signal ends it."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import uvicorn
from sse_starlette.sse import AppStatus

from outrider.errors import OptionError
from outrider.files import why

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.applications import Starlette


class _Server(uvicorn.Server):
    """Says that it is ready, once it is."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], object]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()


def run(app: Starlette, listening: socket.socket, *, grace: int, access_log: bool, ready: Callable[[], object]) -> None:
    """Serve until SIGINT or SIGTERM. Answers that are under way then have `grace` seconds to end.

    ready: is called once the app answers.
    """
    AppStatus.enable_automatic_graceful_drain = False  # streams are finished, not cut
    level = "info" if access_log else "error"
    config = uvicorn.Config(
        app, access_log=access_log, log_level=level, timeout_graceful_shutdown=grace, server_header=False
    )
    _Server(config, ready).run(sockets=[listening])


def listen(host: str, port: int) -> socket.socket:
    """A socket that clients can connect to. port: 0 for any that is free.

    Its connections send at once what they have. asyncio sees to that for sockets that it makes itself only, and else a
    response waits some 40 ms between its parts for the client's delayed acknowledgement.

    Raises:
        OptionError: when the address is taken, or is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family)
    except OSError as error:
        raise OptionError(
            f"{host}:{port} cannot be listened at: {why(error)}. Choose another --host or --port."
        ) from error
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def url_of(listening: socket.socket) -> str:
    """Where clients on this machine find it."""
    host, port, *_ = listening.getsockname()
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
