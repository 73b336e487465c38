"""A page for browsers at /: a chat that shows which tokens were drafted. Its files are in `page_files`.

Scripts and styles come from these files alone, without inline code, and talk to this server only. No script can make
HTML of a text: the page has no Trusted Types.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

if TYPE_CHECKING:
    from os import PathLike, stat_result

    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import Scope

_FOLDER = Path(__file__).with_name("page_files")
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "Cache-Control": "no-cache",  # browsers ask each time, and are told that nothing has changed
}
_TYPES = {  # Python asks the system for them, which may know others, and browsers run no script of another
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


class _Files(StaticFiles):
    """The page's files, with its headers."""

    def file_response(
        self, full_path: str | PathLike[str], stat_result: stat_result, scope: Scope, status_code: int = 200
    ) -> Response:
        response = super().file_response(full_path, stat_result, scope, status_code)
        kind = {} if response.status_code == 304 else {"Content-Type": _TYPES[Path(full_path).suffix]}
        response.headers.update(_HEADERS | kind)
        return response


def page_routes() -> list[BaseRoute]:
    """The page at /, and its files below /page."""
    files = _Files(directory=_FOLDER)
    return [Route("/", partial(_index, files)), Mount("/page", files)]


async def _index(files: _Files, request: Request) -> Response:
    return await files.get_response("index.html", request.scope)
