"""What is done with the choices of a request: before they are prepared, and with the pieces of all of them."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial

from outrider.decoding.results import TextChunk
from outrider.engine.engine import Engine
from outrider.server.infill import Infill
from outrider.server.options import AnswerChoice
from outrider.types import TokenLogprobs


def emptied(chunk: TextChunk) -> TextChunk:
    """A piece of an answer of no tokens, for which the prompt is read, and one token is generated."""
    logprobs: list[TokenLogprobs] | None = None if chunk.logprobs is None else []
    result = chunk.result and dataclasses.replace(
        chunk.result, text="", token_ids=[], tokens=[], finish_reason="length", stop_string=None,
        logprobs=None if chunk.result.logprobs is None else [],
        stats=dataclasses.replace(chunk.result.stats, num_generated_tokens=0),
    )  # fmt: skip
    return dataclasses.replace(chunk, text="", tokens=[], logprobs=logprobs, result=result)


def with_infill(choice: AnswerChoice, engine: Engine) -> AnswerChoice:
    """A choice whose prompt is laid out for this model."""
    if not isinstance(choice.prompt, Infill):
        return choice
    prompt, needed = choice.prompt.laid_out(engine.tokenizer, engine.bundle.manifest.tokenizer.infill)
    stops = (*choice.options.get("stop_token_ids", ()), *needed["stop_token_ids"])
    return dataclasses.replace(choice, prompt=prompt, options=choice.options | {"stop_token_ids": stops})


async def scored(choices: list[AnswerChoice], engine: Engine) -> list[AnswerChoice]:
    """The choices, with the log-probabilities of prompts that are echoed with them. Equal prompts are read once."""
    found: dict[int, tuple[Sequence[int], Sequence[TokenLogprobs]]] = {}
    for choice in choices:
        if choice.echoed is None or id(choice.prompt) in found:
            continue
        token_ids = await asyncio.to_thread(partial(engine.encode_prompt, choice.prompt, chat_template=False))
        score = partial(engine.score_tokens, token_ids[:1], token_ids[1:], top=choice.echoed, chat_template=False)
        found[id(choice.prompt)] = token_ids, await asyncio.to_thread(score) if len(token_ids) > 1 else []
    return [dataclasses.replace(choice, scored=found.get(id(choice.prompt))) for choice in choices]


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
