"""Mask tokens in a main model's graph: they are read as embeddings, and change no bit of anything else."""

import functools
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
from numpy.typing import NDArray

import outrider
from heads import write_head
from outrider.bundle import Bundle, read_bundle
from outrider.errors import BundleError, ExportError
from outrider.models.backends.embeds import EMBEDDINGS, Masks
from outrider.models.backends.heads.weights import MainWeights
from outrider.models.backends.openvino_paged import OpenVINOPaged
from outrider.models.backends.paged_graph import read_decoder
from outrider.models.backends.taps import LAST, after_layers
from outrider.types import Chunk
from outrider_export.drafters import add_drafter
from outrider_export.heads import container
from outrider_export.heads.checks import check_main
from outrider_export.heads.formats import read_head
from shapes import cosines

TOKENS = [5, 77, 130]  # of the vocabulary, whose embeddings the masks have
ANSWER: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True}


@pytest.fixture(scope="module")
def bundle(model: Path) -> Bundle:
    return read_bundle(model)


@pytest.fixture(scope="module")
def path(bundle: Bundle) -> Path:
    return bundle.model_path(bundle.manifest.main)


@pytest.fixture(scope="module")
def masks(bundle: Bundle, path: Path, tmp_path_factory: pytest.TempPathFactory) -> Masks:
    """Masks with the embeddings of tokens."""
    token_ids = ov.opset13.parameter([-1], np.int64)
    graph = ov.Model([ov.opset13.result(MainWeights(ov.Core(), path).embed(token_ids))], [token_ids])
    hints = {"INFERENCE_PRECISION_HINT": "f32"}
    rows = ov.Core().compile_model(graph, "CPU", hints)([np.array(TOKENS)])[0][:, 0]
    target = tmp_path_factory.mktemp("masks") / "openvino_model.xml"
    container.write(target, {EMBEDDINGS: rows}, {}, "fp32")
    first = bundle.manifest.main.vocab_size
    return Masks(target, range(first, first + len(TOKENS)))


def load(bundle: Bundle, path: Path, masks: Masks | None, precision: str, features: Seq[str] = ()) -> OpenVINOPaged:
    if precision not in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES") and precision == "BF16":
        pytest.skip("this processor does not calculate in bf16")
    build = functools.partial(read_decoder, masks=masks, features=features)
    token_ids = masks.token_ids if masks else ()
    backend = OpenVINOPaged(
        path,
        vocab_size=bundle.manifest.main.vocab_size,
        precision={"FP32": "f32", "BF16": "bf16"}[precision],
        features=features,
        mask_token_ids=token_ids,
        build=build,
    )
    backend.allocate(1000)
    return backend


def read(backend: OpenVINOPaged, *pieces: Seq[int]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The rows behind all tokens, and their hidden states, if the backend gives any."""
    slot = backend.open(200)
    assert slot is not None
    rows, states = [], []
    for piece in pieces:
        chunk = Chunk(slot, piece, len(piece), backend.capabilities.features)
        found = backend.submit([chunk]).wait()
        rows += [found.row(i).full().copy() for i in range(len(piece))]
        states += [found.features(chunk).copy()] if backend.capabilities.features else []
    slot.close()
    return np.array(rows), np.concatenate(states) if states else np.zeros(0, np.float32)


@pytest.mark.parametrize("features", [(), (after_layers(0), after_layers(1), LAST)], ids=["plain", "taps"])
@pytest.mark.parametrize("precision", ["FP32", "BF16"])
def test_they_change_no_bit_of_other_rows(
    bundle: Bundle, path: Path, masks: Masks, precision: str, features: tuple[str, ...]
) -> None:
    text = np.random.default_rng(0).integers(0, bundle.manifest.main.vocab_size, 70).tolist()
    pieces = text[:60], text[60:61], text[61:64], text[64:]
    without, with_masks = (load(bundle, path, each, precision, features) for each in (None, masks))
    assert with_masks.capabilities.mask_token_ids == (*masks.token_ids,)
    for found, expected in zip(read(with_masks, *pieces), read(without, *pieces), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("precision", ["FP32", "BF16"])
def test_they_are_read_as_their_embeddings(bundle: Bundle, path: Path, masks: Masks, precision: str) -> None:
    """Masks with the embeddings of tokens give these tokens' rows, and those of what is read behind them.

    In bf16 nearly so.
    """
    backend = load(bundle, path, masks, precision)
    mine = [*masks.token_ids]
    found, _ = read(backend, [9, 8, 7], mine, [4, mine[1], 6], [mine[2], mine[0]])
    expected, _ = read(backend, [9, 8, 7], TOKENS, [4, TOKENS[1], 6], [TOKENS[2], TOKENS[0]])
    if precision == "FP32":
        np.testing.assert_array_equal(found, expected)
    else:  # the embedding's rows and the masks' are rounded at different places
        near = cosines(found, expected)
        assert np.median(near) > 0.999
        assert near.min() > 0.99  # with AMX, rows have other bits in bf16 in calls of other sizes


def test_wrong_embeddings_are_said(bundle: Bundle, path: Path, masks: Masks, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"has embeddings \[3, \d+\], and this main model's mask tokens are \[2, "):
        load(bundle, path, Masks(masks.path, masks.token_ids[:2]), "FP32")
    with pytest.raises(BundleError, match="cannot be read by OpenVINO"):
        load(bundle, path, Masks(tmp_path / "none.xml", masks.token_ids), "FP32")


def test_graphs_of_another_form_are_refused(openvino_bundle: Bundle, masks: Masks) -> None:
    """The toy adds positions to its embedding."""
    path = openvino_bundle.model_path(openvino_bundle.manifest.main)
    with pytest.raises(BundleError, match="place of the embedding .* is not found there"):
        load(openvino_bundle, path, masks, "FP32")


def test_models_in_onnx_are_refused(tiny: Path, tmp_path: Path) -> None:
    head = read_head(write_head(tmp_path / "head", "masks"), read_bundle(tiny).manifest.main.geometry)
    check_main(head, "openvino")
    with pytest.raises(ExportError, match="Mask tokens are for main models in OpenVINO's format, and this one is in"):
        check_main(head, "onnx")


@pytest.mark.parametrize("cache_size", [0.02, 0.0006], ids=["room", "no room"])
def test_nothing_of_them_stays_in_the_cache(folder: Path, tmp_path: Path, cache_size: float) -> None:
    """Answers that go on from what was read beside masks are those of an engine without any."""
    add_drafter(folder, write_head(tmp_path / "head", "masks"))
    texts = []
    for drafter in (None, "masks"):
        engine = outrider.load(folder, cache_size=cache_size, num_assistant_tokens=3)
        prompt, made = [*range(40, 75)], []
        for _ in range(3):
            result = engine.generate(prompt, drafter=drafter, **ANSWER)
            made.append(result.token_ids)
            engine.settle()
            assert engine.cache["main"].num_used_tokens == 0
            prompt = [*prompt, *result.token_ids, 3]
        again = engine.generate(prompt, drafter=None, logprobs=3, **ANSWER)
        assert again.stats.num_cached_tokens > 100
        texts.append((made, again.token_ids, again.logprobs))
        assert (drafter is None) == (result.stats.num_draft_tokens == 0)
        engine.close()
    assert texts[0] == texts[1]


def test_an_engine_for_another_drafter_has_none(folder: Path, tmp_path: Path) -> None:
    add_drafter(folder, write_head(tmp_path / "head", "masks"), name="ahead")
    for drafter, count in (("ahead", 3), ("auto", 3), ("suffix", 0), (None, 0)):
        with outrider.load(folder, cache_size=0.02, drafter=drafter) as engine:
            assert len(engine.main.capabilities.mask_token_ids) == count
            assert ("ahead" in engine.drafters) == bool(count)
            assert engine.draft_models == {}
