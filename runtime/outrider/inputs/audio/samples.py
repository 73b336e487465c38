"""Samples of audio, from arrays and from WAV files."""

from __future__ import annotations

import wave
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.config.files import user_path
from outrider.errors import OptionError, RequestError
from outrider.system.files import reading

if TYPE_CHECKING:
    from numpy.typing import NDArray

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
