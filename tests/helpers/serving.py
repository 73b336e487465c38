"""Live servers for tests, in a thread and as a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import uvicorn
from starlette.applications import Starlette

import outrider
from outrider.decoding.metrics import Stats
from outrider.decoding.results import Result, TextChunk
from outrider.inputs.reasoning import ReasoningFormat
from outrider.inputs.tools import ToolFormat
from outrider.server import Settings, make_app
from outrider.server.connections import limited
from outrider.server.conversations import Conversations
from outrider.server.dialect import AnswerHead, Dialect, ServedAnswer
from outrider.server.logprobs import TokenTexts
from outrider.server.options import AnswerChoice
from outrider.server.run import listen
from outrider.testing import ToyTokenizer
from toys import wait_until as wait_until

SERVE = [sys.executable, "-c", "from outrider.cli import main; main()", "serve"]
CONFIG = outrider.Config().replace(cache_size=0.02, max_new_tokens=40, keep_records=False)
_IDLE_SECONDS = 20.0  # at most, until idle jobs end on a busy machine
MESSAGES: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why is the sky blue?"}]

# What the tests of calls have models told of, and ask for.
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "Answer with <tool_call></tool_call>.<|im_end|>\n{% endif %}{% for message in messages %}<|im_start|>"
    "{{ message.role }}\n{{ message.content }}{% for call in message.tool_calls %}<tool_call>"
    "{{ call.function.arguments.place }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"open": {"type": "boolean"}, "kind": {"enum": ["sea", "land"]}},
    "required": ["open", "kind"],
    "additionalProperties": False,
}


class Live:
    """A server in a thread, on a port of its own."""

    def __init__(self, app: Starlette) -> None:
        self.app, self.service = app, app.state.service
        self._socket = listen("127.0.0.1", 0)
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        http = limited(self.service.settings)
        options: dict[str, Any] = {"log_level": "warning", "lifespan": "on", "http": http, "ws": "none"}
        self._server = uvicorn.Server(uvicorn.Config(app, timeout_graceful_shutdown=20, **options))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True)

    @classmethod
    def of(cls, bundles: dict[str, Path], settings: Settings | None = None, config: outrider.Config = CONFIG) -> Live:
        return cls(make_app(bundles, settings, config))

    def start(self) -> None:
        self._thread.start()
        wait_until(lambda: self._server.started)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(300)
        assert not self._thread.is_alive()

    def client(self, **options: Any) -> Any:
        """OpenAI's; untyped, as its types know neither our fields nor our models."""
        defaults: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": 300}
        return openai.OpenAI(base_url=f"{self.url}/v1", **(defaults | options))

    def engine(self, name: str = "tiny") -> outrider.Engine:
        engine: outrider.Engine | None = self.service.models.find(name).engine
        assert engine is not None
        return engine

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs or waits, in the server and in the engines, once their idle jobs have no slot open."""
        models, queue = self.service.models, self.service.queue

        def is_busy() -> bool:
            used = any(m.engine and m.engine.cache["main"].num_used_tokens for m in models.all)
            return bool(used or queue.running or queue.waiting)

        end = time.monotonic() + _IDLE_SECONDS
        while is_busy() and time.monotonic() < end:
            time.sleep(0.01)
        return not is_busy()


def post(http: httpx.Client, path: str, **fields: Any) -> Any:
    """What a request that is answered gets, as JSON."""
    answer = http.post(path, json=fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events_of(answer: httpx.Response) -> list[Any]:
    """The events of a stream, as JSON."""
    assert answer.status_code == 200, answer.text
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]


def head_of(template: str = "", conversations: Conversations | None = None) -> AnswerHead:
    """The head of an answer of a model with this chat template. conversations: where it may be stored."""
    stored = Conversations(0) if conversations is None else conversations
    forms = ToolFormat.of_template(template), ReasoningFormat.of_template(template)
    return AnswerHead("resp_1", 0, "m", "f", TokenTexts(ToyTokenizer()), forms[0], stored, forms[1])


def result_of(text: str, reason: Any = "stop") -> Result:
    return Result(text, [], reason, Stats(), None, lossless=True)


def answer_of(
    dialect: Dialect, template: str = "", conversations: Conversations | None = None, /, **fields: Any
) -> ServedAnswer:
    """An answer that has not begun, to a body with these fields. template: of the model."""
    head = head_of(template, conversations)
    wanted = dialect.to_chat(json.dumps({"model": "m"} | fields).encode(), head.conversations)
    return dialect.answer(wanted, head, dialect.choices(wanted))


def choice_of(dialect: Dialect, /, **fields: Any) -> AnswerChoice:
    """The first choice that a body with these fields asks for."""
    return answer_of(dialect, **fields).choices[0].choice


def body_of(dialect: Dialect, answer: ServedAnswer, text: str, reason: str = "stop") -> Any:
    return dialect.whole(answer, [result_of(text, reason)])


def streamed(dialect: Dialect, answer: ServedAnswer, chunks: Iterable[TextChunk]) -> list[Any]:
    """The events of a stream."""
    events = [*dialect.begin(answer)]
    for chunk in chunks:
        events += dialect.events(answer, answer.read(0, chunk))
    return events


def chunks_of(text: str, size: int = 3) -> list[TextChunk]:
    """An answer in pieces of so many characters, and its end."""
    pieces = [TextChunk(text[i : i + size], Stats()) for i in range(0, len(text), size)]
    return [*pieces, TextChunk("", Stats(), result_of(text))]


@contextmanager
def serving(
    bundles: dict[str, Path],
    settings: Settings | None = None,
    config: outrider.Config = CONFIG,
    *,
    calls: bool = False,
) -> Iterator[Live]:
    """calls: whether the models are loaded, and told of calls."""
    live = Live.of(bundles, settings, config)
    live.start()
    try:
        for name in bundles if calls else ():
            live.service.models.find(name).load()
            tokenizer: Any = live.engine(name).tokenizer
            tokenizer.set_chat_template(TEMPLATE)
        yield live
    finally:
        live.stop()


@contextmanager
def served(*arguments: object, **environment: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A server, and what it prints when it is ready."""
    command = [*SERVE, "--port", "0", "--cache-size", "0.02", "--json", *map(str, arguments)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | environment
    )
    assert process.stdout
    try:
        yield process, json.loads(process.stdout.readline() or process.communicate()[1])
    finally:
        process.kill()
        process.communicate()
