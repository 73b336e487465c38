"""An API as a row: how a body of it asks for a chat or a completion, and how an answer is a body or events of it."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from outrider.decoding.results import AnswerToken, Result, TextChunk
from outrider.inputs.reasoning import ReasoningFormat, Thought
from outrider.inputs.tools import ToolCallDelta, ToolFormat
from outrider.server.conversations import Conversations
from outrider.server.errors import ApiError, shaped
from outrider.server.logprobs import LocatedLogprobs, TextOffsets, TokenTexts
from outrider.server.options import AnswerChoice, choices_of_chat, choices_of_completion
from outrider.server.protocol.requests import ChatRequest, CompletionRequest, LoadRequest
from outrider.server.protocol.responses import FinishReason
from outrider.server.reader import AnswerReading, Piece, Reader
from outrider.server.usage import timings_of, usage_of

Events: TypeAlias = Iterable[Any]  # as structs or dicts


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a body asks for."""

    request: ChatRequest | CompletionRequest | LoadRequest
    own: Any = None  # what only this API's answers need of the body


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What all bodies of one answer begin with, and what is known of its model."""

    id: str
    created: int  # seconds since 1970
    model: str
    system_fingerprint: str
    texts: TokenTexts
    tool_format: ToolFormat | None
    conversations: Conversations  # where the answer may be stored
    reasoning_format: ReasoningFormat | None = None
    loose_calls: bool = True  # as in the settings
    num_prompt_tokens: int = 0  # of the first choice

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of a body."""
        return {name: getattr(self, name) for name in ("id", "created", "model", "system_fingerprint")}


@dataclass(frozen=True, slots=True)
class Part:
    """A part of an answer, as far as it has come: reasoning, text, or a call."""

    kind: Literal["thought", "text", "call"]
    index: int  # among the parts
    text: str = ""  # of a call: its arguments, in JSON
    name: str = ""  # of a call
    call_index: int = 0  # among the calls
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    logprobs: tuple[dict[str, Any], ...] = ()  # of its text, in dialects that locate them


class News(NamedTuple):
    """What happens to a part. part: after that. text, logprobs: what it grows by."""

    kind: Literal["begun", "grown", "ended"]
    part: Part
    text: str = ""
    logprobs: Sequence[dict[str, Any]] = ()


class ServedChoice:
    """One choice of an answer, as far as it has come."""

    def __init__(
        self, number: int, choice: AnswerChoice, reading: AnswerReading, texts: TokenTexts, *, shown: bool
    ) -> None:
        self.number, self.choice, self._reading, self._shows_thoughts = number, choice, reading, shown
        self.parts: list[Part] = []
        self.result: Result | None = None
        self.located: LocatedLogprobs | None = None
        self.offsets = TextOffsets(texts)  # of the tokens whose log-probabilities were given out
        self._reader: Reader | None = None

    @property
    def has_begun(self) -> bool:
        """Whether a piece was read."""
        return self._reader is not None

    def of_kind(self, kind: Literal["thought", "text", "call"]) -> list[Part]:
        """Its parts of a kind."""
        return [part for part in self.parts if part.kind == kind]

    @property
    def text(self) -> str:
        """What it says, without reasoning and calls."""
        return "".join(part.text for part in self.of_kind("text"))

    @property
    def thoughts(self) -> str:
        """Its reasoning, if that is shown."""
        return "".join(part.text for part in self.of_kind("thought"))

    @property
    def calls(self) -> list[Part]:
        """Its calls. One that a stop string has cut is none."""
        calls = self.of_kind("call")
        is_stopped = self.result is not None and self.result.finish_reason == "stop"
        return calls[:-1] if calls and is_stopped and self._is_cut else calls

    @property
    def has_called(self) -> bool:
        """Whether it has a call."""
        return self._reader is not None and self._reader.has_called

    @property
    def _is_cut(self) -> bool:
        return self._reader is not None and self._reader.is_cut

    @property
    def finish_reason(self) -> FinishReason:
        """Why it has ended, as OpenAI's API says it."""
        if self.result is not None and self.result.finish_reason == "length":
            return "length"
        return "tool_calls" if self.has_called and not self._is_cut else "stop"

    def read(self, chunk: TextChunk) -> list[News]:
        """Take in a piece of the answer."""
        if self._reader is None:
            self._reader = self._reading.reader(thinks=chunk.thinks)
        if self.located is not None:
            self.located.read(chunk.text, chunk.logprobs or ())
        pieces = self._reader.read(chunk.text, chunk.result)
        news = [each for piece in pieces for each in self._add(piece)]
        if chunk.result:
            self.result = chunk.result
            news += [] if self.parts else self._begin("text")
            news.append(News("ended", self.parts[-1]))
        return news

    def _add(self, piece: Piece) -> Iterator[News]:
        kind: Literal["thought", "text", "call"] = "text"
        if isinstance(piece, str):
            text = piece
        elif isinstance(piece, Thought):
            kind, text = "thought", piece.text
        else:
            kind, text = "call", piece.arguments
        logprobs = self.located.of(text) if self.located is not None else []
        if kind == "thought" and not self._shows_thoughts:
            return
        is_new = piece.name is not None if isinstance(piece, ToolCallDelta) else False
        if is_new or not self.parts or self.parts[-1].kind != kind:
            yield from self._begin(kind, (piece.name or "") if isinstance(piece, ToolCallDelta) else "")
        if text:
            part = self.parts[-1]
            part = self.parts[-1] = replace(part, text=part.text + text, logprobs=(*part.logprobs, *logprobs))
            yield News("grown", part, text, logprobs)

    def _begin(self, kind: Literal["thought", "text", "call"], name: str = "") -> list[News]:
        ended = [News("ended", self.parts[-1])] if self.parts else []
        self.parts.append(Part(kind, len(self.parts), name=name, call_index=len(self.of_kind("call"))))
        return [*ended, News("begun", self.parts[-1])]


class ChoicePiece(NamedTuple):
    """A piece of a choice, and what it changes."""

    said: ServedChoice
    chunk: TextChunk
    news: Sequence[News]
    is_first: bool  # of the choice
    is_last: bool  # of all choices


class ServedAnswer:
    """All choices of one answer, as far as they have come. locates: their parts have log-probabilities."""

    def __init__(
        self, wanted: Wanted, head: AnswerHead, choices: Sequence[AnswerChoice], *, locates: bool = False
    ) -> None:
        request: Any = wanted.request
        self.request, self.own, self.head = request, wanted.own, head
        self.reading = reading_of(request, head)
        shown = not isinstance(request, ChatRequest) or _shows_thoughts(request)
        self.choices = [ServedChoice(i, each, self.reading, head.texts, shown=shown) for i, each in enumerate(choices)]
        if locates and request.logprobs:
            for said in self.choices:
                said.located = LocatedLogprobs(head.texts, self.reading.markers(head.texts))
        self.num_events = 0  # that were numbered

    def read(self, number: int, chunk: TextChunk) -> ChoicePiece:
        """Take in a piece of a choice."""
        said = self.choices[number]
        is_first = not said.has_begun
        news = said.read(chunk)
        is_last = chunk.result is not None and all(each.result for each in self.choices)
        return ChoicePiece(said, chunk, news, is_first, is_last)

    @property
    def results(self) -> list[Result]:
        """Of the choices that have ended."""
        return [said.result for said in self.choices if said.result]

    @property
    def timings(self) -> dict[str, Any]:
        """The field `timings`."""
        return {"timings": timings_of([result.stats for result in self.results])}

    @property
    def totals(self) -> dict[str, Any]:
        """The fields `usage` and `timings`, as OpenAI's and llama-server's."""
        stats = [result.stats for result in self.results]
        return {"usage": usage_of(stats, self.request.n or 1, self.num_reasoning), **self.timings}

    @property
    def num_reasoning(self) -> int:
        """Tokens of reasoning."""
        return sum(self.reading.count(result, self.head.texts) for result in self.results)

    def event(self, kind: str, choices: Sequence[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        """An event of a stream, as OpenAI's."""
        usage = {"usage": None} if self.wants_usage else {}
        return {"object": kind, "choices": [*choices], **usage, **self.head.fields, **fields}

    def tokens(self, tokens: Sequence[AnswerToken]) -> dict[str, Any]:
        """The field `tokens` of a choice, if it was asked for."""
        if not self.request.return_tokens:
            return {}
        texts = self.head.texts
        made = [{"id": t.token_id, "text": texts[t.token_id], "source": t.source, "drafter": t.drafter} for t in tokens]
        return {"tokens": made}

    @property
    def wants_usage(self) -> bool:
        """Whether a stream's last event is to have the usage; null is in those before it then, as OpenAI has it."""
        options = self.request.stream_options
        return bool(options and options.include_usage)


def _shows_thoughts(request: ChatRequest) -> bool:
    return not (request.include_reasoning is False or bool(request.reasoning and request.reasoning.exclude))


def reading_of(request: Any, head: AnswerHead) -> AnswerReading:
    """How a request's answers are read: those of a completion as they are."""
    if not isinstance(request, ChatRequest):
        return AnswerReading()
    return AnswerReading(
        reasoning=head.reasoning_format if request.reasoning_format != "none" else None,
        calls=head.tool_format if request.tools and request.tool_choice != "none" else None,
        max_calls=1 if request.parallel_tool_calls is False else None,
        tools=msgspec.to_builtins(request.tools or []),
        loose=head.loose_calls,
        once=request.tool_choice == "required",
    )


def choices_of(wanted: Wanted) -> list[AnswerChoice]:
    """The answers to generate. Raises ApiError for fields that contradict each other."""
    if isinstance(wanted.request, ChatRequest):
        return choices_of_chat(wanted.request)
    if isinstance(wanted.request, CompletionRequest):
        return choices_of_completion(wanted.request)
    return []


def first_choice(wanted: Wanted) -> list[AnswerChoice]:
    """The one answer of APIs that give no more."""
    return choices_of(wanted)[:1]


@dataclass(frozen=True, slots=True)
class Dialect:
    """An API that answers prompts."""

    path: str
    prefix: str  # of an answer's id
    to_chat: Callable[[bytes, Conversations], Wanted]  # what a body asks for. Raises ApiError with status 400
    events: Callable[[ServedAnswer, ChoicePiece], Events]  # of a stream, for a piece that was read
    body: Callable[[ServedAnswer], Any]  # of a response that is not streamed
    begin: Callable[[ServedAnswer], Events] = lambda _: ()  # events before the prompt is read
    failure: Callable[[ApiError, int], Any] | None = None  # of a stream that fails, if that is not an error's body
    ping: Callable[[str], Any] = lambda _: None  # an event of the model of this name in a silence; None: a comment
    progress: Callable[[ServedAnswer, int, dict[str, Any]], Any] | None = None  # how far a prompt is read
    choices: Callable[[Wanted], list[AnswerChoice]] = choices_of
    loaded: Callable[[LoadRequest, str], Any] | None = None  # the body after a model's load
    locates: bool = False  # parts have log-probabilities
    last: str = ""  # data after the last event
    lines: bool = False  # a stream is lines of JSON, not server-sent events
    named: bool = False  # events have their type as name

    def answer(self, wanted: Wanted, head: AnswerHead, choices: Sequence[AnswerChoice]) -> ServedAnswer:
        """An answer that has not begun."""
        return ServedAnswer(wanted, head, choices, locates=self.locates)

    def failed(self, error: ApiError, num_events: int) -> Any:
        """The last event of a stream that fails after so many."""
        return shaped(error, self.path) if self.failure is None else self.failure(error, num_events)

    def whole(self, answer: ServedAnswer, results: Sequence[Result]) -> Any:
        """The body of a response to choices that have ended."""
        for number, result in enumerate(results):
            answer.read(number, whole_chunk(result))
        return self.body(answer)


def whole_chunk(result: Result) -> TextChunk:
    """An answer in one piece."""
    return TextChunk(result.text, result.stats, result, result.tokens, result.logprobs, result.thinks)
