"""Builds a tokenizer from a GGUF file's metadata: `tokenizer.json` and `tokenizer_config.json`.

Of byte-level BPE ("gpt2"), the file has vocabulary, merges and token types, but only the name of its pre-tokenizer: see
`gguf_pretokenizers`. (transformers 5.5 saves a GGUF's tokenizer as CodeLlama's.) Of SentencePiece's BPE ("llama"), it
has scores instead of merges: two tokens are merged where the result is a token, those with the highest score first (as
in Transformers' `generate_merges`). Of Gemma 4's ("gemma4"), which has the same spelling, it has merges.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from outrider.errors import ExportError
from outrider.inputs.text.chat_template import DEFAULT
from outrider.inputs.text.token_bytes import SPACE
from outrider_export.sources.gguf_file import GGUFHeader
from outrider_export.tokenizers.files import in_config, write_files
from outrider_export.tokenizers.gguf_pretokenizers import BYTE_LEVEL, PRE_TOKENIZERS, unknown_name

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # tokenizer.ggml.token_type

_PHI3 = re.compile(r"phi[- ]?3", re.IGNORECASE)  # in the name of a model, of files whose architecture is llama
_GEMMA4 = "gemma4"
_SENTENCEPIECE = ("llama", _GEMMA4)
_NOT_STRIPPED = ("<unk>", "<s>", "<|endoftext|>")


def name_of(header: GGUFHeader) -> str:
    """The model's name; empty if the file does not say."""
    return header.text("general.name", "")


def is_sentencepiece(header: GGUFHeader) -> bool:
    """Whether the tokens have SentencePiece's spelling."""
    return header.text("tokenizer.ggml.model") in _SENTENCEPIECE


def check_tokenizer(header: GGUFHeader) -> None:
    """Raise for a tokenizer that cannot be rebuilt exactly.

    Raises:
        ExportError: with the file's kind and the known ones.
    """
    model, pre = header.text("tokenizer.ggml.model"), header.text("tokenizer.ggml.pre", "default")
    instead = "Export the original checkpoint instead."
    if model not in ("gpt2", *_SENTENCEPIECE):
        raise ExportError(
            f"{header.path} has a {model!r} tokenizer; byte-level BPE ('gpt2') and SentencePiece's BPE ('llama', "
            f"'gemma4') are those that can be rebuilt from a GGUF file. {instead}"
        )
    if model == "gpt2" and pre not in PRE_TOKENIZERS:
        raise ExportError(f"{header.path} has {unknown_name(pre)} {instead}")
    tokens, types = header.texts("tokenizer.ggml.tokens"), header.integers("tokenizer.ggml.token_type")
    if len(tokens) != len(types):
        raise ExportError(f"{header.path} is damaged: {len(tokens):,} tokens and {len(types):,} token types.")
    if header.flag("tokenizer.ggml.add_eos_token", False):
        raise ExportError(f"{header.path} has a tokenizer that ends every text with the end token. {instead}")
    if model in ("gpt2", _GEMMA4):
        header.texts("tokenizer.ggml.merges")
    elif len(scores := header.floats("tokenizer.ggml.scores")) != len(tokens):
        raise ExportError(f"{header.path} is damaged: {len(tokens):,} tokens and {len(scores):,} scores.")


def is_padding(token: str, token_type: int, token_id: int) -> bool:
    """Whether an entry only fills the vocabulary up to the width of the output matrix."""
    return token_type == UNUSED or token == f"[PAD{token_id}]"


def write_tokenizer(header: GGUFHeader, folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` into `folder`.

    Raises:
        ExportError: as `check_tokenizer`.
    """
    check_tokenizer(header)
    write_files(folder, _tokenizer(header), _config(header))


def _tokenizer(header: GGUFHeader) -> dict[str, Any]:
    tokens, types = header.texts("tokenizer.ggml.tokens"), header.integers("tokenizer.ggml.token_type")
    real = [(i, t, k) for i, (t, k) in enumerate(zip(tokens, types, strict=True)) if not is_padding(t, k, i)]
    # The file cannot say that spaces after a special token belong to it, as they do in Phi 3's tokenizers.
    is_phi3 = is_sentencepiece(header) and (header.architecture == "phi3" or _PHI3.search(name_of(header)) is not None)
    added = [
        {
            "id": token_id, "content": token, "single_word": False, "lstrip": False,
            "rstrip": is_phi3 and token not in _NOT_STRIPPED and token_type in (CONTROL, USER_DEFINED),
            "normalized": False, "special": token_type != USER_DEFINED,
        }
        for token_id, token, token_type in real
        if token_type in (CONTROL, USER_DEFINED, UNKNOWN)
    ]  # fmt: skip
    # Added tokens are listed among the others, too, so that they have their ids even if the vocabulary has gaps.
    vocabulary = {token: token_id for token_id, token, _ in real}
    parts = (_sentencepiece if is_sentencepiece(header) else _bytes)(header, vocabulary)
    model = parts.pop("model")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        **parts,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            **model,
        },
    }


def _bytes(header: GGUFHeader, _: dict[str, int]) -> dict[str, Any]:
    """The parts of a tokenizer.json that are byte-level BPE's own."""
    rule, post = PRE_TOKENIZERS[header.text("tokenizer.ggml.pre")], BYTE_LEVEL
    if header.flag("tokenizer.ggml.add_bos_token", rule.begins):
        post = {"type": "Sequence", "processors": [post, _begin_with(header)]}
    return {
        "normalizer": {"type": "NFC"} if rule.normalizes else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*rule.steps]},
        "post_processor": post,
        "decoder": BYTE_LEVEL,
        "model": {"merges": _stored_merges(header), "ignore_merges": rule.takes_whole_words},
    }


def _sentencepiece(header: GGUFHeader, vocabulary: dict[str, int]) -> dict[str, Any]:
    """The parts of a tokenizer.json that are those of BPE with SentencePiece's spelling, as Llama 2's is."""
    is_prefixed = header.flag("tokenizer.ggml.add_space_prefix", True)
    has_merges = header.text("tokenizer.ggml.model") == _GEMMA4
    begins = has_merges or header.flag("tokenizer.ggml.add_bos_token", True)  # as llama.cpp, whatever Gemma 4's say
    normalizers: list[dict[str, Any]] = [{"type": "Prepend", "prepend": SPACE}] if is_prefixed else []
    normalizers.append({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
    ]  # fmt: skip
    if is_prefixed:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = next((i for i, k in enumerate(header.integers("tokenizer.ggml.token_type")) if k == UNKNOWN), None)
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "post_processor": _begin_with(header) if begins else None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "unk_token": None if unknown is None else header.texts("tokenizer.ggml.tokens")[unknown],
            "fuse_unk": True,
            "byte_fallback": True,
            "merges": _stored_merges(header) if has_merges else _merges(header, vocabulary),
        },
    }


def _stored_merges(header: GGUFHeader) -> list[list[str]]:
    return [merge.split(" ", 1) for merge in header.texts("tokenizer.ggml.merges")]


def _merges(header: GGUFHeader, vocabulary: dict[str, int]) -> list[list[str]]:
    """All pairs of tokens that make a token, in the order in which SentencePiece merges them."""
    scores, types = header.floats("tokenizer.ggml.scores"), header.integers("tokenizer.ggml.token_type")
    found = []
    for token, token_id in vocabulary.items():
        if types[token_id] != NORMAL:
            continue
        parts = [(token[:i], token[i:]) for i in range(1, len(token))]
        for left, right in parts:
            if left in vocabulary and right in vocabulary:
                found.append((-scores[token_id], -len(left), -len(right), left, right))
    found.sort()
    return [[left, right] for *_, left, right in found]


def _begin_with(header: GGUFHeader) -> dict[str, Any]:
    """The post-processor that prepends the BOS token."""
    tokens, token_id = header.texts("tokenizer.ggml.tokens"), header.integer("tokenizer.ggml.bos_token_id")
    if not 0 <= token_id < len(tokens):
        raise ExportError(
            f"{header.path} is damaged: its BOS token has the id {token_id:,}, and it has {len(tokens):,} tokens."
        )
    token = tokens[token_id]
    bos = {"SpecialToken": {"id": token, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in ("A", "B"))
    return {
        "type": "TemplateProcessing",
        "single": [bos, first],
        "pair": [bos, first, bos, second],
        "special_tokens": {token: {"id": token, "ids": [token_id], "tokens": [token]}},
    }


def _config(header: GGUFHeader) -> dict[str, Any]:
    tokens = header.texts("tokenizer.ggml.tokens")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": header.integer(".context_length", least=1),
        "padding_side": "left",
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        token_id = header.integer(f"tokenizer.ggml.{key}_token_id", -1)
        if 0 <= token_id < len(tokens):
            config[f"{name}_token"] = tokens[token_id]
    if templates := _templates(header):
        config["chat_template"] = in_config(templates)
    return config


def _templates(header: GGUFHeader) -> dict[str, str]:
    """The file's chat templates by name, as in tokenizer_config.json."""
    key = "tokenizer.chat_template"
    names = {key: DEFAULT, **{k: k[len(key) + 1 :] for k in header.metadata if k.startswith(f"{key}.")}}
    return {name: text for each, name in names.items() if (text := header.text(each, ""))}
