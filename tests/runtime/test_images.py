"""Images as they come from elsewhere: which are read, at what size, and in how much memory."""

import base64
import binascii
import io
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import outrider
from outrider.errors import RequestError, TooLong
from outrider.inputs.vision import images, prompts, read_image, to_data_url
from tiny_vision import asking, picture

Image: Any = pytest.importorskip("PIL.Image", reason="the extra [vision]")


def file_of(image: Any, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_these_formats_are_read(kind: str) -> None:
    image = Image.fromarray(picture(1))
    found = read_image(file_of(image, kind))
    assert (found.size, found.mode) == (image.size, "RGB")
    assert np.abs(np.asarray(found).astype(float) - np.asarray(image)).mean() < 10


def test_base64_is_read_as_clients_write_it() -> None:
    data = bytes(range(256)) + b"ab"
    lines = base64.encodebytes(data).decode()
    for text in (lines, lines.replace("\n", "\r\n"), lines.replace("\n", ""), lines.rstrip("=\n"), f" {lines}"):
        assert images.from_base64(text) == data
    for text in ("a", "aGk*", "a===b", "-_-_"):
        with pytest.raises(binascii.Error):
            images.from_base64(text)
    file = base64.encodebytes(file_of(Image.fromarray(picture(1)), "PNG")).decode()
    assert read_image(f"DATA:image/png;name=a.png;BASE64,{file}").size


@pytest.mark.parametrize("kind", ["EPS", "BMP", "TIFF", "PPM", "TGA", "ICO", "PDF", "PCX", "SGI"])
def test_no_other_decoder_is_given_bytes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow has Ghostscript read an EPS file."""
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *_, **__: pytest.fail("Ghostscript was started"))
    for read in (read_image, to_data_url):
        with pytest.raises(RequestError, match="cannot be read by Pillow. Give the path or bytes of a PNG, JPEG"):
            read(file_of(Image.fromarray(picture(1)), kind))
    assert read_image(Image.fromarray(picture(1))).size == (31, 40)  # an app may open what it likes


def test_the_first_frame_is_read_alone() -> None:
    frames = [Image.new("RGB", (20, 20), color) for color in ("red", "blue", "lime")]
    for kind in ("GIF", "WEBP", "PNG"):
        found = read_image(file_of(frames[0], kind, save_all=True, append_images=frames[1:], lossless=True))
        assert found.getpixel((5, 5)) == (255, 0, 0), kind


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_a_size_is_checked_before_a_pixel_is_decoded(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    most = 1_000_000 // (16 if kind == "WEBP" else 8)
    side = int(most**0.5)
    assert read_image(file_of(Image.new("RGB", (side, side)), kind), memory=0.001).size == (side, side)
    larger = file_of(Image.new("RGB", (side + 2, side)), kind)
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda _: pytest.fail("it is decoded"))
    with pytest.raises(RequestError, match=rf"more than the {most:,} that image_memory=0.001 GB has room for"):
        read_image(larger, memory=0.001)


def test_no_image_is_larger_than_pillow_s_own_limit() -> None:
    bomb = file_of(Image.new("1", (20_000, 20_000)), "PNG")
    assert len(bomb) < 100_000
    with pytest.raises(RequestError, match="has too many pixels: Image size .* Make it smaller"):
        read_image(bomb)


MEASURE = """
import io, sys
from pathlib import Path
from PIL import GifImagePlugin, JpegImagePlugin, PngImagePlugin, WebPImagePlugin
from outrider.inputs.vision import read_image

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024

data = Path(sys.argv[1]).read_bytes()
before = peak()
image = read_image(data)
print((peak() - before) / (image.size[0] * image.size[1]))
"""


@pytest.mark.fast_cases(1)
@pytest.mark.needs("Linux")
@pytest.mark.parametrize(("kind", "mode", "turned", "most"), [
    ("PNG", "RGBA", True, 8), ("JPEG", "RGB", True, 8), ("JPEG", "CMYK", False, 8), ("WEBP", "RGBA", False, 16),
])  # fmt: skip
def test_decoding_takes_what_is_said(tmp_path: Path, kind: str, mode: str, turned: bool, most: int) -> None:
    exif = Image.Exif()
    exif[0x112] = 6
    path = tmp_path / "image"
    path.write_bytes(file_of(Image.new(mode, (4000, 3000)), kind, **({"exif": exif} if turned else {})))
    done = subprocess.run([sys.executable, "-c", MEASURE, path], capture_output=True, text=True, check=True)
    assert 3 < float(done.stdout) < most + 0.7


@pytest.mark.slow
def test_images_that_cannot_fit_are_not_all_decoded(seeing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Any] = []

    def watched(*given: Any) -> Any:
        read.append(given)
        return read_image(*given)

    monkeypatch.setattr(prompts, "read_image", watched)
    with outrider.load(seeing, cache_size=0.02, keep_records=False, drafter=None, image_memory=0.001) as engine:
        with pytest.raises(
            TooLong, match="The first 205 of 1000 images take 8,200 tokens, more than the model's context"
        ):
            engine.generate(asking(*[picture(1)] * 1000))
        assert len(read) == 205
        with pytest.raises(RequestError, match=r"more than the 125,000 that image_memory=0.001 GB"):
            engine.generate(asking(Image.new("RGB", (400, 400))))


def chunk(kind: bytes, content: bytes) -> bytes:
    """A chunk of a PNG file."""
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def test_no_image_is_thin_and_endless() -> None:
    """Resizing took 48 bytes for each pixel along an edge: 3 GB for a file of 120 KB."""
    longest = read_image(file_of(Image.new("1", (65_535, 1)), "PNG"))
    assert longest.size == (65_535, 1)
    for size in ((65_536, 1), (1, 65_536)):
        for given in (
            file_of(Image.new("1", size), "PNG"),
            Image.new("RGB", size),
            np.zeros((*size[::-1], 3), "uint8"),
        ):
            with pytest.raises(RequestError, match=r"pixels, and an edge has at most 65,535\. Cut it\."):
                read_image(given)


def test_scans_of_a_jpeg_are_counted() -> None:
    """Each goes through all pixels: a file of 3 MB had the decoder busy for hours."""
    whole = file_of(Image.new("RGB", (64, 64), (9, 200, 30)), "JPEG", progressive=True)
    assert read_image(whole).size == (64, 64)
    last = whole[whole.rfind(b"\xff\xc4") : -2]  # the last scan with its table
    assert read_image(whole[:-2] + last * 90 + whole[-2:]).size == (64, 64)
    for read in (read_image, to_data_url):
        with pytest.raises(RequestError, match=r"is a JPEG of 110 scans, and at most 100 are decoded\. Save it again"):
            read(whole[:-2] + last * 100 + whole[-2:])


def test_damaged_tags_are_not_printed_one_by_one(recwarn: pytest.WarningsRecorder) -> None:
    images._ignore_warnings.cache_clear()  # pytest has filters of its own for each test
    count = 1000
    tags = b"".join(struct.pack("<HHII", tag, 7, 2**31, 8) for tag in range(count))
    exif = chunk(b"eXIf", b"II*\0\x08\0\0\0" + struct.pack("<H", count) + tags + bytes(4))
    plain = file_of(Image.new("L", (8, 8)), "PNG")
    assert read_image(plain[:-12] + exif + plain[-12:]).size == (8, 8)
    assert not recwarn.list


def test_exif_data_have_a_size() -> None:
    """Tags may name the same bytes: with Pillow 12, a photo of 300 KB took some GB."""
    size, plain = 131_070, file_of(Image.new("L", (8, 8)), "PNG")
    photo = file_of(Image.new("L", (8, 8)), "JPEG")
    segment = b"\xff\xe1" + struct.pack(">H", 40_008) + b"Exif\0\0" + bytes(40_000)
    digits = chunk(b"tEXt", b"Raw profile type exif\0" + b"0" * 2 * size + b"00")
    exif = chunk(b"eXIf", bytes(size + 1))
    webp = file_of(Image.new("L", (8, 8)), "WEBP", exif=bytes(size + 1))
    for damaged in (plain[:33] + exif + plain[33:], plain[:-12] + exif + plain[-12:], plain[:33] + digits + plain[33:]):
        with pytest.raises(RequestError, match=r"has 131,07[1-7] bytes of EXIF data, and at most 131,070 are read"):
            read_image(damaged)
    for damaged in (webp, photo[:2] + segment * 4 + photo[2:]):
        with pytest.raises(RequestError, match=r"bytes of EXIF data, and at most 131,070 are read\. Save it without"):
            read_image(damaged)
