"""Gives toy checkpoints the files that Whisper, T5 and OPUS-MT have on the hub, with their names, keys and forms."""

import base64
import json
import struct
from pathlib import Path
from typing import Any

_NORMALIZED = {"accessorise": "accessorize", "colour": "color", "centre": "center"}
_EXTRA_IDS = 100  # T5's <extra_id_99> to <extra_id_0>, after its pieces
# What T5's normaliser replaces, of some thousand rules: ligatures, signs, composed forms, spaces.
_RULES = {
    "\ufb01": "fi", "\u212b": "\u00c5", "e\u0301": "\u00e9", "\u2026": "...", "\u00a0": " ", "\n": " ", "\r": " ",
    "\t": " ",
}  # fmt: skip


def edit(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file. `...` removes one."""
    content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    content |= changes
    _write(path, {key: value for key, value in content.items() if value is not ...})


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def publish_whisper(folder: Path) -> None:
    """The files of openai/whisper-tiny: GPT-2's tokenizer in four files, and old keys of the configurations."""
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
    _write(
        folder / "tokenizer_config.json",
        ends
        | {
            "add_bos_token": False,
            "add_prefix_space": False,
            "added_tokens_decoder": {
                str(each["id"]): {key: value for key, value in each.items() if key != "id"}
                for each in tokenizer["added_tokens"]
            },
            "additional_special_tokens": special,
            "clean_up_tokenization_spaces": True,
            "errors": "replace",
            "model_max_length": 1024,
            "processor_class": "WhisperProcessor",
            "return_attention_mask": False,
            "tokenizer_class": "WhisperTokenizer",
        },
    )
    generation = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    edit(
        folder / "generation_config.json",
        alignment_heads=[[1, 0], [1, 2]],
        forced_decoder_ids=[[1, None], [2, added["<|transcribe|>"]]],
        prev_sot_token_id=added["<|startofprev|>"],
        transformers_version="4.31.0.dev0",
    )
    edit(
        folder / "config.json",
        _name_or_path="openai/whisper-tiny",
        begin_suppress_tokens=generation["begin_suppress_tokens"],
        dtype=...,
        forced_decoder_ids=[[1, added["<|en|>"]], [2, added["<|transcribe|>"]], [3, added["<|notimestamps|>"]]],
        max_length=448,
        suppress_tokens=generation["suppress_tokens"],
        torch_dtype="float32",
        transformers_version="4.27.0.dev0",
        use_cache=True,
    )
    edit(folder / "preprocessor_config.json", processor_class="WhisperProcessor", nb_max_frames=3000, n_samples=480_000)


def publish_t5(folder: Path) -> None:
    """The files of google/flan-t5-small: SentencePiece's normaliser, extra ids, and the keys of its configurations."""
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
        names
        | {
            "additional_special_tokens": extra[::-1],
            "extra_ids": _EXTRA_IDS,
            "model_max_length": 512,
            "name_or_path": "google/t5-v1_1-small",
            "sp_model_kwargs": {},
            "tokenizer_class": "T5Tokenizer",
        },
    )
    edit(
        folder / "config.json",
        dtype=...,
        n_positions=512,
        output_past=True,
        task_specific_params={"summarization": {"max_length": 200, "num_beams": 4, "prefix": "summarize: "}},
        torch_dtype="float32",
        transformers_version="4.23.1",
    )
    edit(folder / "generation_config.json", _from_model_config=True, transformers_version="4.27.0.dev0")


def publish_marian(folder: Path) -> None:
    """The files of Helsinki-NLP/opus-mt-en-de: old keys of the configurations, and those of the tokenizer."""
    ids = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    pad = ids["<pad>"]
    _write(
        folder / "tokenizer_config.json",
        {
            "target_lang": "deu", "source_lang": "eng", "unk_token": "<unk>", "eos_token": "</s>",
            "pad_token": "<pad>", "model_max_length": 512, "sp_model_kwargs": {}, "separate_vocabs": False,
            "special_tokens_map_file": None, "name_or_path": "marian", "tokenizer_class": "MarianTokenizer",
        },
    )  # fmt: skip
    edit(
        folder / "config.json",
        _name_or_path="/tmp/Helsinki-NLP/opus-mt-en-de",  # noqa: S108 - as it is there
        add_final_layer_norm=False,
        bad_words_ids=[[pad]],
        dtype=...,
        extra_pos_embeddings=pad + 1,
        forced_eos_token_id=0,
        id2label={"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"},
        max_length=512,
        normalize_before=False,
        normalize_embedding=False,
        num_beams=6,
        num_hidden_layers=2,
        static_position_embeddings=True,
        torch_dtype="float16",
    )
    edit(
        folder / "generation_config.json",
        _from_model_config=...,
        bos_token_id=0,
        max_length=512,
        renormalize_logits=True,
        transformers_version="4.32.0.dev0",
    )


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
