"""What the runtime reads from files and requests: damaged, it is refused by an error of ours, and nothing worse."""

import io
import json
import shutil
import struct
import wave
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import strategies as st

from fuzzing import damaged, damaged_json, few_or_many, fuzz
from outrider.bundle import read_bundle
from outrider.bundle.folder import Bundle
from outrider.engine.chat.file import read_chat
from outrider.inputs.audio import read_samples
from outrider.inputs.vision import read_image
from outrider.testing import save_toy_bundle
from watching import chat_engine

pytestmark = few_or_many


def without_checksum(content: bytes) -> bytes:
    """A file as earlier versions wrote it, so that what is checked after the checksum is tried."""
    whole = json.loads(content)
    del whole["checksum"]
    return json.dumps(whole).encode()


@pytest.mark.parametrize("states", [False, True])
def test_manifest(openvino_bundle: Bundle, tmp_path: Path, states: bool, num_examples: int) -> None:
    if states:
        folder = save_toy_bundle(tmp_path / "bundle", states=True).folder
    else:
        folder = shutil.copytree(openvino_bundle.folder, tmp_path / "bundle")
    path = folder / "outrider.json"
    whole = without_checksum(path.read_bytes())

    def read(content: bytes) -> None:
        path.write_bytes(content)
        read_bundle(folder)

    fuzz(read, whole, damaged(whole) | damaged_json(json.loads(whole)), num_examples)


def npy(array: np.ndarray[Any, Any]) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@pytest.mark.parametrize("name", ["to_main.npy", "proposed.npy"])
def test_ids_of_a_drafter(openvino_bundle: Bundle, tmp_path: Path, name: str, num_examples: int) -> None:
    """The files are behind hashes, and whoever writes them writes the hashes, too."""
    drafter = openvino_bundle.manifest.drafters[0]
    size = drafter.model.geometry.logits_width if name == "proposed.npy" else drafter.model.vocab_size
    model = msgspec.structs.replace(drafter.model, vocab_size=size)
    drafter = msgspec.structs.replace(drafter, model=model)
    main = msgspec.structs.replace(openvino_bundle.manifest.main, vocab_size=size)
    bundle = Bundle(tmp_path, msgspec.structs.replace(openvino_bundle.manifest, main=main))
    path = tmp_path / model.folder / name
    path.parent.mkdir()
    reader: Callable[[Any], Any] = bundle.read_map if name == "to_main.npy" else bundle.read_proposed

    def read(content: bytes) -> None:
        path.write_bytes(content)
        reader(drafter)

    whole = npy(np.arange(size, dtype=np.int32))
    lengths = st.sampled_from([0, 1, 2**28, 2**40, 2**63, 10**40]).map(
        lambda length: whole.replace(b"(%d,)" % size, b"(%d,)" % length)
    )
    fuzz(read, whole, damaged(whole) | lengths, num_examples)


def test_bytes_of_tokens(openvino_bundle: Bundle, tmp_path: Path, num_examples: int) -> None:
    tokenizer = openvino_bundle.manifest.tokenizer
    bundle = Bundle(tmp_path, openvino_bundle.manifest)
    path = tmp_path / tokenizer.folder / "token_bytes.msgpack"
    path.parent.mkdir()

    def read(content: bytes) -> None:
        path.write_bytes(content)
        bundle.read_token_bytes(tokenizer, 40)

    whole = msgspec.msgpack.encode([b"%d" % i for i in range(40)])
    fuzz(read, whole, damaged(whole), num_examples)


@pytest.fixture(scope="module")
def chat(openvino_bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file of a conversation with tools and a turn that was answered twice."""
    path = tmp_path_factory.mktemp("chat") / "chat.json"
    with chat_engine(openvino_bundle) as engine:
        talk = engine.chat("be kind", tools=[{"name": "look"}], max_new_tokens=12)
        for words in ("hello there", "the same"):
            talk.send(words, ignore_eos=True)
        talk.save(path)
    return without_checksum(path.read_bytes())


def test_chat_file(chat: bytes, openvino_bundle: Bundle, tmp_path: Path, num_examples: int) -> None:
    path = tmp_path / "chat.json"

    def read(content: bytes) -> None:
        path.write_bytes(content)
        read_chat(path, openvino_bundle)

    fuzz(read, chat, damaged(chat) | damaged_json(json.loads(chat)), num_examples)


def picture(form: str) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (16, 20, 3)).astype(np.uint8)
    image = Image.fromarray(pixels)
    exif = Image.Exif()
    exif[0x0112] = 6  # turned
    options: dict[str, Any] = {} if form == "GIF" else {"exif": exif}
    image.convert("P" if form == "GIF" else "RGB").save(file, form, **options)
    return file.getvalue()


def with_checksums(png: bytes) -> bytes:
    """The same chunks with the checksums that they should have, as far as the chunks' lengths say where they are."""
    made, at = bytearray(png), 8
    while at + 12 <= len(made):
        (size,) = struct.unpack_from(">I", made, at)
        end = at + 8 + size
        if end + 4 > len(made):
            break
        struct.pack_into(">I", made, end, zlib.crc32(made[at + 4 : end]))
        at = end + 4
    return bytes(made)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF"])
def test_images(form: str, num_examples: int) -> None:
    pytest.importorskip("PIL", reason="the extra [vision]")
    whole = picture(form)
    contents = damaged(whole)
    fuzz(read_image, whole, contents | contents.map(with_checksums) if form == "PNG" else contents, num_examples)


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_sound(tmp_path: Path, width: int, num_examples: int) -> None:
    path = tmp_path / "sound.wav"
    with wave.open(str(path), "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(width)
        file.setframerate(16_000)
        file.writeframes(bytes(range(24 * width)))
    whole = path.read_bytes()

    def read(content: bytes) -> None:
        path.write_bytes(content)
        read_samples(path, 16_000)

    fuzz(read, whole, damaged(whole), num_examples)
