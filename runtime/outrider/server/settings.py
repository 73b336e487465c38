"""How a server behaves: limits, and who may use it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Limits of a server, and who may use it.

    api_key: clients must send it as a bearer token; None: no key is needed. allowed_hosts: names that requests may have
    in their Host header, besides localhost and IP addresses; "*" allows all. max_running: answers that are generated at
    the same time, each of a request's n counted. max_waiting: answers in the queue, beyond which requests are refused
    with status 429. max_body: bytes of a request. max_stored: characters of conversations that are kept in memory for
    previous_response_id; the one that was used least recently goes first. head_seconds: to receive a request's headers.
    body_seconds: to receive its body. request_seconds: from its arrival to the end of its answer, waiting included.
    send_seconds: for a client to take a piece of its answer. max_connections: beyond which those without a whole
    request are closed; `outrider serve` limits them and headers, an app in another server does not. strict_models:
    refuse an unknown name also where one model is served, which otherwise answers. loose_calls: JSON that calls an
    offered tool is a call also without the format's marker, as small models write it. allowed_origins: of web pages
    elsewhere that may use the server (CORS), such as "https://app.example"; "*": of all. idle_seconds: after which a
    model that nobody uses is unloaded; None: never.
    """

    api_key: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    max_running: int = 32
    max_waiting: int = 128
    max_body: int = 4 << 20
    max_stored: int = 64 << 20
    max_connections: int = 512
    head_seconds: float = 20.0
    body_seconds: float = 30.0
    request_seconds: float = 600.0
    strict_models: bool = False
    loose_calls: bool = True
    allowed_origins: tuple[str, ...] = ()
    send_seconds: float = 60.0
    idle_seconds: float | None = None
