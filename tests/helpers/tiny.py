"""Tiny random models with a real tokenizer, as checkpoint folders and as GGUF files, without torch."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
USER_DEFINED = ("<tool_call>",)
UNKNOWN = "<unk>"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NUM_TOKENS = 404  # 400 trained pieces, the bytes among them, and the four above
TEXT = (
    "def quicksort(items):\n    if len(items) <= 1:\n        return items\n    pivot, *rest = items\n",
    "The quick brown fox jumps over the lazy dog. It's 2024, isn't it? We'll see: 3.14 and 2,718.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. 日本語 中文 한국어 🙂",
) * 8


def train_tokenizer(
    pre: str = "qwen2",
    special: Iterable[str] = SPECIAL,
    text: Iterable[str] = TEXT,
    user_defined: Iterable[str] = USER_DEFINED,
) -> Any:
    """A BPE tokenizer as the real ones are made, written here by hand.

    pre: "qwen2", "qwen35", "llama-bpe", "dbrx" or "smollm", which are byte-level, or "sentencepiece".
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    if pre == "sentencepiece":
        return train_sentencepiece(special, text)
    tokenizer = Tokenizer(models.BPE())
    if pre in ("qwen2", "qwen35", "llama-bpe", "dbrx"):
        is_qwen = pre.startswith("qwen")
        if is_qwen:
            tokenizer.normalizer = normalizers.NFC()
        digits, marks = r"\p{N}" if is_qwen else r"\p{N}{1,3}", r"\p{M}" if pre == "qwen35" else ""
        words = (
            rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}{marks}]+|{digits}"
            rf"| ?[^\s\p{{L}}{marks}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        )
        first: Any = pre_tokenizers.Split(Regex(words), behavior="isolated")
        second = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    else:
        first = pre_tokenizers.Digits(individual_digits=True)
        second = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([first, second])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(text, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in user_defined])
    return tokenizer


def train_sentencepiece(special: Iterable[str] = SPECIAL, text: Iterable[str] = TEXT) -> Any:
    """BPE with SentencePiece's spelling of spaces and bytes, as Llama 2's, whose merges are those of its tokens."""
    from tokenizers import Tokenizer, models, normalizers, trainers
    from transformers.convert_slow_tokenizer import generate_merges

    trained = Tokenizer(models.BPE(unk_token=UNKNOWN))
    replaced = normalizers.Replace(" ", "\u2581")
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), replaced])
    first = [UNKNOWN, *special, *USER_DEFINED, *(f"<0x{byte:02X}>" for byte in range(256))]
    trained.train_from_iterator(
        text, trainers.BpeTrainer(vocab_size=NUM_TOKENS, special_tokens=first, limit_alphabet=60)
    )
    content = json.loads(trained.to_str())
    vocabulary: dict[str, int] = content["model"]["vocab"]
    scores = {token: -token_id for token, token_id in vocabulary.items()}
    content["model"] |= {"byte_fallback": True, "fuse_unk": True, "merges": generate_merges(vocabulary, scores, first)}
    content["added_tokens"] = [
        {
            "id": vocabulary[token], "content": token, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": token not in USER_DEFINED,
        }
        for token in (UNKNOWN, *special, *USER_DEFINED)
    ]  # fmt: skip
    content["decoder"] = {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}, {"type": "ByteFallback"},
            {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    }  # fmt: skip
    return Tokenizer.from_str(json.dumps(content))


SHAPE: dict[str, Any] = {
    "vocab_size": 448, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 8192, "tie_word_embeddings": True, "rms_norm_eps": 1e-6,
}  # fmt: skip


def write_checkpoint(
    folder: Path, seed: int = 0, num_layers: int = SHAPE["num_hidden_layers"], kept: Sequence[int] | None = None
) -> None:
    """As much of a Qwen2 checkpoint as `write_gguf` reads. kept: the layers to write; by default all."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    hidden, wide = SHAPE["hidden_size"], SHAPE["intermediate_size"]
    narrow = hidden * SHAPE["num_key_value_heads"] // SHAPE["num_attention_heads"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (SHAPE["vocab_size"], hidden)}
    for i in range(num_layers):
        attention = {"q_proj": (hidden,), "k_proj": (narrow,), "v_proj": (narrow,)}
        rest = {
            "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (wide, hidden), "mlp.up_proj": (wide, hidden),
            "mlp.down_proj": (hidden, wide), "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
        }  # fmt: skip
        for name, (rows,) in attention.items():
            shapes[f"model.layers.{i}.self_attn.{name}.weight"] = (rows, hidden)
            shapes[f"model.layers.{i}.self_attn.{name}.bias"] = (rows,)
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in rest.items()}
    shapes["model.norm.weight"] = (hidden,)
    weights = {
        name: np.ones(shape, np.float32) if "norm" in name else rng.normal(0, 0.1, shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    kept = range(num_layers) if kept is None else kept
    for i in range(num_layers):
        of_layer = [name for name in weights if name.startswith(f"model.layers.{i}.")]
        taken = {name: weights.pop(name) for name in of_layer}
        if i in kept:
            at = f"model.layers.{kept.index(i)}."
            weights |= {name.replace(f"model.layers.{i}.", at): each for name, each in taken.items()}
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(SHAPE | {"num_hidden_layers": len(kept)}), encoding="utf-8")
    train_tokenizer().save(str(folder / "tokenizer.json"))


FILE_TYPES = {"F32": "ALL_F32", "Q4_K": "MOSTLY_Q4_K_M"}


def random_q4_k(array: Any) -> Any:
    """Q4_K blocks for a matrix of this shape, uint8 [rows, bytes]: the gguf package reads them and makes none."""
    import gguf
    import numpy as np

    rng = np.random.default_rng(array.view(np.uint32).reshape(-1)[:4])  # another for each matrix
    scales = rng.integers(32, 64, (*array.shape[:-1], array.shape[-1] // 256, 8))
    minima = np.minimum(scales + rng.integers(-3, 4, scales.shape), 63)
    blocks = rng.integers(0, 256, (*scales.shape[:-1], 144)).astype(np.uint8)
    blocks[..., :4] = np.array([0.0004, 0.003], dtype=np.float16).view(np.uint8)
    low, high = slice(0, 4), slice(4, 8)
    blocks[..., 4:8] = scales[..., low] | scales[..., high] >> 4 << 6
    blocks[..., 8:12] = minima[..., low] | minima[..., high] >> 4 << 6
    blocks[..., 12:16] = scales[..., high] & 15 | (minima[..., high] & 15) << 4
    found = gguf.dequantize(blocks.reshape(len(array), -1), gguf.GGMLQuantizationType.Q4_K)
    assert found.shape == array.shape
    assert 0.05 < found.std() < 0.2
    return blocks.reshape(len(array), -1)


def tokenizer_keys(tokenizer: dict[str, Any], pre: str, size: int) -> dict[str, Any]:
    """A GGUF file's metadata of what tokenizer.json has. size: of the vocabulary, padding included."""
    tokens = {token_id: (token, 1) for token, token_id in tokenizer["model"]["vocab"].items()}
    for token in tokenizer["added_tokens"]:
        tokens[token["id"]] = (token["content"], 3 if token["special"] else 4)
    tokens |= {i: (token, 6) for i, (token, _) in tokens.items() if token.startswith("<0x")}
    rows = [tokens.get(i, (f"[PAD{i}]", 5)) for i in range(size)]
    unknown = tokenizer["model"]["unk_token"]
    rows = [(token, 2 if token == unknown else kind) for token, kind in rows]
    has_scores = bool(tokenizer["model"]["byte_fallback"])
    return {
        "tokenizer.ggml.model": "llama" if has_scores else "gpt2",
        "tokenizer.ggml.pre": "default" if has_scores else pre,
        "tokenizer.ggml.tokens": [token for token, _ in rows],
        "tokenizer.ggml.token_type": [kind for _, kind in rows],
        "tokenizer.ggml.merges": None if has_scores else [" ".join(merge) for merge in tokenizer["model"]["merges"]],
        "tokenizer.ggml.scores": [-float(i) for i in range(len(rows))] if has_scores else None,
        "tokenizer.ggml.eos_token_id": 402,
        "tokenizer.ggml.padding_token_id": 400,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }


def write_gguf(
    path: Path,
    checkpoint: Path,
    quantisation: str,
    pre: str,
    metadata: dict[str, Any],
    per_file: int = 0,
    finer: str = "",
) -> None:
    """Write a Qwen2 checkpoint as GGUF, the way its converter does: padded vocabulary, named pre-tokenizer.

    per_file: the most tensors of a file; with more there are several. finer: a part of the names of matrices in Q8_0.
    """
    import gguf
    from safetensors.numpy import load_file

    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(path, "qwen2", split_max_tensors=per_file)
    values: dict[str, Any] = {
        "general.file_type": int(gguf.LlamaFileType[FILE_TYPES.get(quantisation, f"MOSTLY_{quantisation}")]),
        "qwen2.block_count": config["num_hidden_layers"],
        "qwen2.context_length": config["max_position_embeddings"],
        "qwen2.embedding_length": config["hidden_size"],
        "qwen2.feed_forward_length": config["intermediate_size"],
        "qwen2.attention.head_count": config["num_attention_heads"],
        "qwen2.attention.head_count_kv": config["num_key_value_heads"],
        "qwen2.rope.freq_base": 10000.0,
        "qwen2.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
    }
    for key, value in (values | tokenizer_keys(tokenizer, pre, config["vocab_size"]) | metadata).items():
        add_key(writer, key, value)
    for weight, array in load_file(checkpoint / "model.safetensors").items():
        if (name := gguf_name_of(weight)) is None:
            continue
        if array.ndim == 1:
            writer.add_tensor(name, array.astype("float32"))
        else:
            name_of_kind = "Q8_0" if finer and finer in name else quantisation
            kind = gguf.GGMLQuantizationType[name_of_kind]
            packed = random_q4_k(array) if name_of_kind == "Q4_K" else gguf.quantize(array.astype("float32"), kind)
            writer.add_tensor(name, packed, raw_dtype=kind)
    finish_gguf(writer)


def finish_gguf(writer: Any) -> None:
    """Write what a `gguf.GGUFWriter` was given."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_key(writer: Any, key: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def gguf_name_of(weight: str) -> str | None:
    """The name in a GGUF file of a checkpoint's weight; None for what is left out."""
    names = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if weight in names:
        return names[weight]
    _, _, layer, rest = weight.split(".", 3)
    parts = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    part, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{parts[part]}.{kind}"
