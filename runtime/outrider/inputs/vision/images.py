"""Reads an image, whatever it is given as."""

from __future__ import annotations

import base64
import functools
import io
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from outrider.errors import OptionError, RequestError, needs, one_line
from outrider.system.files import shown

MEMORY = 0.5  # GB to decode an image in
# What Pillow may read a file as. It has decoders for many more, some of which start other programs.
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_BYTES = 8  # that a pixel takes while it is decoded: Pillow has four for each, and converting or turning makes a copy
_BYTES_OF_WEBP = 16  # libwebp has copies of its own
_MOST_EDGE = 65_535  # pixels, as in JPEG: resizing takes 48 bytes for each along an edge, however thin the image is
_MOST_SCANS = 100  # of a JPEG: each goes through all pixels. Encoders write about ten.
# Bytes of EXIF data, twice what JPEG has room for in one segment. Pillow before 13 copies the data of each tag, even
# where those of thousands overlap: 360 MB here at most, and some GB for a file of 300 KB.
_MOST_EXIF = 131_070
_EXIF_OF_JPEG = re.compile(rb"\xff\xe1(..)Exif\0\0", re.DOTALL)
_GIVE = "Give the path or bytes of a PNG, JPEG, WebP or GIF file, an image of Pillow's, or an array uint8 [h, w, 3]."


def read_image(image: Any, memory: float = MEMORY) -> Any:
    """An image as Pillow's, RGB, turned as its camera was held; of a GIF and its like the first frame.

    image: a path, bytes, a `data:` URL, an image of Pillow's, or an array uint8 [height, width, 3]. memory: GB that
    decoding may take. A file's size is known from its header, before a pixel is decoded.

    Raises:
        RequestError: when it is none of these, has no pixels or too many, or would have to be fetched.
        OptionError: when Pillow is not installed.
    """
    pillow, ops = _pillow()
    if isinstance(image, np.ndarray):
        return _of_array(pillow, image, memory)
    name = "image"
    if is_data_url(image):
        image = _of_data_url(image)
    elif isinstance(image, str | Path):
        name = f"image {shown(image)}"
        image = _bytes_of(image)
    if isinstance(image, bytes | bytearray | memoryview):
        image = _opened(pillow, image, name)
    if not isinstance(image, pillow.Image):
        raise RequestError(f"The image is a {type(image).__name__}. {_GIVE}")
    width, height = image.size
    _check_size(width, height, _BYTES_OF_WEBP if image.format == "WEBP" else _BYTES, memory)
    try:
        image.load()
        _check_exif(_num_exif_bytes(image.info))  # those of a PNG may stand at its end
        image = ops.exif_transpose(image)  # a copy; the one before goes
        return image.convert("RGB")
    except RequestError:
        raise
    except Exception as error:  # cut short, say: decoders of damaged files raise many kinds
        raise RequestError(f"The {name} is damaged: {one_line(error)}. {_GIVE}") from error


def to_data_url(image: Any) -> str:
    """An image as a `data:` URL, which is JSON, and reads as the same pixels. Raises as `read_image`.

    The bytes of a file are kept as they are, so that a photo takes no more room. Other images become a PNG.
    """
    if is_data_url(image):
        return str(image)
    name = "image"
    if isinstance(image, str | Path):
        name = f"image {shown(image)}"
        image = _bytes_of(image)
    if not isinstance(image, bytes | bytearray | memoryview):
        file = io.BytesIO()
        read_image(image).save(file, "PNG")
        image = file.getvalue()
    kind = _opened(_pillow()[0], image, name).get_format_mimetype()
    return f"data:{kind};base64,{base64.b64encode(image).decode()}"


def is_data_url(image: object) -> bool:
    """Whether it is a text that says that it is a `data:` URL."""
    return isinstance(image, str) and image[:5].lower() == "data:"


def from_base64(text: str) -> bytes:
    """The bytes that a text in base64 stands for, in lines or in one, and with or without padding.

    Raises:
        ValueError: for other text. Source: "forgiving-base64 decode", https://infra.spec.whatwg.org.
    """
    body = "".join(text.split())
    return base64.b64decode(body + "=" * (-len(body) % 4), validate=True)


def _bytes_of(path: str | Path) -> bytes:
    if isinstance(path, str) and path.startswith(("http://", "https://", "ftp://")):
        raise RequestError(
            f"The image {shown(path)} is on the network, and images are never fetched. Send it as a data: URL."
        )
    try:
        return Path(path).expanduser().read_bytes()
    except (OSError, ValueError, RuntimeError) as error:
        raise RequestError(f"The image {shown(path)} cannot be read: {one_line(error)}. {_GIVE}") from error


def _pillow() -> tuple[Any, ModuleType]:
    with needs("Images need the package Pillow", "vision", OptionError):
        from PIL import Image, ImageOps
    _ignore_warnings()
    return Image, ImageOps


@functools.cache
def _ignore_warnings() -> None:
    """Have Pillow not print a line for each damaged tag of a photo's EXIF data, of which one file may have 65,535."""
    warnings.filterwarnings("ignore", module=r"PIL\.TiffImagePlugin")


def _opened(pillow: Any, data: bytes | bytearray | memoryview, name: str) -> Any:
    """An image of Pillow's, whose pixels are read later."""
    if data[:2] == b"\xff\xd8":  # of a JPEG, Pillow reads EXIF data when it is opened
        _check_exif(sum(int.from_bytes(found[1], "big") for found in _EXIF_OF_JPEG.finditer(data)))
    try:
        image = pillow.open(io.BytesIO(data), formats=_FORMATS)
    except pillow.DecompressionBombError as error:
        raise RequestError(f"The {name} has too many pixels: {one_line(error)}. Make it smaller.") from error
    except Exception as error:  # of a damaged header; many kinds
        raise RequestError(f"The {name} cannot be read by Pillow. {_GIVE}") from error
    if image.format in ("JPEG", "MPO"):
        num_scans = bytes(data).count(b"\xff\xda")
        if num_scans > _MOST_SCANS:
            raise RequestError(
                f"The {name} is a JPEG of {num_scans:,} scans, and at most {_MOST_SCANS} are decoded. Save it again."
            )
    return image


def _num_exif_bytes(info: Mapping[Any, Any]) -> int:
    """What Pillow reads as EXIF data. info: what it has found in a file beside pixels."""
    exif, in_digits = info.get("exif", b""), info.get("Raw profile type exif", "")
    return max(len(exif), len(in_digits) // 2) if isinstance(exif, bytes) else 0


def _check_exif(num_bytes: int) -> None:
    if num_bytes > _MOST_EXIF:
        raise RequestError(
            f"The image has {num_bytes:,} bytes of EXIF data, and at most {_MOST_EXIF:,} are read. Save it without."
        )


def _of_data_url(url: str) -> bytes:
    head, comma, body = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise RequestError(f"The image's URL begins {head[:60]!r}, and has to be data:image/…;base64,…")
    try:
        return from_base64(body)
    except ValueError as error:
        raise RequestError(
            f"The image's data: URL is no base64: {one_line(error)}. Encode the file's bytes."
        ) from error


def _of_array(pillow: Any, array: np.ndarray[Any, Any], memory: float) -> Any:
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3:
        raise RequestError(f"The image is an array {array.dtype} {list(array.shape)}. {_GIVE}")
    height, width, _ = array.shape
    _check_size(width, height, _BYTES, memory)
    return pillow.fromarray(np.ascontiguousarray(array), "RGB")


def _check_size(width: int, height: int, bytes_per_pixel: int, memory: float) -> None:
    if not width * height:
        raise RequestError(f"The image has {width} × {height} pixels, and needs at least one. {_GIVE}")
    if max(width, height) > _MOST_EDGE:
        raise RequestError(
            f"The image has {width:,} × {height:,} pixels, and an edge has at most {_MOST_EDGE:,}. Cut it."
        )
    most = int(memory * 1e9) // bytes_per_pixel
    if width * height > most:
        raise RequestError(
            f"The image has {width:,} × {height:,} pixels, more than the {most:,} that image_memory={memory:g} GB has "
            "room for. Make it smaller: the model sees some thousand along its longest edge at most."
        )
