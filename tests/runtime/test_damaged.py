"""Damaged files: what the fuzzers found, one by one."""

import struct
import tracemalloc
import wave
from pathlib import Path

import msgspec
import numpy as np
import pytest

from outrider.bundle.folder import Bundle
from outrider.errors import BundleError, OptionError, RequestError
from outrider.inputs.audio import read_samples


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    """A file of 100 samples. Its header has 44 bytes; the last four are the length of the samples in bytes."""
    with wave.open(str(tmp_path / "sound.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes(bytes(200))
    return tmp_path / "sound.wav"


def overwrite(path: Path, at: int, content: bytes) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[:at] + content + whole[at + len(content) :])


def test_a_chunk_of_sound_that_ends_behind_the_file(sound: Path) -> None:
    overwrite(sound, 12, b"junk" + struct.pack("<I", 2**31))
    with pytest.raises(RequestError, match="is no WAV file that can be read .*ffmpeg"):
        read_samples(sound, 16_000)


def test_a_length_of_sound_is_no_reason_to_make_room(sound: Path) -> None:
    overwrite(sound, 4, struct.pack("<I", 2**32 - 1))
    overwrite(sound, 40, struct.pack("<I", 2**32 - 2))
    tracemalloc.start()
    try:
        assert len(read_samples(sound, 16_000)) == 100
        assert tracemalloc.get_traced_memory()[1] < 1e6
    finally:
        tracemalloc.stop()


def test_samples_have_a_width_that_is_known(sound: Path) -> None:
    overwrite(sound, 32, struct.pack("<HH", 5, 40))
    with pytest.raises(RequestError, match="its samples have 40 bits, and 8, 16, 24 and 32 are read"):
        read_samples(sound, 16_000)


def test_ids_of_a_drafter_have_the_size_that_they_promise(openvino_bundle: Bundle, tmp_path: Path) -> None:
    """NumPy makes room for as many as the header says, and reads the header as Python."""
    drafter = openvino_bundle.manifest.drafters[0]
    count = 1 << 28
    drafter = msgspec.structs.replace(drafter, model=msgspec.structs.replace(drafter.model, vocab_size=count))
    bundle = Bundle(tmp_path, openvino_bundle.manifest)
    path = tmp_path / drafter.model.folder / "to_main.npy"
    path.parent.mkdir()
    np.save(path, np.arange(40, dtype=np.int32))
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"(40,), }         ", b"(%d,), }  " % count))
    tracemalloc.start()
    try:
        with pytest.raises(BundleError, match="to_main.npy cannot be read: .*Export the bundle again"):
            bundle.read_map(drafter)
        assert tracemalloc.get_traced_memory()[1] < 1e6
    finally:
        tracemalloc.stop()
    path.write_bytes(whole.replace(b"'fortran", b"\0{'desc:"))
    with pytest.raises(BundleError, match="to_main.npy cannot be read: its header is damaged"):
        bundle.read_map(drafter)


def test_a_value_of_any_length_leaves_room_for_what_to_do() -> None:
    message = str(OptionError(f"{'[' * 40_000} is no number. Give one."))
    assert len(message) < 2100
    assert message.startswith("[[[")
    assert message.endswith("is no number. Give one.")
