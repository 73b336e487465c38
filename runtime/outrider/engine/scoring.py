"""How likely a given text is to a model: log-probabilities of its tokens, read like a draft that is always right."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from outrider.config import GenerationConfig
from outrider.config.checks import are_ids, shown_value
from outrider.decoding.answer import Answer
from outrider.decoding.request_queue import RequestQueue
from outrider.errors import OptionError, RequestError
from outrider.types import Distribution, Draft, DraftPolicy, DraftRequest, Noise, Outcome, Rows, TokenLogprobs, Turn

PIECE_TOKENS = 64  # most tokens a round: a row of logits for each is in memory


def as_token_ids(answer: Any) -> list[int]:
    """The token ids of an answer that is no text: a list, or an array.

    Raises:
        OptionError: when it is neither.
    """
    values = answer.tolist() if hasattr(answer, "tolist") else answer
    if isinstance(values, bytes) or not isinstance(values, Sequence) or not are_ids(tuple(values)):
        raise OptionError(f"answer={shown_value(answer)} is neither a text nor token ids. Give one of them.")
    return [int(value) for value in values]


def options(token_ids: Sequence[int], vocab_size: int, top: int = 0) -> GenerationConfig:
    """Those of a request that scores these tokens. top: how many of the likeliest are wanted in place of each.

    Raises:
        RequestError: when there is none, or one that is not in the vocabulary.
    """
    if not token_ids:
        raise RequestError("answer='' has no tokens to score. Pass the text of an answer, or its token ids.")
    if unknown := [token_id for token_id in token_ids if not 0 <= token_id < vocab_size]:
        raise RequestError(f"The answer has token id {unknown[0]}; the vocabulary ends at {vocab_size - 1:,}.")
    return GenerationConfig(
        drafter=None, logprobs=top, logprobs_of="unprocessed", max_new_tokens=len(token_ids), ignore_eos=True
    )


def score(queue: RequestQueue, answer: Answer, token_ids: Sequence[int]) -> list[TokenLogprobs]:
    """Natural log-probabilities, one for each of `token_ids`, which follow the answer's prompt.

    answer: made with `options`. Source: teacher forcing; the rounds are those of
    speculative decoding with every token accepted.

    Raises:
        OutriderError: when the answer fails.
    """
    give(answer, token_ids)
    for _ in queue.run(answer):
        pass
    return [*(answer.logprobs or ())]


def give(answer: Answer, token_ids: Sequence[int]) -> None:
    """Have these tokens read as the answer, in pieces that wait for rows as those of a prompt do."""
    begin = answer.sequence.num_prompt_tokens
    answer.request = replace(
        answer.request,
        policy=_Given(begin, tuple(token_ids)),
        verifier=_Accepting(begin, tuple(token_ids)),
        num_assistant_tokens=PIECE_TOKENS - 1,
        waits=True,
    )
    answer.delivery.save = None


@dataclass(frozen=True)
class _Given(DraftPolicy):
    """A policy whose drafts are the tokens to score."""

    begin: int
    token_ids: tuple[int, ...]

    def choose(self, requests: Sequence[DraftRequest]) -> list[Turn]:
        """The next tokens of each."""
        turns = []
        for request in requests:
            done = len(request.sequence) - self.begin
            turns.append(Turn(request, draft=Draft([*self.token_ids[done : done + request.limit]])))
        return turns


@dataclass(frozen=True)
class _Accepting:
    """A verifier that accepts the tokens to score, whatever the rows say."""

    begin: int
    token_ids: tuple[int, ...]
    lossless: ClassVar[bool] = False
    trees: ClassVar[bool] = False

    def draw(self, rows: Rows, i: int, noise: Noise, position: int) -> tuple[int, Distribution | None]:  # noqa: ARG002
        """The given token at row i."""
        return self.token_ids[position - self.begin + i], None

    def draw_several(
        self,
        rows: Rows,
        i: int,
        noise: Noise,
        position: int,
        count: int,  # noqa: ARG002
    ) -> Sequence[tuple[int, Distribution | None]]:
        """The given token alone."""
        return [self.draw(rows, i, noise, position)]

    def verify(self, draft: Draft, rows: Rows, noise: Noise, position: int) -> Outcome:
        """Accept the whole draft, and add the given token after it."""
        return Outcome.of_chain(len(draft), self.draw(rows, len(draft), noise, position)[0])
