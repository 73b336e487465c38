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

    steps: of its `pre_tokenizer`.
    """

    steps: tuple[dict[str, Any], ...]
    normalizes: bool = False  # to NFC
    takes_whole_words: bool = False  # a word that is in the vocabulary is one token, without merges
    begins: bool = False  # with BOS, where the file does not say


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


BYTE_LEVEL = _byte_level(True)  # with GPT-2's expression


def _split(*patterns: str) -> PreTokenizer:
    """Expressions, each of which divides what those before it left."""
    splits = (
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in patterns
    )
    return PreTokenizer((*splits, _byte_level(False)))


_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_QWEN2 = _CONTRACTIONS + (
    r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)  # fmt: skip
_QWEN35 = _QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
_CASED = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased(ending: str, digits: str) -> str:
    """Words in which a capital letter begins a new one."""
    return (
        f"{_CASED[0]}*{_CASED[1]}+{ending}|{_CASED[0]}+{_CASED[1]}*{ending}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


GPT2 = PreTokenizer((BYTE_LEVEL,))
DIGITS = PreTokenizer(({"type": "Digits", "individual_digits": True}, BYTE_LEVEL))
QWEN2 = _split(_QWEN2)
QWEN35 = _split(_QWEN35)
DBRX = _split(_QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|"))
LLAMA3 = replace(DBRX, takes_whole_words=True, begins=True)
GPT4O = _split(_cased(f"{_CONTRACTIONS}?", r"\p{N}{1,3}"))
TEKKEN = replace(_split(_cased("", r"\p{N}")), takes_whole_words=True, begins=True)
# The letters of DeepSeek's first tokenizers, which a space may precede.
_LETTERS = (
    "A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-"
    "\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-"
    "\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    "\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-"
    "\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134"
    "\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17"
    "\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-"
    "\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
DEEPSEEK_LLM = _split(
    "[\r\n]",
    f"\\s?[{_LETTERS}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}+",
)
DEEPSEEK_V3 = _split(
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
YOUTU = replace(
    _split(
        "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
        "|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        _cased(f"{_CONTRACTIONS}?", r"\p{N}"),
    ),
    takes_whole_words=True,
)

# Digits as the publisher's: individual ones, of any script.
DEEPSEEK_CODER = PreTokenizer(
    (
        *_split(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+").steps[:-1],
        {"type": "Digits", "individual_digits": True},
        _byte_level(False),
    )
)
BAILING = _split(_QWEN2.replace(r"\s*[\r\n]+", r"\s*[\r\n]"))
SEED_CODER = _split(_QWEN2.replace(r"[^\s\p{L}\p{N}]+[\r\n]*", r"[^\s\p{L}\p{N}]+"))
EXAONE_MOE = _split(
    _QWEN2.replace(r"?\p{L}+", r"?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+")
    .replace(r"[\r\n]*|\s*[\r\n]+", r"[\r\n/]?|\s*[\r\n]")
)  # fmt: skip
MINICPM5 = replace(_split(r"\p{N}{1,3}", _QWEN2.replace(r"\p{N}|", r"\p{N}+|")), takes_whole_words=True)
# Groups of three digits from the right. Published as \d and \b, which not all readers take for digits of any script.
AYA = _split(r"\p{Nd}{1,3}(?=(?:\p{Nd}{3})*(?![\p{L}\p{M}\p{Nd}\p{Pc}]))", _cased(f"{_CONTRACTIONS}?", r"\p{N}{1,3}"))
# Words without Chinese characters. Published as differences of sets, which not all readers have.
KIMI = _split(
    r"\p{Han}+|"
    + _cased(f"{_CONTRACTIONS}?", r"\p{N}{1,3}")
    .replace(_CASED[0][len(r"[^\r\n\p{L}\p{N}]?") :], r"(?:(?!\p{Han})[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}])")
    .replace(_CASED[1], r"(?:(?!\p{Han})[\p{Ll}\p{Lm}\p{Lo}\p{M}])")
    .replace(r"[\r\n/]*", r"[\r\n]*")
)

_NAMES = (
    (LLAMA3, "llama-bpe llama3 llama-v3 lfm2 falcon3 falcon-h1 pixtral midm-2.0 jina-v5-nano"),
    (DBRX, "dbrx smaug-bpe glm4 glm5 chatglm-bpe"),  # OLMo 2, Phi 4, Granite 4; SmolLM3; GLM-4
    (replace(QWEN2, normalizes=True), "qwen2"),
    (QWEN2, "deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2"),
    (replace(QWEN35, normalizes=True), "qwen35"),
    (GPT4O, "gpt-4o llama4 kanana2 talkie minimax-m2"),  # gpt-oss
    (TEKKEN, "tekken"),  # Mistral Nemo and later
    (DEEPSEEK_LLM, "deepseek-llm"),  # V2, V2-Lite
    (DEEPSEEK_V3, "deepseek-v3 hunyuan-dense joyai-llm"),
    (DEEPSEEK_CODER, "deepseek-coder"),
    (BAILING, "bailingmoe bailingmoe2 llada-moe"),  # Ling and Ring
    (SEED_CODER, "seed-coder"),  # Seed-OSS
    (EXAONE_MOE, "exaone-moe"),
    (MINICPM5, "minicpm5"),
    (AYA, "tiny_aya cohere2moe"),
    (KIMI, "kimi-k2"),  # Moonlight
    (YOUTU, "youtu"),
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
