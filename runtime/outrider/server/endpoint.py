"""Requests for text, from their arrival to the end of their answer."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, TypeAlias, TypeVar, cast

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from outrider.decoding.answer import Answer
from outrider.decoding.metrics import Stats
from outrider.decoding.results import Result, TextChunk
from outrider.engine.engine import Engine
from outrider.inputs.vision import has_images
from outrider.server.bodies import Bodies, Gone, unless_gone
from outrider.server.choices import emptied, merge, scored, with_infill
from outrider.server.conversations import Conversations
from outrider.server.dialect import AnswerHead, Dialect, ServedAnswer, Wanted
from outrider.server.errors import as_api_error, out_of_time
from outrider.server.limits import Queue
from outrider.server.metrics import Meter, Metrics
from outrider.server.models import Models
from outrider.server.options import AnswerChoice, with_adapter
from outrider.server.protocol.reading import read_object
from outrider.server.protocol.requests import LoadRequest
from outrider.server.protocol.writing import to_json
from outrider.server.settings import Settings
from outrider.server.streaming import comment_of, event_of, line_of, send_stream
from outrider.server.usage import progress_of

log = logging.getLogger("outrider.server")

CHECK_SECONDS = 5.0  # until a stream's headers go out, whether its request was found to be right or is still checked
PING_SECONDS = 10.0  # of silence, after which a stream has a sign of life

Done = TypeVar("Done")
Step: TypeAlias = "AnswerHead | tuple[int, TextChunk]"
END: Final = "end"
News: TypeAlias = "Step | Exception | str"


@dataclass(frozen=True, slots=True)
class Service:
    """What all requests of one server share."""

    settings: Settings
    models: Models
    queue: Queue
    metrics: Metrics
    conversations: Conversations
    bodies: Bodies


async def read_json(service: Service, request: Request, work: Callable[[dict[str, Any]], Done]) -> Done:
    """What `work` makes of the JSON object that a request's body is, perhaps in a thread. Raises ApiError."""
    return await service.bodies.read(request.scope, request.receive, lambda body: work(read_object(body)))


class Endpoint:
    """An address that answers prompts: an ASGI app. A client that leaves ends its answer at once."""

    def __init__(self, service: Service, dialect: Dialect) -> None:
        self._service, self._dialect = service, dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the request, generate, and send the answer."""
        began = time.monotonic()
        try:
            wanted, choices = await self._service.bodies.read(scope, receive, self._read)
            if isinstance(wanted.request, LoadRequest):
                response = as_json(await unless_gone(self._load(wanted.request), receive))
                await response(scope, receive, send)
                return
            job = _Job(self._service, self._dialect, wanted, choices, began)
            await unless_gone(job.run(scope, receive, send), receive)
        except Gone:
            log.info("A client has disconnected.")

    def _read(self, body: bytes) -> tuple[Wanted, list[AnswerChoice]]:
        """What a body asks for, and its answers, in any thread."""
        wanted = self._dialect.to_chat(body, self._service.conversations)
        return wanted, self._dialect.choices(wanted)

    async def _load(self, request: LoadRequest) -> Any:
        """Load a model, or unload it. Returns what says so."""
        models = self._service.models
        model = models.find(request.model)
        if request.unload:
            await models.unload(model)
        else:
            async with models.use(model):
                pass
        return self._dialect.loaded(request, model.name) if self._dialect.loaded is not None else None


class _Job:
    """One request: its places in the queue, its engine, its answer."""

    def __init__(
        self, service: Service, dialect: Dialect, wanted: Wanted, choices: list[AnswerChoice], began: float
    ) -> None:
        self._service, self._dialect, self._wanted, self._began = service, dialect, wanted, began
        self._request: Any = wanted.request
        self._choices = choices
        self._model, adapter = service.models.find_adapted(self._request.model)
        self._name = self._request.model if adapter else self._model.name
        if adapter is not None:
            self._choices = [with_adapter(choice, adapter) for choice in self._choices]
        self._logged = 0.0  # time.monotonic of the last line about its prompt
        self._deadline = asyncio.get_running_loop().time() + service.settings.request_seconds

    async def run(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Wait for a place, generate, and send the response.

        Raises:
            ApiError, OutriderError: before anything was sent.
        """
        if not self._request.stream:
            response = as_json(await self._whole())
            await response(scope, receive, send)
            return
        news: asyncio.Queue[News] = asyncio.Queue(1)
        work = asyncio.create_task(self._work(news))
        try:
            first = await _next(news, asyncio.get_running_loop().time() + CHECK_SECONDS)
            if isinstance(first, BaseException):
                raise first
            kind = "application/x-ndjson" if self._dialect.lines else "text/event-stream"
            events = self._events(first, news)
            await send_stream(events, send, kind=kind, seconds=self._service.settings.send_seconds)
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def _whole(self) -> Any:
        """The body of a response that is not streamed."""
        dialect, found = self._dialect, dict[int, Result]()
        try:
            async with asyncio.timeout_at(self._deadline), aclosing(self._steps()) as steps:
                answer = dialect.answer(self._wanted, cast("AnswerHead", await anext(steps)), self._choices)
                async for step in steps:
                    if isinstance(step, tuple) and step[1].result:
                        found[step[0]] = step[1].result
        except TimeoutError as error:
            raise out_of_time(self._service.settings.request_seconds) from error
        return dialect.whole(answer, [found[number] for number in range(len(self._choices))])

    async def _work(self, news: asyncio.Queue[News]) -> None:
        """Put what comes into a queue, and at its end why it ended: an error, or END."""
        end: News = END
        try:
            async with asyncio.timeout_at(self._deadline), aclosing(self._steps()) as steps:
                async for step in steps:
                    await news.put(step)
        except TimeoutError:
            end = out_of_time(self._service.settings.request_seconds)
        except Exception as error:
            end = error
        await news.put(end)

    async def _events(self, first: News | None, news: asyncio.Queue[News]) -> AsyncGenerator[bytes, None]:
        """The events of a stream, with signs of life. A failure is its last event. first: None: it is still checked."""
        clock = asyncio.get_running_loop().time
        dialect, answer = self._dialect, cast("ServedAnswer", None)  # until the head comes
        reading: dict[int, float] = {}  # by choice when the reading of its prompt began
        state, num_sent, sent = "waiting", 0, clock()
        step: News | None = first
        while True:
            bodies: Iterable[Any] = ()
            if isinstance(step, AnswerHead):
                answer = dialect.answer(self._wanted, step, self._choices)
                bodies = dialect.begin(answer)
            elif isinstance(step, Exception):
                yield self._written(dialect.failed(as_api_error(step), num_sent))
                return
            elif isinstance(step, tuple):
                number, chunk = step
                if chunk.is_progress:
                    state = chunk.stats.progress
                    bodies = self._progress(answer, step, clock() - reading.setdefault(number, clock()))
                else:
                    bodies = dialect.events(answer, answer.read(number, chunk))
                    if (began := reading.pop(number, None)) is not None:
                        bodies = chain(self._progress(answer, step, clock() - began), bodies)
            elif step is END:
                if dialect.last:
                    yield b"data: %s\n\n" % dialect.last.encode()
                return
            for body in bodies:
                num_sent += 1
                yield self._written(body)
                sent = clock()
            if step is None or clock() - sent >= PING_SECONDS:
                ping = dialect.ping(self._name)
                yield comment_of(state) if ping is None else self._written(ping)
                sent = clock()
            step = await _next(news, sent + PING_SECONDS)

    def _progress(self, answer: ServedAnswer, step: tuple[int, TextChunk], seconds: float) -> Iterable[Any]:
        """The event for a piece of a prompt that was read, if `return_progress` asks for it."""
        if not self._request.return_progress or self._dialect.progress is None:
            return ()
        number, chunk = step
        return [self._dialect.progress(answer, number, progress_of(chunk.stats, seconds))]

    def _written(self, body: Any) -> bytes:
        """An event's bytes."""
        if self._dialect.lines:
            return line_of(body)
        return event_of(body, body["type"] if self._dialect.named else None)

    async def _steps(self) -> AsyncGenerator[Step, None]:
        """The head, once nothing but a failure can refuse the request, then the pieces of all choices as they come.

        If the main model's device fails, or its engine is closed, while the request waits, another engine begins anew.
        """
        service, count, is_right = self._service, len(self._choices), False
        waiting = service.metrics.waiting.labels(self._model.name)
        with service.queue.entry(count) as entry, ExitStack() as in_queue:
            waiting.inc(count)
            in_queue.callback(waiting.dec, count)
            while True:
                async with service.models.use(self._model) as engine:
                    answers = None if self._needs_place else await self._prepare(engine)
                    if answers and not is_right:
                        is_right = True
                        yield self._head(engine, answers)
                    if entry.since is None:
                        await entry.admitted.wait()
                    if not engine.is_working:
                        continue
                    in_queue.close()
                    service.metrics.queued.labels(self._model.name).observe(time.monotonic() - self._began)
                    answers = answers or await self._prepare(engine)
                    if not is_right:
                        yield self._head(engine, answers)
                    async with aclosing(self._pieces(engine, answers)) as pieces:
                        async for piece in pieces:
                            yield piece
                    return

    @property
    def _needs_place(self) -> bool:
        """Whether a model has to read images, or to score the prompt, before the answer is prepared."""
        return any(
            choice.echoed is not None or (isinstance(choice.prompt, list) and has_images(choice.prompt))
            for choice in self._choices
        )

    async def _prepare(self, engine: Engine) -> list[Answer]:
        """The answers, checked. Those that are not streamed come whole.

        Pieces that nobody waits for would wake this thread while the main model needs all cores.
        """
        whole = not self._request.stream and not any(choice.limit for choice in self._choices)
        choices = [with_infill(choice, engine) for choice in self._choices]
        self._choices = await scored(self._choices, engine)
        if len({id(choice.prompt) for choice in choices}) == 1:  # several answers: its images are read once
            prompt = await engine.aread_images(choices[0].prompt, **choices[0].options)
            choices = [dataclasses.replace(choice, prompt=prompt) for choice in choices]
        how: dict[str, Any] = {"at_once": whole, "prompt_progress": True}
        prepared = (engine.aprepare(each.prompt, cancel=each.limit, **how, **each.options) for each in choices)
        return await asyncio.gather(*prepared)

    async def _pieces(self, engine: Engine, answers: Sequence[Answer]) -> AsyncGenerator[tuple[int, TextChunk], None]:
        """The pieces of all choices as they come, with the choice's number."""
        meters = [Meter(self._service.metrics, self._model.name, self._began) for _ in answers]
        try:
            async with aclosing(merge([engine.arun(answer) for answer in answers])) as pieces:
                async for number, chunk in pieces:
                    meters[number].read(chunk)
                    choice = self._choices[number]
                    if chunk.is_progress:
                        self._log_progress(chunk.stats)
                    elif choice.limit is not None:
                        choice.limit.read(chunk.text)
                    yield number, emptied(chunk) if choice.is_empty else chunk
        finally:
            for meter in meters:
                meter.close()

    def _log_progress(self, stats: Stats) -> None:
        """Log how far a prompt is read that takes a while."""
        now = time.monotonic()
        self._logged = self._logged or now
        if now - self._logged >= PING_SECONDS:
            self._logged = now
            log.info("%s: %s.", self._model.name, stats.progress)

    def _head(self, engine: Engine, answers: Sequence[Answer]) -> AnswerHead:
        model = self._model
        return AnswerHead(
            id=f"{self._dialect.prefix}{secrets.token_hex(12)}",
            created=int(time.time()),
            model=self._name,
            system_fingerprint=model.fingerprint,
            texts=model.texts,
            tool_format=engine.tool_format,
            conversations=self._service.conversations,
            reasoning_format=engine.reasoning_format,
            loose_calls=self._service.settings.loose_calls,
            num_prompt_tokens=answers[0].stats.num_prompt_tokens,
        )


async def _next(news: asyncio.Queue[News], until: float) -> News | None:
    """What comes next; None if nothing does until then."""
    try:
        async with asyncio.timeout_at(until):
            return await news.get()
    except TimeoutError:
        return None


def as_json(body: Any) -> Response:
    """The response with this body."""
    return Response(to_json(body), media_type="application/json")
