"""Streams in an event loop."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

import outrider
from outrider.bundle import Bundle
from outrider.types import Drafter
from watching import Watcher, chat_engine, watched

LONG: dict[str, Any] = {"max_new_tokens": 400, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine(openvino_bundle: Bundle) -> Iterator[outrider.Engine]:
    with chat_engine(openvino_bundle) as engine:
        yield engine


class Leaving(Watcher):
    """Notes how requests have ended."""

    def __init__(self) -> None:
        self.reasons: dict[Any, tuple[str | None, int]] = {}

    def left(self, request: Any) -> None:
        self.reasons[request] = request.finish_reason, request.stats.num_generated_tokens


class Failing(Drafter):
    """A drafter that fails in the engine's thread."""

    num_assistant_tokens = 4

    def propose(self, requests: Any) -> list[Any]:
        raise ValueError("no draft today")


async def until_left(watcher: Leaving, count: int = 1) -> list[tuple[str | None, int]]:
    async with asyncio.timeout(300):
        while len(watcher.reasons) < count:
            await asyncio.sleep(0.001)
    return [*watcher.reasons.values()]


def test_eight_conversations_at_a_time(engine: outrider.Engine) -> None:
    async def talk(i: int) -> list[tuple[str, list[int]]]:
        chat = engine.chat(f"number {i}", max_new_tokens=30)
        answers = []
        for words in ("hello", "the same the same", "why"):
            text, tokens = "", []
            async for chunk in chat.astream(words):
                text += chunk.text
                tokens += chunk.tokens
            assert chunk.result
            assert text == chunk.result.text
            assert tokens == chunk.result.tokens
            answers.append((text, chunk.result.token_ids))
        return answers

    async def talks() -> list[list[tuple[str, list[int]]]]:
        return await asyncio.gather(*map(talk, range(8)))

    together = asyncio.run(talks())
    for i, answers in enumerate(together):
        chat = engine.chat(f"number {i}", max_new_tokens=30, drafter=None)
        assert [chat.send(w).token_ids for w in ("hello", "the same the same", "why")] == [each for _, each in answers]


def test_awaited_answers_are_the_same(engine: outrider.Engine) -> None:
    async def ask() -> tuple[outrider.Result, outrider.Result]:
        chat = engine.chat(max_new_tokens=30)
        return await engine.agenerate("hello", max_new_tokens=30), await chat.asend("hello")

    both = asyncio.run(ask())
    expected = engine.generate("hello", max_new_tokens=30)
    assert [result.token_ids for result in both] == [expected.token_ids] * 2


def test_errors_reach_the_task(engine: outrider.Engine) -> None:
    async def ask(prompt: Any, **options: Any) -> None:
        await engine.agenerate(prompt, **options)

    with pytest.raises(outrider.OptionError, match="no_such"):
        asyncio.run(ask("hello", no_such=1))
    engine.add_drafter("failing", Failing())
    with pytest.raises(ValueError, match="no draft today"):
        asyncio.run(ask("hello", drafter="failing"))


def test_a_cancelled_task_ends_its_request(engine: outrider.Engine) -> None:
    async def cancelled() -> list[tuple[str | None, int]]:
        with watched(engine, watcher := Leaving()):
            chat = engine.chat(**LONG)
            begun = asyncio.Event()

            async def read() -> None:
                async for _ in chat.astream("hello"):
                    begun.set()

            task = asyncio.create_task(read())
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            found = await until_left(watcher)
            assert [turn.finish_reason for turn in chat.turns] == ["cancelled"]
            await chat.asend("go on", max_new_tokens=3)
        return found

    ((reason, count),) = asyncio.run(cancelled())
    assert reason == "cancelled"
    assert count < 400


def test_a_cancelled_await_leaves_the_chat_as_it_was(engine: outrider.Engine) -> None:
    async def cancelled() -> list[tuple[str | None, int]]:
        chat = engine.chat(**LONG)
        with watched(engine, watcher := Leaving()):
            task = asyncio.create_task(chat.asend("hello"))
            while chat._cancel is None:
                await asyncio.sleep(0)
            await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert chat.turns == ()
            await chat.asend("go on", max_new_tokens=3)
            return [*watcher.reasons.values()]

    assert ("length", 3) in asyncio.run(cancelled())


def test_a_slow_task_pauses_its_request_alone(engine: outrider.Engine) -> None:
    """Text is not piled up for it, nobody waits for it, and it gets all of it."""

    async def slow() -> tuple[int, outrider.Result, list[Any]]:
        stream = engine.astream("hello", **LONG)
        chunks = [await anext(stream)]
        async with asyncio.timeout(300):
            while not engine._queue._scheduler.is_far_ahead:
                await asyncio.sleep(0.001)
        paused_at = chunks[0].stats.num_generated_tokens
        other = await engine.agenerate("the same", max_new_tokens=30)
        chunks += [chunk async for chunk in stream]
        return paused_at, other, chunks

    paused_at, other, chunks = asyncio.run(slow())
    assert 0 < paused_at < 400
    assert other.token_ids == engine.generate("the same", max_new_tokens=30).token_ids
    assert "".join(chunk.text for chunk in chunks) == engine.generate("hello", **LONG).text


def test_a_task_of_a_closed_loop_ends_its_request(engine: outrider.Engine) -> None:
    stream = engine.astream("hello", **LONG)
    loop = asyncio.new_event_loop()
    with watched(engine, watcher := Leaving()):
        loop.run_until_complete(anext(stream))
        loop.close()
        engine.generate("the same", max_new_tokens=30)  # rounds in which the other one has news
        asyncio.run(until_left(watcher, 2))
    assert sorted(watcher.reasons.values())[0][0] == "cancelled"
