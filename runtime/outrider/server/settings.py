"""How a server behaves: limits, and who may use it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Limits of a server, and who may use it."""

    api_key: str | None = None  # clients must send it as a bearer token; None: no key is needed
    allowed_hosts: tuple[str, ...] = ()  # names in Host headers, besides localhost and IP addresses; "*": all
    allowed_origins: tuple[str, ...] = ()  # of web pages elsewhere (CORS), such as "https://app.example"; "*": all
    strict_models: bool = False  # refuse an unknown name also where one model is served, which otherwise answers
    loose_calls: bool = True  # JSON that calls an offered tool is a call without the format's marker, too
    max_running: int = 32  # answers that are generated at the same time, each of a request's n counted
    max_waiting: int = 128  # answers in the queue; more are refused with status 429
    max_body: int = 4 << 20  # bytes of a request
    max_stored: int = 64 << 20  # characters of conversations for previous_response_id; the least recently used goes
    max_connections: int = 512  # beyond which those without a whole request are closed, with `outrider serve` only
    body_seconds: float = 30.0  # to receive a request's body
    request_seconds: float = 600.0  # from its arrival to the end of its answer, waiting included
    send_seconds: float = 60.0  # for a client to take a piece of its answer
    idle_seconds: float | None = None  # after which a model that nobody uses is unloaded; None: never
