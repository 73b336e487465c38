"""What the server counts of an answer."""

import re
from types import SimpleNamespace

import pytest

from outrider.decoding.metrics import Stats
from outrider.decoding.results import TextChunk
from outrider.server.metrics import Meter, Metrics


def value(metrics: Metrics, name: str) -> float:
    found = re.search(rf'^vllm:{name}{{model_name="m"}} (\S+)$', metrics.text().decode(), re.MULTILINE)
    assert found
    return float(found[1])


def test_tokens_of_a_stream_that_was_left_are_counted() -> None:
    metrics = Metrics(["m"])
    meter = Meter(metrics, "m", 0.0)
    stats = Stats(num_prompt_tokens=5)
    for stats.num_read_tokens, text in ((2, ""), (4, ""), (5, "a")):  # as the prompt is read
        meter.read(TextChunk(text, stats))
        assert value(metrics, "prompt_tokens_total") == stats.num_read_tokens
        assert value(metrics, "num_prompt_tokens_unread") == 5 - stats.num_read_tokens
        assert value(metrics, "time_to_first_token_seconds_count") == bool(text)
    for _ in range(3):  # too fast for each to be counted at once
        stats.num_generated_tokens += 2
        meter.read(TextChunk("a", stats))
    assert value(metrics, "num_requests_running") == 1
    meter.close()
    assert value(metrics, "generation_tokens_total") == 6
    assert value(metrics, "num_requests_running") == 0


def test_the_time_to_the_first_token_is_that_without_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that is not streamed comes as one piece, at its end."""
    monkeypatch.setattr("outrider.server.metrics.time", SimpleNamespace(monotonic=lambda: 110.0))
    metrics = Metrics(["m"])
    Meter(metrics, "m", 100.0).read(TextChunk("a", Stats(num_prompt_tokens=1, decode_seconds=9.0)))
    assert value(metrics, "time_to_first_token_seconds_sum") == 1
