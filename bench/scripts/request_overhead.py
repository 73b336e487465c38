"""Measures what a request to the server costs more than `engine.generate`, on the same engine.

    python bench/scripts/request_overhead.py BUNDLE [REPEATS]

Both answer the same messages, one after the other, greedily and without drafts; the client keeps its connection. Prints
medians in milliseconds, and the median of the paired differences. For an idle machine, so it is run by hand.
"""

import http.client
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "helpers"))

from collections.abc import Callable

import outrider
from serving import MESSAGES, Live

NUM_TOKENS = (1, 16, 64)


def main() -> None:
    """Measure."""
    bundle, repeats = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 30
    live = Live.of({"model": bundle}, config=outrider.Config().replace(drafter=None))
    live.start()
    connection = http.client.HTTPConnection("127.0.0.1", live.port)

    def ask(num_tokens: int, *, stream: bool) -> None:
        body: dict[str, Any] = {"model": "model", "messages": MESSAGES, "max_tokens": num_tokens, "stream": stream}
        connection.request(
            "POST",
            "/v1/chat/completions",
            json.dumps(body | {"temperature": 0, "ignore_eos": True}),
            {"Content-Type": "application/json"},
        )
        response = connection.getresponse()
        text = response.read()
        assert response.status == 200, text

    ask(1, stream=False)  # loads the model
    engine = live.engine("model")
    ways: dict[str, Callable[[int], object]] = {
        "engine.generate": lambda n: engine.generate(MESSAGES, max_new_tokens=n, ignore_eos=True),
        "engine.stream": lambda n: [*engine.stream(MESSAGES, max_new_tokens=n, ignore_eos=True)],
        "request": lambda n: ask(n, stream=False),
        "streamed request": lambda n: ask(n, stream=True),
    }
    print(f"{bundle.name}, {repeats} repeats; {engine.setting['main_device']}")
    for num_tokens in NUM_TOKENS:
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(repeats):
            for name, way in ways.items():
                began = time.perf_counter()
                way(num_tokens)
                seconds[name].append(time.perf_counter() - began)
        for name, taken in seconds.items():
            more = statistics.median(own - plain for own, plain in zip(taken, seconds["engine.generate"], strict=True))
            print(f"{num_tokens:3} tokens  {name:16} {1e3 * statistics.median(taken):8.2f} ms  {1e3 * more:+7.2f} ms")
    live.stop()


if __name__ == "__main__":
    main()
