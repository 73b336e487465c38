"""Serve a bundle from several processes or machines with Ray Serve, each conversation from one of them.

    OUTRIDER_API_KEY=… python samples/ray_serve.py my-bundle --replicas 2

Needs: pip install ".[server]" "ray[serve]". Runs on this machine, or on the cluster at RAY_ADDRESS, where every
machine has the bundle at the same path.

Each replica runs the app of `outrider serve`. In front of them, `Front` reads a request, names its conversation, and
hands it to the replica that comes first for that name by rendezvous hashing: each turn finds the prompt of the last one
in the replica's prefix cache, however many fronts there are, and a replica that ends changes no other's conversations.
A replica that is full passes requests on to the next. When a replica dies, requests that it had not begun to answer are
sent to another; streams that it had begun end with an error event.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

try:
    import ray
    from ray import serve
    from ray.exceptions import ObjectLostError, RayActorError, WorkerCrashedError
    from ray.serve.config import ProxyLocation, RequestRouterConfig
    from ray.serve.exceptions import BackPressureError
    from ray.serve.request_router import RequestRouter
except ImportError as error:
    sys.exit(f'{error}. Run: pip install ".[server]" "ray[serve]"')
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from outrider import Config
from outrider.server import Settings, make_app

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.types import Message

MAX_BODY = 4 << 20  # bytes
MAX_RUNNING = 32  # answers at a time on a replica
MAX_WAITING = 128  # in a front; then 429
TRIES = 4
DIED = RayActorError, WorkerCrashedError, ObjectLostError
SCOPE = "type", "http_version", "method", "scheme", "path", "raw_path", "root_path", "query_string", "headers", "client"


class ByConversation(RequestRouter):  # type: ignore[misc, unused-ignore]
    """Ranks replicas by a hash of the conversation's name and their own (rendezvous hashing)."""

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """Ranks of one replica each: the next is asked when the one before has no room."""
        name = pending_request.args[0] if pending_request else ""
        return [[each] for each in sorted(candidate_replicas, key=lambda each: _hash(name, str(each.replica_id)))]


class Server:
    """A replica: the app of `outrider serve`, with a loaded model."""

    async def __init__(  # type: ignore[misc] # Ray awaits it
        self, model: str, bundle: str, config: Config, settings: Settings
    ) -> None:
        self._replica = serve.get_replica_context().replica_tag
        self._app = make_app({model: bundle}, settings, config)
        self._lifespan = self._app.router.lifespan_context(self._app)
        await self._lifespan.__aenter__()
        await asyncio.to_thread(self._app.state.service.models.all[0].load)

    async def answer(self, _: str, scope: dict[str, Any], body: bytes) -> AsyncIterator[Message]:
        """The app's ASGI messages for a request. The first argument is for `ByConversation`."""
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        unread = [{"type": "http.request", "body": body}]

        async def receive() -> Message:
            return unread.pop() if unread else await asyncio.Future()  # a client that leaves cancels `answer`

        running = asyncio.create_task(self._app(scope, receive, messages.put))
        running.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            while (message := await messages.get()) is not None:
                if message["type"] == "http.response.start":
                    message["headers"] = [*message["headers"], (b"x-replica", self._replica.encode())]
                yield message
            running.result()
        finally:
            running.cancel()

    async def __del__(self) -> None:
        """Ray awaits this when a replica has finished its requests."""
        await self._lifespan.__aexit__(None, None, None)


class Front:
    """Hands requests to replicas, and to another one when a replica dies before it answers."""

    def __init__(self, server: Any) -> None:
        self._answer = server.options(stream=True).answer

    async def __call__(self, request: Request) -> Response:
        """Answer an HTTP request."""
        body = b""
        async for piece in request.stream():
            body += piece
            if len(body) > MAX_BODY:
                return _error(413, f"The body is larger than {MAX_BODY:,} bytes, the limit here.")
        if request.url.path == "/metrics":
            return _error(404, "A replica's metrics are not the server's: see Ray's.")
        scope = {name: request.scope[name] for name in SCOPE if name in request.scope}
        for i in range(TRIES):
            messages = self._answer.remote(conversation_of(body), scope, body)
            try:
                start, first = await anext(messages), await anext(messages)
            except BackPressureError:
                return _error(429, "All replicas are busy. Try again later.", {"Retry-After": "5"})
            except DIED:
                await asyncio.sleep(0.2 * i)
                continue
            response = StreamingResponse(_pieces(first, messages), start["status"])
            response.raw_headers = start["headers"]
            return response
        return _error(503, "Replicas that were to answer have died. Try again later.", {"Retry-After": "30"})


async def _pieces(message: Message, messages: Any) -> AsyncIterator[bytes]:
    """The body of a response that has begun. `messages` are those after `message`."""
    try:
        yield message.get("body", b"")
        async for following in messages:
            yield following.get("body", b"")
    except DIED:
        error = {"message": "The replica died while it answered.", "type": "server_error", "code": "replica_died"}
        yield b"data: " + json.dumps({"error": error}).encode() + b"\n\n"
    finally:
        messages.cancel()


def conversation_of(body: bytes) -> str:
    """What a conversation's requests have in common: `prompt_cache_key`, else how it begins."""
    try:
        fields = json.loads(body)
        if key := fields.get("prompt_cache_key"):
            return str(key)
        messages = fields.get("messages") or []
        end = next((i + 1 for i, message in enumerate(messages) if message.get("role") == "user"), len(messages))
        return json.dumps(messages[:end] or str(fields.get("prompt"))[:256], sort_keys=True)
    except (ValueError, AttributeError, TypeError, RecursionError):
        return ""  # a replica says what is wrong with it


def _hash(*names: str) -> bytes:
    return hashlib.blake2b("\0".join(names).encode(errors="replace")).digest()


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": {"message": message, "type": "server_error", "code": status}}, status, headers)


def build(model: str, bundle: str, config: Config, settings: Settings, *, replicas: int, cpus: float) -> Any:
    """The application, for `serve.run`."""
    server = serve.deployment(
        name="Server",
        num_replicas=replicas,
        ray_actor_options={"num_cpus": cpus},
        max_ongoing_requests=MAX_RUNNING,
        max_queued_requests=MAX_WAITING,
        request_router_config=RequestRouterConfig(request_router_class=ByConversation),
        graceful_shutdown_timeout_s=60,
    )(Server)
    front = serve.deployment(
        name="Front", max_ongoing_requests=MAX_WAITING + replicas * MAX_RUNNING, ray_actor_options={"num_cpus": 0}
    )(Front)
    return front.bind(server.bind(model, bundle, config, settings))


def main() -> None:
    """Serve until SIGINT or SIGTERM."""
    parser = argparse.ArgumentParser(description="Serve a bundle from several processes or machines with Ray Serve.")
    parser.add_argument("bundle")
    parser.add_argument("--name", help="that requests ask for; default: that of the bundle's folder")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--cpus", type=float, default=1, help="of a replica: Ray starts it where they are free")
    parser.add_argument("--cache-size", type=float, help="GB of a replica")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args()
    key = os.environ.get("OUTRIDER_API_KEY")
    if given.host != "127.0.0.1" and not key:
        parser.error(f"--host {given.host} lets other machines in: set OUTRIDER_API_KEY")
    bundle = os.path.abspath(given.bundle)  # noqa: PTH100 - the same on all machines
    name = given.name or os.path.basename(bundle)  # noqa: PTH119
    config = Config().replace(num_threads=max(int(given.cpus), 1))
    if given.cache_size is not None:
        config = config.replace(cache_size=given.cache_size)
    settings = Settings(api_key=key, max_running=MAX_RUNNING, max_waiting=MAX_WAITING)

    ray.init(log_to_driver=False)
    serve.start(proxy_location=ProxyLocation.HeadOnly, http_options={"host": given.host, "port": given.port})
    serve.run(build(name, bundle, config, settings, replicas=given.replicas, cpus=given.cpus), name="outrider")
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):  # after `ray.init`, which sets its own
        signal.signal(number, lambda *_: ended.set())
    print(
        f"Serving {name} at http://{given.host}:{given.port}/v1 with {given.replicas} replicas until Ctrl-C", flush=True
    )
    while not ended.wait(1):
        pass
    serve.delete("outrider")
    ray.shutdown()


if __name__ == "__main__":
    main()
