"""Pairs of different vocabularies and cut output matrices in the engine: exact on toys; bundles that do not fit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import pytest

import outrider
from joint import CONFIG, PROMPT, sample_joint
from outrider.bundle import Bundle, list_files, read_bundle, write_manifest
from outrider.drafters import Subset
from outrider.errors import BundleError
from outrider.testing import ToyTokenizer, save_toy_bundle

# Manifests that are changed after an export's back.


def rewrite(bundle: Bundle, **changes: Any) -> None:
    """Write the manifest again, with a changed drafter and the current files."""
    drafter = msgspec.structs.replace(bundle.manifest.drafters[0], **changes)
    files = list_files(bundle.folder)
    write_manifest(bundle.folder, msgspec.structs.replace(bundle.manifest, drafters=(drafter,), files=files))


Way = Literal["intersection", "text"]
LETTERS = [bytes([i]) for i in b"abcdefghijklmnop"]
DRAFTS = {
    "partial": [*LETTERS[3:12], b"?", b"!", b"p"],
    "longer": [*LETTERS[:9], b"ab", b"abc", b"ba", b"cd", b"p"],
}
PROPOSED = [0, 1, 3, 4, 7, 8, 10, 15]
PROPOSED_OF_PARTIAL = [0, 2, 3, 6, 8, 9, 11]
PAIRS: dict[str, dict[str, Any]] = {
    f"{name}, {way}": {"draft_tokens": draft, "vocabulary": way}
    for way in ("intersection", "text")
    for name, draft in DRAFTS.items()
}
PAIRS["cut"] = {"vocab_size": 16, "proposed": PROPOSED}
PAIRS |= {
    f"cut, {way}": {**PAIRS[f"partial, {way}"], "proposed": PROPOSED_OF_PARTIAL} for way in ("intersection", "text")
}
NUM_SAMPLES = 1000


def make_engine(bundle: Bundle, draft: list[bytes] = LETTERS) -> outrider.Engine:
    return outrider.Engine(bundle, CONFIG, tokenizer=ToyTokenizer(LETTERS), draft_tokenizer=ToyTokenizer(draft))


@pytest.fixture(scope="module", params=PAIRS)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> outrider.Engine:
    pair, folder = PAIRS[request.param], tmp_path_factory.mktemp("pair")
    bundle = save_toy_bundle(folder, tokens=LETTERS, draft_noise=0.15, seed=1, **pair)
    return make_engine(bundle, pair.get("draft_tokens", LETTERS))


@pytest.mark.fast_cases(6)
@pytest.mark.parametrize("options", [
    {},
    {"repetition_penalty": 1.3, "banned_token_ids": [3, 4]},
    {"temperature": 1.0, "seed": 2},
    {"temperature": 0.7, "top_p": 0.9, "seed": 3},
])  # fmt: skip
def test_greedy_and_coupled_text_is_plain_text(engine: outrider.Engine, options: dict[str, Any]) -> None:
    plain = engine.generate(PROMPT, drafter=None, max_new_tokens=60, ignore_eos=True, **options)
    for n in (1, 3, 6):
        drafted = engine.generate(PROMPT, num_assistant_tokens=n, max_new_tokens=60, ignore_eos=True, **options)
        assert drafted.token_ids == plain.token_ids
        assert drafted.stats.num_draft_tokens > 0


@pytest.mark.slow
def test_rejection_samples_have_the_joint_distribution_of_the_main_model(engine: outrider.Engine) -> None:
    p_value, stats = sample_joint(
        engine, NUM_SAMPLES, {"temperature": 1.0}, sampling="rejection", num_assistant_tokens=3
    )
    assert sum(each.num_draft_tokens for each in stats) > NUM_SAMPLES / 4
    assert sum(each.num_accepted_tokens for each in stats) > NUM_SAMPLES / 20
    assert p_value > 1e-4


def test_rows_are_widened() -> None:
    subset = Subset(np.array([1, 4], dtype=np.int32), 6)
    for row in ([0.5, -2.0], [3.0, 1.0]):
        wide = subset.widen(np.array(row, dtype=np.float32))
        assert wide.dtype == np.float32
        assert wide.tolist() == [-np.inf, row[0], -np.inf, -np.inf, row[1], -np.inf]


# Bundles


@pytest.fixture
def cut(tmp_path: Path) -> Bundle:
    options: dict[str, Any] = {"tokens": LETTERS, "proposed": PROPOSED, "formats": ("onnx", "onnx")}
    return save_toy_bundle(tmp_path / "pair", vocab_size=16, **options)


@pytest.mark.parametrize(("token_ids", "message"), [
    (np.arange(7, dtype=np.int32), r"proposed.npy is int32 \[7\] and has to be int32 \[8\], an id for each logit"),
    (np.arange(9, 17, dtype=np.int32), "has ids from 9 to 16; they go from 0 to 15"),
    (np.array([0, 1, 2, 3, 4, 5, 6, 6], dtype=np.int32), "has ids that do not ascend"),
], ids=str)  # fmt: skip
def test_proposed_ids_that_do_not_fit_are_refused(cut: Bundle, token_ids: Any, message: str) -> None:
    np.save(cut.folder / "draft" / "proposed.npy", token_ids)
    rewrite(cut)
    with pytest.raises(BundleError, match=message):
        make_engine(read_bundle(cut.folder))


def test_a_cut_that_the_manifest_does_not_know_is_refused(cut: Bundle) -> None:
    rewrite(cut, num_proposed_tokens=7)
    with pytest.raises(BundleError, match="Drafter 'draft' proposes 7 tokens and gives 8 logits"):
        read_bundle(cut.folder)
    rewrite(cut, num_proposed_tokens=None)
    with pytest.raises(BundleError, match="draft model gives 8 logits for 16 tokens"):
        read_bundle(cut.folder)
    (cut.folder / "draft" / "proposed.npy").unlink()
    rewrite(cut)
    with pytest.raises(BundleError, match=r"lists no draft/proposed\.npy, which drafter 'draft' needs"):
        read_bundle(cut.folder)


@pytest.fixture
def pair(tmp_path: Path) -> Callable[[Way], Bundle]:
    return lambda way: save_toy_bundle(
        tmp_path / "pair", tokens=LETTERS, draft_tokens=DRAFTS["partial"], vocabulary=way, formats=("onnx", "onnx")
    )


@pytest.mark.parametrize(("to_main", "message"), [
    (np.zeros(11, np.int32), r"to_main.npy is int32 \[11\] and has to be int32 \[12\]"),
    (np.full(12, 16, np.int32), "has ids from 16 to 16; they go from −1 to 15"),
    (np.full(12, -1, np.int32), "to_main.npy has no token in common"),
    (np.array([{}] * 12), r"is object \[12\] and has to be int32"),
], ids=str)  # fmt: skip
def test_a_map_that_does_not_fit_is_refused(pair: Any, to_main: Any, message: str) -> None:
    bundle = pair("intersection")
    np.save(bundle.folder / "draft" / "to_main.npy", to_main)
    rewrite(bundle)
    with pytest.raises(BundleError, match=message):
        make_engine(read_bundle(bundle.folder), DRAFTS["partial"])


@pytest.mark.parametrize("content", [b"", b"\xc1", msgspec.msgpack.encode([b"a"])])
def test_token_bytes_that_do_not_fit_are_refused(pair: Any, content: bytes) -> None:
    bundle = pair("text")
    (bundle.folder / "tokenizer" / "token_bytes.msgpack").write_bytes(content)
    rewrite(bundle)
    with pytest.raises(BundleError, match=r"token_bytes.msgpack (cannot be read|has 1 tokens; the vocabulary has 16)"):
        make_engine(read_bundle(bundle.folder), DRAFTS["partial"])


@pytest.mark.parametrize(("way", "path"), [
    ("intersection", "draft/to_main.npy"),
])  # fmt: skip
def test_what_is_not_there_is_named(pair: Any, way: Way, path: str) -> None:
    bundle = pair(way)
    (bundle.folder / path).unlink()
    rewrite(bundle)
    with pytest.raises(BundleError, match=f"lists no {path}, which drafter 'draft' needs"):
        read_bundle(bundle.folder)


def test_another_vocabulary_needs_a_tokenizer_and_a_way(pair: Any) -> None:
    bundle = pair("text")
    rewrite(bundle, tokenizer=None)
    with pytest.raises(BundleError, match="no tokenizer for drafter 'draft'"):
        read_bundle(bundle.folder)
    rewrite(bundle, vocabulary="same")
    with pytest.raises(BundleError, match="vocabulary of drafter 'draft' is not the main model's"):
        read_bundle(bundle.folder)
