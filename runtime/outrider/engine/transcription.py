"""Transcribes audio in windows, as Whisper does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from outrider.bundle.manifest import AudioEntry, EncoderEntry
from outrider.decoding.results import Result, Segment, Transcription
from outrider.errors import OptionError, nearest
from outrider.inputs.audio import log_mel, read_samples
from outrider.types import Prompt, Source

_PRECISION = 0.02  # seconds from one timestamp to the next


@dataclass(frozen=True, slots=True)
class Transcriber:
    """Transcribes audio with an engine whose model reads it.

        transcriber = Transcriber(encoder, encoder.audio, engine.generate, engine.tokenizer.decode, eos_token_ids)
        transcriber.run("talk.wav", language="en", timestamps=True).segments

    audio: the encoder's. generate: answers a prompt. decode: the text of tokens. eos_token_ids: end an answer.

    Source: openai/whisper, `transcribe.py`: windows of 30 s, one after the other. With timestamps, the next window
    begins at the last one that was said. Nothing of an earlier window's text is read again, and no window is repeated
    at a higher temperature.
    """

    encoder: EncoderEntry
    audio: AudioEntry
    generate: Callable[..., Result]
    decode: Callable[[Seq[int]], str]
    eos_token_ids: Seq[int]

    def run(
        self,
        audio: Any,
        *,
        language: str | None = None,
        task: str | None = None,
        timestamps: bool = False,
        sampling_rate: int | None = None,
        **options: Any,
    ) -> Transcription:
        """The text of audio; see `Engine.transcribe`."""
        entry = self.audio
        self._check(language, task)
        samples = read_samples(audio, entry.sampling_rate, sampling_rate)
        size = entry.chunk_seconds * entry.sampling_rate // entry.hop_length  # frames of a window
        features = log_mel(
            samples,
            num_mel_bins=entry.num_mel_bins,
            sampling_rate=entry.sampling_rate,
            window_length=entry.window_length,
            hop_length=entry.hop_length,
            padding=size * entry.hop_length,
        )
        num_frames = -(-len(samples) // entry.hop_length)
        frames_per_second = entry.sampling_rate / entry.hop_length
        results: list[Result] = []
        segments: list[Segment] = []
        begin = 0
        while begin < num_frames:
            source = Source.of_audio(features[:, begin : begin + size])
            if entry.languages and language is None:
                language = self._find_language(source)
            result = self.generate(Prompt(self._begin(language, task, timestamps), source=source), **options)
            results.append(result)
            length = min(size, num_frames - begin)
            found = [Segment(0.0, length / frames_per_second, result.text)]
            if timestamps:
                found, said = self._cut(result.token_ids, length / frames_per_second)
                least = min(length, int(frames_per_second))  # a second, whatever the model says, so that this ends soon
                length = max(min(round(said * frames_per_second), length), least)
            offset = begin / frames_per_second
            segments += [Segment(each.begin + offset, each.end + offset, each.text) for each in found]
            begin += length
            if result.finish_reason == "cancelled":
                break
        return Transcription("".join(each.text for each in segments), language, segments, results)

    def _check(self, language: str | None, task: str | None) -> None:
        """Raise OptionError for a language or a task that the model does not know."""
        entry = self.audio
        for name, value, known in (("language", language, entry.languages), ("task", task, entry.tasks)):
            if value is None or value in known:
                continue
            if not known:
                raise OptionError(f"{name}={value!r} is for models of several languages. Leave it out.")
            raise OptionError(f"{name}={value!r} is not known to this model. {nearest(str(value), known)}")

    def _begin(self, language: str | None, task: str | None, timestamps: bool) -> list[int]:
        """The decoder's first tokens."""
        entry = self.audio
        token_ids = [*self.encoder.begin_token_ids]
        if entry.languages and language is not None:
            token_ids.append(entry.languages[language])
        if entry.tasks:
            token_ids.append(entry.tasks[task or "transcribe"])
        return token_ids if timestamps else [*token_ids, entry.no_timestamps_token_id]

    def _find_language(self, source: Source) -> str:
        """The likeliest language of a window."""
        prompt = Prompt(self.encoder.begin_token_ids, source=source)
        result = self.generate(prompt, max_new_tokens=1, min_new_tokens=0, temperature=0.0, drafter=None)
        by_id = {token_id: name for name, token_id in self.audio.languages.items()}
        return by_id[result.token_ids[0]]

    def _cut(self, token_ids: list[int], seconds: float) -> tuple[list[Segment], float]:
        """The segments of a window's answer, and how many of its seconds were transcribed.

        Two timestamps in a row end one segment and begin the next. A text that ends with a single one is complete. If
        the last segment has no end, it is left to the next window, unless it is the only one.
        """
        first = self.audio.first_timestamp_token_id
        if token_ids and token_ids[-1] in self.eos_token_ids:
            token_ids = token_ids[:-1]
        segments = list(self._segments(token_ids, seconds))
        stamps = [token_id for token_id in token_ids if token_id >= first]
        is_open = bool(token_ids) and token_ids[-1] < first
        is_pair = len(token_ids) > 1 and token_ids[-1] >= first and token_ids[-2] >= first
        if len(segments) > 1 and is_open:
            return segments[:-1], (stamps[-1] - first) * _PRECISION
        if is_pair:
            return segments, (stamps[-1] - first) * _PRECISION
        return segments, seconds

    def _segments(self, token_ids: list[int], seconds: float) -> Iterator[Segment]:
        first = self.audio.first_timestamp_token_id
        begin, text = 0.0, list[int]()
        for token_id in token_ids:
            if token_id < first:
                text.append(token_id)
                continue
            at = (token_id - first) * _PRECISION
            if text:
                yield Segment(begin, at, self.decode(text))
            begin, text = at, []
        if text:
            yield Segment(begin, seconds, self.decode(text))
