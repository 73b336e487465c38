"""Log-mel features of audio, as Whisper reads them."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

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
    of silence to put after them.
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
