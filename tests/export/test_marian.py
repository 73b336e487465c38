"""The tokenizer of a tiny random MarianMT, and what its checkpoint says."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import outrider
from encoder_decoders import sentencepiece_model, unigram_pieces, write_marian
from outrider.engine.engine import Engine
from outrider.errors import ExportError
from outrider_export.tokenizers.marian_tokenizer import tokenizer_of
from tiny import TEXT

TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "def quicksort(items): return items",
)


@pytest.fixture(scope="module")
def marian(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("checkpoints") / "marian"
    write_marian(folder)
    return folder


@pytest.fixture(scope="module")
def translator(convert: Any, marian: Path) -> Iterator[Engine]:
    bundle, _ = convert(marian, weights="fp32")
    with outrider.load(bundle.folder) as engine:
        yield engine


def test_bundle_says_what_the_checkpoint_does(translator: Engine, marian: Path) -> None:
    ids = json.loads((marian / "vocab.json").read_text(encoding="utf-8"))
    encoder = translator.bundle.manifest.main.encoder
    assert encoder is not None
    assert encoder.begin_token_ids == encoder.suppress_token_ids == (ids["<pad>"],)
    assert translator.bundle.manifest.tokenizer.eos_token_ids == (0,)
    assert translator.bundle.manifest.main.vocab_size == len(ids)


@pytest.mark.parametrize("text", [*TEXTS, "  The  quick   fox ", "quick, quicker", "overlazy jumps"])
def test_tokens_are_sentencepieces(translator: Engine, marian: Path, text: str) -> None:
    ids = json.loads((marian / "vocab.json").read_text(encoding="utf-8"))
    pieces = sentencepieces(marian / "source.spm", text)
    found = translator.tokenizer.encode_prompt(text)
    assert found == [ids[piece] for piece in pieces] + [0]
    assert translator.tokenizer.decode(found) == " ".join(text.split())


def test_letters_of_the_target_keep_their_ids_and_codes_of_languages_are_tokens(
    translator: Engine, marian: Path
) -> None:
    ids = json.loads((marian / "vocab.json").read_text(encoding="utf-8"))
    known = "\u00f6"  # in target.spm only
    assert known not in unigram_pieces(TEXT[:2])
    expected = ["\u2581", "f", known, "x", "<unk>", "</s>"]
    assert translator.tokenizer.encode_prompt(f"f{known}x\U0001f680") == [ids[piece] for piece in expected]
    # Nor is a text cut into the target language's longer pieces, as its letters are.
    assert ids["\u2581quer"] not in translator.tokenizer.encode_prompt("quer")
    found = translator.tokenizer.encode_prompt(">>deu<< The fox")
    assert found == [ids[piece] for piece in (">>deu<<", "\u2581The", "\u2581fox", "</s>")]


def sentencepieces(path: Path, text: str) -> list[str]:
    """The pieces of a text, by the SentencePiece library in OpenVINO's tokenizers."""
    import openvino as ov
    import openvino_tokenizers
    from openvino import opset13 as ops

    texts = ops.parameter([-1], dtype=ov.Type.string)
    model = ops.constant(np.frombuffer(path.read_bytes(), dtype=np.uint8))
    attributes = {"add_bos": False, "add_eos": False, "reverse": False, "alpha": 1, "nbest_size": 1}
    node = openvino_tokenizers._get_factory().create("SentencepieceTokenizer", [model, texts], attributes)
    found = ov.compile_model(ov.Model([node.output(1)], [texts], "pieces"), "CPU")([text])[0].tolist()
    pieces = ["<unk>", "<s>", "</s>", *unigram_pieces(TEXT[:2])]
    return [pieces[token_id] for token_id in found]


def edit(name: str, **changes: Any) -> Callable[[Path], object]:
    def make(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")

    return make


def model(content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / "source.spm").write_bytes(content)


PIECES = {"\u2581": -2.0, "a": -3.0}


@pytest.mark.parametrize(("damage", "message"), [
    (edit("tokenizer_config.json", separate_vocabs=True), "separate_vocabs"),
    (edit("vocab.json", extra=9999), "does not number its tokens from 0 on"),
    (model(sentencepiece_model(PIECES, model_type=2)), "its type is 2"),
    (model(sentencepiece_model(PIECES, piece_type=4)), "of type 4"),
    (model(sentencepiece_model({})), "no pieces"),
    (model(sentencepiece_model(PIECES)[:-3]), "cut short"),
    (model(b"\xff" * 40), "no SentencePiece model"),
], ids=["two vocabularies", "gap", "bpe", "user-defined", "empty", "cut", "garbage"])  # fmt: skip
def test_other_tokenizers_are_refused(
    marian: Path, tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    shutil.copytree(marian, tmp_path / "other", ignore=shutil.ignore_patterns("*.safetensors"))
    damage(tmp_path / "other")
    with pytest.raises(ExportError, match=message):
        tokenizer_of(tmp_path / "other")


def test_sequences_that_are_banned_are_refused(marian: Path, tmp_path: Path) -> None:
    from outrider_export import export_bundle

    shutil.copytree(marian, tmp_path / "other")
    edit("generation_config.json", bad_words_ids=[[3, 4]])(tmp_path / "other")
    with pytest.raises(ExportError, match=r"\[3, 4\] among its bad_words_ids"):
        export_bundle(tmp_path / "other", output=tmp_path / "out")
