"""What goes out of an answer, and who takes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Event
from typing import Protocol

from outrider.decoding.metrics import Stats
from outrider.decoding.results import AnswerToken, Result, TextChunk
from outrider.errors import RequestError
from outrider.inputs.text import TextStream
from outrider.system.guard import Guard
from outrider.types import TokenLogprobs


class Sink(Protocol):
    """Where an answer goes: pieces of text, the last with the result, or an error. Called by the worker."""

    def put(self, news: TextChunk | BaseException, /) -> None:
        """Take a piece. Must not raise, nor take long: all requests wait for it."""

    def qsize(self) -> int:
        """Pieces that were not read yet. An answer pauses when it is far ahead of its reader."""


@dataclass(eq=False, slots=True)
class Delivery:
    """An answer's text on its way to a reader."""

    text: TextStream
    cancel: Event | None = None  # set from any thread to end the answer here
    thinks: bool = False  # whether the prompt has begun the model's reasoning
    save: Callable[[list[int]], None] | None = None  # called with the answer's tokens, unless it was cancelled
    sink: Sink = field(default_factory=SimpleQueue[TextChunk | BaseException])
    abandoned: bool = False  # set by the reader: the answer is not read any more
    done: bool = False  # the result or the error was sent
    prompt_progress: bool = False  # whether a chunk without text follows each piece of the prompt that was read
    num_sent_characters: int = 0
    num_sent_tokens: int = 0

    @property
    def has_news(self) -> bool:
        """Whether there is text that was not sent."""
        return len(self.text.text) > self.num_sent_characters

    @property
    def may_be_cancelled(self) -> bool:
        """Whether `is_cancelled` has to be asked."""
        return self.abandoned or self.cancel is not None

    def is_cancelled(self) -> bool:
        """Whether the reader has gone, or the app has set `cancel`, an object that may be its own.

        Raises:
            RequestError: when that raises.
        """
        if self.abandoned or self.cancel is None:
            return self.abandoned
        what = f"cancel.is_set(), of a {type(self.cancel).__name__},"
        with Guard(what, RequestError, "Fix it, or pass a threading.Event."):
            return bool(self.cancel.is_set())

    def send_progress(self, stats: Stats) -> None:
        """Tell a reader that asked for it how far the prompt is read, unless it has news that it did not read yet."""
        if self.prompt_progress and not self.sink.qsize():
            self.sink.put(TextChunk("", stats, thinks=self.thinks))

    def send(
        self,
        tokens: Sequence[AnswerToken],
        logprobs: Sequence[TokenLogprobs] | None,
        stats: Stats,
        result: Result | None = None,
    ) -> None:
        """Send new text. tokens, logprobs: of the whole answer so far. result: at its end."""
        text = self.text.text[self.num_sent_characters :]
        num_tokens = self.text.num_certain_tokens if result is None else self.text.num_tokens
        new = slice(self.num_sent_tokens, num_tokens)
        self.num_sent_characters += len(text)
        self.num_sent_tokens = num_tokens
        new_logprobs = None if logprobs is None else [*logprobs[new]]
        self.sink.put(TextChunk(text, stats, result, [*tokens[new]], new_logprobs, self.thinks))
