"""The draft diet: which tokens are kept, and bundles through the real converters."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import outrider
from exports import Recorder, check_answers, logits_of_ir
from outrider.bundle import read_bundle
from outrider.cli import run
from outrider.errors import OptionError
from outrider_export import export_bundle
from outrider_export.diet.diet import Diet, read_corpus

ROWS = 24
some_ids = st.lists(st.integers(0, ROWS - 1), min_size=1, unique=True).map(sorted)


def logits(folder: Path) -> Any:
    """float32 [18, width] of the stateful IR in `folder`."""
    return logits_of_ir(folder / "openvino_model.xml", [*range(2, 20)])


# Which tokens


@given(st.data())
def test_without_a_corpus_the_lowest_ids_and_the_required_are_kept(data: st.DataObject) -> None:
    candidates = np.array(data.draw(some_ids), dtype=np.int32)
    required = np.array(
        sorted(data.draw(st.sets(st.sampled_from(candidates.tolist()), max_size=ROWS - 1))), dtype=np.int32
    )
    num_tokens = data.draw(st.integers(len(required) + 1, ROWS))
    chosen = Diet(num_tokens, candidates, required, [], ROWS).choose(None, Recorder())  # type: ignore[arg-type]
    others = [i for i in candidates if i not in required]
    assert chosen.dtype == np.int32
    assert chosen.tolist() == sorted([*required, *others[: num_tokens - len(required)]])


def test_a_corpus_is_read(tmp_path: Path) -> None:
    path = tmp_path / "corpus.txt"
    path.write_text("one\ntwo\n" * 30_000, encoding="utf-8")
    pieces = read_corpus(path)
    assert "".join(pieces) == "one\ntwo\n" * 30_000
    assert len(pieces) == 3
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"prompt": "a", "text": "b"}\n\n{"turns": ["c", "d"]}\n', encoding="utf-8")
    assert read_corpus(path) == ["a", "b", "c", "d"]
    assert read_corpus(None) == []


@pytest.mark.parametrize(("name", "content", "message"), [
    ("a.jsonl", '{"text": "a"}\n{"txt": "b"}', r"a\.jsonl, line 2, has neither 'text' nor"),
    ("a.jsonl", '{"turns": [1]}', "line 1, has neither"),
    ("a.jsonl", "[1]", "line 1, has neither"),
    ("a.jsonl", "text", "line 1, has neither"),
    ("a.jsonl", "[" * 100_000 + "]" * 100_000, "line 1, has neither"),
    ("a.txt", " \n", "holds no text"),
    ("a.txt", b"\xff\xfe", "cannot be read"),
    ("a.txt", None, "cannot be read"),
    ("x" * 5000, None, "cannot be read"),
])  # fmt: skip
def test_what_is_no_corpus_is_refused(tmp_path: Path, name: str, content: Any, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(OptionError, match=message):
        read_corpus(tmp_path / name)


# Bundles


KEPT: dict[str, Any] = {"weights": "int4", "draft_weights": "int4"}


@pytest.mark.slow
def test_a_kept_gguf_file_is_cut(gguf_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tied, with the weights that it has; special tokens and end tokens (400 and up) stay."""
    arguments = ["export", str(gguf_file), "--draft", str(gguf_file), "-o", str(tmp_path / "b")]
    kept = ["--weights", "int4", "--draft-weights", "int4"]
    assert run([*arguments, *kept, "--draft-vocab", "100", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["notes"] == ["draft vocabulary: 100 of 404 tokens."]
    bundle = read_bundle(tmp_path / "b")
    bundle.check_hashes()
    (drafter,) = bundle.manifest.drafters
    assert (drafter.vocabulary, drafter.num_proposed_tokens, drafter.model.geometry.logits_width) == ("same", 100, 100)
    assert drafter.model.weights == "int4"
    token_ids = bundle.read_proposed(drafter)
    assert token_ids.tolist() == [*range(96), 400, 401, 402, 403]
    whole = logits(bundle.folder / "main")
    assert np.allclose(logits(bundle.folder / "draft"), whole[:, token_ids], rtol=0, atol=1e-5 * np.abs(whole).max())
    check_answers(bundle.folder, "def quicksort")
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


@pytest.mark.slow
def test_a_corpus_chooses(gguf_file: Path, tmp_path: Path) -> None:
    (tmp_path / "c.txt").write_text("return items\n" * 20, encoding="utf-8")
    progress = Recorder()
    bundle = export_bundle(
        gguf_file,
        gguf_file,
        output=tmp_path / "b",
        draft_vocab=40,
        draft_vocab_corpus=tmp_path / "c.txt",
        progress=progress,
        **KEPT,
    )
    used = set(outrider.load(bundle.folder, drafter=None, cache_size=0.01).tokenizer.encode("return items\n"))
    assert max(used) > 40
    assert used < set(bundle.read_proposed(bundle.manifest.drafters[0]).tolist())
    assert progress.notes == ["draft vocabulary: 40 of 404 tokens; 100.0% of the corpus's tokens are among them."]


@pytest.mark.parametrize(("weights", "changes"), [("int8", {}), ("int4", {"tie_word_embeddings": False})])
def test_converted_weights_are_cut(make_checkpoint: Any, convert: Any, weights: str, changes: Any) -> None:
    checkpoint = make_checkpoint(f"diet-{weights}", hidden_size=128, dtype="bfloat16", seed=3, **changes)
    bundle, _ = convert(checkpoint, checkpoint, weights=weights, draft_weights=weights, draft_vocab=50)
    (drafter,) = bundle.manifest.drafters
    token_ids, whole = bundle.read_proposed(drafter), logits(bundle.folder / "main")
    assert len(token_ids) == drafter.model.geometry.logits_width == 50
    assert np.allclose(logits(bundle.folder / "draft"), whole[:, token_ids], rtol=0, atol=1e-5 * np.abs(whole).max())


def test_only_shared_tokens_are_kept(
    make_checkpoint: Any, make_gguf: Any, build_tokenizer: Any, gguf_file: Path, tmp_path: Path
) -> None:
    tokenizer = build_tokenizer(special=("<|endoftext|>", "<|start|>", "<|im_end|>"))
    draft = make_gguf("diet-near", make_checkpoint("diet-near", tokenizer=tokenizer, seed=2))
    bundle = export_bundle(gguf_file, draft, output=tmp_path / "b", draft_vocab=403, **KEPT)
    (drafter,) = bundle.manifest.drafters
    assert drafter.vocabulary == "intersection"
    token_ids = bundle.read_proposed(drafter)
    assert token_ids.tolist() == np.flatnonzero(bundle.read_map(drafter) >= 0).tolist()
    assert 401 not in token_ids
    check_answers(bundle.folder, "def quicksort")


@pytest.mark.parametrize(("options", "message"), [
    ({"draft": None, "draft_vocab": 100}, "are for a draft model, and none is named"),
    ({"draft": None, "draft_vocab_corpus": "c.txt"}, "are for a draft model, and none is named"),
    ({"draft_vocab": -1}, "draft_vocab=-1 is not a number of tokens"),
    ({"draft_vocab": "most"}, "draft_vocab='most' is not a number of tokens"),
    ({"draft_vocab": 4}, "draft_vocab=4 leaves no room for text: 4 special tokens are always proposed"),
    ({"draft_vocab": "all", "draft_vocab_corpus": "c.txt"}, "leaves nothing to choose by a corpus"),
    ({"draft_vocab_corpus": "nowhere.txt"}, "nowhere.txt cannot be read"),
])  # fmt: skip
def test_what_cannot_be_meant_is_refused(gguf_file: Path, tmp_path: Path, options: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        export_bundle(gguf_file, **({"draft": gguf_file} | options), output=tmp_path / "b")
    assert list(tmp_path.iterdir()) == []
