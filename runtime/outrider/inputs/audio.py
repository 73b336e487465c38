"""Audio for Whisper: samples from files and arrays, and their log-mel features."""

from __future__ import annotations

import wave
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.config.files import user_path
from outrider.errors import OptionError, RequestError
from outrider.system.files import reading

_SAVE_IT = "Save it as PCM: ffmpeg -i FILE -ar {rate} -ac 1 -c:a pcm_s16le out.wav"


def read_samples(audio: Any, rate: int, own_rate: int | None = None) -> NDArray[np.float32]:
    """Samples from −1 to 1, float32 [n], at `rate` Hz.

    audio: numbers [n], or the path of a WAV file. own_rate: of an array; None: `rate`.

    Raises:
        OptionError: when it is neither.
        RequestError: when it is empty, has another rate, more than one dimension or values that are no samples, or the
            file is damaged.
    """
    if isinstance(audio, str | Path):
        samples, found = _read_wav(user_path(audio), rate)
        where = str(audio)
    else:
        samples, found, where = _read_array(audio), own_rate or rate, "The audio"
    if found != rate:
        raise RequestError(
            f"{where} has {found:,} samples a second, and the model reads {rate:,}. Resample it: ffmpeg -i FILE -ar "
            f"{rate} -ac 1 out.wav."
        )
    if not len(samples):
        raise RequestError(f"{where} is empty. Give at least one sample.")
    return samples


def _read_array(audio: Any) -> NDArray[np.float32]:
    if audio is None or isinstance(audio, bytes | dict):
        raise OptionError(
            f"The audio is a {type(audio).__name__}. Give float32 samples from −1 to 1, or the path of a .wav file."
        )
    try:
        samples = np.asarray(audio)
    except ValueError as error:
        raise OptionError(f"The audio is no array of numbers: {error}. Give float32 samples from −1 to 1.") from error
    if samples.dtype.kind != "f":
        hint = "Divide 16-bit samples by 32,768." if samples.dtype.kind in "iu" else "Give float32 samples."
        raise OptionError(f"The audio has values of type {samples.dtype}; samples are floats from −1 to 1. {hint}")
    if samples.ndim != 1:
        raise RequestError(f"The audio has the shape {list(samples.shape)}; give one channel, [n].")
    samples = samples.astype(np.float32)
    if not np.isfinite(samples).all():
        bad = int(np.flatnonzero(~np.isfinite(samples))[0])
        raise RequestError(f"Sample {bad:,} of the audio is {samples[bad]}. Give finite numbers from −1 to 1.")
    return samples


def _read_wav(path: Path, rate: int) -> tuple[NDArray[np.float32], int]:
    """The samples of a PCM file, averaged over its channels, and its rate."""
    with reading(f"Audio {path}", _SAVE_IT.format(rate=rate), RequestError):
        size = path.stat().st_size
        try:
            with wave.open(str(path), "rb") as file:
                width, channels, found = file.getsampwidth(), file.getnchannels(), file.getframerate()
                # Room is made for as many as are asked for, and a damaged header may promise any number.
                raw = file.readframes(min(file.getnframes(), size // (width * channels)))
        except (wave.Error, EOFError, RuntimeError) as error:  # RuntimeError: of a chunk that ends behind the file
            raise ValueError(f"it is no WAV file that can be read ({str(error) or 'it ends early'})") from error
        if width > 4:
            raise ValueError(f"its samples have {8 * width} bits, and 8, 16, 24 and 32 are read")
    raw = raw[: len(raw) // (width * channels) * (width * channels)]
    if width == 1:  # unsigned
        values = np.frombuffer(raw, dtype=np.uint8).astype(np.float32) / 128 - 1
    elif width == 3:
        parts = np.frombuffer(raw, dtype=np.uint8).reshape(-1, 3).astype(np.int32)
        whole = (parts[:, 0] << 8 | parts[:, 1] << 16 | parts[:, 2] << 24) >> 8
        values = whole.astype(np.float32) / (1 << 23)
    else:
        kind = np.dtype(f"<i{width}")
        values = np.frombuffer(raw, dtype=kind).astype(np.float32) / (1 << (8 * width - 1))
    return values.reshape(-1, channels).mean(axis=1, dtype=np.float32), found


_BLOCK = 3000  # frames that are transformed at once
_FLOOR = 1e-10
_RANGE = 8.0  # of log10; lower values are raised to it


def log_mel(
    samples: NDArray[np.float32],
    *,
    num_mel_bins: int = 80,
    sampling_rate: int = 16_000,
    window_length: int = 400,
    hop_length: int = 160,
    padding: int = 0,
) -> NDArray[np.float32]:
    """Log-mel features, float32 [mel bins, frames], as Whisper was trained with (openai/whisper, `audio.py`).

    Frames of 25 ms every 10 ms, a periodic Hann window, the power of the Fourier transform, a bank of mel filters, the
    logarithm, and a floor 8 below the highest value of the audio. samples: float32 [n], from −1 to 1. padding: samples
    of silence to put behind them.
    """
    half = window_length // 2
    padded = np.concatenate([samples, np.zeros(padding, dtype=np.float32)]) if padding else samples
    padded = np.pad(padded.astype(np.float64), half, mode="reflect" if len(padded) > half else "constant")
    frames = np.lib.stride_tricks.sliding_window_view(padded, window_length)[::hop_length]
    frames = frames[: (len(samples) + padding) // hop_length]  # as Whisper, without the last one
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(window_length) / window_length)
    filters = mel_filters(num_mel_bins, sampling_rate, window_length)
    mel = np.empty((num_mel_bins, len(frames)))
    for begin in range(0, len(frames), _BLOCK):
        power = np.abs(np.fft.rfft(frames[begin : begin + _BLOCK] * window)) ** 2
        mel[:, begin : begin + _BLOCK] = filters @ power.T
    logs = np.log10(np.maximum(mel, _FLOOR))
    logs = np.maximum(logs, logs.max(initial=-np.inf) - _RANGE)
    features: NDArray[np.float32] = ((logs + 4.0) / 4.0).astype(np.float32)
    return features


@lru_cache(8)
def mel_filters(num_mel_bins: int, sampling_rate: int, window_length: int) -> NDArray[np.float64]:
    """Triangles on Slaney's mel scale, each with an area of one, float64 [mel bins, window_length // 2 + 1].

    Source: Slaney 1998, "Auditory Toolbox"; librosa's `filters.mel` with its defaults, as shipped with Whisper.
    """
    frequencies = np.linspace(0, sampling_rate / 2, window_length // 2 + 1)
    edges = _to_hertz(np.linspace(0, _to_mel(sampling_rate / 2), num_mel_bins + 2))
    widths = np.diff(edges)
    slopes = edges[:, None] - frequencies  # [mel bins + 2, frequencies]
    rising = -slopes[:-2] / widths[:-1, None]
    falling = slopes[2:] / widths[1:, None]
    triangles = np.maximum(0, np.minimum(rising, falling))
    filters: NDArray[np.float64] = triangles * (2.0 / (edges[2:] - edges[:-2]))[:, None]
    return filters


_LINEAR = 200.0 / 3.0  # hertz per mel below 1,000 Hz
_KNEE = 1000.0  # hertz; above it, the scale is logarithmic
_STEP = np.log(6.4) / 27.0  # of the logarithm, per mel


def _to_mel(hertz: float) -> float:
    return hertz / _LINEAR if hertz < _KNEE else _KNEE / _LINEAR + float(np.log(hertz / _KNEE)) / _STEP


def _to_hertz(mels: NDArray[np.float64]) -> NDArray[np.float64]:
    knee = _KNEE / _LINEAR
    return np.where(mels < knee, mels * _LINEAR, _KNEE * np.exp(_STEP * (np.maximum(mels, knee) - knee)))
