"""Long audio: windows by timestamps, thresholds, and fallback, with scripted answers and with a toy Whisper."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from encoder_decoder_toy import (
    AUDIO_START,
    FIRST_STAMP,
    NO_SPEECH,
    NO_TIMESTAMPS,
    PREVIOUS,
    VOCAB,
    WHISPER,
    save_whisper,
    whisper_tokenizer,
)
from encoder_decoders import tone
from outrider.config import GenerationConfig
from outrider.decoding.metrics import Stats
from outrider.decoding.results import Result, Transcription
from outrider.engine.engine import Engine
from outrider.engine.transcription import Transcriber
from outrider.engine.transcription_options import FALLBACK_TEMPERATURES, TranscriptionOptions
from outrider.engine.transcription_windows import compression_ratio, cut
from outrider.errors import OptionError, OutriderError
from outrider.types import Prompt, TokenLogprobs
from toys import load_toy

EOS = VOCAB - 1
assert WHISPER.audio is not None
AUDIO = WHISPER.audio
BEGIN = [AUDIO_START, AUDIO.languages["en"], AUDIO.tasks["transcribe"]]
A, B, C = 0, 1, 2  # tokens of text


def at(seconds: float) -> int:
    return FIRST_STAMP + round(seconds / 0.02)


@pytest.mark.parametrize(("token_ids", "pieces", "done", "said"), [
    ([at(0), A, at(0.4), at(0.4), B, at(0.7), at(0.7)], [(0, 0.4, [A]), (0.4, 0.7, [B])], 0.7, 6),
    ([at(0), A, at(0.4), at(0.4), B], [(0, 0.4, [A])], 0.4, 3),  # B has no end: it is read again
    ([at(0), A, at(0.4), at(0.5), B, at(0.8)], [(0, 0.4, [A]), (0.5, 0.8, [B])], 1.0, 6),
    ([at(0.1), A, at(0.4)], [(0.1, 0.4, [A])], 1.0, 3),
    ([at(0), A, B], [(0, 1.0, [A, B])], 1.0, 3),
    ([A, B], [(0, 1.0, [A, B])], 1.0, 2),
    ([at(0), at(0.4), at(0.4)], [], 0.4, 2),
    ([at(0)], [], 1.0, 1),
    ([], [], 1.0, 0),
], ids=["pair", "open", "single", "one", "no end", "no stamps", "nothing said", "only a stamp", "nothing"])  # fmt: skip
def test_a_window_ends_with_its_last_complete_segment(
    token_ids: list[int], pieces: list[tuple[float, float, list[int]]], done: float, said: int
) -> None:
    found, end, kept = cut(token_ids, FIRST_STAMP, 1.0)
    assert [(pytest.approx(each[0]), pytest.approx(each[1]), each[2]) for each in pieces] == [*map(tuple, found)]
    assert end == pytest.approx(done)
    assert kept == token_ids[:said]


@dataclass
class Scripted:
    """Answers windows in turn. attempts: for each window, tokens and mean log-probability at each temperature."""

    windows: Sequence[Sequence[tuple[list[int], float]]]
    no_speech: float = 0.1
    prompts: list[list[int]] = field(default_factory=list)
    configs: list[GenerationConfig] = field(default_factory=list)
    features: list[Any] = field(default_factory=list)
    num_asked: int = 0  # for the probability of silence

    def generate(self, prompt: Prompt, config: GenerationConfig, **options: Any) -> Result:
        assert prompt.source is not None
        if not self.features or self.features[-1] is not prompt.source.values:
            self.features.append(prompt.source.values)
            self.attempts = iter(self.windows[len(self.features) - 1])
        self.prompts.append(list(prompt.token_ids))
        self.configs.append(config)
        token_ids, self.average = next(self.attempts)
        logprobs = None
        if config.logprobs is not None:
            logprobs = [TokenLogprobs(token_id, self.average) for token_id in [*token_ids, EOS]]
        text = self.decode([token_id for token_id in token_ids if token_id < VOCAB])
        return Result(text, [*token_ids, EOS], "stop", Stats(), config.seed, True, logprobs=logprobs)

    def score(self, prompt: Prompt, token_ids: Sequence[int], config: GenerationConfig) -> list[float]:
        if list(token_ids) == [NO_SPEECH]:
            self.num_asked += 1
            assert prompt.token_ids[-1] == AUDIO_START
            assert config.logprobs_of == "unprocessed"
            return [float(np.log(self.no_speech))]
        assert (config.temperature, config.logprobs_of) == (0, "processed")
        return [self.average] * len(token_ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        return whisper_tokenizer().decode(list(token_ids))

    def run(self, seconds: float, config: GenerationConfig | None = None, **options: Any) -> Transcription:
        transcriber = Transcriber(
            WHISPER, AUDIO, 512, config or GenerationConfig(), self.generate, self.score, self.decode, (EOS,)
        )
        wanted = TranscriptionOptions(language="en", **options)
        return transcriber.run(np.linspace(-0.5, 0.5, int(seconds * 16_000), dtype=np.float32), wanted)

    @property
    def temperatures(self) -> list[float]:
        return [config.temperature for config in self.configs]


def sure(*token_ids: int) -> list[tuple[list[int], float]]:
    """A window whose first answer is likely."""
    return [([*token_ids], -0.1)]


LONG = (
    sure(at(0), A, at(0.6), at(0.6), B),  # B is cut by the window's end
    sure(at(0), B, at(0.5), at(0.5)),
    sure(at(0), C, at(0.4)),
    sure(at(0), A, at(0.38)),
)


def test_no_speech_is_lost_between_windows() -> None:
    """A segment that the end of a window cuts is read again, whole. The text has no timestamps, asked for or not."""
    shown = Scripted(LONG)
    found = shown.run(2.5, timestamps=True)
    assert found.text == "abca"
    spans = [(round(each.begin, 2), round(each.end, 2), each.text) for each in found.segments]
    assert spans == [(0, 0.6, "a"), (0.6, 1.1, "b"), (1.1, 1.5, "c"), (2.1, 2.48, "a")]
    hidden = Scripted(LONG)
    found = hidden.run(2.5)
    assert found.text == "abca"
    spans = [(round(each.begin, 2), round(each.end, 2), each.text) for each in found.segments]
    assert spans == [(0, 0.6, "a"), (0.6, 1.1, "b"), (1.1, 2.1, "c"), (2.1, 2.5, "a")]
    assert hidden.prompts == shown.prompts == [BEGIN] * 4
    # Each window has its own features: it begins where the one before ended.
    whole = Scripted([sure(A)] * 3).run(2.5, without_timestamps=True)
    assert [(each.begin, each.end) for each in whole.segments] == [(0, 1), (1, 2), (2, 2.5)]
    first, second = hidden.features[:2]
    assert np.allclose(first[:, 62:98], second[:, 2:38], atol=1e-3)  # without the frames next to the border


def test_without_timestamps_windows_have_a_fixed_length() -> None:
    script = Scripted([sure(A, at(0.5), at(0.5), B), sure(C)])
    found = script.run(1.5, without_timestamps=True)
    assert found.text == "abc"
    assert script.prompts == [[*BEGIN, NO_TIMESTAMPS]] * 2


def test_a_window_always_goes_on() -> None:
    assert len(Scripted([sure(at(0), at(0))] * 5).run(0.05).windows) == 5


GOOD, UNLIKELY, REPEATED = ([A], -0.2), ([B], -1.4), ([A] * 90, -0.1)


@pytest.mark.parametrize(("attempts", "options", "temperatures"), [
    ([GOOD], {}, [0]),
    ([UNLIKELY, REPEATED, GOOD], {}, [0, 0.2, 0.4]),
    ([UNLIKELY] * 6, {}, [*FALLBACK_TEMPERATURES]),
    ([UNLIKELY], {"logprob_threshold": None}, [0]),
    ([REPEATED], {"compression_ratio_threshold": None}, [0]),
    ([UNLIKELY], {"logprob_threshold": -1.5}, [0]),
    ([UNLIKELY], {"temperature": 0}, [0]),
    ([UNLIKELY, GOOD], {"temperature": [0.5, 0.7]}, [0.5, 0.7]),
    ([REPEATED, UNLIKELY, GOOD], {"temperature": (0, 1, 0.3)}, [0, 1, 0.3]),
], ids=["good", "bad", "never good", "no logprob", "no ratio", "lower", "greedy", "sampled", "own order"])  # fmt: skip
def test_windows_that_fail_are_tried_again(
    attempts: list[tuple[list[int], float]], options: dict[str, Any], temperatures: list[float]
) -> None:
    script = Scripted([attempts])
    found = script.run(1, **options)
    assert script.temperatures == temperatures
    assert found.segments[0].temperature == temperatures[-1]
    assert found.segments[0].avg_logprob == pytest.approx(attempts[-1][1])
    assert found.segments[0].compression_ratio == compression_ratio(found.text)
    assert found.windows[0].logprobs is None  # nobody asked
    # What is sampled after greedy decoding has a seed of its own each time, always the same ones.
    if temperatures[0] == 0:
        assert [config.seed for config in script.configs] == [None, *range(len(attempts) - 1)]


def test_a_seed_counts_on() -> None:
    script = Scripted([[UNLIKELY, UNLIKELY, GOOD], [UNLIKELY, GOOD]])
    script.run(2, GenerationConfig(seed=7))
    assert [config.seed for config in script.configs if config.temperature] == [7, 8, 9]


def test_the_engines_temperature_is_the_only_one() -> None:
    script = Scripted([[UNLIKELY]])
    script.run(1, GenerationConfig(temperature=0.7))
    assert script.temperatures == [0.7]


@pytest.mark.parametrize(("no_speech", "average", "options", "text", "num_attempts", "num_asked"), [
    (0.7, -1.2, {}, "b", 1, 1),  # silence is not tried again
    (0.5, -1.2, {}, "ab", 6, 6),
    (0.9, -0.9, {}, "ab", 1, 0),  # a likely text is not doubted, and nobody asks
    (0.7, -1.2, {"no_speech_threshold": None}, "ab", 6, 0),
    (0.7, -1.2, {"no_speech_threshold": 0.8}, "ab", 6, 6),
    (0.7, -0.1, {"logprob_threshold": None}, "", 1, 2),  # then silence alone decides, of both windows
], ids=["silence", "speech", "likely", "off", "higher", "no logprob"])  # fmt: skip
def test_silence_is_left_out(
    no_speech: float, average: float, options: dict[str, Any], text: str, num_attempts: int, num_asked: int
) -> None:
    script = Scripted([[([at(0), A], average)] * 6, sure(at(0), B)], no_speech)
    found = script.run(1.5, **options)
    assert found.text == text
    assert len(found.windows) == 2
    assert len(script.prompts) == num_attempts + 1
    assert script.num_asked == num_asked
    if text == "ab":
        assert found.segments[0].no_speech_prob == (pytest.approx(no_speech) if num_asked else None)


def test_silence_is_the_whole_window() -> None:
    script = Scripted([[([at(0), A, at(0.2), at(0.2)], -2.0)], sure(at(0), B)], no_speech=0.9)
    found = script.run(1.5, timestamps=True)
    assert [(each.begin, each.end, each.text) for each in found.segments] == [(1, 1.5, "b")]


def test_earlier_text_is_a_prompt_if_asked_for() -> None:
    windows = [
        sure(at(0), A, at(0.6), at(0.6), B),
        [([at(0), B, at(0.5), at(0.5)], -2.0), ([at(0), B, at(0.5), at(0.5)], -0.2)],
        [([at(0), C, at(0.4)], -2.0)] * 3 + [([at(0), C, at(0.4)], -0.1)],
        sure(at(0), A, at(0.38)),
    ]
    script = Scripted(windows)
    script.run(2.5, GenerationConfig(max_new_tokens=510), condition_on_previous_text=True)
    first, second = [at(0), A, at(0.6)], [at(0), B, at(0.5)]
    assert script.prompts[0] == BEGIN
    assert script.prompts[1:3] == [[PREVIOUS, *first, *BEGIN]] * 2
    assert script.prompts[3:7] == [[PREVIOUS, *first, *second, *BEGIN]] * 4
    assert script.prompts[7] == BEGIN  # what was sampled at more than 0.5 is no prompt
    assert [config.max_new_tokens for config in script.configs[:2]] == [510, 512 - 7]  # as many as fit


def test_a_long_prompt_is_cut_at_its_begin() -> None:
    text = [A, B] * 150
    script = Scripted([sure(at(0), *text, at(0.6), at(0.6)), sure(C)])
    script.run(1.5, condition_on_previous_text=True, compression_ratio_threshold=None)
    assert script.prompts[1] == [PREVIOUS, *[*text, at(0.6)][-255:], *BEGIN]


@pytest.mark.parametrize(("options", "message"), [
    ({"temperature": "hot"}, "temperature='hot' is neither a number"),
    ({"temperature": []}, "temperature=\\[\\] is neither a number"),
    ({"temperature": [0, True]}, "is neither a number"),
    ({"no_speech_threshold": "much"}, "no_speech_threshold='much' is no number"),
    ({"logprob_threshold": float("nan")}, "logprob_threshold=nan is no number"),
    ({"timestamps": 1}, "timestamps=1 is neither True nor False"),
    ({"timestamps": True, "without_timestamps": True}, "Leave out one"),
    ({"temperature": [0, -1]}, "temperature=-1"),
    ({"task": "sing"}, "task='sing' is not known"),
], ids=str)  # fmt: skip
def test_wrong_options_get_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message) as error:
        Scripted([]).run(1, **options)
    assert "\n" not in str(error.value)


def test_a_bundle_without_the_token_has_no_earlier_text() -> None:
    script = Scripted([])
    audio = msgspec.structs.replace(AUDIO, previous_token_id=None)
    transcriber = Transcriber(WHISPER, audio, 512, GenerationConfig(), script.generate, script.score, str, (EOS,))
    with pytest.raises(OptionError, match="does not name.*export the model again"):
        transcriber.run(np.zeros(10, dtype=np.float32), TranscriptionOptions(condition_on_previous_text=True))


@pytest.fixture(scope="module")
def listener(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    bundle = save_whisper(tmp_path_factory.mktemp("toy") / "whisper")
    with load_toy(bundle, cache_size=0.01, keep_records=False, tokenizer=whisper_tokenizer()) as made:
        yield made


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("options", [
    {"timestamps": True},
    {"logprob_threshold": -0.7, "temperature": (0.0, 0.4, 0.8)},  # some windows fail
    {"condition_on_previous_text": True},
], ids=["timestamps", "fallback", "previous"])  # fmt: skip
def test_drafted_is_plain(listener: Engine, tmp_path: Path, options: dict[str, Any]) -> None:
    """So windows begin at the same places, fail the same thresholds and are sampled with the same noise."""
    assert listener.main.capabilities.bit_exact_batching
    common: dict[str, Any] = {"max_new_tokens": 40, **options}
    plain = listener.transcribe(tone(2.2), drafter=None, **common)
    assert len(plain.windows) > 2
    assert plain.text == "".join(segment.text for segment in plain.segments)
    assert not set(plain.text) & set("<>")  # no timestamps
    if "temperature" in options:
        assert max(segment.temperature for segment in plain.segments) > 0
    backends: list[Any] = [listener.loaded[role].backend for role in ("main", "draft")]
    for name in listener.drafters:
        before = [each.encoder.num_runs for each in backends]
        found = listener.transcribe(tone(2.2), drafter=name, num_assistant_tokens=3, **common)
        # Once for each window, also where its language is asked for, and for a draft model with the same encoder.
        assert [each.encoder.num_runs for each in backends] == [before[0] + len(found.windows), before[1]]
        assert [window.token_ids for window in found.windows] == [window.token_ids for window in plain.windows]
        assert (found.segments, found.language) == (plain.segments, plain.language)
        assert sum(window.stats.num_accepted_tokens for window in found.windows)
    again = listener.transcribe(tone(2.2), **common)
    assert again.segments == plain.segments


SILENCE = np.zeros(100, dtype=np.float32)


@pytest.mark.parametrize(("audio", "options", "message"), [
    (None, {}, "Give float32 samples"),
    (SILENCE[:0], {}, "empty"),
    (np.full(100, np.nan, dtype=np.float32), {}, "Sample 0 of the audio is nan"),
    (np.zeros((2, 100), dtype=np.float32), {}, "one channel"),
    (np.zeros(100, dtype=np.int16), {}, "Divide 16-bit samples"),
    (SILENCE, {"sampling_rate": 80}, "80 samples a second"),
    (SILENCE, {"language": "xx"}, "language='xx' is not known"),
    ("missing.wav", {}, "missing.wav"),
], ids=["none", "no samples", "nan", "stereo", "integers", "rate", "language", "no file"])  # fmt: skip
def test_what_is_no_sound_is_refused(listener: Engine, audio: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OutriderError, match=message) as error:
        listener.transcribe(audio, **options)
    assert "\n" not in str(error.value)
    with pytest.raises(OptionError, match="Use engine.transcribe"):
        listener.generate("hello")


def test_timestamps_change_no_text(listener: Engine) -> None:
    shown, hidden = (listener.transcribe(tone(1.7), max_new_tokens=40, timestamps=value) for value in (True, False))
    assert shown.text == hidden.text
    assert len(shown.segments) > len(hidden.segments)
    assert [window.token_ids for window in shown.windows] == [window.token_ids for window in hidden.windows]


def test_options_of_requests_are_passed_on(listener: Engine) -> None:
    found = listener.transcribe(tone(0.5), language="en", max_new_tokens=5, logprobs=2)
    logprobs = found.windows[0].logprobs
    assert logprobs is not None
    assert len(logprobs[0].top) == 2
    with pytest.raises(OptionError, match="max_new_token.*max_new_tokens"):
        listener.transcribe(tone(0.5), max_new_token=5)
