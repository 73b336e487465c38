"""Which engine a request gets, by the state of the one before. The engines are fakes."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from outrider.server import models as served
from outrider.server.models import Model, Models
from outrider.testing import save_toy_bundle
from serving import CONFIG


class FakeEngine:
    """Has the state that `use` asks for."""

    tokenizer = None

    def __init__(self, *_: object) -> None:
        self.cache: dict[str, Any] = {}
        self.is_working, self.has_failed, self.is_closed = True, False, False

    def close(self) -> None:
        self.is_working, self.is_closed = False, True


Test = Callable[[Models, Model], Coroutine[Any, Any, None]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Test], None]:
    bundle = save_toy_bundle(tmp_path, draft=False)
    monkeypatch.setattr(served, "open_bundle", lambda _, **__: bundle)
    monkeypatch.setattr(served, "Engine", FakeEngine)
    monkeypatch.setattr(served, "TokenTexts", lambda *_: None)
    monkeypatch.setattr("gc.collect", lambda: None)

    def run(test: Test) -> None:
        models = Models({"toy": tmp_path}, CONFIG)
        asyncio.run(asyncio.wait_for(test(models, models.find("toy")), 20))

    return run


async def get(models: Models, model: Model) -> Any:
    async with models.use(model) as engine:
        return engine


async def rest() -> None:
    """Let other tasks come to where they wait for each other."""
    for _ in range(20):
        await asyncio.sleep(0)


def test_answers_end_before_a_draft_model_is_loaded_again(run: Callable[[Test], None]) -> None:
    async def test(models: Models, model: Model) -> None:
        one: Any
        async with models.use(model) as one:
            async with models.use(model) as two:
                assert two is model.engine is not None
                one.has_failed = True
                waiting = [asyncio.create_task(get(models, model)) for _ in range(3)]
                await rest()
            await rest()
            assert model.engine is one
            assert one.is_working
            assert not any(each.done() for each in waiting)
        found = await asyncio.gather(*waiting)
        assert found == [model.engine] * 3 != [one] * 3
        assert not one.is_working
        assert (model.num_users, model.num_answered) == (0, 0)

    run(test)


def test_a_client_that_leaves_while_it_waits_is_forgotten(run: Callable[[Test], None]) -> None:
    async def test(models: Models, model: Model) -> None:
        one: Any
        async with models.use(model) as one:
            one.has_failed = True
            waiting = asyncio.create_task(get(models, model))
            await rest()
            waiting.cancel()
            await rest()
            assert (model.num_users, model.num_answered) == (1, 1)
        assert await get(models, model) is not one

    run(test)


def test_a_model_is_loaded_again_once_its_memory_is_free(
    run: Callable[[Test], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then it is shown as loaded: there may be no room for two."""
    closing, goes_on, close = threading.Event(), threading.Event(), FakeEngine.close

    def close_slowly(engine: FakeEngine) -> None:
        closing.set()
        assert goes_on.wait(30)
        close(engine)

    async def test(models: Models, model: Model) -> None:
        one = await get(models, model)
        monkeypatch.setattr(FakeEngine, "close", close_slowly)
        unloading = asyncio.create_task(models.unload_idle(0))
        await asyncio.to_thread(closing.wait, 30)
        asked = asyncio.create_task(get(models, model))
        await rest()
        await asyncio.to_thread(int)  # had a load begun, it would have ended by now
        assert (model.engine, model.info.loaded) == (None, True)
        goes_on.set()
        two = await asked
        await unloading
        assert one.is_closed
        assert two.is_working

    run(test)


@pytest.mark.parametrize("state", [{"is_working": False, "has_failed": True}, {"is_working": False}])
def test_an_engine_that_answers_nothing_is_replaced_at_once(
    run: Callable[[Test], None], state: dict[str, bool]
) -> None:
    """Its main model's device has failed, or an app has closed it. It may fail again, once loaded."""

    async def test(models: Models, model: Model) -> None:
        engines = []
        async with models.use(model):
            for _ in range(3):
                engine: Any = await get(models, model)
                assert engine.is_working
                vars(engine).update(state)
                engines.append(engine)
            await models.unload_idle(0)  # somebody uses it
            assert model.engine is engines[-1]
        assert len({id(engine) for engine in engines}) == 3
        assert all(engine.is_closed for engine in engines[:-1])
        assert model.cache_use == 0

    run(test)
