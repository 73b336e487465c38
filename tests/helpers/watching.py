"""An observer that does nothing, to inherit from, and chats with toys."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import outrider
from outrider.bundle import Bundle
from outrider.testing import ToyTokenizer


def chat_engine(bundle: Bundle, **options: Any) -> outrider.Engine:
    """An engine for toy conversations, with short pieces of prompts."""
    options = {"cache_size": 0.02, "max_num_batched_tokens": 32, **options}
    return outrider.Engine(bundle, outrider.Config().replace(**options), tokenizer=ToyTokenizer(chat=True))


class Watcher:
    """An observer that does nothing."""

    def entered(self, request: Any, drafter: str | None) -> None: ...

    def admitted(self, request: Any) -> None: ...

    def drafting(self, stage: Any, requests: Any) -> None: ...

    def drafted(self, drafts: Any, error: BaseException | None = None) -> None: ...

    def called(self, call: Any) -> None: ...

    def verified(self, request: Any, draft: Any, outcome: Any) -> None: ...

    def committed(self, request: Any) -> None: ...

    def left(self, request: Any) -> None: ...


class AfterCalls(Watcher):
    """Calls a function in a thread of its own at the n-th call of the main model."""

    def __init__(self, count: int, function: Callable[[], object]) -> None:
        self._left, self._function = count, function
        self.threads: list[threading.Thread] = []

    def called(self, call: Any) -> None:
        self._left -= 1
        if self._left == 0:
            self.threads.append(threading.Thread(target=self._function))
            self.threads[0].start()


@contextmanager
def watched(engine: outrider.Engine, watcher: Watcher) -> Iterator[None]:
    """Let `watcher` observe the engine during the block."""
    engine._queue.observer = watcher
    try:
        yield
    finally:
        engine._queue.observer = None
