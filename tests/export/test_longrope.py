"""LongRoPE: texts beyond a length are rotated by a second set of frequencies, from their first token on."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exports import error_of
from outrider.models.backends.openvino_paged import OpenVINOPaged
from outrider.types import Chunk, Prompt
from outrider_export.direct.convert import open_weights
from outrider_export.direct.graph import build
from outrider_export.direct.pack import pack
from outrider_export.direct.save import save
from shapes import logits_of, make_model

LIMIT = 40
TOKENS = np.random.default_rng(3).integers(0, 400, size=56).tolist()
ROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": np.linspace(1, 1.4, 8).tolist(),
    "long_factor": np.linspace(1.5, 6, 8).tolist(), "original_max_position_embeddings": LIMIT,
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A random model, and its graph."""
    folder = tmp_path_factory.mktemp("phi3")
    model = make_model("phi3", sliding_window=None, original_max_position_embeddings=LIMIT, rope_parameters=ROPE)
    model.save_pretrained(folder)
    weights = open_weights(folder, is_gguf=False)
    assert (weights.decoder.limits.long_from, weights.decoder.limits.length) == (LIMIT, None)
    packed = pack(weights, "fp32", folder / "model.bin", lambda _: None)
    save(*build(weights.decoder, weights, packed), folder / "model.xml")
    return model, folder / "model.xml"


@pytest.fixture(scope="module")
def backend(made: tuple[Any, Path]) -> OpenVINOPaged:
    found = OpenVINOPaged(made[1], vocab_size=448, precision="f32", cache_precision="f32", long_from=LIMIT)
    found.allocate(512)
    assert found.capabilities.long_from == LIMIT
    return found


def read(backend: OpenVINOPaged, texts: list[list[int]], lengths: list[int]) -> list[Any]:
    """The logits of all texts, which are read in the same calls. lengths: that their slots have room for."""
    slots: list[Any] = [backend.open(length) for length in lengths]
    found: list[list[Any]] = [[] for _ in texts]
    for begin, end in ((0, 24), (24, None)):
        chunks = [Chunk(slot, text[begin:end], len(text[begin:end])) for slot, text in zip(slots, texts, strict=True)]
        step = backend.submit(chunks).wait()
        for chunk, rows in zip(chunks, found, strict=True):
            rows.extend(row.full().copy() for row in step.rows(chunk))
    for slot in slots:
        slot.close()
    return [np.stack(rows) for rows in found]


@pytest.mark.parametrize("length", [LIMIT, LIMIT + 1, len(TOKENS)])
def test_each_set_is_transformers_own(length: int, made: tuple[Any, Path], backend: OpenVINOPaged) -> None:
    (found,) = read(backend, [TOKENS[:length]], [length])
    assert error_of(found, logits_of(made[0], TOKENS[:length])) < 5e-6


def test_a_text_that_may_become_long_is_long_from_the_start(made: tuple[Any, Path], backend: OpenVINOPaged) -> None:
    (found,) = read(backend, [TOKENS[:30]], [LIMIT + 1])
    assert error_of(found, logits_of(made[0], TOKENS)[:30]) < 5e-6


def test_a_call_has_texts_of_both_sets(backend: OpenVINOPaged) -> None:
    short, long = TOKENS[:LIMIT], TOKENS[::-1]
    alone = [read(backend, [text], [len(text)])[0] for text in (short, long)]
    for found, expected in zip(read(backend, [short, long], [len(short), len(long)]), alone, strict=True):
        assert error_of(found, expected) < 1e-6


def test_prefixes_of_one_set_are_not_the_other_s(backend: OpenVINOPaged) -> None:
    text = [7, *TOKENS[:39]]
    for length in (LIMIT, LIMIT + 1):
        slot = backend.open(length, Prompt(text))
        assert slot is not None
        assert slot.length == 0
        backend.submit([Chunk(slot, text[:-1], 0)]).wait()
        slot.publish(text)
        slot.close()
    for length in (LIMIT, LIMIT + 1):
        slot = backend.open(length, Prompt(text))
        assert slot is not None
        assert slot.length >= backend.block_size
        slot.close()
