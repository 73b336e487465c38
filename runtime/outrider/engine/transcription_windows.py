"""One window of a transcription: its segments by timestamps, and whether its text is good enough."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from outrider.decoding.results import Result
from outrider.engine.transcription_options import TranscriptionOptions

TIMESTAMP_SECONDS = 0.02  # seconds from one timestamp to the next


class Piece(NamedTuple):
    """A segment of a window. begin, end: seconds of the window. text_token_ids: without timestamps."""

    begin: float
    end: float
    text_token_ids: list[int]


def cut(token_ids: Sequence[int], first: int, seconds: float) -> tuple[list[Piece], float, list[int]]:
    """The complete segments of a window, how many of its seconds they take, and their tokens.

        cut([stamp(0.0), 7, stamp(2.0), stamp(2.0), 8], stamp(0.0), 30.0)  # one segment, of 2 s: 8 is read again

    token_ids: without the end token. first: the token of 0.00 s. seconds: of audio in the window.

    Two timestamps in a row end one segment and begin the next. Without any such pair the text is one segment, and the
    window is done. A single timestamp at the end says that nothing is spoken after it, so the window is done as well.
    Otherwise the window is done up to its last pair: what follows is not complete.

    Source: openai/whisper, `transcribe.py`.
    """
    is_stamp = [token_id >= first for token_id in token_ids]
    ends = [i for i in range(1, len(token_ids)) if is_stamp[i - 1] and is_stamp[i]]
    if not ends:
        piece = _piece(token_ids, first, seconds)
        return [piece] if piece.text_token_ids else [], seconds, [*token_ids]
    ends_with_one = is_stamp[-2:] == [False, True]
    if ends_with_one:
        ends.append(len(token_ids))
    pieces = [_piece(token_ids[i:k], first, seconds) for i, k in zip([0, *ends], ends, strict=False)]
    done = seconds if ends_with_one else min((token_ids[ends[-1] - 1] - first) * TIMESTAMP_SECONDS, seconds)
    return [each for each in pieces if each.text_token_ids], done, [*token_ids[: ends[-1]]]


def _piece(token_ids: Sequence[int], first: int, seconds: float) -> Piece:
    """A segment from its tokens. It begins and ends with the window where they do not begin and end with timestamps."""
    text = [token_id for token_id in token_ids if token_id < first]
    stamps = [min((token_id - first) * TIMESTAMP_SECONDS, seconds) for token_id in token_ids if token_id >= first]
    begin = stamps[0] if stamps and token_ids[0] >= first else 0.0
    end = stamps[-1] if stamps and token_ids[-1] >= first else seconds
    return Piece(begin, max(begin, end), text)


def compression_ratio(text: str) -> float:
    """How many times smaller zlib makes a text: high where it repeats itself."""
    content = text.encode("utf-8", "surrogatepass")
    return len(content) / len(zlib.compress(content))


@dataclass(slots=True)
class Attempt:
    """A window's answer at one temperature.

    token_ids: without the end token. average: log-probability of a token, the end's among them. find: computes the
    probability that nothing is spoken, which takes a request; None if the model has no token for it.
    """

    result: Result
    token_ids: list[int]
    temperature: float
    average: float
    find: Callable[[], float | None]
    ratio: float = field(init=False)
    no_speech: float | None = None
    _is_found: bool = False

    def __post_init__(self) -> None:
        self.ratio = compression_ratio(self.result.text.strip())

    @property
    def figures(self) -> tuple[float, float, float, float | None]:
        """Of its segments: temperature, avg_logprob, compression_ratio, no_speech_prob."""
        return self.temperature, self.average, self.ratio, self.no_speech

    def fails(self, options: TranscriptionOptions) -> bool:
        """Whether the window is to be tried at the next temperature: its text repeats itself or is unlikely."""
        threshold = options.compression_ratio_threshold
        repeats = threshold is not None and self.ratio > threshold
        is_unlikely = options.logprob_threshold is not None and self.average < options.logprob_threshold
        if is_unlikely and self.is_silent(options):
            return False
        return repeats or is_unlikely

    def is_silent(self, options: TranscriptionOptions) -> bool:
        """Whether the window is left out: the model finds that nothing is spoken, and its text unlikely.

        A likely text is kept, so the probability is asked for only where the text is not.
        """
        if options.no_speech_threshold is None:
            return False
        if options.logprob_threshold is not None and self.average > options.logprob_threshold:
            return False
        if not self._is_found:
            self.no_speech, self._is_found = self.find(), True
        return self.no_speech is not None and self.no_speech > options.no_speech_threshold
