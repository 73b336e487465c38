"""What all addresses have in common: how answers become bodies of responses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import msgspec
from msgspec import UNSET

from outrider.decoding.results import AnswerToken, Result, TextChunk
from outrider.inputs.reasoning import ReasoningFormat
from outrider.inputs.tools import ToolFormat
from outrider.server.conversations import Conversations
from outrider.server.errors import ApiError
from outrider.server.logprobs import TokenTexts
from outrider.server.options import AnswerChoice
from outrider.server.protocol.reading import read_request
from outrider.server.protocol.requests import Asked, Generation, LoadRequest
from outrider.server.protocol.responses import FinishReason, Token
from outrider.server.reader import AnswerReading, Piece, Reader
from outrider.server.usage import timings_of, usage_of

Kind = TypeVar("Kind", bound=Asked)
Many = TypeVar("Many", bound=Generation)


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What all bodies of one answer begin with. created: in seconds since 1970. texts: of tokens.

    conversations: where the answer may be stored. loose_calls: as in the settings.
    """

    id: str
    created: int
    model: str
    system_fingerprint: str
    texts: TokenTexts
    tool_format: ToolFormat | None
    conversations: Conversations
    reasoning_format: ReasoningFormat | None = None
    loose_calls: bool = True

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of a body."""
        return {
            "id": self.id,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }


@dataclass(frozen=True, slots=True)
class WrappedRequest(Generic[Kind]):
    """A request of another API. own: as one of this server's. others: its fields that only that API has."""

    own: Kind
    others: Mapping[str, Any]

    @property
    def stream(self) -> bool | None:
        """Whether the answer is streamed."""
        return self.own.stream

    @property
    def model(self) -> str:
        """The model's name; empty if none is given."""
        return self.own.model


class ServedAnswer(ABC, Generic[Kind]):
    """One request's answer, whole or as events of a stream.

    kind: of the request. prefix: of the answer's id. last: the data of a stream's last event; empty: there is none.
    lines: a stream is lines of JSON, not server-sent events.
    """

    kind: ClassVar[type[Asked]]
    prefix: ClassVar[str]
    last: ClassVar[str] = "[DONE]"
    lines: ClassVar[bool] = False

    def __init__(self, request: Kind, head: AnswerHead, choices: Sequence[AnswerChoice]) -> None:  # noqa: ARG002
        self.request, self.head = request, head

    @classmethod
    def read(cls, body: bytes) -> Any:
        """The request that a body is. Raises ApiError with status 400."""
        return read_request(body, cls.kind)

    @staticmethod
    def loaded(request: LoadRequest, name: str) -> Any:
        """The body that says that a model is loaded, or is not any more, for APIs with a request for that."""
        raise NotImplementedError

    @staticmethod
    @abstractmethod
    def choices(request: Any, conversations: Conversations) -> list[AnswerChoice]:
        """The answers to generate. Raises ApiError for fields that contradict each other."""

    @abstractmethod
    def whole(self, results: Sequence[Result]) -> Any:
        """The body of a response that is not streamed."""

    @abstractmethod
    def begin(self) -> Iterator[Any]:
        """The events before the first piece."""

    @abstractmethod
    def events(self, number: int, chunk: TextChunk) -> Iterator[Any]:
        """The events for a piece of the answer `number`."""

    def failure(self, error: ApiError) -> Any:
        """The event that ends a stream which fails."""
        return error.body


class SingleAnswer(ServedAnswer[Kind]):
    """One choice, whose text is split into reasoning, content and calls."""

    last = ""

    def __init__(
        self, request: Kind, head: AnswerHead, choices: Sequence[AnswerChoice], reading: AnswerReading
    ) -> None:
        super().__init__(request, head, choices)
        self._reading = reading
        self._reader: Reader | None = None

    def _pieces(self, text: str, result: Result | None, *, thinks: bool) -> list[Piece]:
        """What a text adds. result: with the last of it. thinks: whether the answer begins within its reasoning."""
        self._reader = self._reader or self._reading.reader(thinks=thinks)
        return self._reader.read(text, result)


class AnswerChoices(ServedAnswer[Many]):
    """n choices for each prompt."""

    def __init__(self, request: Many, head: AnswerHead, choices: Sequence[AnswerChoice]) -> None:
        super().__init__(request, head, choices)
        self._results: list[Result | None] = [None] * len(choices)
        self._reading = AnswerReading()

    @abstractmethod
    def _piece(self, number: int, chunk: TextChunk, **last: Any) -> Iterator[msgspec.Struct]:
        """The events of a piece of a choice. last: fields of the last of them."""

    @abstractmethod
    def _event(self, choices: Sequence[Any], **fields: Any) -> msgspec.Struct:
        """An event of a stream."""

    def events(self, number: int, chunk: TextChunk) -> Iterator[msgspec.Struct]:
        """The events for a piece of a choice. The last piece of all is followed by the usage, if it was asked for."""
        self._results[number] = chunk.result
        ended = [result for result in self._results if result]
        is_last = len(ended) == len(self._results)
        timings = {"timings": timings_of([result.stats for result in ended])} if is_last else {}
        if not self._wants_usage:
            yield from self._piece(number, chunk, **timings)
            return
        yield from self._piece(number, chunk)
        if is_last:
            yield self._event([], **self._totals(ended))

    def _tokens(self, tokens: Sequence[AnswerToken]) -> dict[str, Any]:
        """The field `tokens` of a choice, if it was asked for."""
        if not self.request.return_tokens:
            return {}
        return {"tokens": [Token(t.token_id, self.head.texts[t.token_id], t.source, t.drafter) for t in tokens]}

    def _totals(self, results: Sequence[Result]) -> dict[str, Any]:
        stats = [result.stats for result in results]
        num_reasoning = sum(self._reading.count(result, self.head.texts) for result in results)
        return {"usage": usage_of(stats, self.request.n or 1, num_reasoning), "timings": timings_of(stats)}

    @property
    def _wants_usage(self) -> bool:
        options = self.request.stream_options
        return bool(options and options.include_usage)

    @property
    def _no_usage_yet(self) -> Any:
        """OpenAI sends null with every event before the usage, and nothing if it was not asked for."""
        return None if self._wants_usage else UNSET


def finish_reason(result: Result) -> FinishReason:
    """Why an answer ended, as OpenAI's API says it."""
    return "length" if result.finish_reason == "length" else "stop"
