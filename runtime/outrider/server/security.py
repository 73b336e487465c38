"""Who may use the server, and what browsers may do with its responses."""

import hmac
import ipaddress
import re

from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.server.addresses import canonical
from outrider.server.errors import ApiError
from outrider.server.settings import Settings

# Of all responses but a page's own: a browser that shows one runs nothing in it.
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
}
# A Host header: a name or an IPv4 address, or an IPv6 address in brackets, and a port.
_HOST = re.compile(r"(?:\[(?P<ipv6>[0-9a-f:.]+)\]|(?P<name>[a-z0-9._-]+))(?::[0-9]{0,5})?", re.IGNORECASE | re.ASCII)
_PREFLIGHT = {
    "Access-Control-Allow-Methods": "GET, POST, DELETE, OPTIONS",
    "Access-Control-Allow-Headers": "*, Authorization, Content-Type",
    "Access-Control-Max-Age": "600",
}
_OPEN = ("/", "/health", "/v1/health", "/ping")  # health checks and the page need no key


class AccessGuard:
    """Lets requests through that have the API key and a Host that is ours.

    A page from elsewhere can have its name resolve to 127.0.0.1 (DNS rebinding), and its scripts then count as ours to
    a browser. Their Host header has that name still. So a name must be one of the settings'; localhost and IP addresses
    cannot be made to resolve to anything else. With an API key all names are allowed, unless some are set.
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app, self._settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request before the app sees it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        scope = {**scope, "path": _read_path(scope)}
        shared = self._shared(dict(scope["headers"]).get(b"origin", b"").decode("latin-1"))

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in {**_HEADERS, **shared}.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            headers = dict(scope["headers"])
            hosts = [value for name, value in scope["headers"] if name == b"host"]
            for host in hosts or [b""]:
                self._check_host(host.decode("latin-1"))
            if shared and scope["method"] == "OPTIONS":  # a browser asks before it sends a page's request
                await Response(status_code=204, headers=_PREFLIGHT)(scope, receive, send_with_headers)
                return
            if scope["path"] not in _OPEN and not scope["path"].startswith("/page/"):
                self._check_key(headers.get(b"authorization", b""), headers.get(b"x-api-key", b""))
        except ApiError as error:
            await error.response(scope["path"])(scope, receive, send_with_headers)
            return
        await self._app(scope, receive, send_with_headers)

    def _shared(self, origin: str) -> dict[str, str]:
        """The headers by which a browser lets a page of this origin read the response; none for other pages."""
        allowed = self._settings.allowed_origins
        if not origin or not ("*" in allowed or origin in allowed):
            return {}
        return {"Access-Control-Allow-Origin": origin, "Vary": "Origin"}

    def _check_key(self, authorization: bytes, x_api_key: bytes) -> None:
        """The key as a bearer token, or as Anthropic's clients send it."""
        key = self._settings.api_key
        if key is None:
            return
        scheme, _, given = authorization.partition(b" ")
        keys = [x_api_key] if x_api_key else []
        keys += [given.strip()] if scheme.lower() == b"bearer" else []
        if not any(hmac.compare_digest(each, key.encode()) for each in keys):
            raise ApiError(
                401,
                "The API key is missing or wrong. Send it as 'Authorization: Bearer KEY'.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _check_host(self, host: str) -> None:
        allowed = self._settings.allowed_hosts
        if "*" in allowed or (self._settings.api_key is not None and not allowed):
            return
        found = _HOST.fullmatch(host)
        if found is not None and found["ipv6"] and _is_address(found["ipv6"], ipaddress.IPv6Address):
            return
        name = (found["name"] or "").removesuffix(".").lower() if found is not None else ""
        names = ("localhost", *(each.removesuffix(".").lower() for each in allowed))
        if name and (name in names or _is_address(name, ipaddress.IPv4Address)):
            return
        raise ApiError(
            403,
            f"The host name '{host[:100]}' is not allowed. Use localhost or its IP address, or start it "
            "with --allowed-host.",
            code="host_not_allowed",
        )


def _read_path(scope: Scope) -> str:
    """The address that a request is for, below the path that another app has mounted this one at."""
    root: str = scope.get("root_path", "")
    path: str = scope["path"]
    return root + canonical(path[len(root) :]) if path.startswith(root) else path


def _is_address(name: str, kind: type[ipaddress.IPv4Address | ipaddress.IPv6Address]) -> bool:
    try:
        kind(name)
    except ValueError:
        return False
    return True
