"""What a transcription is to be like: OpenAI's options, by their names and with their defaults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.config.checks import is_finite_number, plain, shown_value
from outrider.errors import OptionError

FALLBACK_TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


@dataclass(frozen=True, slots=True)
class TranscriptionOptions:
    """Options of one transcription; see `Engine.transcribe`.

        TranscriptionOptions(language="en", temperature=0.0, no_speech_threshold=None)

    Raises:
        OptionError: for a value of another kind.

    Source: openai/whisper, `transcribe.py`.
    """

    language: str | None = None
    task: str | None = None
    timestamps: bool = False
    without_timestamps: bool = False
    temperature: float | Sequence[float] | None = None
    compression_ratio_threshold: float | None = 2.4
    logprob_threshold: float | None = -1.0
    no_speech_threshold: float | None = 0.6
    condition_on_previous_text: bool = False

    def __post_init__(self) -> None:
        for name in ("timestamps", "without_timestamps", "condition_on_previous_text"):
            if not isinstance(value := getattr(self, name), bool):
                raise OptionError(f"{name}={shown_value(value)} is neither True nor False.")
        for name in ("compression_ratio_threshold", "logprob_threshold", "no_speech_threshold"):
            if (value := getattr(self, name)) is not None and not is_finite_number(plain(value)):
                raise OptionError(f"{name}={shown_value(value)} is no number. Give one, or None to turn it off.")
        if self.timestamps and self.without_timestamps:
            raise OptionError("timestamps=True shows what without_timestamps=True leaves out. Leave out one of them.")
        values = self._values()
        if values is not None and not (values and all(map(is_finite_number, values))):
            raise OptionError(
                f"temperature={shown_value(self.temperature)} is neither a number nor some of them. Give one, such as "
                "0.0, or several in the order in which they are tried."
            )

    def temperatures(self, default: float) -> tuple[float, ...]:
        """Those at which a window is tried, in order. default: of the engine."""
        if (values := self._values()) is not None:
            return (*map(float, values),)
        return (default,) if default else FALLBACK_TEMPERATURES

    def _values(self) -> tuple[Any, ...] | None:
        given = plain(self.temperature)
        if given is None:
            return None
        return tuple(map(plain, given)) if isinstance(given, list | tuple) else (given,)
