"""Gives toy checkpoints the files that Whisper, T5 and OPUS-MT have on the hub, with their names, keys and forms."""

import base64
import json
import struct
from pathlib import Path
from typing import Any

_NORMALIZED = {"accessorise": "accessorize", "colour": "color", "centre": "center"}
# What T5's normaliser replaces, of some thousand rules: ligatures, signs, composed forms, spaces.
_RULES = {
    "\ufb01": "fi", "\u212b": "\u00c5", "e\u0301": "\u00e9", "\u2026": "...", "\u00a0": " ", "\n": " ", "\r": " ",
    "\t": " ",
}  # fmt: skip
# What stands in them whatever the sizes: {model: {file: keys}}.
_FIXED: dict[str, dict[str, dict[str, Any]]] = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))


def edit(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file. `...` removes one."""
    content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    content |= changes
    _write(path, {key: value for key, value in content.items() if value is not ...})


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def publish_whisper(folder: Path) -> None:
    """The files of openai/whisper-tiny: GPT-2's tokenizer in four files, and old keys of the configurations."""
    fixed = _FIXED["whisper"]
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    added = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    special = [token["content"] for token in tokenizer["added_tokens"] if token["special"]]
    end, begin = "<|endoftext|>", ["<|startoftranscript|>", "<|notimestamps|>"]
    pieces = [*begin, None, end]

    def template(*sequences: str) -> list[dict[str, Any]]:
        own = {"A": 0, "B": 1}
        made: list[dict[str, Any]] = [{"SpecialToken": {"id": name, "type_id": 0}} for name in begin]
        made += [{"Sequence": {"id": name, "type_id": own[name]}} for name in sequences]
        return [*made, {"SpecialToken": {"id": end, "type_id": own[sequences[-1]]}}]

    tokenizer |= {
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "decoder": byte_level | {"add_prefix_space": True},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": template("A"),
            "pair": template("A", "B"),
            "special_tokens": {
                name: {"id": name, "ids": [added[name]], "tokens": [name]} for name in pieces if name is not None
            },
        },
    }
    _write(folder / "tokenizer.json", tokenizer)
    model = tokenizer["model"]
    _write(folder / "vocab.json", model["vocab"])
    merges = [each if isinstance(each, str) else " ".join(each) for each in model["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n", encoding="utf-8")
    _write(folder / "normalizer.json", _NORMALIZED)
    _write(folder / "added_tokens.json", added)
    ends = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), end)
    _write(folder / "special_tokens_map.json", ends | {"additional_special_tokens": special})
    decoder = {
        str(each["id"]): {key: value for key, value in each.items() if key != "id"}
        for each in tokenizer["added_tokens"]
    }
    own = {"added_tokens_decoder": decoder, "additional_special_tokens": special}
    _write(folder / "tokenizer_config.json", ends | fixed["tokenizer_config.json"] | own)
    generation = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    edit(
        folder / "generation_config.json",
        forced_decoder_ids=[[1, None], [2, added["<|transcribe|>"]]],
        prev_sot_token_id=added["<|startofprev|>"],
        **fixed["generation_config.json"],
    )
    edit(
        folder / "config.json",
        begin_suppress_tokens=generation["begin_suppress_tokens"],
        dtype=...,
        forced_decoder_ids=[[1, added["<|en|>"]], [2, added["<|transcribe|>"]], [3, added["<|notimestamps|>"]]],
        suppress_tokens=generation["suppress_tokens"],
        **fixed["config.json"],
    )
    edit(folder / "preprocessor_config.json", **fixed["preprocessor_config.json"])


def publish_t5(folder: Path) -> None:
    """The files of google/flan-t5-small: SentencePiece's normaliser, extra ids, and the keys of its configurations."""
    fixed = _FIXED["t5"]
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    rules = base64.b64encode(charsmap(_RULES)).decode()
    words = {"type": "Metaspace", "replacement": "\u2581", "add_prefix_space": True}
    extra = [token for token, _ in tokenizer["model"]["vocab"] if token.startswith("<extra_id_")]
    tokenizer |= {
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": rules},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, words]},
        "decoder": words,
    }
    _write(folder / "tokenizer.json", tokenizer)
    names = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    _write(folder / "special_tokens_map.json", names | {"additional_special_tokens": extra[::-1]})
    _write(
        folder / "tokenizer_config.json",
        names | fixed["tokenizer_config.json"] | {"additional_special_tokens": extra[::-1]},
    )
    edit(folder / "config.json", dtype=..., **fixed["config.json"])
    edit(folder / "generation_config.json", **fixed["generation_config.json"])


def publish_marian(folder: Path) -> None:
    """The files of Helsinki-NLP/opus-mt-en-de: old keys of the configurations, and those of the tokenizer."""
    fixed = _FIXED["marian"]
    ids = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    pad = ids["<pad>"]
    _write(folder / "tokenizer_config.json", fixed["tokenizer_config.json"])
    edit(
        folder / "config.json",
        bad_words_ids=[[pad]],
        dtype=...,
        extra_pos_embeddings=pad + 1,
        **fixed["config.json"],
    )
    edit(folder / "generation_config.json", _from_model_config=..., **fixed["generation_config.json"])


def charsmap(rules: dict[str, str]) -> bytes:
    """SentencePiece's precompiled normaliser: a double-array trie (Darts), then what it replaces keys with."""
    texts, trie = b"", dict[int, Any]()
    for key, text in rules.items():
        node = trie
        for byte in key.encode():
            node = node.setdefault(byte, {})
        node[-1] = len(texts)  # where the text begins
        texts += text.encode() + b"\0"
    units: dict[int, int] = {}
    blocks = 0

    def place(node: dict[int, Any], index: int, label: int) -> None:
        nonlocal blocks
        blocks += 1  # each node's children get a block of their own: simple, and large
        base = blocks << 8
        units[index] = (index ^ base) << 10 | (-1 in node) << 8 | label
        for byte, child in node.items():
            if byte == -1:
                units[base] = 1 << 31 | child
            else:
                place(child, base ^ byte, byte)

    place(trie, 0, 0)
    size = (blocks + 1) << 8
    array = struct.pack(f"<{size}I", *(units.get(i, 0) for i in range(size)))
    return struct.pack("<I", len(array)) + array + texts
