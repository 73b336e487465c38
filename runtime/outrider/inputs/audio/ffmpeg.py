"""Audio in other containers than WAV, and at other rates than the model's, through FFmpeg's libraries in PyAV.

Needs the extra: pip install "outrider[audio]".
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.errors import OptionError, RequestError, needs, one_line

# Containers of one file. Playlists and the like would have FFmpeg open other files.
_FORMATS = "aac,aiff,amr,asf,au,caf,flac,matroska,mov,mp3,mp4,ogg,w64,wav,webm"
MOST_SAMPLES = 1 << 29  # three hours at 48 kHz: a small file may be decoded to any number
_BLOCK = 1 << 20  # samples that are resampled at once


def is_installed() -> bool:
    """Whether PyAV is."""
    return find_spec("av") is not None


def read(path: Path, where: str) -> tuple[NDArray[np.float32], int]:
    """The samples of a file's first audio stream, averaged over its channels, and its rate.

    where: names the file in messages.

    Raises:
        OptionError: without PyAV.
        RequestError: when it has no audio, too much, or is damaged.
    """
    av = _av(f"{where} is no WAV file, and to read others")
    parts, left = list[NDArray[np.float32]](), MOST_SAMPLES
    options = {"format_whitelist": _FORMATS, "protocol_whitelist": ""}
    try:
        with path.open("rb") as file, av.open(file, options=options) as container:
            if not container.streams.audio:
                raise RequestError(f"{where} has no audio. Name a file that has.")
            stream = container.streams.audio[0]
            converter = av.AudioResampler(format="fltp")
            for frame in container.decode(stream):
                parts += [each.to_ndarray().mean(axis=0, dtype=np.float32) for each in converter.resample(frame)]
                if (left := left - frame.samples) < 0:
                    raise RequestError(
                        f"{where} has more than {MOST_SAMPLES:,} samples. Cut it, or save it at the model's rate: "
                        "ffmpeg -i FILE -ar 16000 -ac 1 out.wav"
                    )
            rate = int(stream.rate or 0)
    except av.FFmpegError as error:
        said = getattr(error, "strerror", None) or one_line(error)
        raise RequestError(f"{where} cannot be read: FFmpeg says '{said}'. Save it as a WAV file.") from error
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.float32), rate


def resample(samples: NDArray[np.float32], rate: int, wanted: int, where: str) -> NDArray[np.float32]:
    """The same audio at another rate, float32 [n × wanted / rate], by libswresample.

    Raises:
        OptionError: without PyAV.
    """
    av = _av(f"{where} has {rate:,} samples a second, the model reads {wanted:,}, and to resample")
    resampler = av.AudioResampler(format="fltp", layout="mono", rate=wanted)
    parts: list[NDArray[np.float32]] = []
    for begin in range(0, len(samples), _BLOCK):
        frame = av.AudioFrame.from_ndarray(samples[None, begin : begin + _BLOCK], format="fltp", layout="mono")
        frame.sample_rate = rate
        parts += [each.to_ndarray()[0] for each in resampler.resample(frame)]
    parts += [each.to_ndarray()[0] for each in resampler.resample(None)]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.float32)  # a few samples may give none


def _av(why: str) -> Any:
    with needs(f"{why} it takes the package av", "audio", OptionError):
        import av
    return av
