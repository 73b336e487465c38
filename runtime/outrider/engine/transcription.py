"""Transcribes audio in windows, as Whisper does."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from outrider.bundle.manifest import AudioEntry, EncoderEntry
from outrider.config import GenerationConfig
from outrider.decoding.results import Result, Segment, Transcription
from outrider.engine.transcription_options import TranscriptionOptions
from outrider.engine.transcription_windows import Attempt, cut
from outrider.errors import OptionError, nearest
from outrider.inputs.audio import log_mel, read_samples
from outrider.types import EncoderSource, Prompt

_RESET_TEMPERATURE = 0.5  # text that was sampled at a higher one is no prompt


@dataclass(frozen=True, slots=True)
class Transcriber:
    """Transcribes audio with an engine whose model reads it.

        transcriber = Transcriber(encoder, encoder.audio, 448, config, engine.generate, score, decode, eos_token_ids)
        transcriber.run("talk.wav", TranscriptionOptions(language="en", timestamps=True)).segments

    context_length: of the decoder. config: the defaults of its requests. generate: answers a prompt, by a
    configuration. score: log-probabilities of an answer's tokens, by a configuration. decode: the text of tokens.
    eos_token_ids: end an answer.

    Source: openai/whisper, `transcribe.py`, and Radford et al. 2022, section 4.5: windows of 30 s, each of which begins
    where the last complete segment ended; a window whose text repeats itself or is unlikely is decoded again at higher
    temperatures; one that is likely silent is left out.
    """

    encoder: EncoderEntry
    audio: AudioEntry
    context_length: int
    config: GenerationConfig
    generate: Callable[..., Result]
    score: Callable[[Prompt, Sequence[int], GenerationConfig], list[float]]
    decode: Callable[[Sequence[int]], str]
    eos_token_ids: Sequence[int]

    def run(
        self, audio: Any, options: TranscriptionOptions, *, sampling_rate: int | None = None, **requests: Any
    ) -> Transcription:
        """The text of audio; see `Engine.transcribe`. requests: the options of each window's requests."""
        entry = self.audio
        self._check(options)
        run = _Run(self, options, requests)
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
        begin, is_over = 0, False
        while begin < num_frames and not is_over:
            length = min(size, num_frames - begin)
            source = EncoderSource.of_audio(features[:, begin : begin + size])
            seconds = run.read(source, begin / frames_per_second, length / frames_per_second)
            begin += max(min(round(seconds * frames_per_second), length), 1)
            is_over = run.results[-1].finish_reason == "cancelled"
        text = "".join(each.text for each in run.segments)
        return Transcription(text, run.language, run.segments, run.results)

    def _check(self, options: TranscriptionOptions) -> None:
        """Raise OptionError for what the model does not know."""
        entry = self.audio
        asked = (("language", options.language, entry.languages), ("task", options.task, entry.tasks))
        for name, value, known in asked:
            if value is None or value in known:
                continue
            if not known:
                raise OptionError(f"{name}={value!r} is for models of several languages. Leave it out.")
            raise OptionError(f"{name}={value!r} is not known to this model. {nearest(str(value), known)}")
        if options.condition_on_previous_text and entry.previous_token_id is None:
            raise OptionError(
                "condition_on_previous_text=True needs the token <|startofprev|>, which this bundle does not name. "
                "Leave it out, or export the model again."
            )


@dataclass(slots=True)
class _Run:
    """One transcription: the language that was found, what was said so far, and the requests that it took."""

    of: Transcriber
    options: TranscriptionOptions
    requests: dict[str, Any]
    config: GenerationConfig = field(init=False)
    temperatures: tuple[float, ...] = field(init=False)
    language: str | None = field(init=False)
    segments: list[Segment] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    previous: list[int] = field(default_factory=list)  # tokens that the next window has as its prompt
    num_sampled: int = 0  # requests

    def __post_init__(self) -> None:
        given = {name: self.requests.pop(name) for name in [*self.requests] if name not in ("cancel", "config")}
        self.config = (self.requests.pop("config", None) or self.of.config).replace(**given)
        self.temperatures = self.options.temperatures(self.config.temperature)
        for temperature in self.temperatures:
            self.config.replace(temperature=temperature)  # checks it
        self.language = self.options.language

    def read(self, source: EncoderSource, offset: float, seconds: float) -> float:
        """Transcribe a window; returns how many of its seconds are done.

        offset: seconds before it. seconds: of audio in it.
        """
        entry, options = self.of.audio, self.options
        if entry.languages and self.language is None:
            self.language = self._find_language(source)
        attempt = self._decode(source)
        self.results.append(attempt.result)
        if attempt.is_silent(options) and attempt.result.finish_reason != "cancelled":
            return seconds
        token_ids, first = attempt.token_ids, entry.first_timestamp_token_id
        if options.without_timestamps:  # a model may write some all the same
            token_ids = [token_id for token_id in token_ids if token_id < first]
        pieces, done, said = cut(token_ids, first, seconds)
        if not options.condition_on_previous_text or attempt.temperature > _RESET_TEMPERATURE:
            self.previous.clear()
        else:
            self.previous += said
        texts = [self.of.decode(piece.text_token_ids) for piece in pieces]
        if options.timestamps:
            spans = [(piece.begin, piece.end, text) for piece, text in zip(pieces, texts, strict=True)]
        else:
            spans = [(0.0, done, "".join(texts))]
        self.segments += [
            Segment(begin + offset, end + offset, text, *attempt.figures) for begin, end, text in spans if text.strip()
        ]
        return done

    def _decode(self, source: EncoderSource) -> Attempt:
        """A window's text, at the first temperature at which it is good, or at the last."""
        attempts = (self._attempt(source, temperature) for temperature in self.temperatures)
        return next(
            attempt
            for i, attempt in enumerate(attempts, 1)
            if i == len(self.temperatures)
            or attempt.result.finish_reason == "cancelled"
            or not attempt.fails(self.options)
        )

    def _attempt(self, source: EncoderSource, temperature: float) -> Attempt:
        own = self.config
        changes: dict[str, Any] = {"temperature": temperature}
        if own.logprobs is None and temperature == 0:
            changes |= {"logprobs": 0, "logprobs_of": "processed"}
        prompt = self._prompt(source)
        if self.previous:
            room = self.of.context_length - len(prompt.token_ids)
            changes["max_new_tokens"] = min(own.max_new_tokens or room, room)
        if temperature:
            changes["seed"] = self._seed()
        config = own.replace(**changes)
        result = self.of.generate(prompt, config, **self.requests)
        if own.logprobs is None and temperature == 0:
            logprobs = [each.logprob for each in result.logprobs or ()]
            result = replace(result, logprobs=None)
        else:  # those at temperature 1, as thresholds are for them
            logprobs = self._logprobs(prompt, result.token_ids, own)
        token_ids = result.token_ids
        if token_ids and token_ids[-1] in self.of.eos_token_ids:
            token_ids = token_ids[:-1]
        average = math.fsum(logprobs) / (len(token_ids) + 1)
        begin = prompt.token_ids[: len(prompt.token_ids) - len(self._begin()) + 1]  # ends with the start token
        return Attempt(result, token_ids, temperature, average, lambda: self._no_speech(begin, source))

    def _seed(self) -> int | None:
        """A sampled request's: its own for each, so that trying again is trying something else.

        Without a seed it is fixed where only windows that fail are sampled, so that a text can be repeated.
        """
        self.num_sampled += 1
        seed = self.config.seed
        if seed is None and self.temperatures[0] > 0:
            return None
        return ((seed or 0) + self.num_sampled - 1) % (1 << 63)

    def _logprobs(self, prompt: Prompt, token_ids: Sequence[int], config: GenerationConfig) -> list[float]:
        """Log-probabilities of an answer by the model's rules, at temperature 1."""
        if not token_ids:
            return []
        changes = {"temperature": 0.0, "logprobs": 0, "logprobs_of": "processed", "max_new_tokens": len(token_ids)}
        greedy = config.replace(**changes, min_new_tokens=0, drafter=None, ignore_eos=True, stop=(), stop_token_ids=())
        return self.of.score(prompt, token_ids, greedy)

    def _no_speech(self, token_ids: Sequence[int], source: EncoderSource) -> float | None:
        """The probability of <|nospeech|> after the start token."""
        if (token_id := self.of.audio.no_speech_token_id) is None:
            return None
        config = GenerationConfig(
            drafter=None, logprobs=0, logprobs_of="unprocessed", max_new_tokens=1, ignore_eos=True
        )
        (logprob,) = self.of.score(Prompt([*token_ids], source=source), [token_id], config)
        return math.exp(logprob)

    def _prompt(self, source: EncoderSource) -> Prompt:
        before: list[int] = []
        if self.previous and self.of.audio.previous_token_id is not None:
            before = [self.of.audio.previous_token_id, *self.previous[-(self.of.context_length // 2 - 1) :]]
        return Prompt([*before, *self._begin()], source=source)

    def _begin(self) -> list[int]:
        """The decoder's first tokens."""
        entry = self.of.audio
        token_ids = [*self.of.encoder.begin_token_ids]
        if entry.languages and self.language is not None:
            token_ids.append(entry.languages[self.language])
        if entry.tasks:
            token_ids.append(entry.tasks[self.options.task or "transcribe"])
        return [*token_ids, entry.no_timestamps_token_id] if self.options.without_timestamps else token_ids

    def _find_language(self, source: EncoderSource) -> str:
        """The likeliest language of a window."""
        prompt = Prompt(self.of.encoder.begin_token_ids, source=source)
        config = GenerationConfig(max_new_tokens=1, temperature=0.0, drafter=None)
        result = self.of.generate(prompt, config)
        by_id = {token_id: name for name, token_id in self.of.audio.languages.items()}
        return by_id[result.token_ids[0]]
