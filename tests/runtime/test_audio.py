"""Audio for Whisper: WAV files of every form, damaged ones, other containers and rates, and log-mel features."""

import struct
import sys
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from encoder_decoders import tone, write_wav
from outrider.errors import OptionError, OutriderError, RequestError
from outrider.inputs.audio import log_mel, read_samples

RATE = 16_000
PCM, FLOAT, A_LAW, EXTENSIBLE = 1, 3, 6, 0xFFFE
TAIL = bytes.fromhex("000000001000800000aa00389b71")


def chunk(name: bytes, content: bytes, size: int | None = None) -> bytes:
    """size: that the header gives; None: the true one."""
    padding = b"\0" * (len(content) % 2)
    return name + struct.pack("<I", len(content) if size is None else size) + content + padding


def form(tag: int, bits: int, channels: int = 1, rate: int = RATE, block: int | None = None) -> bytes:
    block = channels * -(-bits // 8) if block is None else block
    return struct.pack("<HHIIHH", tag, channels, rate, min(rate * block, 0xFFFFFFFF), block, bits)


def extended(tag: int, bits: int, channels: int = 1, valid: int | None = None) -> bytes:
    """WAVE_FORMAT_EXTENSIBLE. valid: bits of a sample that are in use."""
    more = struct.pack("<HHIH", 22, valid or bits, 0, tag) + TAIL
    return form(EXTENSIBLE, bits, channels) + more


def riff(*chunks: bytes, name: bytes = b"RIFF") -> bytes:
    body = b"WAVE" + b"".join(chunks)
    return name + struct.pack("<I", len(body)) + body


def in_24_bits(values: Sequence[int]) -> bytes:
    return b"".join(value.to_bytes(3, "little", signed=True) for value in values)


S16 = struct.pack("<4h", 0, 16384, -32768, 32767)
EXPECTED_16 = [0, 0.5, -1, 32767 / 32768]
DATA = chunk(b"data", S16)
PLAIN = chunk(b"fmt ", form(PCM, 16))

FORMS: dict[str, tuple[bytes, list[float]]] = {
    "8 bits": (riff(chunk(b"fmt ", form(PCM, 8)), chunk(b"data", bytes([128, 192, 0]))), [0, 0.5, -1]),
    "16 bits": (riff(PLAIN, DATA), EXPECTED_16),
    "24 bits": (riff(chunk(b"fmt ", form(PCM, 24)), chunk(b"data", in_24_bits([1 << 22, -1 << 23]))), [0.5, -1]),
    "32 bits": (riff(chunk(b"fmt ", form(PCM, 32)), chunk(b"data", struct.pack("<2i", 1 << 30, -1 << 31))), [0.5, -1]),
    "12 of 16 bits": (riff(chunk(b"fmt ", form(PCM, 12)), DATA), EXPECTED_16),
    "float": (riff(chunk(b"fmt ", form(FLOAT, 32)), chunk(b"data", struct.pack("<2f", 0.25, -1.5))), [0.25, -1.5]),
    "double": (riff(chunk(b"fmt ", form(FLOAT, 64)), chunk(b"data", struct.pack("<2d", 0.25, -0.5))), [0.25, -0.5]),
    "extensible": (riff(chunk(b"fmt ", extended(PCM, 16)), DATA), EXPECTED_16),
    "extensible, 20 of 24 bits": (
        riff(chunk(b"fmt ", extended(PCM, 24, valid=20)), chunk(b"data", in_24_bits([1 << 22]))),
        [0.5],
    ),
    "extensible float": (riff(chunk(b"fmt ", extended(FLOAT, 32)), chunk(b"data", struct.pack("<f", 0.75))), [0.75]),
    "three channels": (
        riff(chunk(b"fmt ", extended(FLOAT, 32, 3)), chunk(b"data", struct.pack("<6f", 1, 0, -0.25, 0, 0.75, 0))),
        [0.25, 0.25],
    ),
    "chunks before and after": (riff(chunk(b"LIST", b"odd"), PLAIN, chunk(b"fact", b"1234"), DATA, DATA), EXPECTED_16),
    "rf64": (riff(chunk(b"ds64", bytes(28)), PLAIN, chunk(b"data", S16, 0xFFFFFFFF), name=b"RF64"), EXPECTED_16),
    "size that was never filled in": (riff(PLAIN, chunk(b"data", S16, 0)), EXPECTED_16),
    "size of a stream": (riff(PLAIN, chunk(b"data", S16, 0xFFFFFFFF)), EXPECTED_16),
    "half a sample at the end": (riff(PLAIN, chunk(b"data", S16[:-1])), EXPECTED_16[:3]),
    "less than promised": (riff(PLAIN, chunk(b"data", S16, 0xFFFFFFF0)), EXPECTED_16),
}


@pytest.mark.parametrize("name", FORMS)
def test_wav_files_of_every_form(tmp_path: Path, name: str) -> None:
    content, expected = FORMS[name]
    (tmp_path / "a.wav").write_bytes(content)
    assert read_samples(tmp_path / "a.wav", RATE).tolist() == expected


DAMAGED: dict[str, tuple[bytes, str]] = {
    "no channels": (riff(chunk(b"fmt ", form(PCM, 16, channels=0, block=2)), DATA), "0 channels and 16,000 samples"),
    "no rate": (riff(chunk(b"fmt ", form(PCM, 16, rate=0)), DATA), "1 channels and 0 samples a second"),
    "rate beyond all": (riff(chunk(b"fmt ", form(PCM, 16, rate=0xFFFFFFFF)), DATA), "4,294,967,295 samples a second"),
    "rate that blows up": (riff(chunk(b"fmt ", form(PCM, 16, rate=1)), DATA), "1 samples a second; 1,000 to 768,000"),
    "no bits": (riff(chunk(b"fmt ", form(PCM, 0, block=0)), DATA), "0 bits"),
    "40 bits": (riff(chunk(b"fmt ", form(PCM, 40)), DATA), "40 bits in 5 bytes"),
    "float of 16 bits": (riff(chunk(b"fmt ", form(FLOAT, 16)), DATA), "16 bits in 2 bytes"),
    "A-law": (riff(chunk(b"fmt ", form(A_LAW, 8)), DATA), "A-law"),
    "adpcm": (riff(chunk(b"fmt ", form(2, 4, block=256)), DATA), "ADPCM"),
    "unknown sub-format": (riff(chunk(b"fmt ", extended(PCM, 16)[:-1] + b"x"), DATA), "format 0xfffe"),
    "short format": (riff(chunk(b"fmt ", form(PCM, 16)[:10]), DATA), "10 bytes of at least 16"),
    "short extension": (riff(chunk(b"fmt ", form(EXTENSIBLE, 16)), DATA), "16 bytes of 40"),
    "data first": (riff(DATA, PLAIN), "before their format"),
    "no data": (riff(PLAIN), "no samples"),
    "empty": (riff(PLAIN, chunk(b"data", b"")), "is empty"),
    "chunk that ends after the file": (riff(chunk(b"junk", b"", 1 << 31), PLAIN, DATA), "no samples.*ffmpeg"),
    "zeros": (riff(bytes(1 << 16)), "no samples"),
    "not a number": (
        riff(chunk(b"fmt ", form(FLOAT, 32)), chunk(b"data", struct.pack("<2f", 0, float("nan")))),
        "Sample 1 of audio .*nan",
    ),
    "beyond float32": (riff(chunk(b"fmt ", form(FLOAT, 64)), chunk(b"data", struct.pack("<d", 1e300))), "is inf"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_wav_files_get_one_line(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    content, message = DAMAGED[name]
    monkeypatch.setattr("outrider.inputs.audio.ffmpeg.is_installed", lambda: False)
    (tmp_path / "a.wav").write_bytes(content)
    with pytest.raises(RequestError, match=message) as error:
        read_samples(tmp_path / "a.wav", RATE)
    assert "\n" not in str(error.value)


def said_of(path: Path) -> str:
    """The error that a file gets, if any."""
    try:
        read_samples(path, RATE)
    except OutriderError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", FORMS)
def test_wav_files_that_end_anywhere(tmp_path: Path, name: str) -> None:
    content, _ = FORMS[name]
    for size in range(len(content)):
        (tmp_path / "a.wav").write_bytes(content[:size])
        assert "\n" not in said_of(tmp_path / "a.wav")


def test_a_length_is_no_reason_to_make_room(tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(riff(PLAIN, chunk(b"data", S16, 0xFFFFFFFE)))
    tracemalloc.start()
    try:
        assert len(read_samples(tmp_path / "a.wav", RATE)) == 4
        assert tracemalloc.get_traced_memory()[1] < 1e6
    finally:
        tracemalloc.stop()


def test_what_needs_the_package_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    write_wav(tmp_path / "fast.wav", bytes(8), rate=44_100)
    (tmp_path / "talk.mp3").write_bytes(b"ID3 and so on")
    makers: list[Callable[[], Any]] = [
        lambda: read_samples(tmp_path / "fast.wav", RATE),
        lambda: read_samples(np.zeros(10, dtype=np.float32), RATE, 8_000),
        lambda: read_samples(tmp_path / "talk.mp3", RATE),
    ]
    for make, message in zip(makers, ("44,100.*16,000", "8,000.*16,000", "talk.mp3 is no WAV file"), strict=True):
        with pytest.raises(OptionError, match=message + r".*package av .*pip install .*\[audio\]") as error:
            make()
        assert "\n" not in str(error.value)
    with pytest.raises(RequestError, match="nowhere.wav cannot be read: No such file"):
        read_samples(tmp_path / "nowhere.wav", RATE)


def test_audio_of_any_rate_is_resampled(tmp_path: Path) -> None:
    pytest.importorskip("av")
    for rate in (8_000, 11_025, 44_100, 48_000, 96_000):
        at = np.arange(rate // 2) / rate
        samples = np.sin(2 * np.pi * 440 * at).astype(np.float32)
        expected = np.sin(2 * np.pi * 440 * np.arange(RATE // 2) / RATE)
        content = riff(chunk(b"fmt ", form(FLOAT, 32, 2, rate)), chunk(b"data", np.repeat(samples, 2).tobytes()))
        (tmp_path / "a.wav").write_bytes(content)
        for audio, own_rate in ((samples, rate), (tmp_path / "a.wav", None)):
            found = read_samples(audio, RATE, own_rate)
            assert abs(len(found) - len(expected)) <= 1
            assert np.abs(found[200:7_800] - expected[200:7_800]).max() < 1e-3  # without the filter's edges


def encode(path: Path, samples: np.ndarray[Any, Any], codec: str, kind: str, rate: int, channels: str) -> None:
    import av

    with av.open(path, "w") as container:
        stream: Any = container.add_stream(codec, rate=rate)
        stream.layout = channels
        resampler = av.AudioResampler(format=kind, layout=channels, rate=rate)
        frame = av.AudioFrame.from_ndarray(samples[None], format="fltp", layout="mono")
        frame.sample_rate = RATE
        fifo = av.AudioFifo()
        for each in [*resampler.resample(frame), *resampler.resample(None)]:
            each.pts = None
            fifo.write(each)
        size = stream.codec_context.frame_size or 1024
        while (piece := fifo.read(size) or fifo.read()) is not None:
            container.mux(stream.encode(piece))
        container.mux(stream.encode(None))


@pytest.mark.parametrize(("name", "codec", "kind", "rate", "channels"), [
    ("a.flac", "flac", "s16", 44_100, "stereo"),
    ("a.mp3", "libmp3lame", "fltp", 44_100, "mono"),
    ("a.m4a", "aac", "fltp", 16_000, "mono"),
    ("a.ogg", "libopus", "flt", 48_000, "stereo"),
    ("a.wav", "adpcm_ms", "s16", 16_000, "mono"),
    ("a.wav", "pcm_mulaw", "s16", 16_000, "mono"),
])  # fmt: skip
def test_other_containers(tmp_path: Path, name: str, codec: str, kind: str, rate: int, channels: str) -> None:
    pytest.importorskip("av")
    samples = 0.5 * np.sin(2 * np.pi * 440 * np.arange(RATE) / RATE).astype(np.float32)
    encode(tmp_path / name, samples, codec, kind, rate, channels)
    found = read_samples(tmp_path / name, RATE)
    assert 0 <= len(found) - RATE < 2_500  # codecs add a little silence
    middle = found[4_000:12_000]
    assert np.abs(np.fft.rfft(middle)).argmax() == 220  # of 2 Hz each
    # A sound that is the same on both sides is as loud as on one. (The resampler that spreads it takes 3 dB.)
    assert 0.3 < np.abs(middle).max() < 0.6
    content = (tmp_path / name).read_bytes()
    for size in (0, 3, len(content) // 2, len(content) - 1):
        (tmp_path / name).write_bytes(content[:size])
        assert "\n" not in said_of(tmp_path / name)


def test_other_files_get_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A playlist names other files; they are not opened. A megabyte of silence in FLAC may be gigabytes of samples."""
    pytest.importorskip("av")
    encode(tmp_path / "a.mp3", tone(0.2), "libmp3lame", "fltp", 44_100, "mono")
    (tmp_path / "a.m3u8").write_text("#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\na.mp3\n#EXT-X-ENDLIST\n")
    monkeypatch.setattr("outrider.inputs.audio.ffmpeg.MOST_SAMPLES", 8_000)
    with pytest.raises(RequestError, match="has more than 8,000 samples. Cut it, or save it"):
        read_samples(tmp_path / "a.mp3", RATE)
    (tmp_path / "b.wav").write_bytes(b"RIFF nonsense")
    for name in ("a.m3u8", "b.wav"):
        with pytest.raises(RequestError, match="cannot be read: FFmpeg says") as error:
            read_samples(tmp_path / name, RATE)
        assert "\n" not in str(error.value)


def test_features_of_blocks_are_those_of_the_whole() -> None:
    """Audio of more than 30 s is transformed in blocks; what lies before does not change a frame."""
    samples = np.random.default_rng(0).uniform(-1, 1, 16_000 * 65).astype(np.float32)
    whole, end = log_mel(samples), log_mel(samples[16_000 * 40 :])
    assert np.allclose(whole[:, 4010:6400], end[:, 10:2400], atol=1e-5)
