"""Pairs of different vocabularies: what they have in common, and their bundles through the real converters."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exports import Recorder, check_answers
from outrider.bundle import read_bundle
from outrider.cli import run
from outrider.errors import VocabularyMismatch
from outrider.inputs.text import Tokenizer
from outrider_export import export_bundle
from outrider_export.describe.pairing import map_tokens
from outrider_export.tokenizers.vocabulary import Vocabulary
from tiny import train_sentencepiece

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
