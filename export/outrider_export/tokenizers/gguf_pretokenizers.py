"""The pre-tokenizers that GGUF files name, as `tokenizer.json` has them: `gguf_pretokenizers.toml` is the table.

A file has only the name. Other names are refused, because a wrong pre-tokenizer gives plausible but wrong tokens.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.errors import nearest


@dataclass(frozen=True)
class PreTokenizer:
    """What becomes of a text before the merges.

    steps: of its `pre_tokenizer`.
    """

    steps: tuple[dict[str, Any], ...]
    normalizes: bool = False  # to NFC
    takes_whole_words: bool = False  # a word that is in the vocabulary is one token, without merges
    begins: bool = False  # with BOS, where the file does not say


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


BYTE_LEVEL = _byte_level(True)  # with GPT-2's expression


def _steps(rule: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """The steps of a rule of the table."""
    splits = rule.get("splits", [])
    steps: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": "|".join(alternatives)}, "behavior": "Isolated", "invert": False}
        for alternatives in splits
    ]
    if rule.get("digits"):
        steps.append({"type": "Digits", "individual_digits": True})
    return (*steps, _byte_level(not splits))


PRE_TOKENIZERS = {
    name: PreTokenizer(_steps(rule), **flags)
    for rule in tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))["rule"]
    for row in rule["of"]
    for flags in [{key: value for key, value in row.items() if key != "names"}]
    for name in row["names"].split()
}


def unknown_name(name: str) -> str:
    """The rest of a message about a name that is not known."""
    if name == "default":
        return "the pre-tokenizer 'default': the file does not name its own."
    return f"the pre-tokenizer {name!r}, which is not known. {nearest(name, PRE_TOKENIZERS)}"
