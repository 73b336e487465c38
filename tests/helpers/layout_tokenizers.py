"""Small tokenizers in the spellings of published `tokenizer.json` files, old and new, one for each family."""

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tiny import TEXT, train_sentencepiece

SPACE = "\u2581"
_MORE = (
    "L'année 1984, « bien sûr » : 12 345,67 €. ¿Qué? El niño comió. Dzień dobry, świecie!",
    "Привет, мир! 今天天气很好，我们去公园。こんにちは。 안녕하세요. سلام دنیا. नमस्ते दुनिया. Γειά σου.",
) * 6


def _bytes(**changes: Any) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True} | changes


def _sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": [*steps]}


# Pre-tokenizers as published; GPT-2's as saved before `use_regex` was there.
_SPLITS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))


def _added(token_id: int, content: str, special: bool = True, **changes: Any) -> dict[str, Any]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": special}
    return {"id": token_id, "content": content, **plain, **changes}


@functools.cache
def _trained(split: str, normalizer: str, seed: str = "") -> str:
    """Byte-level BPE of 320 pieces; JSON in today's spelling."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    content = json.loads(made.to_str())
    content |= {"pre_tokenizer": _SPLITS[split], "normalizer": {"type": normalizer} if normalizer else None}
    made = Tokenizer.from_str(json.dumps(content))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=336, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([*TEXT, *_MORE, seed], trainer)
    text: str = made.to_str()
    return text


def byte_level(
    split: str,
    special: Sequence[str],
    *,
    normalizer: str = "",
    plain: Sequence[str] = (),
    bos: str = "",
    eos: str = "",
    old: bool = False,
    **model: Any,
) -> dict[str, Any]:
    """Byte-level BPE with these special tokens and, in `plain`, added ones that are part of a text.

    bos, eos: added to each text. old: as saved before 2023: merges are texts, and keys of later versions are missing.
    """
    content: dict[str, Any] = json.loads(_trained(split, normalizer))
    content["pre_tokenizer"] = _SPLITS[split]
    size = len(content["model"]["vocab"])
    content["added_tokens"] = [
        *(_added(size + i, token, normalized=old) for i, token in enumerate(special)),
        *(_added(size + len(special) + i, token, False, normalized=token.isspace()) for i, token in enumerate(plain)),
    ]
    content["decoder"] = _bytes()
    content["post_processor"] = _bytes(trim_offsets=False)
    if bos or eos:
        ids = {token: size + special.index(token) for token in (bos, eos) if token}
        single: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
        pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
        first = [{"SpecialToken": {"id": bos, "type_id": 0}}] if bos else []
        last = [{"SpecialToken": {"id": eos, "type_id": 0}}] if eos else []
        template = {
            "type": "TemplateProcessing", "single": [*first, *single, *last], "pair": [*first, *pair, *last],
            "special_tokens": {token: {"id": token, "ids": [at], "tokens": [token]} for token, at in ids.items()},
        }  # fmt: skip
        content["post_processor"] = {"type": "Sequence", "processors": [content["post_processor"], template]}
    content["model"] |= model
    if old:
        content["model"] = {
            "dropout": None, "unk_token": None, "continuing_subword_prefix": "", "end_of_word_suffix": "",
            "vocab": content["model"]["vocab"], "merges": [" ".join(pair) for pair in content["model"]["merges"]],
        }  # fmt: skip
        content["version"] = "1.0"
    return content


@functools.cache
def _sentencepiece() -> str:
    text: str = train_sentencepiece(("<s>", "</s>", "<|user|>"), [*TEXT, *_MORE]).to_str()
    return text


_PIECES = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
_PREPENDED = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE}, _PIECES]}
_DECODED = [
    {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
]  # fmt: skip
_STRIPPED = [*_DECODED, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]


def sentencepiece(
    layout: str = "prepended", *, bos: bool = True, old: bool = False, rstrip: bool = False, plain: Sequence[str] = ()
) -> dict[str, Any]:
    """BPE with SentencePiece's spelling.

    layout: "prepended" (Llama 2), "first" (Llama with legacy=false, Mistral v0.3), "always" (Metaspace), "replaced"
    (Yi), "split" (Gemma).
    """
    content: dict[str, Any] = json.loads(_sentencepiece())
    metaspace = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": layout, "split": False}
    decoder = _STRIPPED if layout in ("prepended", "first", "always") else _DECODED
    content |= {
        "normalizer": _PREPENDED if layout == "prepended" else _PIECES if layout in ("replaced", "split") else None,
        "pre_tokenizer": metaspace if layout in ("first", "always") else None,
        "decoder": {"type": "Sequence", "decoders": decoder},
    }
    if layout == "split":
        content["pre_tokenizer"] = {
            "type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False,
        }  # fmt: skip
    size = max(content["model"]["vocab"].values()) + 1
    content["added_tokens"] += [_added(size + i, token, False) for i, token in enumerate(plain)]
    for token in content["added_tokens"]:
        token["rstrip"] = rstrip and token["content"] == "<|user|>"
    if bos:
        at = content["model"]["vocab"]["<s>"]
        single: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
        pair = [*single, {"SpecialToken": {"id": "<s>", "type_id": 1}}, {"Sequence": {"id": "B", "type_id": 1}}]
        first = {"SpecialToken": {"id": "<s>", "type_id": 0}}
        content["post_processor"] = {
            "type": "TemplateProcessing", "single": [first, *single], "pair": [first, *pair],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [at], "tokens": ["<s>"]}},
        }  # fmt: skip
    if old:
        content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]
        content["model"].pop("ignore_merges", None)
    return content


@functools.cache
def _unigram() -> str:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=special, unk_token=special[2], show_progress=False)
    made.train_from_iterator([*TEXT, *_MORE], trainer)
    text: str = made.to_str()
    return text


def unigram(layout: str = "old") -> dict[str, Any]:
    """T5's. layout: "old" (t5-small), "published" (flan-t5), or "new", as Transformers 5 saves it."""
    content: dict[str, Any] = json.loads(_unigram())
    size = len(content["model"]["vocab"])
    content["model"].pop("byte_fallback", None)
    content["added_tokens"] += [_added(size + i, f"<extra_id_{2 - i}>") for i in range(3)]
    end = {"SpecialToken": {"id": "</s>", "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    content["post_processor"] = {
        "type": "TemplateProcessing", "single": [first, end], "pair": [first, end, second, end],
        "special_tokens": {"</s>": {"id": "</s>", "ids": [1], "tokens": ["</s>"]}},
    }  # fmt: skip
    old = {"type": "Metaspace", "replacement": SPACE, "add_prefix_space": True}
    new = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "always", "split": True}
    content["normalizer"] = None
    if layout == "new":
        content |= {"pre_tokenizer": new, "decoder": new}
        content["model"]["byte_fallback"] = False
        content["normalizer"] = {
            "type": "Sequence",
            "normalizers": [
                {"type": "Strip", "strip_left": False, "strip_right": True},
                {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": SPACE},
            ],
        }
    else:
        content["pre_tokenizer"] = _sequence({"type": "WhitespaceSplit"}, old)
        content["decoder"] = old
    return content


def _whisper() -> dict[str, Any]:
    """With a piece that no merge leads to, as Whisper's multilingual vocabulary has."""
    special = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>"]
    content = byte_level("gpt2", special, plain=["<|0.00|>", "<|0.02|>"], old=True)
    model = content["model"]
    model["merges"] = [merge for merge in model["merges"] if merge.replace(" ", "") not in ("Ġfox", "er", "日")]
    content["normalizer"] = None
    return content | {"model": {"type": "BPE", **model}}


_CHAT = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_RUNS = [" " * n for n in range(8, 1, -1)]
_LLAMA3 = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
_LLAMA4 = ["<|begin_of_text|>", "<|end_of_text|>", "<|header_start|>", "<|header_end|>", "<|eom|>", "<|eot|>"]
FAMILIES: dict[str, Callable[[], dict[str, Any]]] = {
    "gpt2-old": lambda: byte_level("gpt2", ["<|endoftext|>"], old=True),
    "gpt2": lambda: byte_level("gpt2", ["<|endoftext|>"]),
    "codegen": lambda: byte_level("gpt2", ["<|endoftext|>"], plain=_RUNS),
    "neox-old": lambda: byte_level(
        "gpt2", ["<|endoftext|>", "<|padding|>"], plain=_RUNS, normalizer="NFC", old=True
    ),
    "neox": lambda: byte_level("gpt2", ["<|endoftext|>", "<|padding|>"], plain=_RUNS, normalizer="NFC"),
    "bloom": lambda: byte_level("bloom", ["<unk>", "<s>", "</s>", "<pad>"], old=True),
    "opt": lambda: byte_level("gpt2", ["</s>", "<pad>", "<unk>"], bos="</s>"),
    "falcon": lambda: byte_level("falcon", ["<|endoftext|>"], old=True),
    "falcon3": lambda: byte_level("falcon3", ["<|endoftext|>", "<|assistant|>", "<|user|>"]),
    "starcoder": lambda: byte_level("starcoder", _CHAT, plain=["<tool_call>"]),
    "cl100k": lambda: byte_level("cl100k", _CHAT),
    "cl100k-nfc": lambda: byte_level("llama3", _CHAT, normalizer="NFC"),
    "llama3": lambda: byte_level("llama3", _LLAMA3, bos="<|begin_of_text|>", ignore_merges=True),
    "llama4": lambda: byte_level("o200k", _LLAMA4, bos="<|begin_of_text|>"),
    "qwen": lambda: byte_level("qwen", _CHAT, normalizer="NFC", plain=["<tool_call>", "</tool_call>"]),
    "tekken": lambda: byte_level("tekken", ["<unk>", "<s>", "</s>", "[INST]"], bos="<s>", ignore_merges=True),
    "deepseek-coder": lambda: byte_level(
        "deepseek-coder", ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"], bos="<｜begin▁of▁sentence｜>",
        plain=["<｜fim▁hole｜>"],
    ),
    "deepseek-llm": lambda: byte_level(
        "deepseek-llm", ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"], bos="<｜begin▁of▁sentence｜>",
        plain=["<｜User｜>"],
    ),
    "deepseek-v3": lambda: byte_level(
        "deepseek-v3", ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"], bos="<｜begin▁of▁sentence｜>",
        plain=["<｜User｜>", "<think>"],
    ),
    "cohere": lambda: byte_level(
        "starcoder", ["<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"], bos="<BOS_TOKEN>",
        normalizer="NFC",
    ),
    "whisper": _whisper,
    "llama2": lambda: sentencepiece(old=True),
    "llama2-rstrip": lambda: sentencepiece(rstrip=True),
    "llama-first": lambda: sentencepiece("first"),
    "llama-always": lambda: sentencepiece("always", plain=["<tool>"]),
    "yi": lambda: sentencepiece("replaced", bos=False),
    "gemma": lambda: sentencepiece("split"),
    "t5-old": lambda: unigram("old"),
    "t5": lambda: unigram("new"),
}  # fmt: skip


@functools.cache
def text_of(family: str) -> str:
    """The `tokenizer.json` of a family."""
    return json.dumps(FAMILIES[family](), ensure_ascii=False)
