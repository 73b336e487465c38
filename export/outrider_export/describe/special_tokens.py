"""The tokens that end an answer, and the special tokens, collected from all configuration files."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from outrider.inputs.text.special_tokens import text_of
from outrider_export.describe.plan import Plan
from outrider_export.sources.gguf_file import GGUFHeader
from outrider_export.sources.source import read_json
from outrider_export.tokenizers.vocabulary import Vocabulary

_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
_ENDS: list[str] = _TABLE["ends"]
_GGUF_ENDS: list[str] = _TABLE["gguf"]["ends"]
_GGUF_NO_ENDS: list[tuple[str, list[str]]] = _TABLE["gguf"]["no_ends"]
_GGUF_CODE_ENDS: dict[str, list[str]] = _TABLE["gguf"]["code_ends"]
# What stands before a text's beginning, between it and its end, and after that, in files of code.
_INFILL_KEYS = (("fim_pre", "prefix"), ("fim_suf", "suffix"), ("fim_mid", "middle"))


def eos_of(plan: Plan) -> tuple[int, ...]:
    """Every EOS id of a model."""
    if plan.header is not None:
        return eos_of_gguf(plan.header, plan.vocabulary)
    return eos_of_folder(plan.path, plan.config, plan.vocabulary)


def eos_of_folder(folder: Path, config: dict[str, Any], vocabulary: Vocabulary) -> tuple[int, ...]:
    """Every EOS id of a checkpoint: generation_config.json, config.json, tokenizer_config.json, well-known names."""
    ids = _ids(read_json(folder / "generation_config.json").get("eos_token_id"))
    ids |= _ids(config.get("eos_token_id"))
    token = token_of_config(read_json(folder / "tokenizer_config.json"), "eos", vocabulary)
    return _complete(ids | _ids(token), vocabulary)


def eos_of_gguf(header: GGUFHeader, vocabulary: Vocabulary) -> tuple[int, ...]:
    """Every EOS id of a GGUF file, as llama.cpp finds them: end of sequence, of turn, of message, of a file of code."""
    named = {name: _id_of_gguf(header, vocabulary, name) for name in ("eos", "eot", "eom", *_GGUF_CODE_ENDS)}
    ids = {token_id for token_id in named.values() if token_id is not None}
    texts = {text: token_id for text in _GGUF_ENDS if (token_id := _find_added(vocabulary, text)) is not None}
    for without, others in _GGUF_NO_ENDS:
        if texts.keys() >= {without, *others}:
            ids.discard(texts.pop(without))
    for name, spellings in _GGUF_CODE_ENDS.items():
        if named[name] is None:
            ids |= {token_id for text in spellings if (token_id := _find_added(vocabulary, text)) is not None}
    return _complete(ids | {*texts.values()}, vocabulary)


def _find_added(vocabulary: Vocabulary, text: str) -> int | None:
    """The id of a token that is not one of plain text."""
    token_id = vocabulary.find(text)
    return token_id if token_id in vocabulary.added_token_ids else None


def infill_of(plan: Plan) -> tuple[str, str, str] | None:
    """The tokens between which a GGUF file's model fills in; None where the file does not name them."""
    if plan.header is None:
        return None
    found = []
    for names in _INFILL_KEYS:
        ids = (_id_of_gguf(plan.header, plan.vocabulary, name) for name in names)
        text = next((plan.vocabulary.tokens[i] for i in ids if i is not None), None)
        if not text:
            return None
        found.append(text)
    before, between, after = found
    return before, between, after


def _id_of_gguf(header: GGUFHeader, vocabulary: Vocabulary, name: str) -> int | None:
    """The token that a GGUF file's metadata names, if it does, and the vocabulary has it."""
    found = header.integer(f"tokenizer.ggml.{name}_token_id", -1)
    return found if 0 <= found < len(vocabulary) else None


def token_of_config(tokenizer_config: dict[str, Any], name: str, vocabulary: Vocabulary) -> int | None:
    """The id of `bos_token`, `eos_token` or `pad_token` as a tokenizer_config.json gives it."""
    token = text_of(tokenizer_config.get(f"{name}_token"))
    return None if token is None else vocabulary.find(token)


def _ids(value: Any) -> set[int]:
    values = value if isinstance(value, list) else [value]
    return {item for item in values if isinstance(item, int)}


def _complete(ids: set[int], vocabulary: Vocabulary) -> tuple[int, ...]:
    named = {vocabulary.find(token) for token in _ENDS} & set(vocabulary.special_token_ids)
    return tuple(sorted(i for i in ids | named if i is not None and 0 <= i < len(vocabulary)))
