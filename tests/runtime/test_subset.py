"""Draft models with a cut output matrix. They propose fewer tokens, and the text does not change."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import outrider
from joint import CONFIG, PROMPT, sample_joint
from manifests import rewrite
from outrider.bundle import Bundle, read_bundle
from outrider.cli import run
from outrider.drafters import Subset
from outrider.errors import BundleError
from outrider.testing import ToyTokenizer, save_toy_bundle

LETTERS = [bytes([i]) for i in b"abcdefghijklmnop"]
OTHER = [*LETTERS[3:12], b"?", b"!", b"p"]
PROPOSED = [0, 1, 3, 4, 7, 8, 10, 15]
PROPOSED_OF_OTHER = [0, 2, 3, 6, 8, 9, 11]
PAIRS: dict[str, dict[str, Any]] = {
    "same": {"vocab_size": 16, "proposed": PROPOSED},
    "intersection": {"draft_tokens": OTHER, "vocabulary": "intersection", "proposed": PROPOSED_OF_OTHER},
    "text": {"draft_tokens": OTHER, "vocabulary": "text", "proposed": PROPOSED_OF_OTHER},
}
NUM_SAMPLES = 3000


def make_engine(bundle: Bundle) -> outrider.Engine:
    other = bundle.manifest.drafters[0].vocabulary != "same"
    return outrider.Engine(
        bundle,
        CONFIG,
        tokenizer=ToyTokenizer(LETTERS),
        draft_tokenizer=ToyTokenizer(OTHER if other else LETTERS),
    )


@pytest.fixture(scope="module", params=PAIRS)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> outrider.Engine:
    folder = tmp_path_factory.mktemp(request.param)
    return make_engine(save_toy_bundle(folder, tokens=LETTERS, draft_noise=0.15, seed=1, **PAIRS[request.param]))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"repetition_penalty": 1.3, "banned_token_ids": [3, 4]},
        {"temperature": 1.0, "seed": 2},
        {"temperature": 0.7, "top_p": 0.9, "seed": 3},
    ],
)
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
    assert sum(each.num_accepted_tokens for each in stats) > NUM_SAMPLES / 10
    assert p_value > 1e-4


def test_a_twin_is_right_where_it_has_the_token_and_never_elsewhere(tmp_path: Path) -> None:
    engine = make_engine(save_toy_bundle(tmp_path, vocab_size=16, tokens=LETTERS, draft_noise=0, proposed=PROPOSED))
    options: dict[str, Any] = {"max_new_tokens": 100, "ignore_eos": True, "temperature": 1.0, "seed": 1}
    result = engine.generate(PROMPT, num_assistant_tokens=1, **options)
    token_ids = [0, *result.token_ids]
    # A round of one draft token is one token, or two where the first of them is proposed.
    at = num_accepted_tokens = 0
    while (at := at + 1) < 100:
        accepted = token_ids[at + 1] in PROPOSED if at > 0 and at < 99 else False
        num_accepted_tokens += accepted
        at += accepted
    assert 0 < num_accepted_tokens < 100
    assert result.stats.num_accepted_tokens == num_accepted_tokens


def test_rows_are_widened() -> None:
    subset = Subset(np.array([1, 4], dtype=np.int32), 6)
    for row in ([0.5, -2.0], [3.0, 1.0]):
        wide = subset.widen(np.array(row, dtype=np.float32))
        assert wide.dtype == np.float32
        assert wide.tolist() == [-np.inf, row[0], -np.inf, -np.inf, row[1], -np.inf]


# Bundles


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    options: dict[str, Any] = {"tokens": LETTERS, "proposed": PROPOSED, "formats": ("onnx", "onnx")}
    return save_toy_bundle(tmp_path / "pair", vocab_size=16, **options)


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        (np.arange(7, dtype=np.int32), r"proposed.npy is int32 \[7\] and has to be int32 \[8\], an id for each logit"),
        (np.arange(8), r"is int64 \[8\] and has to be int32"),
        (np.arange(9, 17, dtype=np.int32), "has ids from 9 to 16; they go from 0 to 15"),
        (np.arange(-1, 7, dtype=np.int32), "has ids from -1 to 6; they go from 0 to 15"),
        (np.array([0, 1, 2, 3, 4, 5, 6, 6], dtype=np.int32), "has ids that do not ascend"),
    ],
    ids=str,
)
def test_ids_that_do_not_fit_are_refused(bundle: Bundle, token_ids: Any, message: str) -> None:
    np.save(bundle.folder / "draft" / "proposed.npy", token_ids)
    rewrite(bundle)
    with pytest.raises(BundleError, match=message):
        make_engine(read_bundle(bundle.folder))


def test_a_manifest_that_does_not_fit_is_refused(bundle: Bundle) -> None:
    rewrite(bundle, num_proposed_tokens=7)
    with pytest.raises(BundleError, match="Drafter 'draft' proposes 7 tokens and gives 8 logits"):
        read_bundle(bundle.folder)
    rewrite(bundle, num_proposed_tokens=None)
    with pytest.raises(BundleError, match="draft model gives 8 logits for 16 tokens"):
        read_bundle(bundle.folder)
    (bundle.folder / "draft" / "proposed.npy").unlink()
    rewrite(bundle)
    with pytest.raises(BundleError, match=r"lists no draft/proposed\.npy, which drafter 'draft' needs"):
        read_bundle(bundle.folder)


def test_inspect_says_so(bundle: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(bundle.folder)]) == 0
    assert "the same vocabulary; proposes 8 of its tokens" in " ".join(capsys.readouterr().out.split())
