"""Runs an app until a signal ends it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from outrider.errors import OptionError
from outrider.server.connections import limited
from outrider.server.models import Models
from outrider.system.files import why

_NOTICE_SECONDS = 5  # seconds from the end of the grace time, in which answers notice that their clients are gone


class _Server(uvicorn.Server):
    """Loads a single model while clients are told so, and says that it is ready, and that it ends.

    A second signal hangs up on clients, as if they had left. So does the end of the grace time, `grace` seconds after
    the first: what uvicorn cancels, it logs as errors. failure: why the model was not loaded.
    """

    failure: BaseException | None = None
    _starting: asyncio.Task[None] | None = None

    def __init__(
        self,
        config: uvicorn.Config,
        models: Models,
        ready: Callable[[], object],
        ending: Callable[[int], object] | None,
        grace: int,
    ) -> None:
        super().__init__(config)
        self._models, self._ready, self._ending, self._grace = models, ready, ending, grace
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        self._starting = asyncio.create_task(self._start())

    async def _start(self) -> None:
        try:
            if len(self._models.all) == 1:
                async with self._models.use(self._models.all[0]):
                    pass
        except Exception as error:
            if not self.should_exit:  # else the load was given up, as the server ends
                self.failure, self.should_exit = error, True
        else:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._models.give_up_loading()
        if self.server_state.tasks and self._ending is not None:
            self._ending(len(self.server_state.tasks))
        timer = asyncio.get_running_loop().call_later(self._grace, self._hang_up)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit and self._loop is not None:
            self._loop.call_soon_threadsafe(self._hang_up)
        else:
            super().handle_exit(sig, frame)

    def _hang_up(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def run(
    app: Starlette,
    listening: Sequence[socket.socket],
    *,
    grace: int,
    access_log: bool,
    ready: Callable[[], object],
    ending: Callable[[int], object] | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM. Answers that are under way then have `grace` seconds to end, or until a second.

    A single model is loaded at once. Until it is, `/health` says what the load is doing, and requests wait.

    app: of `make_app`. ready: is called once requests are answered. ending: is called with the number of these answers,
    if there are any.

    Raises:
        OutriderError: when the single model cannot be loaded.
    """
    level = "info" if access_log else "error"
    config = uvicorn.Config(
        app,
        access_log=access_log,
        log_level=level,
        timeout_graceful_shutdown=grace + _NOTICE_SECONDS,
        server_header=False,
        http=limited(app.state.service.settings),
        ws="none",
    )
    server = _Server(config, app.state.service.models, ready, ending, grace)
    server.run(sockets=list(listening))
    if server.failure is not None:
        raise server.failure


def listen_all(host: str, port: int) -> list[socket.socket]:
    """The sockets for a host: for "localhost" one of IPv4 and one of IPv6, where the machine has it.

    Clients try one of these addresses first; where nobody listens there, some wait for seconds, and others fail.

    Raises:
        OptionError: as `listen`.
    """
    if host != "localhost":
        return [listen(host, port)]
    first = listen("127.0.0.1", port)
    if not _has_ipv6():
        return [first]
    for _ in range(_TRIES):
        try:
            return [first, listen("::1", first.getsockname()[1])]
        except OptionError:
            first.close()
            if port:
                raise
            first = listen("127.0.0.1", 0)  # this port is another program's on IPv6
    return [first]


_TRIES = 8


def _has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


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
        raise OptionError(f"{host}:{port} is not available: {why(error)}. Choose another --host or --port.") from error
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def url_of(listening: socket.socket) -> str:
    """Where clients on this machine find it."""
    host, port, *_ = listening.getsockname()
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
