"""Requests that run in the background, and closed engines."""

import asyncio
import gc
import threading
import weakref
from typing import Any

import pytest

import outrider
from outrider.bundle import Bundle
from outrider.decoding.idle import IdleJob
from outrider.decoding.request_queue import RequestQueue
from outrider.decoding.results import TextChunk
from outrider.decoding.row_budget import RowBudget
from outrider.testing import FakeBackend
from toys import load_toy

LONG: dict[str, Any] = {"max_new_tokens": 400, "ignore_eos": True}


def test_a_sink_is_given_what_a_stream_yields(openvino_engine: outrider.Engine) -> None:
    news: list[Any] = []
    ended = threading.Event()

    def sink(each: TextChunk | BaseException) -> None:
        news.append(each)
        if isinstance(each, BaseException) or each.result:
            ended.set()

    handle = openvino_engine.submit("hello", sink=sink, max_new_tokens=30, ignore_eos=True)
    assert ended.wait(300)
    expected = openvino_engine.generate("hello", max_new_tokens=30, ignore_eos=True)
    assert "".join(chunk.text for chunk in news) == expected.text
    assert news[-1].result.token_ids == expected.token_ids
    assert len(news) > 1
    assert all(chunk.result is None for chunk in news[:-1])
    assert handle.done


def test_a_submitted_request_is_cancelled(openvino_engine: outrider.Engine) -> None:
    news: list[Any] = []
    begun, ended = threading.Event(), threading.Event()

    def sink(each: Any) -> None:
        news.append(each)
        begun.set()
        if each.result:
            ended.set()

    handle = openvino_engine.submit("hello", sink=sink, **LONG)
    assert begun.wait(300)
    handle.cancel()
    assert ended.wait(300)
    result = news[-1].result
    assert result.finish_reason == "cancelled"
    whole = openvino_engine.generate("hello", **LONG).token_ids
    assert 0 < len(result.token_ids) < len(whole)
    assert result.token_ids == whole[: len(result.token_ids)]


@pytest.mark.parametrize("way", ["generate", "agenerate", "score"])
def test_waiting_in_the_engine_s_own_thread_is_refused(openvino_engine: outrider.Engine, way: str) -> None:
    """It would wait for itself, and everybody for it."""
    engine, raised, ended = openvino_engine, list[BaseException](), threading.Event()

    def ask() -> object:
        if way == "agenerate":
            return asyncio.run(engine.agenerate("hello", max_new_tokens=2))
        return engine.score("hello", [1, 2]) if way == "score" else engine.generate("hello", max_new_tokens=2)

    def sink(each: TextChunk | BaseException) -> None:
        try:
            ask()
        except outrider.RequestError as error:
            raised.append(error)
        if isinstance(each, BaseException) or each.result:
            ended.set()

    beside = engine.stream("hello", **LONG)
    first = next(beside).text
    engine.submit("hello", sink=sink, max_new_tokens=3, ignore_eos=True)
    assert ended.wait(300)
    assert all("it runs in the engine's thread" in str(error) for error in raised)
    assert raised
    assert first + "".join(chunk.text for chunk in beside) == engine.generate("hello", **LONG).text


def test_a_closed_engine_says_so_and_frees_its_models(openvino_bundle: Bundle) -> None:
    with load_toy(openvino_bundle, cache_size=0.02) as engine:
        stream = engine.stream("hello", **LONG)
        next(stream)
        models = [weakref.ref(model.backend) for model in engine.loaded.values()]
    with pytest.raises(outrider.RequestError, match="This engine is closed"):
        list(stream)
    for use in (
        lambda: engine.generate("hello"), lambda: next(engine.stream("hello")),
        lambda: engine.submit("hello", sink=print), lambda: engine.max_tokens, lambda: engine.measure_costs(1),
    ):  # fmt: skip
        with pytest.raises(outrider.RequestError, match="This engine is closed. Load the bundle again"):
            use()
    engine.close()
    del stream
    gc.collect()
    assert [model() for model in models] == [None, None]


def test_garbage_collection_does_not_wait_for_the_worker() -> None:
    """It may run in a thread that has a lock which the worker waits for."""
    lock, began, ended = threading.Lock(), threading.Event(), threading.Event()
    got: list[bool] = []

    class Locking(IdleJob):
        patience = 0.0

        @property
        def is_due(self) -> bool:
            return not got

        def go_on(self, *_: object) -> None:
            began.set()
            got.append(lock.acquire(timeout=20))
            ended.set()

    with lock:
        queue = RequestQueue(FakeBackend(99, seed=0), RowBudget(64), jobs=[Locking()])
        assert began.wait(60)
        del queue
    assert ended.wait(60)
    assert got == [True]


def test_requests_that_arrive_while_an_engine_closes_all_end(openvino_bundle: Bundle) -> None:
    engine = load_toy(openvino_bundle, cache_size=0.02)
    ended: list[str] = []

    def ask() -> None:
        try:
            while True:
                engine.generate("hello", max_new_tokens=3)
        except outrider.RequestError as error:
            ended.append(str(error))

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    engine.generate("abc", max_new_tokens=20)
    engine.close()
    for thread in threads:
        thread.join(300)
    assert len(ended) == 4
    assert set(ended) == {"This engine is closed. Load the bundle again."}
