"""The tokens that end an answer, and the special tokens, collected from all configuration files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outrider_export.gguf_file import GGUFHeader
from outrider_export.plan import Plan
from outrider_export.sources import read_json
from outrider_export.vocabulary import Vocabulary

# End of turn and end of text under the names that chat models use. As special tokens they end an answer, even if the
# configuration does not list them (many list one and use two). Not <|end|>: it ends a turn for Phi-3, which lists it,
# and only a paragraph for others.
END_TOKENS = (
    "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<end_of_turn>", "<|return|>",
    "<|call|>",
)  # fmt: skip


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
    """Every EOS id of a GGUF file: end of sequence, of turn and of message, and well-known names."""
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    return _complete({header.integer(key) for key in keys if key in header.metadata}, vocabulary)


def token_of_config(tokenizer_config: dict[str, Any], name: str, vocabulary: Vocabulary) -> int | None:
    """The id of `bos_token`, `eos_token` or `pad_token` as a tokenizer_config.json gives it."""
    token = tokenizer_config.get(f"{name}_token")
    if isinstance(token, dict):
        token = token.get("content")
    return vocabulary.find(token) if isinstance(token, str) else None


def _ids(value: Any) -> set[int]:
    values = value if isinstance(value, list) else [value]
    return {item for item in values if isinstance(item, int)}


def _complete(ids: set[int], vocabulary: Vocabulary) -> tuple[int, ...]:
    named = {vocabulary.find(token) for token in END_TOKENS} & set(vocabulary.special_token_ids)
    return tuple(sorted(i for i in ids | named if i is not None and 0 <= i < len(vocabulary)))
