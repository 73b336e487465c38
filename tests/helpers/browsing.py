"""The server's page in a Chromium that is installed, driven by Playwright."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from playwright.sync_api import Browser, Page, Request, Route

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge")
QUIET = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
# What the policy forbids is said by events too.
WATCH = "addEventListener('securitypolicyviolation', (event) => console.error('policy', event.violatedDirective))"
# Keeps the bodies of responses, which the protocol does not have once a page has read them piece by piece.
COPY = """() => {
    window.received ??= [];
    window.plainFetch ??= fetch;
    window.fetch = async (...given) => {
        const response = await plainFetch(...given);
        if (!response.url.endsWith("/completions")) return response;
        const place = received.push("") - 1;
        response.clone().body.pipeThrough(new TextDecoderStream())
            .pipeTo(new WritableStream({ write: (text) => { received[place] += text; } })).catch(() => {});
        return response;
    };
}"""


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser. Skips the test where there is none."""
    api = pytest.importorskip("playwright.sync_api", reason="drives the browser: pip install playwright")
    path = os.environ.get("OUTRIDER_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip("no Chromium is installed: apt install chromium, or set OUTRIDER_CHROMIUM to its path")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(QUIET))
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(browser: Browser, url: str, expected: Sequence[str] = (), **options: Any) -> Iterator[Page]:
    """The page at a URL, in a session of its own. expected: parts of the only messages that its console may show."""
    said: list[str] = []
    context = browser.new_context(**options)
    try:
        page = context.new_page()
        page.set_default_timeout(30_000)
        page.add_init_script(WATCH)
        page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: said.append(f"uncaught: {error}"))
        page.goto(url)
        page.wait_for_load_state("networkidle")
        yield page
    finally:
        context.close()
    unexpected = [line for line in said if not any(part in line for part in expected)]
    assert not unexpected, unexpected  # said, because pytest does not explain the assertions of helpers


def send(page: Page, text: str) -> None:
    """Send a message, as people do."""
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def ask(page: Page, text: str) -> list[dict[str, Any]]:
    """Send a message and wait for the answer. Returns the events of the response."""
    page.evaluate(COPY)
    send(page, text)
    page.get_by_role("button", name="Retry").wait_for()
    return events_of(page)


def events_of(page: Page, number: int = -1) -> list[dict[str, Any]]:
    """The events of one of the responses since the first `ask`."""
    lines = page.evaluate(f"received.at({number})").split("\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


def asked(request: Request) -> dict[str, Any]:
    """The body of a request."""
    body: dict[str, Any] = json.loads(request.post_data or "")
    return body


def show_menu(page: Page) -> None:
    """Open the settings, and on a phone the pickers, if they are hidden."""
    if not page.locator("#settings").is_visible():
        page.get_by_role("button", name="Settings").click()


def set_options(page: Page, **values: object) -> None:
    """Fill in the settings by their ids."""
    show_menu(page)
    for name, value in values.items():
        page.locator(f"#{name}").fill(str(value))


def answer_with(
    page: Page,
    *pieces: str,
    calls: Sequence[dict[str, Any]] = (),
    error: str | None = None,
    times: int | None = None,
) -> None:
    """Have the next requests answered with these pieces of text, one token each, and calls; perhaps an error then.

    times: so many requests alone.
    """
    events: list[dict[str, Any]] = [{"choices": [{"index": 0, "delta": {"tool_calls": [part]}}]} for part in calls]
    for piece in pieces:
        token = {"id": 1, "text": piece, "source": "accepted", "drafter": "ngram"}
        events.append({"choices": [{"index": 0, "delta": {"content": piece}, "tokens": [token]}]})
    if error is None:
        names = ("predicted_n", "rounds_n", "draft_n", "draft_n_accepted", "predicted_per_second")
        choice = {"index": 0, "delta": {}, "finish_reason": "stop", "seed": None}
        events.append({"choices": [choice], "timings": dict.fromkeys(names, len(pieces))})
    else:
        events.append({"error": {"message": error}})
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"

    def fulfil(route: Route) -> None:
        route.fulfill(status=200, content_type="text/event-stream", body=body)

    page.route("**/v1/chat/completions", fulfil, times=times)
