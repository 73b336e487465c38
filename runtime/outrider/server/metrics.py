"""Prometheus metrics, with vLLM's names (vllm-project/vllm, docs/design/metrics.md and vllm/v1/metrics/loggers.py)."""

from __future__ import annotations

import time
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from outrider.decoding.metrics import Stats
from outrider.decoding.results import TextChunk

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_REST = 0.5  # seconds
# Counters: name, meaning, and the field of `Stats` that they add up.
_COUNTERS = (
    ("prompt_tokens", "Prompt tokens, as they are read or found in the prefix cache.", "num_read_tokens"),
    ("generation_tokens", "Generated tokens.", "num_generated_tokens"),
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "num_prompt_tokens"),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", "num_cached_tokens"),
    ("spec_decode_num_drafts", "Rounds in which tokens were drafted.", "num_drafts"),
    ("spec_decode_num_draft_tokens", "Draft tokens.", "num_draft_tokens"),
    ("spec_decode_num_accepted_tokens", "Accepted draft tokens.", "num_accepted_tokens"),
)


class Metrics:
    """The counts and times of one server's models.

    meter = Meter(metrics, "qwen", time.monotonic())
    meter.read(chunk)                # each piece of an answer
    meter.close()                    # always
    metrics.text()
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)  # memory and time; on Linux
        self.running = self._gauge("num_requests_running", "Answers being generated.")
        self.waiting = self._gauge("num_requests_waiting", "Answers that wait in the queue.")
        self.cache_use = self._gauge("kv_cache_usage_perc", "Fraction of the KV cache that running requests use.")
        self.unread = self._gauge("num_prompt_tokens_unread", "Tokens of running prompts that are yet to be read.")
        self.counters = [(self._counter(name, what), field) for name, what, field in _COUNTERS]
        self.accepted = self._counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens, by their position in the draft.",
            "position",
        )
        self.success = self._counter("request_success", "Finished answers, by their finish_reason.", "finished_reason")
        self.queued = self._histogram("request_queue_time_seconds", "Seconds in the server's queue.", _SECONDS)
        self.first_token = self._histogram("time_to_first_token_seconds", "Seconds to the first token.", _SECONDS)
        self.per_token = self._histogram(
            "request_time_per_output_token_seconds",
            "Seconds per token after the first, as an answer's average.",
            _SECONDS,
        )
        self.whole = self._histogram("e2e_request_latency_seconds", "Seconds to the end of the answer.", _SECONDS)
        self.prompts = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self.answers = self._histogram("request_generation_tokens", "Generated tokens of an answer.", _TOKENS)
        histograms = (self.queued, self.first_token, self.per_token, self.whole, self.prompts, self.answers)
        for name in names:  # so that they are there before the first request
            for each in (
                self.running,
                self.waiting,
                self.unread,
                self.cache_use,
                *(counter for counter, _ in self.counters),
                *histograms,
            ):
                each.labels(name)

    def text(self) -> bytes:
        """All metrics, in Prometheus' text format."""
        return generate_latest(self._registry)

    def _gauge(self, name: str, what: str) -> Gauge:
        return Gauge(f"vllm:{name}", what, ["model_name"], registry=self._registry)

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(f"vllm:{name}", what, ["model_name", *labels], registry=self._registry)

    def _histogram(self, name: str, what: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"vllm:{name}", what, ["model_name"], registry=self._registry, buckets=buckets)


class Meter:
    """Counts one answer as it is generated, so that what a cancelled stream has cost is counted too.

    began: time.monotonic of the request's arrival.

    The first piece is counted, the last one, and of the others one in `_REST` seconds: counting takes a while.
    """

    def __init__(self, metrics: Metrics, model: str, began: float) -> None:
        self._metrics, self._model, self._began = metrics, model, began
        self._counted = [0] * len(metrics.counters)
        self._accepted: list[int] = []
        self._stats: Stats | None = None  # what is not counted yet
        self._read = 0.0
        self._unread = 0
        self._has_begun = False  # there is a token
        metrics.running.labels(model).inc()

    def read(self, chunk: TextChunk) -> None:
        """Count what a piece of the answer adds."""
        metrics, model, stats = self._metrics, self._model, chunk.stats
        now, self._stats = time.monotonic(), stats
        if chunk.is_progress:
            self._count(stats)
            return
        if not self._has_begun:
            self._has_begun = True
            metrics.first_token.labels(model).observe(now - self._began - stats.decode_seconds)
            metrics.prompts.labels(model).observe(stats.num_prompt_tokens)
        elif not chunk.result and now - self._read < _REST:
            return
        self._read = now
        self._count(stats)
        if chunk.result:
            num_tokens, seconds = stats.num_generated_tokens, now - self._began
            metrics.success.labels(model, chunk.result.finish_reason).inc()
            metrics.answers.labels(model).observe(num_tokens)
            metrics.whole.labels(model).observe(seconds)
            if num_tokens > 1:
                metrics.per_token.labels(model).observe(stats.decode_seconds / (num_tokens - 1))

    def _count(self, stats: Stats) -> None:
        metrics, model = self._metrics, self._model
        self._stats = None
        # The engine's thread goes on counting in `stats`, so each number is read once.
        for i, (counter, field) in enumerate(metrics.counters):
            now = getattr(stats, field)
            counter.labels(model).inc(now - self._counted[i])
            self._counted[i] = now
        self._set_unread(stats.num_prompt_tokens - stats.num_read_tokens)
        accepted = [*stats.num_accepted_tokens_per_position]
        self._accepted += [0] * (len(accepted) - len(self._accepted))
        for position, now in enumerate(accepted):
            metrics.accepted.labels(model, str(position)).inc(now - self._accepted[position])
        self._accepted = accepted

    def _set_unread(self, num_tokens: int) -> None:
        self._metrics.unread.labels(self._model).inc(num_tokens - self._unread)
        self._unread = num_tokens

    def close(self) -> None:
        """The answer has ended, in whatever way."""
        if self._stats is not None:
            self._count(self._stats)
        self._set_unread(0)
        self._metrics.running.labels(self._model).dec()
