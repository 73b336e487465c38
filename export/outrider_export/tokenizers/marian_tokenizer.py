"""Builds `tokenizer.json` for a MarianMT checkpoint, which has a SentencePiece model and `vocab.json` instead.

`source.spm` cuts a text into pieces, and `vocab.json` has the ids of its pieces and of the target language's. Both
become one Unigram model with the ids of `vocab.json`. A character that `source.spm` does not know keeps the id that it
may have in `vocab.json`, as in Transformers' `MarianTokenizer`. Two things differ from it: several such characters in a
row keep their ids, where MarianTokenizer looks up the row as one piece, and mostly finds none; and a piece of
`source.spm` that `vocab.json` lacks is cut into smaller ones, where MarianTokenizer has <unk>.

Source of the format: google/sentencepiece, `sentencepiece_model.proto`.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from outrider.errors import ExportError
from outrider.inputs.text.token_bytes import SPACE
from outrider_export.sources.source import read_json
from outrider_export.tokenizers.files import write_files

MODEL, VOCABULARY = "source.spm", "vocab.json"
_SPECIAL = _EOS, _UNKNOWN, _PAD = "</s>", "<unk>", "<pad>"
_UNIGRAM = 1  # trainer_spec.model_type
_NORMAL, _USER_DEFINED, _BYTE = 1, 4, 6  # types of pieces
_PENALTY = 10.0  # of an unknown character, below the lowest score, as in SentencePiece
_NEVER = -1000.0  # the score of pieces that no text is cut into: lower than that of all their characters


def is_marian(folder: Path) -> bool:
    """Whether a checkpoint has MarianMT's tokenizer."""
    return (folder / MODEL).is_file()


def tokenizer_of(folder: Path) -> dict[str, Any]:
    """The content of a `tokenizer.json` for a checkpoint folder.

    Raises:
        ExportError: when a file is missing or damaged, or the tokenizer is of another kind.
    """
    ids = _read_ids(folder)
    scores, charsmap = _read_model(folder / MODEL)
    unknown = min(scores.values()) - _PENALTY
    tokens = sorted(ids, key=ids.__getitem__)
    pieces = [(token, scores.get(token, unknown if len(token) == 1 else _NEVER)) for token in tokens]
    codes = {token for token in tokens if token.startswith(">>") and token.endswith("<<")}  # of languages
    added = [
        {
            "id": ids[token], "content": token, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": token in _SPECIAL,
        }
        for token in tokens
        if token in {*_SPECIAL, *codes}
    ]  # fmt: skip
    steps = [_replace(" {2,}", " "), _replace(r"\A | \z", "")]
    if charsmap:
        steps.insert(0, {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap).decode()})
    metaspace = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "always", "split": True}
    end = {"SpecialToken": {"id": _EOS, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in ("A", "B"))
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": metaspace,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [first, end],
            "pair": [first, second, end],
            "special_tokens": {_EOS: {"id": _EOS, "ids": [ids[_EOS]], "tokens": [_EOS]}},
        },
        "decoder": metaspace,
        "model": {"type": "Unigram", "unk_id": ids[_UNKNOWN], "vocab": pieces, "byte_fallback": False},
    }


def write_tokenizer(source: Path, folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` of the checkpoint `source` into `folder`.

    Raises:
        ExportError: as `tokenizer_of`.
    """
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": read_json(source / "tokenizer_config.json").get("model_max_length", 512),
        "eos_token": _EOS,
        "unk_token": _UNKNOWN,
        "pad_token": _PAD,
    }
    write_files(folder, tokenizer_of(source), config)


def _replace(pattern: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}


def _read_ids(folder: Path) -> dict[str, int]:
    """The ids of `vocab.json`, of which every one has a token."""
    if read_json(folder / "tokenizer_config.json").get("separate_vocabs"):
        raise ExportError(
            f"{folder} has one vocabulary for its source and another for its target (separate_vocabs), and a bundle "
            "has one for both. Choose a checkpoint whose vocabularies are shared."
        )
    ids = read_json(folder / VOCABULARY)
    if {*ids.values()} != {*range(len(ids))} or not {*_SPECIAL} <= {*ids}:
        raise ExportError(
            f"{folder / VOCABULARY} does not number its tokens from 0 on, {' and '.join(_SPECIAL)} among them. "
            "Download the checkpoint again."
        )
    return ids


def _read_model(path: Path) -> tuple[dict[str, float], bytes]:
    """The scores of a SentencePiece model's pieces, and its table for normalising characters."""
    scores: dict[str, float] = {}
    charsmap = b""
    try:
        for number, value in _fields(path.read_bytes()):
            if number == 1:
                piece = dict(_fields(value))
                kind = piece.get(3, _NORMAL)
                if kind in (_USER_DEFINED, _BYTE):
                    raise ValueError(f"it has the piece {piece[1].decode()!r} of type {kind}")
                if kind == _NORMAL:
                    scores[piece[1].decode()] = struct.unpack("<f", piece.get(2, bytes(4)))[0]
            elif number == 2 and (kind := dict(_fields(value)).get(3, _UNIGRAM)) != _UNIGRAM:
                raise ValueError(f"its type is {kind}")
            elif number == 3:
                charsmap = dict(_fields(value)).get(2, b"")
        if not scores:
            raise ValueError("it has no pieces")
    except (OSError, ValueError, TypeError, AttributeError, LookupError, struct.error) as error:
        raise ExportError(
            f"{path} is no SentencePiece model that Outrider reads: {error}. MarianMT's are Unigram models without "
            "bytes and user-defined symbols."
        ) from error
    return scores, charsmap


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a message in protobuf's format: numbers, and what they hold as int or bytes."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = 0
        for shift in range(0, 70, 7):
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise ValueError("a number in it has more than ten bytes")

    while at < len(data):
        number, kind = divmod(varint(), 8)
        if kind == 0:
            yield number, varint()
            continue
        size = {1: 8, 2: -1, 5: 4}[kind]
        size = varint() if size < 0 else size
        if at + size > len(data):
            raise ValueError("it is cut short")
        yield number, data[at : at + size]
        at += size
