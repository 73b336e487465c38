"""Each list, name, nesting, text and number of a request may be large: others are served while it is read.

What a client chooses is also full of line ends and of what a terminal obeys, none of which reaches the log.
"""

import asyncio
import json
import logging
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import OptionError
from outrider.server import make_app
from outrider.tokens.grammar import Grammars
from serving import CONFIG

pytest.importorskip("llguidance", reason="the extra [structured]")

EVIL = "\n2026-01-01 CRITICAL \x1b[31m\x1b]0;title\x07\u202e"
USER: dict[str, Any] = {"role": "user", "content": "Hi"}
CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
LEVELS = "[" * 90 + "]" * 90

Body = Callable[[int], dict[str, Any]]  # by its size in bytes


def name(i: int) -> str:
    return f"{i * 2654435761 % 2**32:x}q{EVIL if i % 999 == 0 else ''}"


def number(i: int) -> int:
    return i


def empty(_: int) -> list[Any]:
    return []


def objects(_: int) -> dict[str, Any]:
    return {}


def levels(_: int) -> Any:
    return json.loads(LEVELS)


def user(_: int) -> dict[str, Any]:
    return USER


def tool(i: int) -> dict[str, Any]:
    return {"type": "function", "function": {"name": f"q{i}", "description": EVIL, "parameters": {"type": "object"}}}


def named_tool(i: int) -> dict[str, Any]:
    return {"type": "function", "name": f"q{i}", "parameters": {"type": "object"}, "input_schema": {"type": "object"}}


def call(i: int) -> dict[str, Any]:
    return {"id": name(i), "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}


def several(make: Callable[[int], Any], size: int) -> list[Any]:
    return [make(i) for i in range(max(1, size // (len(json.dumps(make(10**6))) + 2)))]


def table(size: int, value: Any = 1) -> dict[str, Any]:
    return {name(i): value for i in range(max(1, size // (len(name(1)) + len(json.dumps(value)) + 6)))}


def form_of(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": EVIL, "schema": {"type": "object", **schema}}}


def bad_schema(size: int) -> dict[str, Any]:
    """Much below one long name, of which nothing is followed."""
    inner = {"type": "object", "properties": table(size // 2, {"not": {"const": 1}})}
    return {"properties": {EVIL + "x" * (size // 2): inner}}


def tagged(i: int) -> dict[str, Any]:
    """One of several schemas that have no value in common."""
    tags = {"oneOf": [{"properties": {"a": {"enum": [j, -1 - j]}}, "required": ["a"]} for j in range(64)]}
    return {"type": "object", "properties": {name(i): tags}}


def filled(field: str, make: Callable[[int], Any], **others: Any) -> Body:
    """A body whose list is large."""
    return lambda size: {field: several(make, size), **others}


def with_schema(make: Body) -> Body:
    return lambda size: {"messages": [USER], "response_format": form_of(make(size))}


def with_function(make: Body) -> Body:
    return lambda size: {
        "messages": [USER],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", **make(size)}}}],
        "tool_choice": "required",
    }


LISTS = {"numbers": number, "lists": empty, "objects": objects, "nested": levels, "texts": name}
SCHEMAS: dict[str, Body] = {
    "properties": lambda n: {"properties": table(n // 2, {}), "required": [*table(n // 2)]},
    "places": bad_schema,
    "oneOf": filled("anyOf", tagged),
    "patterns": lambda n: {"properties": {name(i): {"pattern": f"a{i}"} for i in range(n // 50)}},
    "classes": lambda n: {"properties": {"a": {"pattern": "[" * n}}},
    "references": lambda n: {"anyOf": [{"$ref": f"#/$defs/{i}/" + "a/" * 40} for i in range(n // 130)]},
}
# By path and field.
CASES: dict[tuple[str, str], Body] = {
    **{(CHAT, f"messages of {what}"): filled("messages", make) for what, make in LISTS.items()},
    **{(CHAT, f"tools of {what}"): filled("tools", make, messages=[USER]) for what, make in LISTS.items()},
    **{(TEXT, f"prompt of {what}"): filled("prompt", make) for what, make in LISTS.items()},
    **{(RESPONSES, f"input of {what}"): filled("input", make) for what, make in LISTS.items()},
    **{(CHAT, f"schema: {what}"): with_schema(make) for what, make in SCHEMAS.items()},
    **{(CHAT, f"function: {what}"): with_function(make) for what, make in SCHEMAS.items()},
    (CHAT, "unknown fields"): lambda n: {"messages": [USER], **{f"penalty{i}frequency": 1 for i in range(n // 30)}},
    (CHAT, "some unknown fields"): lambda n: {"messages": [USER], **table(1500), EVIL: "x" * n},
    (CHAT, "tools"): lambda n: {"messages": [USER], "tools": several(tool, n), "tool_choice": {"name": "q1"}},
    (CHAT, "allowed tools"): lambda n: {"messages": [USER], "tools": several(tool, n // 2), "tool_choice": {
        "type": "allowed_tools", "mode": "auto", "tools": several(named_tool, n // 2)}},
    (CHAT, "hosted tools"): lambda n: {"messages": [USER], "tools": several(lambda i: {"type": name(i)}, n)},
    (CHAT, "messages"): filled("messages", user),
    (CHAT, "a message's keys"): lambda n: {"messages": [USER | table(n)]},
    (CHAT, "parts"): lambda n: {"messages": [USER | {"content": several(lambda _: {"type": "text", "text": "a"}, n)}]},
    (CHAT, "a text"): lambda n: {"messages": [USER | {"content": EVIL + "a" * n}]},
    (CHAT, "a role"): lambda n: {"messages": [USER | {"role": EVIL + "a" * n}]},
    (CHAT, "halves of characters"): lambda n: {"messages": [USER | {"content": "\ud800" * (n // 6)}]},
    (CHAT, "calls"): lambda n: {"messages": [{"role": "assistant", "tool_calls": several(call, n)}, USER]},
    (CHAT, "a call's arguments"): lambda n: {"messages": [{"role": "assistant", "tool_calls": [call(0) | {
        "function": {"name": "f", "arguments": json.dumps([0] * (n // 3))}}]}, USER]},
    (CHAT, "images"): lambda n: {"messages": [USER | {"content": several(
        lambda _: {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, n)}]},
    (CHAT, "model"): lambda n: {"messages": [USER], "model": EVIL + "tiny:" * (n // 5)},
    (CHAT, "stop"): filled("stop", name, messages=[USER]),
    (CHAT, "logit_bias"): lambda n: {"messages": [USER], "logit_bias": {str(i): 1 for i in range(n // 11)}},
    (CHAT, "pairs of logit_bias"): lambda n: {"messages": [USER], "logit_bias": [[i, False] for i in range(n // 17)]},
    (CHAT, "banned_token_ids"): filled("banned_token_ids", number, messages=[USER]),
    (CHAT, "guided_choice"): filled("guided_choice", name, messages=[USER]),
    (CHAT, "template's variables"): lambda n: {"messages": [USER], "chat_template_kwargs": table(n)},
    (CHAT, "metadata"): lambda n: {"messages": [USER], "metadata": table(n)},
    (CHAT, "digits"): lambda n: {"messages": [USER], "seed": 10 ** min(n, 4000) - 1, "temperature": "1" * n},
    (CHAT, "two names"): lambda n: {"messages": [USER], "stop": "a" * (n // 2), "stop_sequences": "b" * (n // 2)},
    (TEXT, "a prompt"): lambda n: {"prompt": EVIL * (n // 60)},
    (TEXT, "a grammar"): lambda n: {"prompt": "a", "grammar": "root ::= " + '"a" ' * (n // 6)},
    (TEXT, "a regex"): lambda n: {"prompt": "a", "regex": "[" * n},
    (TEXT, "references"): lambda n: {"prompt": "a", "references": ["a" * (n // 60)] * 60},
    (RESPONSES, "messages"): filled("input", user),
    (RESPONSES, "calls"): lambda n: {"input": [x for i in range(n // 170) for x in (
        {"type": "function_call", "call_id": f"c{i}", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": f"c{i}", "output": "x"})]},
    (RESPONSES, "references"): lambda n: {"input": several(lambda i: {"type": "item_reference", "id": name(i)}, n)},
    (RESPONSES, "tools"): filled("tools", named_tool, input="Hi"),
    (RESPONSES, "include"): filled("include", name, input="Hi"),
    (RESPONSES, "unknown fields"): lambda n: {"input": "Hi", **table(n)},
    (RESPONSES, "schema: places"): lambda n: {
        "input": "Hi", "text": {"format": {"type": "json_schema", "name": EVIL, "schema": bad_schema(n)}}},
    (MESSAGES, "messages"): filled("messages", user),
    (MESSAGES, "blocks"): lambda n: {"messages": [USER | {"content": several(
        lambda i: {"type": f"{name(i)}_tool_result", "content": EVIL}, n)}]},
    (MESSAGES, "calls"): lambda n: {"messages": [USER, {"role": "assistant", "content": several(
        lambda i: {"type": "tool_use", "id": name(i), "name": "f", "input": {}}, n)}]},
    (MESSAGES, "system"): lambda n: {"messages": [USER], "system": several(lambda _: {"type": "text", "text": "a"}, n)},
    (MESSAGES, "tools"): filled("tools", named_tool, messages=[USER]),
    (MESSAGES, "unknown fields"): lambda n: {"messages": [USER], **table(n)},
    ("/v1/messages/count_tokens", "messages"): filled("messages", user),
    ("/api/chat", "images"): lambda n: {"messages": [USER | {"images": several(lambda _: "AAAA", n)}]},
    ("/api/chat", "options"): lambda n: {"messages": [USER], "options": table(n)},
    ("/api/chat", "tools"): filled("tools", tool, messages=[USER]),
    ("/api/chat", "format"): lambda n: {"messages": [USER], "format": bad_schema(n)},
    ("/api/generate", "options"): lambda n: {"prompt": "Hi", "options": table(n)},
    ("/api/generate", "context"): filled("context", number, prompt="Hi"),
    ("/api/embed", "input"): filled("input", name),
    ("/api/show", "model"): lambda n: {"model": EVIL + "a" * n},
    ("/v1/embeddings", "numbers"): filled("input", number),
    ("/v1/embeddings", "lists"): lambda n: {"input": several(lambda _: [1], n)},
    ("/v1/embeddings", "texts"): filled("input", name),
    ("/v1/embeddings", "unknown fields"): lambda n: {"input": "a", **table(n)},
    ("/v1/rerank", "documents"): filled("documents", name, query=EVIL),
    ("/completion", "prompt"): lambda n: {"prompt": several(lambda i: i if i % 2 else "a", n)},
    ("/completion", "samplers"): filled("samplers", name, prompt="a"),
    ("/completion", "response_fields"): filled("response_fields", name, prompt="a"),
    ("/infill", "input_extra"): lambda n: {"input_prefix": "a", "input_suffix": "b", "input_extra": several(
        lambda _: {"filename": "a", "text": "b"}, n)},
    ("/tokenize", "content"): lambda n: {"content": "a " * (n // 2), "with_pieces": True},
    ("/detokenize", "tokens"): lambda n: {"tokens": several(lambda _: 5, n)},
    ("/apply-template", "messages"): filled("messages", user),
}  # fmt: skip
BASE = {"model": "tiny", "max_tokens": 1, "max_output_tokens": 1}


def body_of(fields: dict[str, Any]) -> bytes:
    return json.dumps(BASE | fields).encode()


class App:
    """A server's app, without a socket. Measures what a request takes."""

    def __init__(self, bundle: Path) -> None:
        self._app, self._runner = make_app({"tiny": bundle}, config=CONFIG), asyncio.Runner()
        self.for_threads: list[Any] = []  # what the event loop has given them
        self._run_in_executor = self._runner.get_loop().run_in_executor
        assert self.ask(CHAT, body_of({"messages": [USER]}))[0] == 200

    def close(self) -> None:
        self._runner.run(self._app.state.service.models.close())
        self._runner.close()

    def ask(self, path: str, body: bytes) -> tuple[int, float, float]:
        """The status, and seconds of processor time: of the event loop's thread, and of all threads."""
        loop, began = time.thread_time(), time.process_time()
        status = self._runner.run(self._ask(path, body))
        return status, time.thread_time() - loop, time.process_time() - began

    def run_in_executor(self, *work: Any) -> Any:
        """The event loop's own, which is seen."""
        self.for_threads += work
        return self._run_in_executor(*work)

    async def _ask(self, path: str, body: bytes) -> int:
        given, statuses = [{"type": "http.request", "body": body}], list[int]()
        self.for_threads.clear()

        async def receive() -> Any:
            return given.pop() if given else await asyncio.get_running_loop().create_future()

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
        await self._app(scope, receive, send)
        return statuses[0]


def refuse(*_: Any) -> None:
    raise OptionError("The grammar is read, and not compiled: that has limits of its own.")


@pytest.fixture(scope="module")
def app(tiny: Path) -> Iterator[App]:
    app = App(tiny)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Grammars, "new_state", refuse)
        patch.setattr(app._runner.get_loop(), "run_in_executor", app.run_in_executor)
        yield app
    app.close()


@pytest.mark.parametrize(("size", "seconds_of_loop", "seconds"), [
    (52_000, 0.05, 2),
    *(pytest.param(size, 1.5, 30, marks=pytest.mark.slow) for size in (480_000, 4_000_000)),  # 0.5 s, and traced
], ids=["52 kB", "480 kB", "4 MB"])  # fmt: skip
@pytest.mark.parametrize(("path", "field"), CASES)
def test_others_are_served_while_a_body_is_read(
    app: App, path: str, field: str, size: int, seconds_of_loop: float, seconds: float, caplog: pytest.LogCaptureFixture
) -> None:
    """The fast ones are all just too large to be read in the event loop."""
    body = body_of(CASES[path, field](size))
    if size > 100_000:
        tracemalloc.start()  # takes three times as long
    with caplog.at_level(logging.INFO):
        status, loop, in_all = app.ask(path, body)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert status in (200, 400, 404, 413)
    assert status == 413 or body in app.for_threads
    assert loop < seconds_of_loop
    assert in_all < seconds  # nothing is quadratic
    assert peak < 100 * 10**6
    assert all(message.isprintable() and len(message) < 3000 for message in caplog.messages)
