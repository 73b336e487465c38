"""The result of a request."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

from outrider.decoding.metrics import Stats
from outrider.types import Draft, Outcome, TokenLogprobs

Source: TypeAlias = Literal["accepted", "recovered", "bonus", "plain"]


class AnswerToken(NamedTuple):
    """A token of an answer, and where it comes from.

    source: "accepted", a draft token; "recovered", the main model's in place of the first rejected one; "bonus", the
    main model's after a draft that was accepted whole; "plain", the main model's in a round without a draft. drafter:
    the name of the drafter whose draft was checked in that round; None if there was none.
    """

    token_id: int
    source: Source = "plain"
    drafter: str | None = None


def tokens_of_round(
    token_ids: Sequence[int], draft: Draft, outcome: Outcome, drafter: str | None = None
) -> list[AnswerToken]:
    """The tokens that a round committed, with their sources. token_ids: the accepted ones, then the next, if not cut.

    drafter: the name of the one that made the draft.
    """
    if not len(draft):
        return [AnswerToken(token_id) for token_id in token_ids]
    is_whole = not draft.children(outcome.path[-1] if outcome.path else -1)
    sources: list[Source] = ["accepted"] * outcome.num_accepted
    sources.append("bonus" if is_whole else "recovered")
    return [AnswerToken(token_id, source, drafter) for token_id, source in zip(token_ids, sources, strict=False)]


@dataclass(frozen=True, slots=True)
class Result:
    """A whole answer.

    text: without special tokens, but for the markers of reasoning and calls, cut before a stop string, and without the
    bytes of a character that "length" or "cancelled" cuts, which are in token_ids and logprobs alone. token_ids: ends
    with the end-of-sequence id if the model gave one. finish_reason: "stop", "length" or "cancelled". seed: of the
    noise; None when greedy. lossless: False for a lossy mode, whose text does not have the main model's distribution.
    exact: whether the request gives these tokens with any drafter or none, alone or in a batch, as measured at load;
    False for sampling whose text depends on drafts, and if the main model's rows depend on the batch. logprobs: one for
    each of token_ids; None unless requested. tokens: token_ids with the source of each. thinks: whether the text begins
    within the model's reasoning, which the prompt has begun; see `engine.reasoning_format`. stop_string: the one that
    ended the answer; None if none did.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    stats: Stats
    seed: int | None
    lossless: bool
    exact: bool = False
    logprobs: list[TokenLogprobs] | None = None
    tokens: list[AnswerToken] = field(default_factory=list)
    thinks: bool = False
    stop_string: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """All fields, for JSON."""
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "thinks": self.thinks,
            "seed": self.seed,
            "lossless": self.lossless,
            "exact": self.exact,
            "logprobs": None if self.logprobs is None else [asdict(token) for token in self.logprobs],
            "tokens": [token._asdict() for token in self.tokens],
            "stats": self.stats.as_dict(),
        }


@dataclass(frozen=True, slots=True)
class TextChunk:
    """The text that one or more rounds added to an answer.

    stats: of the request so far; with `prompt_progress`, chunks before the first text say how much of the prompt is
    read: `stats.num_read_tokens`. result: None until the last chunk, whose text may be empty. tokens: those whose text
    this chunk completes, with their sources; the tokens of all chunks are those of the result. logprobs: one for each
    of them; None unless requested. thinks: as of the result.
    """

    text: str
    stats: Stats
    result: Result | None = None
    tokens: list[AnswerToken] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    thinks: bool = False

    @property
    def is_progress(self) -> bool:
        """Whether it only says how far the prompt is read."""
        return not self.text and self.result is None


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a transcription. begin, end: seconds from the beginning of the audio.

    The rest is that of its window, by OpenAI's names. temperature: at which it was decoded. avg_logprob: of its tokens,
    at temperature 1. compression_ratio: of its text by zlib. no_speech_prob: None where its text was likely, and nobody
    asked.
    """

    begin: float
    end: float
    text: str
    temperature: float = 0.0
    avg_logprob: float | None = None
    compression_ratio: float | None = None
    no_speech_prob: float | None = None


@dataclass(frozen=True, slots=True)
class Transcription:
    """The text of audio.

    language: that was given or found; None for a model of one language. segments: by the model's timestamps if they
    were asked for, otherwise one for each window. windows: the answer for each window, with its tokens and counts; a
    window begins where the last complete segment ended, so what follows that in its text is in the next one's.
    """

    text: str
    language: str | None
    segments: list[Segment]
    windows: list[Result]

    def as_dict(self) -> dict[str, Any]:
        """All fields, for JSON."""
        return {
            "text": self.text,
            "language": self.language,
            "segments": [asdict(segment) for segment in self.segments],
            "windows": [window.as_dict() for window in self.windows],
        }
