"""Several conversations share an engine: who gets rounds and room, counted."""

import threading
from collections import Counter
from typing import Any

import pytest

from outrider.bundle import Bundle
from toys import in_threads
from watching import Watcher, chat_engine, watched


class Rounds(Watcher):
    """Counts the rounds of each request from the moment when all are there until the first one leaves."""

    def __init__(self, together: int) -> None:
        self._together, self._there = together, 0
        self.rounds: Counter[Any] = Counter()
        self.tokens: Counter[Any] = Counter()
        self.widest = 0

    def admitted(self, request: Any) -> None:
        self._there += 1

    def left(self, request: Any) -> None:
        self._together = 1000

    def committed(self, request: Any) -> None:
        if self._there >= self._together:
            self.rounds[request] += 1
            self.tokens[request] = request.stats.num_generated_tokens
            counts = [self.rounds[each] for each in self.rounds]
            self.widest = max(self.widest, max(counts) - min(counts))


def test_running_conversations_get_equal_rounds(openvino_bundle: Bundle) -> None:
    """Whether they draft well, badly or not, and though one of them has a long prompt to read."""
    with chat_engine(openvino_bundle) as engine, watched(engine, watcher := Rounds(6)):
        chats = [engine.chat(drafter=d, max_new_tokens=300, ignore_eos=True) for d in (None, "auto", "suffix") * 2]
        # One reader for all: nobody is paused for a thread that does not run.
        streams = [chat.stream("abc " * (100 if i == 0 else 1)) for i, chat in enumerate(chats)]
        while streams:
            streams = [stream for stream in streams if next(stream, None) is not None]
    assert len(watcher.rounds) == 6
    assert min(watcher.rounds.values()) > 20
    assert watcher.widest <= 1


@pytest.mark.parametrize("max_round_seconds", ["auto", 0.001])
def test_long_prompts_and_answers_beside_them_are_as_alone(
    openvino_bundle: Bundle, max_round_seconds: float | str
) -> None:
    """However rows are shared: each prompt's pieces, and the answers that share their calls."""
    prompts = ["abc", "hello " * 70, "x", "one two " * 50, "yes " * 20]
    options: dict[str, Any] = {"max_new_tokens": 120, "ignore_eos": True}
    with chat_engine(openvino_bundle, max_round_seconds=max_round_seconds, enable_prefix_caching=False) as engine:
        alone = [engine.generate(prompt, drafter=None, **options).token_ids for prompt in prompts]
        streams = [engine.stream(prompt, **options) for prompt in prompts]
        begun = [(next(streams[0]), 0)]  # the first one is decoded when the others come
        chunks = begun + [(chunk, i) for i, stream in enumerate(streams) for chunk in stream]
    together = {i: chunk.result.token_ids for chunk, i in chunks if chunk.result}
    assert [together[i] for i in range(len(prompts))] == alone


def test_conversations_that_wait_for_room_take_turns(openvino_bundle: Bundle) -> None:
    """Room for two of six: none gets a third answer ahead of the others, however soon it asks again."""
    num_chats, num_turns = 6, 4
    order: list[int] = []
    entered = threading.Semaphore(0)

    class Order(Watcher):
        def entered(self, request: Any, drafter: str | None) -> None:
            entered.release()

        def admitted(self, request: Any) -> None:
            if not order:
                for _ in range(num_chats - 1):
                    assert entered.acquire(timeout=300)
            order.append(request.request.max_new_tokens - 200)

    # A token takes 2 layers x 2 (keys, values) x 16 numbers x 4 bytes; prompt and answer take up to 300 tokens.
    with chat_engine(openvino_bundle, cache_size=0.0002, drafter=None) as engine:
        assert 500 < engine.max_tokens < 900

        def talk(i: int) -> None:
            chat = engine.chat(max_new_tokens=200 + i)
            for turn in range(num_turns):
                chat.send(f"{i} {turn}")
                chat.rewind()

        with watched(engine, Order()):
            in_threads(talk, range(num_chats))
    assert len(order) == num_chats * num_turns
    counts = [Counter(order[:i]) for i in range(len(order))]
    assert max(max(c.values(), default=0) - min(c[i] for i in range(num_chats)) for c in counts) <= 2
