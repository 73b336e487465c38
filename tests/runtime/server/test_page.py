"""The page's files as a browser receives them; see test_browser.py for what they do."""

import re
from pathlib import Path

import httpx
import pytest

from outrider.server import app
from serving import Live

FOLDER = Path(app.__file__).with_name("page_files")
FILES = sorted(path.name for path in FOLDER.iterdir())
PATHS = ["/", *(f"/page/{name}" for name in FILES)]
POLICY = {
    "default-src 'none'", "script-src 'self'", "style-src 'self'", "connect-src 'self'", "img-src 'self' data:",
    "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'", "require-trusted-types-for 'script'",
    "trusted-types 'none'",
}  # fmt: skip
TYPES = {
    "": "text/html; charset=utf-8", ".html": "text/html; charset=utf-8", ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml",
}  # fmt: skip
UNSAFE = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|\bon\w+=\"|<style|style=\""


@pytest.mark.parametrize("path", PATHS)
def test_files_come_with_their_headers(path: str, live: Live) -> None:
    answer = httpx.get(f"{live.url}{path}")
    assert answer.content == (FOLDER / (path.removeprefix("/page/").strip("/") or "index.html")).read_bytes()
    assert answer.headers["content-type"] == TYPES[Path(path).suffix]
    assert set(answer.headers["content-security-policy"].split("; ")) == POLICY
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["cache-control"] == "no-cache"
    head = httpx.head(f"{live.url}{path}")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(len(answer.content))
    assert head.headers["content-security-policy"] == answer.headers["content-security-policy"]


@pytest.mark.parametrize("path", ["/", "/page/app.js"])
def test_files_that_have_not_changed_are_not_sent_again(path: str, live: Live) -> None:
    first = httpx.get(f"{live.url}{path}")
    again = httpx.get(f"{live.url}{path}", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["content-security-policy"] == first.headers["content-security-policy"]  # caches keep the newer
    changed = httpx.get(f"{live.url}{path}", headers={"If-None-Match": '"other"'})
    assert changed.status_code == 200


@pytest.mark.parametrize(
    "path", ["/page/nothing.js", "/page/", "/page", "/index.html", "/page/..%2fapp.py", "/page/%2e%2e/app.py"]
)
def test_nothing_else_is_a_file(path: str, live: Live) -> None:
    answer = httpx.get(f"{live.url}{path}", follow_redirects=True)
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "unknown_url"


def test_files_are_read_only(live: Live) -> None:
    for path in ("/", "/page/app.js"):
        answer = httpx.post(f"{live.url}{path}", json={})
        assert (answer.status_code, answer.json()["error"]["code"]) == (405, "method_not_allowed")


def test_other_names_of_this_machine_do_not_get_the_page(live: Live) -> None:
    assert httpx.get(live.url, headers={"Host": "elsewhere.example"}).status_code == 403


def test_files_name_only_files_that_are_there() -> None:
    named: set[str] = set()
    for path in FOLDER.iterdir():
        text = path.read_text(encoding="utf-8")
        named.update(re.findall(r'(?:from|import) "\./([\w.]+)"', text))
        named.update(re.findall(r'(?:src|href)="page/([\w.]+)"', text))
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)\w", text), f"{path.name} names another server"
        assert not re.search(UNSAFE, text), path.name
    assert named | {"index.html"} == set(FILES)
