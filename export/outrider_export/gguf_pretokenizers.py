"""The pre-tokenizers that GGUF files name (`tokenizer.ggml.pre`), as `tokenizer.json` has them.

A file has only the name. The expressions are those of the models' own `tokenizer.json`; many names stand for the same
ones. Other names are refused, because a wrong pre-tokenizer gives plausible but wrong tokens.

Source: which names share expressions, and which take whole words and begin texts with BOS, is llama.cpp's table in
src/llama-vocab.cpp. Names whose texts end with a separator, of models for embeddings, are left out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from outrider.errors import nearest


@dataclass(frozen=True)
class PreTokenizer:
    """What becomes of a text before the merges.

    steps: of its `pre_tokenizer`. normalizes: to NFC. takes_whole_words: a word that is in the vocabulary is one token,
    without merges, and a text begins with BOS where the file does not say.
    """

    steps: tuple[dict[str, Any], ...]
    normalizes: bool = False
    takes_whole_words: bool = False


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


BYTE_LEVEL = _byte_level(True)  # with GPT-2's expression


def _split(pattern: str) -> PreTokenizer:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return PreTokenizer((split, _byte_level(False)))


_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_QWEN2 = _CONTRACTIONS + (
    r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)  # fmt: skip
_QWEN35 = _QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
_CASED = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased(ending: str, digits: str) -> PreTokenizer:
    """Words in which a capital letter begins a new one."""
    return _split(
        f"{_CASED[0]}*{_CASED[1]}+{ending}|{_CASED[0]}+{_CASED[1]}*{ending}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


GPT2 = PreTokenizer((BYTE_LEVEL,))
DIGITS = PreTokenizer(({"type": "Digits", "individual_digits": True}, BYTE_LEVEL))
QWEN2 = _split(_QWEN2)
QWEN35 = _split(_QWEN35)
DBRX = _split(_QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|"))
LLAMA3 = replace(DBRX, takes_whole_words=True)
GPT4O = _cased(f"{_CONTRACTIONS}?", r"\p{N}{1,3}")
TEKKEN = replace(_cased("", r"\p{N}"), takes_whole_words=True)

_NAMES = (
    (LLAMA3, "llama-bpe llama3 llama-v3 lfm2 falcon3 falcon-h1 pixtral midm-2.0 jina-v5-nano"),
    (DBRX, "dbrx smaug-bpe glm4 chatglm-bpe"),  # OLMo 2, Phi 4, Granite 4; SmolLM3; GLM-4
    (replace(QWEN2, normalizes=True), "qwen2"),
    (QWEN2, "deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2"),
    (replace(QWEN35, normalizes=True), "qwen35"),
    (GPT4O, "gpt-4o llama4 kanana2 talkie minimax-m2"),  # gpt-oss
    (TEKKEN, "tekken"),  # Mistral Nemo and later
    (DIGITS, "smollm starcoder refact codeshell exaone minerva-7b mellum2"),
    (replace(DIGITS, normalizes=True), "command-r"),
    (
        GPT2,
        "gpt-2 phi-2 gigachat a.x-4.0 mellum modern-bert exaone4 jais trillion granite-docling jina-es jina-de "
        "jina-v2-es jina-v2-de",
    ),
    (replace(GPT2, normalizes=True), "olmo mpt"),
)
PRE_TOKENIZERS = {name: rule for rule, names in _NAMES for name in names.split()}


def unknown_name(name: str) -> str:
    """The rest of a message about a name that is not known."""
    if name == "default":
        return "the pre-tokenizer 'default': the file does not name its own."
    return f"the pre-tokenizer {name!r}, which is not known. {nearest(name, PRE_TOKENIZERS)}"
