"""MiniCPM-V's images beside those of its publishers' code, and their numbers in conversations."""

import re
import zlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

import outrider
from minicpm import (
    KINDS,
    RECORDED,
    learned_places,
    minicpm_tokenizer,
    parts_of,
    write_minicpm,
)
from outrider.inputs.vision import Tiles, cut_into_tiles, image_text, read_image
from outrider.inputs.vision.tiles import PROCESSORS
from outrider_export.describe.encoder_decoder import vocabulary_of
from outrider_export.describe.vision import vision_of
from outrider_export.sources.source import read_config, text_part
from tiny_vision import asking

pytest.importorskip("PIL.Image", reason="the extra [vision]")
VERSIONS = ("4.5", "4.6")


@pytest.fixture(scope="module", params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def checkpoint(version: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_minicpm(tmp_path_factory.mktemp("minicpm") / version, version)


@pytest.fixture(scope="module")
def entry(checkpoint: Path) -> Any:
    return vision_of(checkpoint, "fp32", vocabulary_of(checkpoint, read_config(checkpoint)))


def noise(number: int, height: int, width: int) -> NDArray[np.uint8]:
    return np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)


def natural(tiles: Tiles, version: str, sizes: Any) -> NDArray[np.float32]:
    """The patches of an image's parts, each row by row."""
    parts = [
        each.reshape(3, each.shape[1] // 4, 4, -1, 4).transpose(1, 3, 0, 2, 4).reshape(-1, 48)
        for each in parts_of(tiles.pixels, version, sizes)
    ]
    return np.concatenate(parts)


def test_pixels_and_tokens_are_those_of_the_publishers_code(entry: Any, version: str) -> None:
    for number, row in enumerate(RECORDED):
        sizes, checksum, text = row["4.6" if version == "4.6" else "4.5"]
        tiles = cut_into_tiles(read_image(noise(number, row["height"], row["width"])), entry)
        assert zlib.crc32(natural(tiles, version, sizes).tobytes()) == checksum
        runs = f"(?:{re.escape(entry.image_token)})+"
        found = re.sub(runs, lambda run: str(len(run[0]) // len(entry.image_token)), image_text(tiles, entry))
        assert found.replace("<slice>", "[").replace("</slice>", "]") == text
        assert image_text(tiles, entry).count(entry.image_token) == sum(tiles.lengths)


def test_patches_have_the_learned_positions_of_pytorch(entry: Any, version: str) -> None:
    entry, is_new = msgspec.structs.replace(entry, num_places=70), version == "4.6"
    layout: Any = PROCESSORS[entry.layout]
    for count in range(2, 200, 2 if is_new else 1):
        places = layout.others([(count, 2)], entry)["learned_places"]
        rows = learned_places(count * entry.patches, 70, is_new=is_new).numpy()
        assert (np.sort(places // 70) == np.repeat(rows, 2 * entry.patches)).all()


def test_images_are_numbered_in_a_conversation(checkpoint: Path, version: str, convert: Any) -> None:
    """And not in a message."""
    with outrider.load(convert(checkpoint, weights="fp32")[0].folder, cache_size=0.05, keep_records=False) as engine:
        chat = engine.chat()
        for number in (0, 1):
            chat.send(asking(noise(number, 40, 31))[0], max_new_tokens=4)
    text = minicpm_tokenizer(version).decode(chat.turns[-1].token_ids, skip_special_tokens=False)
    assert [f"<image_id>{number}</image_id><image>" in text for number in range(3)] == [True, True, False]
    assert ("</slice>\nWhat is this?" in text) == (version != "4.6")  # whose template has parts in its own way


def test_text_parts_are_those_of_their_version() -> None:
    config = {"architectures": ["MiniCPMV"], "model_type": "minicpmv", "hidden_size": 8, "vision_config": {}}
    found = {
        version: text_part(config | {"version": float(version)})["model_type"] for version in ("2.6", "4.0", "4.5")
    }
    assert found == {version: KINDS[version] for version in found}
