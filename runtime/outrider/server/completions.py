"""/v1/completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from outrider.decoding.results import Result, TextChunk
from outrider.server.answers import AnswerChoices, AnswerHead, finish_reason
from outrider.server.conversations import Conversations
from outrider.server.infill import Infill
from outrider.server.logprobs import TextOffsets, completion_logprobs
from outrider.server.options import AnswerChoice, choices_of_completion
from outrider.server.protocol.requests import CompletionRequest
from outrider.server.protocol.responses import Completion, CompletionChoice, CompletionLogprobs
from outrider.types import TokenLogprobs


class Completions(AnswerChoices[CompletionRequest]):
    """The answers to one or several texts."""

    kind = CompletionRequest
    prefix = "cmpl-"

    def __init__(self, request: CompletionRequest, head: AnswerHead, choices: Sequence[AnswerChoice]) -> None:
        super().__init__(request, head, choices)
        self._offsets = [TextOffsets(head.texts) for _ in choices]
        self._echoes = [self._echo(choice.prompt) if request.echo else "" for choice in choices]  # not given out yet
        self._scored = [choice.scored for choice in choices]  # the same

    def _echo(self, prompt: Any) -> str:
        """A prompt as text."""
        if isinstance(prompt, Infill):
            return prompt.before
        return prompt if isinstance(prompt, str) else self.head.texts.text_of(prompt)

    @staticmethod
    def choices(request: CompletionRequest, conversations: Conversations) -> list[AnswerChoice]:  # noqa: ARG004
        """The n answers of each prompt."""
        return choices_of_completion(request)

    def whole(self, results: Sequence[Result]) -> Completion:
        """All choices in one body."""
        choices = [self._choice(i, result) for i, result in enumerate(results)]
        return Completion(choices=choices, **self.head.fields, **self._totals(results))

    def begin(self) -> Iterator[Completion]:
        """Nothing comes before the text."""
        yield from ()

    def _choice(self, number: int, result: Result) -> CompletionChoice:
        logprobs, tokens = self._logprobs(result.logprobs, number), self._tokens(result.tokens)
        return CompletionChoice(
            number, self._echoes[number] + result.text, finish_reason(result), logprobs, result.seed, **tokens
        )

    def _piece(self, number: int, chunk: TextChunk, **last: Any) -> Iterator[Completion]:
        logprobs, tokens = self._logprobs(chunk.logprobs, number), self._tokens(chunk.tokens)
        text, self._echoes[number] = self._echoes[number] + chunk.text, ""
        if result := chunk.result:
            choice = CompletionChoice(number, text, finish_reason(result), logprobs, result.seed, **tokens)
            yield self._event([choice], **last)
        else:
            yield self._event([CompletionChoice(number, text, logprobs=logprobs, **tokens)])

    def _event(self, choices: Sequence[CompletionChoice], **fields: Any) -> Completion:
        return Completion(choices=list(choices), **{"usage": self._no_usage_yet} | self.head.fields | fields)

    def _logprobs(self, tokens: Sequence[TokenLogprobs] | None, number: int) -> CompletionLogprobs | None:
        if tokens is None:
            return None
        scored, self._scored[number] = self._scored[number], None
        first = scored[0][0] if scored and scored[0] else None
        before = scored[1] if scored else ()
        return completion_logprobs([*before, *tokens], self.head.texts, self._offsets[number], first)
