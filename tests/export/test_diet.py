"""The draft diet: which tokens are kept, and bundles through the real converters."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import outrider
from exports import Recorder, check_answers, logits_of_ir
from outrider.bundle import read_bundle
from outrider.cli import run
from outrider.errors import OptionError, VocabularyMismatch
from outrider.inputs.text import Tokenizer
from outrider_export import export_bundle
from outrider_export.describe.pairing import map_tokens
from outrider_export.diet import diet
from outrider_export.diet.corpus import read_corpus
from outrider_export.diet.diet import Diet
from outrider_export.diet.usual_tokens import read_texts, score_tokens, script_of
from outrider_export.tokenizers.vocabulary import Vocabulary
from tiny import train_sentencepiece

ROWS = 24
some_ids = st.lists(st.integers(0, ROWS - 1), min_size=1, unique=True).map(sorted)


def logits(folder: Path) -> Any:
    """float32 [18, width] of the stateful IR in `folder`."""
    return logits_of_ir(folder / "openvino_model.xml", [*range(2, 20)])


# Which tokens


@given(st.data())
def test_without_texts_the_lowest_ids_of_a_script_and_the_required_are_kept(data: st.DataObject) -> None:
    candidates = np.array(data.draw(some_ids), dtype=np.int32)
    required = np.array(
        sorted(data.draw(st.sets(st.sampled_from(candidates.tolist()), max_size=ROWS - 1))), dtype=np.int32
    )
    num_tokens = data.draw(st.integers(len(required) + 1, ROWS))
    vocabulary = Vocabulary(tuple(f"word{i}" for i in range(ROWS)), ())
    counts, progress = data.draw(st.sampled_from([[], [np.zeros(ROWS, dtype=np.int64)]])), Recorder()
    chosen = Diet(vocabulary, candidates, required, num_tokens, [], None).choose_by(counts, progress)
    assert "nan" not in progress.notes[0]
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
    assert {400, 401, 402, 403} <= {*token_ids.tolist()}
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
    ({"draft": None, "draft_vocab_corpus": __file__}, "are for a draft model, and none is named"),
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


# The default size of a draft model's output matrix: which tokens are kept, and whether it pays.


LATIN = [f"word{i}" for i in range(500)]
HAN = [chr(0x4E00 + i) for i in range(100)]
VOCABULARY = Vocabulary((*LATIN, *HAN), ())


@pytest.mark.parametrize(("text", "script"), [
    (" the", "LATIN"), (" für", "LATIN BEYOND ASCII"), ("的时候", "CJK"), ("です", "HIRAGANA"), (" на", "CYRILLIC"),
    ("한국", "HANGUL"), ("में", "DEVANAGARI"), ("\n\n", "SPACE"), (" 123", "DIGIT"), ("();", "ASCII"), ("。", "SYMBOL"),
])  # fmt: skip
def test_tokens_have_scripts(text: str, script: str) -> None:
    assert script_of(text.encode()) == script
    assert script_of(b"\xe6\x9c") == "PART"


def test_texts_are_in_many_languages() -> None:
    texts = read_texts()
    assert {"en", "code", "zh", "de", "ar", "ja", "ru", "ko", "hi"} <= {*texts}
    assert all(len(text.encode()) > 400 for text in texts.values())


def test_each_script_has_its_own_ranks() -> None:
    """Its first tokens come before the late ones of a larger script with lower ids."""
    best = np.argsort(-score_tokens(VOCABULARY, []))[:100]
    assert {*range(20), *range(500, 510)} <= {*best.tolist()}


@pytest.mark.parametrize(("row_share", "num_tokens", "is_cut"), [
    (1 / 1000, 100, True), (1 / 6000, 100, False), (1 / 1000, 500, False), (1 / 1000, 4, False),
])  # fmt: skip
def test_a_matrix_is_cut_where_that_saves_a_tenth(
    row_share: float, num_tokens: int, is_cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for a vocabulary that is hardly larger, nor where special tokens leave no room. Tokens of texts are kept."""
    monkeypatch.setattr(diet, "Tokenizer", lambda _: SimpleNamespace(encode=lambda _: [450, 451, 590]))
    progress, required = Recorder(), np.array([555, 599], np.int32)
    plan = Diet(VOCABULARY, np.arange(600, dtype=np.int32), required, num_tokens, [], row_share)
    chosen = plan.choose(Path(), progress)
    if not is_cut:
        assert (chosen, progress.notes) == (None, [])
        return
    assert chosen is not None
    assert len(chosen) == 100
    assert {450, 451, 555, 590, 599} <= {*chosen.tolist()}
    assert progress.notes == [
        "draft vocabulary: 100 of 600 tokens; a draft token takes 0.50 of its time, by the bytes that it reads. "
        "--draft-vocab all keeps all."
    ]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("format", ["openvino", "onnx"])
def test_an_exported_draft_model_is_cut(
    format: str,  # noqa: A002
    untied: Path,
    gguf_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The text stays the main model's. `--draft-vocab all` overrules. A matrix of its own is never written whole."""
    if format == "onnx":
        pytest.importorskip("onnxruntime")
    monkeypatch.setattr(diet, "this_machine", lambda: SimpleNamespace(draft_vocab=200))
    monkeypatch.setattr(diet, "_LEAST_SAVED", 0.0)
    options = KEPT if format == "openvino" else {"format": format}
    model, progress = gguf_file if format == "openvino" else untied, Recorder()
    bundle = export_bundle(model, model, output=tmp_path / "b", progress=progress, **options)
    (drafter,) = bundle.manifest.drafters
    assert drafter.num_proposed_tokens == len(bundle.read_proposed(drafter)) == 200
    assert {400, 401, 402, 403} <= {*bundle.read_proposed(drafter).tolist()}  # special
    assert any(note.startswith("draft vocabulary: 200 of 404 tokens") for note in progress.notes)
    check_answers(bundle.folder, "def quicksort")
    if format == "openvino":
        whole = export_bundle(model, model, output=tmp_path / "whole", draft_vocab="all", **options)
        assert whole.manifest.drafters[0].num_proposed_tokens is None


# Pairs of different vocabularies: what they have in common, and their bundles through the real converters.


PROMPT = "def quicksort(items): 日本語 🙂"
OTHER_TEXT = ("Er sagte, die Sonne scheine und der Wind wehe nicht; Übermut tut selten gut.",) * 8


def byte_level(*tokens: str, special: tuple[int, ...] = ()) -> Vocabulary:
    return Vocabulary(tokens, special, frozenset(special), "byte level")


def sentencepiece(*tokens: str, special: tuple[int, ...] = ()) -> Vocabulary:
    return Vocabulary(tokens, special, frozenset(special), "sentencepiece")


def test_tokens_are_compared_as_bytes() -> None:
    main = byte_level("Ġthe", "Ċ", "Ã©", "Ã", "a", "▁b", "</s>", special=(6,))
    draft = sentencepiece("</s>", "▁the", "<0x0A>", "é", "<0xC3>", "<0x61>", "a", "▁b", special=(0,))
    assert map_tokens(main, draft).tolist() == [6, 0, 1, 2, 3, -1, 4, -1]


def test_special_tokens_match_special_tokens_alone() -> None:
    main, draft = byte_level("<x>", "a", "<y>", special=(0,)), byte_level("<x>", "<y>", "a", special=(1,))
    assert map_tokens(main, draft).tolist() == [-1, -1, 1]


def test_no_main_token_is_taken_twice() -> None:
    main, draft = sentencepiece("<0x41>", "A"), sentencepiece("<0x41>", "A", "A ")
    assert map_tokens(main, draft).tolist() == [-1, 1, -1]


@pytest.mark.parametrize(("decoder", "spelling"), [
    ({"type": "ByteLevel"}, b" b"),
    ({"type": "Sequence", "decoders": [{"type": "Replace", "content": " "}, {"type": "ByteFallback"}]}, b"\xc4\xa0b"),
    ({"type": "Metaspace"}, b"\xc4\xa0b"),
    (None, b"\xc4\xa0b"),
], ids=str)  # fmt: skip
def test_the_decoder_tells_the_spelling(tmp_path: Path, decoder: Any, spelling: bytes) -> None:
    added = [{"id": 2, "content": "Ġ!", "special": False}]
    content = {"model": {"vocab": {"Ġb": 0, "▁b": 1, "<0x0A>": 3}}, "added_tokens": added, "decoder": decoder}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    token_bytes = Vocabulary.of_folder(tmp_path).token_bytes
    assert token_bytes[0] == spelling
    is_sentencepiece = decoder is not None and decoder["type"] != "ByteLevel"
    assert token_bytes[1] == (b" b" if is_sentencepiece else "▁b".encode())
    assert token_bytes[3] == (b"\n" if is_sentencepiece else b"<0x0A>")
    assert token_bytes[2] == "Ġ!".encode()  # added tokens are spelled out


@pytest.fixture(scope="module")
def main(make_checkpoint: Any) -> Path:
    folder: Path = make_checkpoint("pairing-main", seed=1)
    return folder


@pytest.mark.slow
def test_most_tokens_in_common(main: Path, make_checkpoint: Any, build_tokenizer: Any, tmp_path: Path) -> None:
    special = ("<|endoftext|>", "<|start|>", "<|im_end|>")
    tokenizer = build_tokenizer(special=special)
    tokenizer.add_tokens(["<extra>"])
    draft = make_checkpoint("pairing-near", tokenizer=tokenizer, seed=2)
    told = Recorder()
    bundle = export_bundle(main, draft, output=tmp_path / "pair", weights="fp32", progress=told)
    (drafter,) = bundle.manifest.drafters
    assert drafter.vocabulary == "intersection"
    to_main = bundle.read_map(drafter)
    assert (len(to_main), drafter.num_shared_tokens) == (405, int((to_main >= 0).sum()))
    assert to_main[400:].tolist() == [400, -1, 402, 403, -1]
    assert np.array_equal(np.sort(to_main[to_main >= 0]), np.unique(to_main[to_main >= 0]))
    assert drafter.tokenizer is not None
    assert (drafter.tokenizer.folder, drafter.tokenizer.eos_token_ids) == ("draft-tokenizer", (400, 402))
    assert told.notes == [
        f"pairing-near has {(drafter.num_shared_tokens or 0) / 404:.1%} of pairing-main's tokens: it proposes "
        "only these (intersection)."
    ]
    read_bundle(bundle.folder).check_hashes()
    check_answers(bundle.folder, PROMPT)


@pytest.mark.slow
def test_few_tokens_in_common(
    main: Path,
    make_checkpoint: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("outrider_export.describe.pairing.MOST", 0.9)  # the bytes are most of a small vocabulary
    draft = make_checkpoint(
        "pairing-far", tokenizer=train_sentencepiece(["<|endoftext|>", "<|im_end|>"], OTHER_TEXT), seed=2
    )
    bundle = export_bundle(main, draft, output=tmp_path / "pair")
    (drafter,) = bundle.manifest.drafters
    assert drafter.vocabulary == "text"
    assert not (bundle.folder / "draft" / "to_main.npy").exists()
    assert drafter.tokenizer is not None
    token_bytes = bundle.read_token_bytes(drafter.tokenizer, drafter.model.vocab_size)
    found = Tokenizer(bundle.folder / drafter.tokenizer.folder)
    for text in ("die Sonne", " die Sonne", "\n", "\n\n die", "🙂 ", "die<|im_end|>"):  # and no space in front
        assert b"".join(token_bytes[i] for i in found.encode(text)) == text.encode()
    check_answers(bundle.folder, PROMPT)
    capsys.readouterr()
    assert run(["inspect", str(bundle.folder)]) == 0
    assert f"text: {drafter.num_shared_tokens} shared tokens" in " ".join(capsys.readouterr().out.split())


def test_nothing_in_common_is_refused(main: Path, make_checkpoint: Any, tmp_path: Path) -> None:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    foreign = tokenizers.Tokenizer(models.BPE({"あ": 0, "い": 1}, []))
    foreign.pre_tokenizer, foreign.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    draft = make_checkpoint("pairing-foreign")
    foreign.save(str(draft / "tokenizer.json"))
    with pytest.raises(VocabularyMismatch, match="none of its 2 tokens is one of the main model's 404"):
        export_bundle(main, draft, output=tmp_path / "pair")
    assert list(tmp_path.iterdir()) == []
