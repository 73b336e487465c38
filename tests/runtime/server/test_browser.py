"""The page in Chromium: what it sends and shows, and who can use it."""

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

import browsing
from browsing import answer_with, ask, asked, chromium, events_of, opened, send, set_options, show_menu
from outrider.decoding.row_budget import RowBudget
from outrider.server import Settings
from serving import CONFIG, Live, serving, wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

REPEATED = "abc abc abc abc abc abc abc abc"
HOSTILE = "<img src=x onerror=console.error('hit')><script>console.error('hit')</script>"
TEXT, FIGURES = ".answer .text", ".answer .figures"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def endless(tiny: Path) -> Iterator[Live]:
    """A server whose answers end at their limit alone, and that drafts however busy the machine is."""
    with serving({"tiny": tiny}, config=CONFIG.replace(ignore_eos=True, num_assistant_tokens=4)) as live:
        live.client().completions.create(model="tiny", prompt="Hi", max_tokens=1)
        yield live


@pytest.fixture
def page(browser: Browser, endless: Live) -> Iterator[Page]:
    with opened(browser, endless.url) as page:
        yield page


@pytest.fixture
def slow_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A toy's answer is still being written when a browser on a busy machine looks."""
    share = RowBudget.share

    def slowly(*args: Any, **named: Any) -> list[int]:
        time.sleep(0.01)
        return share(*args, **named)

    monkeypatch.setattr(RowBudget, "share", slowly)


@pytest.mark.parametrize(("drafter", "options"), [("auto", {}), ("suffix", {"temperature": 1.0, "seed": 7})])
def test_the_answer_is_the_engines(page: Page, endless: Live, drafter: str, options: dict[str, Any]) -> None:
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": REPEATED}]
    first = endless.engine().generate(turns, drafter=None, max_new_tokens=50, **options).text
    turns += [{"role": "assistant", "content": first}, {"role": "user", "content": "And?"}]
    second = endless.engine().generate(turns, drafter=None, max_new_tokens=50, **options).text
    set_options(page, system="Be brief.", max_tokens=50, **options)
    page.select_option("#drafter", drafter)
    page.get_by_role("switch", name="Show drafts").check()
    ask(page, REPEATED)
    send(page, "And?")
    page.get_by_text("50 tokens").nth(1).wait_for()
    page.get_by_role("button", name="Retry").wait_for()
    assert page.locator(TEXT).all_text_contents() == [first, second]
    assert ("seed 7" in page.locator(FIGURES).first.inner_text()) == bool(options)


def test_drafts_are_shown_as_the_server_says(page: Page) -> None:
    set_options(page, max_tokens=60)
    page.select_option("#drafter", "suffix")
    switch = page.get_by_role("switch", name="Show drafts")
    switch.check()
    events = ask(page, REPEATED)
    sources = [token["source"] for event in events for token in event["choices"][0].get("tokens", [])]
    assert len(sources) == 60
    assert "accepted" in sources

    def shown() -> list[str]:
        return [name.removeprefix("token ") for name in page.locator(f"{TEXT} .token").evaluate_all(
            "(nodes) => nodes.map((node) => node.className)")]  # fmt: skip

    assert set(shown()) == set(sources)
    before = shown()
    line, timings = page.locator(FIGURES).inner_text(), events[-1]["timings"]
    for source in set(sources):
        assert f"{sources.count(source)} {source}" in line
    assert f"{59 / timings['rounds_n']:.2f} a round" in line
    assert f"{timings['predicted_per_second']:.1f} a second" in line
    assert page.get_by_role("region", name="Where tokens come from").is_visible()
    lines = page.locator("#legend .token").evaluate_all(
        "(nodes) => nodes.map((node) => getComputedStyle(node).textDecorationStyle)"
    )
    assert len(set(lines)) == 4  # they differ without colours
    switch.uncheck()
    assert shown() == []
    assert page.get_by_role("region", name="Where tokens come from").count() == 0
    switch.check()
    assert shown() == before


@pytest.mark.usefixtures("slow_rounds")
@pytest.mark.parametrize("by", ["button", "key"])
def test_stop_ends_the_answer_at_the_server(page: Page, endless: Live, by: str) -> None:
    set_options(page, max_tokens=6000)
    send(page, "Go on")
    page.locator(TEXT).filter(has_text=re.compile(r"\S")).wait_for()
    assert endless.service.queue.running
    if by == "button":
        page.get_by_role("button", name="Stop").click()
    else:
        page.keyboard.press("Escape")
    page.get_by_role("button", name="Retry").wait_for()
    wait_until(lambda: endless.is_idle)
    text = page.locator(TEXT).text_content()
    assert text
    assert page.get_by_role("button", name="Send").is_visible()
    assert page.evaluate("document.activeElement.id") == "message"
    assert page.get_by_role("button", name="Compare").count() == 0  # the answer has no figures of its own
    set_options(page, max_tokens=5)
    with page.expect_request("**/v1/chat/completions") as request:
        send(page, "Again")
    turns = asked(request.value)["messages"]
    assert [turn["role"] for turn in turns] == ["user", "assistant", "user"]
    page.get_by_text("5 tokens").wait_for()


@pytest.mark.parametrize("options", [{}, {"temperature": 1}], ids=["greedy", "sampled"])
def test_compare_shows_both_speeds_and_the_same_text(page: Page, options: dict[str, Any]) -> None:
    set_options(page, max_tokens=60, **options)
    page.select_option("#drafter", "suffix")
    ask(page, REPEATED)
    requests: list[dict[str, Any]] = []
    page.on("request", lambda request: requests.append(asked(request)) if request.method == "POST" else None)
    page.get_by_role("button", name="Compare").click()
    region = page.get_by_role("region", name="Comparison")
    region.wait_for()
    assert [(each["drafter"], each["earlier_answers"]) for each in requests] == [("suffix", False), ("none", False)]
    drafted = events_of(page, -2)[-1]["timings"]
    assert "The texts are the same." in region.inner_text()
    rows = [row.inner_text().split("\t") for row in region.get_by_role("row").all()]
    assert rows[0] == ["", "Drafter suffix", "No drafts"]
    assert rows[1][1] == f"{drafted['predicted_per_second']:.1f}"
    assert rows[2][1:] == [f"{59 / drafted['rounds_n']:.2f}", "1.00"]
    assert rows[3][1:] == ["60", "60"]
    assert rows[4][1:] == [f"{drafted['draft_n_accepted']} of {drafted['draft_n']}", "0 of 0"]
    assert "times as fast as plain decoding" in region.inner_text()
    assert page.locator(".answer").count() == 1
    set_options(page, max_tokens=5)
    ask(page, "hello")
    page.get_by_role("button", name="Compare").click()
    page.get_by_role("log").get_by_text(
        "Fewer than 50 tokens say little about speed. The texts are the same."
    ).wait_for()


@pytest.mark.usefixtures("slow_rounds")
def test_a_conversation_survives_a_reload_and_is_deleted(page: Page) -> None:
    set_options(page, max_tokens=20, system="Be brief.")
    page.get_by_role("switch", name="Show drafts").check()
    ask(page, REPEATED)
    shown = page.locator("#log").inner_text()
    set_options(page, max_tokens=6000)
    send(page, "Go on")
    page.locator(TEXT).last.filter(has_text=re.compile(r"\S")).wait_for()
    page.reload()
    page.get_by_role("button", name="Retry").wait_for()
    assert (
        page.locator("#log")
        .inner_text()
        .startswith(shown.removesuffix("Compare with plain decoding").split("Retry")[0])
    )
    assert page.locator(f"{FIGURES} strong").all_inner_texts() == ["Not complete."]
    assert page.locator(f"{TEXT} .token").count() > 0
    set_options(page, max_tokens=3)
    with page.expect_request("**/v1/chat/completions") as request:
        send(page, "And?")
    turns = asked(request.value)["messages"]
    assert [turn["role"] for turn in turns] == ["system", "user", "assistant", "user", "assistant", "user"]
    page.get_by_role("button", name="Compare").wait_for()
    show_menu(page)
    page.once("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete").click()
    page.reload()
    assert page.locator(".answer").count() == 0
    assert REPEATED not in page.evaluate("JSON.stringify(localStorage)")


def attach(page: Page, name: str, content: bytes, kind: str = "text/plain") -> None:
    page.locator("#files").set_input_files({"name": name, "mimeType": kind, "buffer": content})


def test_several_conversations_and_files(page: Page) -> None:
    answer_with(page, "An answer")
    ask(page, "First")
    page.get_by_role("button", name="New chat").click()
    attach(page, "a.txt", b"x `y`\n")
    page.get_by_text("a.txt, 6 bytes").wait_for()
    with page.expect_request("**/v1/chat/completions") as request:
        send(page, "Second")
    assert [turn["content"] for turn in asked(request.value)["messages"]] == ["Second\n\na.txt:\n```\nx `y`\n```"]
    page.get_by_role("button", name="Retry").wait_for()
    show_menu(page)
    page.once("dialog", lambda dialog: dialog.accept("Another title"))
    page.get_by_role("button", name="Rename").click()
    assert page.locator("#chat option").all_text_contents() == ["Another title", "First"]
    page.select_option("#chat", label="First")
    assert page.locator(".question").all_text_contents() == ["First"]
    attach(page, "a", b"a" * 200_001)
    page.get_by_role("alert").filter(has_text="may have 200 kB together").wait_for()


PICTURE = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAoAAAAKCAYAAACNMs+9AAAAFUlEQVR42mP8z8BQz0AEYBxVSF+FABJADveWkH6oAAAAAElFTkSuQmCC"
)  # 10 × 10 pixels, red


def test_images_go_to_models_that_see_them(browser: Browser, endless: Live) -> None:
    models = httpx.get(f"{endless.url}/v1/models").json()
    models["data"][0]["vision"] = True
    with opened(browser, endless.url) as page:
        attach(page, "a.png", PICTURE, "image/png")
        page.get_by_role("alert").filter(has_text="a.png is an image, and this model sees none").wait_for()
        page.route("**/v1/models", lambda route: route.fulfill(json=models))
        page.reload()
        page.get_by_text("Add images or text files").wait_for()
        answer_with(page, "Red")
        attach(page, "a.png", PICTURE, "image/png")
        page.get_by_text("a.png, 78 bytes").wait_for()
        with page.expect_request("**/v1/chat/completions") as request:
            send(page, "What is this?")
        (turn,) = asked(request.value)["messages"]
        assert [part["type"] for part in turn["content"]] == ["image_url", "text"]
        assert turn["content"][0]["image_url"]["url"].startswith("data:image/jpeg;base64,")
        page.get_by_role("button", name="Retry").wait_for()
        page.reload()
        assert page.get_by_role("img", name="a.png").evaluate("(image) => image.naturalWidth") == 10
        attach(page, "b.png", b"no image", "image/png")
        page.get_by_role("alert").filter(has_text="b.png cannot be read as an image").wait_for()


def test_messages_can_be_copied_and_edited(browser: Browser, endless: Live) -> None:
    with opened(browser, endless.url, permissions=["clipboard-read", "clipboard-write"]) as page:
        answer_with(page, "**An", " answer**")
        for text in ("One", "Two", "Three"):
            ask(page, text)
        page.get_by_role("button", name="Copy").nth(1).click()
        page.get_by_role("button", name="Copied").wait_for()
        assert page.evaluate("navigator.clipboard.readText()") == "**An answer**"
        page.get_by_role("button", name="Edit").nth(1).click()
        page.keyboard.press("Escape")
        assert page.locator("#message").input_value() == ""
        page.get_by_role("button", name="Edit").nth(1).click()
        assert page.locator("#message").input_value() == "Two"
        assert page.locator(".edited .question").text_content() == "Two"
        with page.expect_request("**/v1/chat/completions") as request:
            send(page, "2")
        assert [turn["content"] for turn in asked(request.value)["messages"]] == ["One", "**An answer**", "2"]
        page.get_by_role("button", name="Retry").wait_for()
        assert page.locator(".question").all_text_contents() == ["One", "2"]


@pytest.mark.parametrize("drafts", [True, False])
def test_html_of_a_model_stays_text(page: Page, drafts: bool) -> None:
    page.get_by_role("switch", name="Show drafts").set_checked(drafts)
    text = f"{HOSTILE}\n\n- {HOSTILE}\n\n[a](javascript:console.error) [b](data:text/html,x)\n\n```{HOSTILE}\n{HOSTILE}"
    answer_with(page, *text.partition("src"))
    ask(page, HOSTILE)
    assert page.locator("#log :is(img, script, iframe, a)").count() == 0
    assert page.locator(".question").text_content() == HOSTILE
    assert str(page.locator(TEXT).text_content()).count(HOSTILE) == 3


def test_calls_are_shown(page: Page) -> None:
    calls = [
        {"index": 0, "id": "call_1", "type": "function", "function": {"name": "look", "arguments": ""}},
        {"index": 0, "function": {"arguments": '{"place": {"kind'}},
        {"index": 0, "function": {"arguments": '": "sea"}}'}},
        {"index": 1, "function": {"name": HOSTILE, "arguments": f'{{"{HOSTILE}'}},
    ]
    answer_with(page, "Let me see.", calls=calls)
    ask(page, "Where?")
    assert page.locator(TEXT).inner_text() == "Let me see."
    shown = page.get_by_role("region", name="Call of look")
    assert shown.locator("strong").inner_text() == "Calls look"
    assert shown.locator("pre").text_content() == '{\n  "place": {\n    "kind": "sea"\n  }\n}'
    assert page.locator(".calls pre").all_text_contents()[1:] == [f'{{"{HOSTILE}']
    assert page.locator("#log :is(img, script)").count() == 0
    assert 'look({"place": {"kind": "sea"}})' in str(page.locator("#status").text_content())
    answer_with(page, "No call.")
    ask(page, "And?")
    assert page.locator(".calls").all_text_contents()[1] == ""


def test_markdown_becomes_nodes(page: Page) -> None:
    text = (
        "# Title\n\nSome **bold**, *italic*, `a*b*c`, snake_case_name, 2 * 3 * 4, \\*plain\\* and [a *link*]"
        "(https://example.org/a?b=c).\nSecond line\n\n1. one\n2. two\n   - inner `x`\n   - more\n3. three\n\n"
        "> quoted\n> text\n\n---\n\n```python\nif a < b:\n    **c**\n```\n\nEnd"
    )
    answer_with(page, *(text[i : i + 3] for i in range(0, len(text), 3)))
    ask(page, "Show me")
    node = page.locator(TEXT)
    tags = node.evaluate("(node) => [...node.children].map((child) => child.tagName).join(' ')")
    assert tags == "H3 P OL BLOCKQUOTE HR PRE P"
    assert node.locator("strong").all_text_contents() == ["bold"]
    assert node.locator("em").all_text_contents() == ["italic", "link"]
    assert node.locator("p > code, li code").all_text_contents() == ["a*b*c", "x"]
    assert "snake_case_name, 2 * 3 * 4, *plain*" in str(node.text_content())
    link = node.get_by_role("link", name="a link")
    assert link.get_attribute("href") == "https://example.org/a?b=c"
    assert link.get_attribute("rel") == "noopener noreferrer"
    assert node.locator("ol > li").count() == 3
    assert node.locator("ol > li > ul > li").all_text_contents() == ["inner x", "more"]
    assert node.locator("pre").text_content() == "if a < b:\n    **c**"
    assert node.locator("pre").get_by_role("button", name="Copy code").count() == 1


def test_tokens_share_their_pieces_text(page: Page) -> None:
    cases = [
        ("Hello world", ["Hello", " world"], ["Hello", " world"]),
        ("Hello world", ["Hello", "world"], ["Hello", " world"]),  # a tokenizer that drops a space at the start
        ("a😀b", ["a", "\ufffd", "\ufffd", "b"], ["a", "", "😀", "b"]),
        ("é", ["\ufffd", ""], ["", "é"]),
        ("end", ["end", "<|im_end|>"], ["end", ""]),
        ("", ["<|im_end|>"], [""]),
        ("x  y", ["x", " ", " y"], ["x", " ", " y"]),
        ("ab", ["abc"], ["ab"]),
        ("abXYcd", ["ab", "cd"], ["abXY", "cd"]),
        ("XYcd", ["cd"], ["XYcd"]),
    ]
    for text, tokens, expected in cases:
        made = page.evaluate(
            """async ([text, tokens]) => {
                const { textsOf } = await import("/page/tokens.js");
                return textsOf(text, tokens);
            }""",
            [text, tokens],
        )
        assert made == expected
        assert "".join(made) == text


@pytest.fixture
def failing(browser: Browser, endless: Live) -> Iterator[Page]:
    with opened(browser, endless.url, ["status of 400"]) as page:
        yield page


def test_errors_are_one_line(failing: Page) -> None:
    page, alert = failing, failing.get_by_role("alert")
    refused = {"error": {"message": "max_tokens=7 is\nrefused.", "param": "max_tokens"}}
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=400, json=refused))
    send(page, "Hi")
    page.get_by_role("button", name="Retry").wait_for()
    page.unroute("**/v1/chat/completions")
    assert alert.inner_text() == "Longest answer, in tokens: max_tokens=7 is refused."
    assert "\n" not in alert.inner_text()
    assert page.locator("#max_tokens").get_attribute("aria-invalid") == "true"
    assert page.locator(FIGURES).inner_text() == "Not complete."  # and is not waited for
    set_options(page, max_tokens=3)
    answer_with(page, "Half an", error="The device\nfailed.")
    page.get_by_role("button", name="Retry").click()
    page.get_by_text("The device failed.").wait_for()
    assert page.locator(TEXT).text_content() == "Half an"
    page.unroute("**/v1/chat/completions")
    page.get_by_role("button", name="Retry").click()
    page.get_by_text("3 tokens").wait_for()
    assert alert.inner_text() == ""
    assert page.locator("[aria-invalid]").count() == 0


def test_a_key_is_asked_for_and_kept_for_the_session(browser: Browser, tiny: Path) -> None:
    with (
        serving({"tiny": tiny}, Settings(api_key="secret")) as live,
        opened(browser, live.url, ["status of 401"]) as page,
    ):
        field = page.get_by_label("This server wants an API key")
        for key in ("wrong", "secret"):
            page.get_by_role("alert").filter(has_text="The API key is missing or wrong").wait_for()
            page.wait_for_function("document.activeElement.id === 'key'")
            with page.expect_response("**/v1/models"):
                field.fill(key)
                page.keyboard.press("Enter")
            page.wait_for_load_state("networkidle")
        field.wait_for(state="hidden")
        assert page.get_by_role("alert").inner_text() == ""
        page.reload()
        ask(page, "Hi")
        kept = "[sessionStorage.length, localStorage.length, document.cookie, location.search]"
        assert page.evaluate(kept) == [1, 2, "", ""]  # the key; the conversation and the settings


def test_announcements_are_few(page: Page) -> None:
    """A screen reader hears that an answer begins, and the whole answer, and none of its pieces."""
    page.evaluate(
        "window.said = []; new MutationObserver(() => said.push(document.querySelector('#status').textContent))"
        ".observe(document.querySelector('#status'), { childList: true })"
    )
    set_options(page, max_tokens=60)
    ask(page, REPEATED)
    text = json.dumps(page.locator("#status").text_content())
    assert page.evaluate(f"said.join('|') === 'Answering.|' + {text}")
    assert text.startswith('"Answer: ')
    live = page.locator("[aria-live]:not([aria-live=off]), [role=status], [role=alert]")
    assert live.evaluate_all("(nodes) => nodes.map((node) => node.id)") == ["error", "status"]
    assert page.get_by_role("log").get_attribute("aria-live") == "off"


CONTRASTS = Path(browsing.__file__).with_name("contrasts.js").read_text(encoding="utf-8")
NAMED = {
    "button", "textbox", "combobox", "switch", "checkbox", "spinbutton", "link", "region", "log", "article", "form",
    "RootWebArea",
}  # fmt: skip


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_have_contrast_and_everything_a_name(browser: Browser, endless: Live, scheme: Any) -> None:
    with opened(browser, endless.url, color_scheme=scheme, reduced_motion="reduce") as page:
        set_options(page, max_tokens=60)
        page.get_by_role("switch", name="Show drafts").check()
        ask(page, REPEATED)
        page.get_by_role("button", name="Compare").click()
        page.get_by_role("region", name="Comparison").wait_for()
        show_menu(page)
        page.locator("#error").evaluate("(node) => { node.textContent = 'An error.'; }")
        assert page.evaluate(CONTRASTS) == []
        tree = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")["nodes"]
        nodes = [node for node in tree if not node["ignored"] and node["role"]["value"] in NAMED]
        found = [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes]
        assert {role for role, _ in found} >= NAMED - {"checkbox", "link"}
        assert [role for role, name in found if not name.strip()] == []


LONG = "qwen2.5-coder-1.5b-instruct-q4_k_m-int8"


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844)], ids=["desktop", "phone"])
def test_the_conversation_has_the_screen(browser: Browser, endless: Live, width: int, height: int) -> None:
    size: Any = {"width": width, "height": height}
    served = [{"id": LONG, "type": "llm", "drafters": ["draft", "suffix"]}]
    failure = ["status of 404"]
    with opened(browser, "about:blank", failure, viewport=size) as page:
        page.route("**/v1/models", lambda route: route.fulfill(json={"data": served}))
        page.route("**/v1/models/*", lambda route: route.fulfill(json={"loading": None}))
        page.goto(endless.url)
        page.locator("#model option").first.wait_for(state="attached")
        show_menu(page)
        page.get_by_role("switch", name="Show drafts").check()
        assert page.locator("#model").evaluate("(node) => node.clientWidth") > 8 * len(LONG) * 0.8  # the whole name
        assert page.locator("header").evaluate("(node) => node.scrollWidth <= node.clientWidth")
        assert page.locator("#delete").evaluate("(node) => node.getBoundingClientRect().bottom") < 640
        page.get_by_role("button", name="Settings").click()
        answer_with(page, "Two **wor", "ds**, then `code`:\n\n```python\nfor i in ", "range(3):\n    print(i)\n```")
        ask(page, "A question that takes more than one line on a phone, as most of them do")
        page.unroute("**/v1/chat/completions")
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert page.evaluate("document.documentElement.scrollHeight") == height
        share = page.locator("#log").evaluate("(node) => node.clientHeight") / height
        assert share > 0.7  # with the legend
        unknown = {"error": {"message": "There is no model of this name.", "param": "model"}}
        page.route("**/v1/chat/completions", lambda route: route.fulfill(status=404, json=unknown))
        send(page, "And?")
        page.get_by_role("alert").filter(has_text="Model: There is no model").wait_for()
        assert page.locator("#model").get_attribute("aria-invalid") == "true"
