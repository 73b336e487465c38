"""Several answers at a time in one event loop."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from collections.abc import Sequence as Seq

    from outrider.decoding.results import TextChunk


async def merge(streams: Seq[AsyncGenerator[TextChunk, None]]) -> AsyncGenerator[tuple[int, TextChunk], None]:
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
