"""Samples of audio: from arrays and files, one channel, at the model's rate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.config.files import user_path
from outrider.errors import OptionError, RequestError
from outrider.inputs.audio import ffmpeg, wav
from outrider.system.files import reading, shown

RATES = (1_000, 768_000)  # Hz: lowest and highest. A file of any other rate is damaged, or a trap.


def read_samples(audio: Any, rate: int, own_rate: int | None = None) -> NDArray[np.float32]:
    """Samples from −1 to 1, float32 [n], at `rate` Hz.

    audio: numbers [n], or the path of a file. Its channels are averaged. own_rate: of an array; None: `rate`.

    Raises:
        OptionError: when it is neither, or needs a package that is not installed.
        RequestError: when it is empty or damaged, or has more than one dimension or values that are no samples.
    """
    if isinstance(audio, str | Path):
        where = f"Audio {shown(audio)}"
        samples, found = _read_file(user_path(audio), rate, where)
    else:
        samples, found, where = _read_array(audio), own_rate or rate, "The audio"
    if not RATES[0] <= found <= RATES[1]:
        raise RequestError(f"{where} has {found:,} samples a second; {RATES[0]:,} to {RATES[1]:,} are read.")
    if not len(samples):
        raise RequestError(f"{where} is empty. Give at least one sample.")
    if not np.isfinite(samples).all():
        bad = int(np.flatnonzero(~np.isfinite(samples))[0])
        raise RequestError(f"Sample {bad:,} of {where[:1].lower()}{where[1:]} is {samples[bad]}, which is no number.")
    return samples if found == rate else ffmpeg.resample(samples, found, rate, where)


def _read_file(path: Path, rate: int, where: str) -> tuple[NDArray[np.float32], int]:
    with reading(where, f"Save it as PCM: ffmpeg -i FILE -ar {rate} -ac 1 -c:a pcm_s16le out.wav", RequestError):
        with path.open("rb") as file:
            is_wav = wav.is_wav(file)
        if not is_wav:
            return ffmpeg.read(path, where)
        try:
            return wav.read(path)
        except wav.OtherCodec:
            if not ffmpeg.is_installed():
                raise
            return ffmpeg.read(path, where)


def _read_array(audio: Any) -> NDArray[np.float32]:
    if audio is None or isinstance(audio, bytes | dict):
        raise OptionError(
            f"The audio is a {type(audio).__name__}. Give float32 samples from −1 to 1, or the path of a file."
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
    return samples.astype(np.float32)
