"""Engines of toy bundles, and work in threads."""

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

import outrider
from outrider.bundle import Bundle
from outrider.models.cost.table import CallCost
from outrider.testing import ToyTokenizer


def load_toy(bundle: Bundle, *, cache_size: float = 0.005, tokenizer: Any = None, **options: Any) -> outrider.Engine:
    """An engine with room for some thousand tokens."""
    config = outrider.Config().replace(cache_size=cache_size, **options)
    return outrider.Engine(bundle, config, tokenizer=tokenizer or ToyTokenizer())


class _Steady(CallCost):
    """A cost that does not adapt: how fast a toy's calls are here must not decide whether it drafts."""

    def observe(self, *_: object, **__: object) -> None:
        pass


def fix_costs(engine: outrider.Engine, main: tuple[float, float], draft: tuple[float, float]) -> None:
    """Have an engine reckon with these seconds: of 2 and 16 rows of its main model, 1 and 128 of its draft model."""
    engine.loaded["main"].cost = _Steady((2, 16), main, main)
    engine.draft_models["draft"].cost = _Steady((1, 128), draft, draft)


def in_threads(work: Callable[..., object], items: Iterable[Any]) -> None:
    """Call `work` with each item, each in a thread of its own, and wait for all of them."""
    threads = [threading.Thread(target=work, args=(item,)) for item in items]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def wait_until(true: Callable[[], object], seconds: float = 300) -> None:
    """Wait for what another thread or process does."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "this took too long"
        time.sleep(0.005)


def random_ids(seed: int, count: int) -> list[int]:
    """Tokens of a toy."""
    made: list[int] = np.random.default_rng(seed).integers(0, 39, count).tolist()
    return made
