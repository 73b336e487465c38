"""Requests for text, from their arrival to the end of their answer."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import msgspec
from sse_starlette import EventSourceResponse
from sse_starlette.sse import SendTimeoutError
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from outrider.decoding.results import Result, TextChunk
from outrider.engine.engine import Engine
from outrider.server.answers import AnswerHead, ServedAnswer
from outrider.server.bodies import Bodies, Gone, unless_gone
from outrider.server.conversations import Conversations
from outrider.server.errors import as_api_error, out_of_time
from outrider.server.infill import Infill
from outrider.server.limits import Queue
from outrider.server.metrics import Meter, Metrics
from outrider.server.models import Models
from outrider.server.options import AnswerChoice, with_adapter
from outrider.server.protocol.items import ResponseEvent
from outrider.server.protocol.messages import MessageEvent
from outrider.server.protocol.reading import read_object
from outrider.server.protocol.requests import Asked, LoadRequest
from outrider.server.settings import Settings
from outrider.types import TokenLogprobs

log = logging.getLogger("outrider.server")

Done = TypeVar("Done")


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

    def __init__(self, service: Service, answer: type[ServedAnswer[Any]]) -> None:
        self._service, self._answer = service, answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the request, generate, and send the answer."""
        began = time.monotonic()
        try:
            request, choices = await self._service.bodies.read(scope, receive, self._read)
            if isinstance(request, LoadRequest):
                response = as_json(await unless_gone(self._load(request), receive))
                await response(scope, receive, send)
                return
            job = _Job(self._service, self._answer, request, choices, began)
            await unless_gone(job.run(scope, send), receive)
        except Gone:
            log.info("A client has disconnected.")

    def _read(self, body: bytes) -> tuple[Any, list[AnswerChoice]]:
        """The request that a body is, and its answers, in any thread."""
        request = self._answer.read(body)
        is_load = isinstance(request, LoadRequest)
        return request, [] if is_load else self._answer.choices(request, self._service.conversations)

    async def _load(self, request: LoadRequest) -> Any:
        """Load a model, or unload it. Returns what says so."""
        models = self._service.models
        model = models.find(request.model)
        if request.unload:
            await models.unload(model)
        else:
            async with models.use(model):
                pass
        return self._answer.loaded(request, model.name)


class _Job:
    """One request: its places in the queue, its engine, its answer."""

    def __init__(
        self,
        service: Service,
        answer: type[ServedAnswer[Any]],
        request: Asked,
        choices: list[AnswerChoice],
        began: float,
    ) -> None:
        self._service, self._kind, self._request, self._began = service, answer, request, began
        self._choices = choices
        self._model, adapter = service.models.find_adapted(request.model)
        self._name = request.model if adapter else self._model.name
        if adapter is not None:
            self._choices = [with_adapter(choice, adapter) for choice in self._choices]
        self._deadline = asyncio.get_running_loop().time() + service.settings.request_seconds

    async def run(self, scope: Scope, send: Send) -> None:
        """Wait for a place, generate, and send the response.

        Raises:
            ApiError, OutriderError: before anything was sent.
        """
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout_at(self._deadline):
                    engine = await self._enter(stack)
                    pieces = await stack.enter_async_context(aclosing(self._pieces(engine)))
                    first = await anext(pieces)
                    answer = self._kind(self._request, self._head(engine), self._choices)
                    if not self._request.stream:
                        response: Response = as_json(answer.whole(await _results(first, pieces, len(self._choices))))
            except TimeoutError as error:
                raise out_of_time(self._service.settings.request_seconds) from error
            if self._request.stream:
                events = self._events(answer, first, pieces)
                timeout = self._service.settings.send_seconds
                if answer.lines:
                    response = StreamingResponse(_lines(events), media_type="application/x-ndjson")
                    send = _in_time(send, timeout)
                else:
                    response = EventSourceResponse(events, sep="\n", send_timeout=timeout)
            try:
                await response(scope, _never, send)
            except SendTimeoutError:
                log.warning("A client does not read its answer, which is cancelled.")

    async def _enter(self, stack: AsyncExitStack) -> Engine:
        """Wait in the queue, then for the model."""
        metrics, name, count = self._service.metrics, self._model.name, len(self._choices)
        waiting = metrics.waiting.labels(name)
        waiting.inc(count)
        try:
            await stack.enter_async_context(self._service.queue.places(count))
        finally:
            waiting.dec(count)
        metrics.queued.labels(name).observe(time.monotonic() - self._began)
        return await stack.enter_async_context(self._service.models.use(self._model))

    async def _pieces(self, engine: Engine) -> AsyncGenerator[tuple[int, TextChunk], None]:
        """The pieces of all choices as they come, with the choice's number; the whole ones if they are not streamed.

        Pieces that nobody waits for would wake this thread while the main model needs all cores.
        """
        meters = [Meter(self._service.metrics, self._model.name, self._began) for _ in self._choices]
        try:
            whole = not self._request.stream and not any(choice.limit for choice in self._choices)
            choices = [_with_infill(choice, engine) for choice in self._choices]
            self._choices = await _scored(self._choices, engine)
            if len({id(choice.prompt) for choice in choices}) == 1:  # several answers: its images are read once
                prompt = await engine.aread_images(choices[0].prompt, **choices[0].options)
                choices = [dataclasses.replace(choice, prompt=prompt) for choice in choices]
            streams = [
                engine.astream(choice.prompt, at_once=whole, cancel=cast("Any", choice.limit), **choice.options)
                for choice in choices
            ]
            async with aclosing(merge(streams)) as pieces:
                async for number, chunk in pieces:
                    meters[number].read(chunk)
                    if (limit := choices[number].limit) is not None:
                        limit.read(chunk.text)
                    yield number, _emptied(chunk) if choices[number].is_empty else chunk
        finally:
            for meter in meters:
                meter.close()

    async def _events(
        self,
        answer: ServedAnswer[Any],
        first: tuple[int, TextChunk],
        pieces: AsyncGenerator[tuple[int, TextChunk], None],
    ) -> AsyncIterator[dict[str, str]]:
        """The events of a stream. A failure is its last event."""
        try:
            for body in answer.begin():
                yield _event(body)
            piece: tuple[int, TextChunk] | None = first
            while piece is not None:
                for body in answer.events(*piece):
                    yield _event(body)
                async with asyncio.timeout_at(self._deadline):
                    piece = await anext(pieces, None)
            if answer.last:
                yield {"data": answer.last}
        except TimeoutError:
            yield _event(answer.failure(out_of_time(self._service.settings.request_seconds)))
        except Exception as error:
            yield _event(answer.failure(as_api_error(error)))

    def _head(self, engine: Engine) -> AnswerHead:
        model = self._model
        return AnswerHead(
            id=f"{self._kind.prefix}{secrets.token_hex(12)}",
            created=int(time.time()),
            model=self._name,
            system_fingerprint=model.fingerprint,
            texts=model.texts,
            tool_format=engine.tool_format,
            conversations=self._service.conversations,
            reasoning_format=engine.reasoning_format,
            loose_calls=self._service.settings.loose_calls,
        )


def _emptied(chunk: TextChunk) -> TextChunk:
    """A piece of an answer of no tokens, for which the prompt is read, and one token is generated."""
    logprobs: list[TokenLogprobs] | None = None if chunk.logprobs is None else []
    result = chunk.result and dataclasses.replace(
        chunk.result, text="", token_ids=[], tokens=[], finish_reason="length", stop_string=None,
        logprobs=None if chunk.result.logprobs is None else [],
        stats=dataclasses.replace(chunk.result.stats, num_generated_tokens=0),
    )  # fmt: skip
    return dataclasses.replace(chunk, text="", tokens=[], logprobs=logprobs, result=result)


def _with_infill(choice: AnswerChoice, engine: Engine) -> AnswerChoice:
    """A choice whose prompt is laid out for this model."""
    if not isinstance(choice.prompt, Infill):
        return choice
    prompt, needed = choice.prompt.laid_out(engine.tokenizer, engine.bundle.manifest.tokenizer.infill)
    stops = (*choice.options.get("stop_token_ids", ()), *needed["stop_token_ids"])
    return dataclasses.replace(choice, prompt=prompt, options=choice.options | {"stop_token_ids": stops})


async def _scored(choices: list[AnswerChoice], engine: Engine) -> list[AnswerChoice]:
    """The choices, with the log-probabilities of prompts that are echoed with them. Equal prompts are read once."""
    found: dict[int, tuple[Sequence[int], Sequence[TokenLogprobs]]] = {}
    for choice in choices:
        if choice.echoed is None or id(choice.prompt) in found:
            continue
        token_ids = await asyncio.to_thread(partial(engine.encode_prompt, choice.prompt, chat_template=False))
        score = partial(engine.score_tokens, token_ids[:1], token_ids[1:], top=choice.echoed, chat_template=False)
        found[id(choice.prompt)] = token_ids, await asyncio.to_thread(score) if len(token_ids) > 1 else []
    return [dataclasses.replace(choice, scored=found.get(id(choice.prompt))) for choice in choices]


async def _results(
    first: tuple[int, TextChunk], pieces: AsyncGenerator[tuple[int, TextChunk], None], count: int
) -> list[Result]:
    """The choices' results, in their order."""
    found: dict[int, Result] = {}
    piece: tuple[int, TextChunk] | None = first
    while piece is not None:
        if piece[1].result:
            found[piece[0]] = piece[1].result
        piece = await anext(pieces, None)
    return [found[number] for number in range(count)]


async def _never() -> Message:
    """For a response: somebody else listens for the client's leaving."""
    await asyncio.get_running_loop().create_future()
    raise AssertionError("unreachable")


def _in_time(send: Send, seconds: float) -> Send:
    async def sending(message: Message) -> None:
        try:
            async with asyncio.timeout(seconds):
                await send(message)
        except TimeoutError as error:
            raise SendTimeoutError from error

    return sending


async def _lines(events: AsyncIterator[dict[str, str]]) -> AsyncIterator[str]:
    async for event in events:
        yield event["data"] + "\n"


def as_json(body: Any) -> Response:
    """The response with this body."""
    return Response(msgspec.json.encode(body), media_type="application/json")


def _event(body: Any) -> dict[str, str]:
    name = {"event": body.type} if isinstance(body, ResponseEvent | MessageEvent) else {}
    return name | {"data": msgspec.json.encode(body).decode()}


async def merge(streams: Sequence[AsyncGenerator[TextChunk, None]]) -> AsyncGenerator[tuple[int, TextChunk], None]:
    """The pieces of several streams as they come, with the number of the stream. An error of one ends all."""
    if len(streams) == 1:  # without tasks, which cost time for each piece
        async with aclosing(streams[0]) as stream:
            async for chunk in stream:
                yield 0, chunk
        return
    news: asyncio.Queue[tuple[int, TextChunk | Exception]] = asyncio.Queue()

    async def pump(number: int, stream: AsyncGenerator[TextChunk, None]) -> None:
        try:
            async with aclosing(stream):
                async for chunk in stream:
                    news.put_nowait((number, chunk))
        except Exception as error:
            news.put_nowait((number, error))

    pumps = [asyncio.create_task(pump(number, stream)) for number, stream in enumerate(streams)]
    try:
        left = len(pumps)
        while left:
            number, each = await news.get()
            if isinstance(each, Exception):
                raise each
            yield number, each
            left -= each.result is not None
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
