"""llama.cpp's /completion and /infill, as editors and scripts ask for them: the same answers in its words.

Source: tools/server/README.md of llama.cpp, and its `server-context.cpp` for the indentation.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import msgspec

from outrider.decoding.results import AnswerToken, Result, TextChunk
from outrider.server.answers import AnswerHead, ServedAnswer, WrappedRequest
from outrider.server.conversations import Conversations
from outrider.server.errors import ApiError
from outrider.server.infill import Infill
from outrider.server.options import AnswerChoice, choices_of_completion
from outrider.server.protocol.loose import IGNORED
from outrider.server.protocol.reading import as_text, read_fields, read_object
from outrider.server.protocol.requests import CompletionRequest
from outrider.server.usage import timings_of

# Samplers that do not change which token is the likeliest; penalties are options of their own.
_SAMPLERS = {"top_k", "top_p", "min_p", "typ_p", "typical_p", "temperature", "penalties", "dry", "xtc", "infill"}
_OWN = ("response_fields", "t_max_predict_ms", "n_indent", "return_tokens")


class Limit:
    """Ends a completion after its first line that is indented less, or some time after its first line.

        limit = Limit(milliseconds=500, indent=4)     # 0: without
        limit.read(chunk.text)
        limit.is_set()                                # as the engine asks for an answer's end

    Source: `t_max_predict_ms` and `n_indent` of llama.cpp.
    """

    def __init__(self, milliseconds: float, indent: int) -> None:
        self._seconds, self._indent = milliseconds / 1000, indent
        self._deadline: float | None = None
        self._text = ""

    def read(self, text: str) -> None:
        """Read what comes next."""
        self._text += text
        if self._deadline is None and self._seconds > 0:
            self._deadline = time.monotonic() + self._seconds

    def is_set(self) -> bool:
        """Whether the answer ends here."""
        is_late = self._deadline is not None and time.monotonic() > self._deadline
        return (is_late and "\n" in self._text) or self.cut(self._text) != self._text

    def cut(self, text: str) -> str:
        """A text up to the first line that is indented less."""
        place = 0
        while self._indent > 0 and (place := text.find("\n", place) + 1):
            behind = text[place:].lstrip(" \t")
            if behind and len(text) - place - len(behind) < self._indent:
                return text[: len(text) - len(behind)]
        return text


class LlamaCompletion(ServedAnswer[CompletionRequest]):
    """The answers to /completion: one, or a list for several prompts."""

    kind = CompletionRequest
    prefix = "llama-"
    last = ""
    fills_in: ClassVar[bool] = False

    def __init__(self, request: Any, head: AnswerHead, choices: Sequence[AnswerChoice]) -> None:
        super().__init__(request.own, head, choices)
        self._asked: Mapping[str, Any] = request.others
        self._choices = choices

    @classmethod
    def read(cls, body: bytes) -> Any:
        """The completion that a body asks for."""
        return cls._read(read_object(body))

    @classmethod
    def _read(cls, fields: dict[str, Any]) -> WrappedRequest[CompletionRequest]:
        others = {name: fields.pop(name, None) for name in _OWN}
        for name in ("n_probs", "logprobs"):
            if fields.pop(name, None):
                message = f"'{name}' is not supported here. Send logprobs to /v1/completions."
                raise ApiError(400, message, param=name, code="unsupported_field")
        if "n_cmpl" in fields:
            fields["n"] = fields.pop("n_cmpl")
        fields["prompt"] = _prompt(fields.get("prompt", "" if cls.fills_in else None))
        _check_samplers(fields)
        return WrappedRequest(read_fields(fields, CompletionRequest), others)

    @staticmethod
    def choices(request: Any, conversations: Conversations) -> list[AnswerChoice]:  # noqa: ARG004
        """The answers to each prompt."""
        milliseconds, indent = (_number(request.others, name) for name in ("t_max_predict_ms", "n_indent"))
        if indent > 0 and request.stream:
            message = "n_indent is not supported in a stream. Set stream to false, or leave it out."
            raise ApiError(400, message, param="n_indent", code="unsupported_field")
        choices = choices_of_completion(request.own)
        if milliseconds <= 0 and indent <= 0:
            return choices
        return [replace(choice, limit=Limit(milliseconds, int(indent))) for choice in choices]

    def whole(self, results: Sequence[Result]) -> Any:
        """The answer in one body, or a list of them."""
        bodies = [self._ended(i, result, result.text) for i, result in enumerate(results)]
        return bodies[0] if len(bodies) == 1 else bodies

    def begin(self) -> Iterator[Any]:
        """Nothing comes before the text."""
        yield from ()

    def events(self, number: int, chunk: TextChunk) -> Iterator[Any]:
        """What a piece adds."""
        if chunk.text or chunk.tokens:
            yield self._piece(number, chunk.text, chunk.tokens)
        if chunk.result:
            yield self._ended(number, chunk.result, "")

    def _piece(self, number: int, text: str, tokens: Sequence[AnswerToken]) -> dict[str, Any]:
        return {"index": number, "content": text, "tokens": [token.token_id for token in tokens], "stop": False}

    def _ended(self, number: int, result: Result, text: str) -> dict[str, Any]:
        """The last event, or the whole answer."""
        limit, prompt = self._choices[number].limit, self._choices[number].prompt
        stats, request = result.stats, self.request
        text = limit.cut(text) if limit else text
        tokens = result.tokens if self._asked["return_tokens"] and not request.stream else []
        kind = "word" if result.stop_string else "eos"
        kind = kind if result.finish_reason == "stop" else "limit"
        made = self._piece(number, text, tokens) | {
            "id_slot": 0,
            "stop": True,
            "model": self.head.model,
            "tokens_predicted": stats.num_generated_tokens,
            "tokens_evaluated": stats.num_prompt_tokens,
            "tokens_cached": stats.num_prompt_tokens + stats.num_generated_tokens,
            "generation_settings": _settings(request) | {"seed": result.seed},
            "prompt": self._shown(prompt),
            "has_new_line": "\n" in result.text,
            "truncated": False,  # a prompt that does not fit is refused
            "stop_type": kind,
            "stopping_word": result.stop_string or "",
            "timings": msgspec.to_builtins(timings_of([stats])),
        }
        return _only(made, self._asked["response_fields"])

    def _shown(self, prompt: Any) -> str:
        if isinstance(prompt, Infill):
            return prompt.before
        return prompt if isinstance(prompt, str) else self.head.texts.spelled(prompt)


class LlamaInfill(LlamaCompletion):
    """The answer to /infill: what is between a prefix and a suffix."""

    fills_in = True

    @classmethod
    def read(cls, body: bytes) -> Any:
        """The completion that a body asks for."""
        fields = read_object(body)
        given = {name: fields.pop(name, None) for name in ("input_prefix", "input_suffix", "input_extra")}
        before, after = (as_text(given[name] or "", name) for name in ("input_prefix", "input_suffix"))
        files = _files(given["input_extra"] or [])
        asked = cls._read(fields)
        if not isinstance(asked.own.prompt, str):
            raise ApiError(400, "The prompt of /infill is not a text.", param="prompt", code="invalid_type")
        infill = Infill(before, after, begun=asked.own.prompt, files=files, field="input_suffix")
        return WrappedRequest(asked.own, {**asked.others, "infill": infill})

    @staticmethod
    def choices(request: Any, conversations: Conversations) -> list[AnswerChoice]:
        """The one answer."""
        made = LlamaCompletion.choices(request, conversations)
        return [replace(choice, prompt=request.others["infill"]) for choice in made]


def _prompt(prompt: Any) -> Any:
    """A prompt that is not an object with images, nor text and token ids in one."""
    if isinstance(prompt, Mapping) and not prompt.get("multimodal_data"):
        return prompt.get("prompt_string")
    if isinstance(prompt, Mapping):
        message = "Images in a text are not supported. Send them to /v1/chat/completions."
        raise ApiError(400, message, param="prompt.multimodal_data", code="unsupported_field")
    if isinstance(prompt, list):
        if {int, str} <= {type(each) for each in prompt}:
            message = "A prompt of texts and token ids in one is not supported. Send one of them."
            raise ApiError(400, message, param="prompt", code="unsupported_field")
        return [_prompt(each) if isinstance(each, Mapping) else each for each in prompt]
    return prompt


def _check_samplers(fields: dict[str, Any]) -> None:
    """Leave out the names and the order of samplers where the likeliest token is taken: also without a temperature."""
    samplers = fields.get("samplers")
    if isinstance(samplers, list) and {*map(str, samplers)} <= _SAMPLERS and not fields.get("temperature"):
        IGNORED.add(["samplers"])
        del fields["samplers"]
        fields["temperature"] = 0.0  # whatever the server's default is


def _number(others: Mapping[str, Any], name: str) -> float:
    value = others[name] or 0
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ApiError(400, f"'{name}' is not a number.", param=name, code="invalid_type")
    return value


def _files(given: Any) -> list[tuple[str, str]]:
    if not isinstance(given, list) or not all(isinstance(each, Mapping) for each in given):
        raise ApiError(400, "'input_extra' is not a list of objects.", param="input_extra", code="invalid_type")
    places = [(each, f"input_extra[{i}]") for i, each in enumerate(given)]
    return [
        (as_text(each.get("filename") or "tmp", f"{place}.filename"), as_text(each.get("text") or "", f"{place}.text"))
        for each, place in places
    ]


def _settings(request: CompletionRequest) -> dict[str, Any]:
    """The options that the request has, by its names."""
    fields = msgspec.to_builtins(request)
    return {name: value for name, value in fields.items() if name not in ("prompt", "model") and value is not None}


def _only(body: dict[str, Any], names: Any) -> dict[str, Any]:
    """The fields that were asked for; "timings/prompt_n" is one of an object."""
    if not isinstance(names, list) or not names:
        return body
    found = dict[str, Any]()
    for name in map(str, names):
        value: Any = body
        for key in name.split("/"):
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is not None:
            found[name] = value
    return found
