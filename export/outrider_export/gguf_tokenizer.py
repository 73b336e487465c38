"""Builds a tokenizer from a GGUF file's metadata: `tokenizer.json` and `tokenizer_config.json`.

    write_tokenizer(header, folder)

The file has vocabulary, merges and token types, but only the name of its pre-tokenizer (`tokenizer.ggml.pre`). For
known names, the expressions are those of the models' own `tokenizer.json`. Other names are refused, because a wrong
pre-tokenizer gives plausible but wrong tokens. (transformers 5.5 saves a GGUF's tokenizer as CodeLlama's.)
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from outrider.errors import ExportError

if TYPE_CHECKING:
    from pathlib import Path

    from outrider_export.gguf_file import GGUFHeader

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # tokenizer.ggml.token_type

_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


# name: normalizer, and the steps before the merges. Not here: llama-bpe, whose tokenizer takes a whole word from the
# vocabulary before it tries the merges (ignore_merges), which OpenVINO's tokenizers do not support.
PRE_TOKENIZERS: dict[str, tuple[dict[str, str] | None, list[dict[str, Any]]]] = {
    "qwen2": ({"type": "NFC"}, [_split(_QWEN2), _byte_level(False)]),
    "smollm": (None, [{"type": "Digits", "individual_digits": True}, _byte_level(True)]),
}


def check_tokenizer(header: GGUFHeader) -> None:
    """Raise for a tokenizer that cannot be rebuilt exactly.

    Raises:
        ExportError: with the file's kind and the known ones.
    """
    model, pre = header.text("tokenizer.ggml.model"), header.text("tokenizer.ggml.pre", "default")
    known = ", ".join(PRE_TOKENIZERS)
    instead = "Export the original checkpoint instead."
    if model != "gpt2":
        raise ExportError(
            f"{header.path} has a {model!r} tokenizer; byte-level BPE ('gpt2') is the one that can be rebuilt "
            f"from a GGUF file. {instead}"
        )
    if pre not in PRE_TOKENIZERS:
        raise ExportError(f"{header.path} has the pre-tokenizer {pre!r}; known are {known}. {instead}")
    tokens, types = header.texts("tokenizer.ggml.tokens"), header.integers("tokenizer.ggml.token_type")
    header.texts("tokenizer.ggml.merges")
    if len(tokens) != len(types):
        raise ExportError(f"{header.path} is damaged: {len(tokens):,} tokens and {len(types):,} token types.")


def is_padding(token: str, token_type: int, token_id: int) -> bool:
    """Whether an entry only fills the vocabulary up to the width of the output matrix."""
    return token_type == UNUSED or token == f"[PAD{token_id}]"


def write_tokenizer(header: GGUFHeader, folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` into `folder`.

    Raises:
        ExportError: as `check_tokenizer`.
    """
    check_tokenizer(header)
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (("tokenizer.json", _tokenizer(header)), ("tokenizer_config.json", _config(header))):
        text = json.dumps(content, ensure_ascii=False, indent=1)
        (folder / name).write_text(text, encoding="utf-8", newline="\n")


def _tokenizer(header: GGUFHeader) -> dict[str, Any]:
    normalizer, steps = PRE_TOKENIZERS[header.text("tokenizer.ggml.pre")]
    tokens, types = header.texts("tokenizer.ggml.tokens"), header.integers("tokenizer.ggml.token_type")
    real = [(i, t, k) for i, (t, k) in enumerate(zip(tokens, types, strict=True)) if not is_padding(t, k, i)]
    added = [
        {
            "id": token_id, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": token_type != USER_DEFINED,
        }
        for token_id, token, token_type in real
        if token_type in (CONTROL, USER_DEFINED, UNKNOWN)
    ]  # fmt: skip
    post: dict[str, Any] = _byte_level(True)
    if header.flag("tokenizer.ggml.add_bos_token", False):
        post = {"type": "Sequence", "processors": [post, _begin_with(header)]}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": post,
        "decoder": _byte_level(True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            # Added tokens are listed here too, so that they have their ids even if the vocabulary has gaps.
            "vocab": {token: token_id for token_id, token, _ in real},
            "merges": [merge.split(" ", 1) for merge in header.texts("tokenizer.ggml.merges")],
        },
    }


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
        "model_max_length": header.integer(header.of_architecture("context_length"), least=1),
        "padding_side": "left",
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        token_id = header.integer(f"tokenizer.ggml.{key}_token_id", -1)
        if 0 <= token_id < len(tokens):
            config[f"{name}_token"] = tokens[token_id]
    if template := header.text("tokenizer.chat_template", ""):
        config["chat_template"] = template
    return config
