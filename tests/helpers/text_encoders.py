"""Toys of embedding models and rerankers as bundles, and tiny random BERTs as checkpoints."""

import json
import shutil
import string
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.bundle import read_bundle
from outrider.bundle.hashes import list_files
from outrider.bundle.manifest import Geometry, Manifest, ModelEntry, TextEncoderEntry, TextEncoderKind, write_manifest
from outrider.system.core import new_core

WIDTH, LENGTH = 16, 64


def table_of(vocab_size: int) -> NDArray[np.float32]:
    """float32 [vocab, width]: the embedding of each token."""
    return np.random.default_rng(0).normal(size=(vocab_size, WIDTH)).astype(np.float32)


def write_tokenizer(source: Path, folder: Path) -> None:
    """A tokenizer with special tokens around one text or two."""
    import openvino

    from outrider_export.tokenizers.ir import write_tokenizer_ir

    folder.mkdir(parents=True)
    shutil.copyfile(source / "tokenizer_config.json", folder / "tokenizer_config.json")
    content = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    ids = {each["content"]: each["id"] for each in content["added_tokens"]}
    first, last = ({"SpecialToken": {"id": name, "type_id": 0}} for name in ("<|im_start|>", "<|im_end|>"))
    text, other = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    special = {name: {"id": name, "ids": [ids[name]], "tokens": [name]} for name in ("<|im_start|>", "<|im_end|>")}
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [first, text, last],
        "pair": [first, text, last, other, last],
        "special_tokens": special,
    }
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    scratch = folder.with_name("scratch")
    shutil.copytree(folder, scratch)
    assert write_tokenizer_ir(scratch)
    begin, end = ids["<|im_start|>"], ids["<|im_end|>"]
    joined = {"single": {"ids": [begin, -1, end], "type_ids": [0] * 3},
              "pair": {"ids": [begin, -1, end, -2, end], "type_ids": [0] * 5}}  # fmt: skip
    model = new_core().read_model(scratch / "openvino_tokenizer.xml")
    model.set_rt_info(json.dumps(joined), "processed_post_processor_template")  # as openvino_tokenizers writes it
    openvino.save_model(model, folder / "openvino_tokenizer.xml")
    del model
    for name in ("openvino_detokenizer.xml", "openvino_detokenizer.bin"):
        shutil.copyfile(scratch / name, folder / name)
    shutil.rmtree(scratch, ignore_errors=True)


def write_toy(folder: Path, tiny: Path, kind: TextEncoderKind) -> Path:
    """A bundle with the tiny model's tokenizer, whose texts are the mean of their tokens, or the first number of it."""
    import openvino as ov
    from openvino import opset14 as ops

    old = read_bundle(tiny)
    write_tokenizer(old.tokenizer_path, folder / "main")
    size = old.manifest.main.vocab_size
    token_ids = ops.parameter([-1, -1], np.int64, name="input_ids")
    mask = ops.parameter([-1, -1], np.int64, name="attention_mask")
    rows = ops.gather(ops.constant(table_of(size)), token_ids, ops.constant(0))
    output, name = rows, "last_hidden_state"
    if kind == "rerank":
        seen = ops.convert(ops.unsqueeze(mask, ops.constant([2])), np.float32)
        total = ops.reduce_sum(ops.multiply(rows, seen), ops.constant([1]))
        mean = ops.divide(total, ops.reduce_sum(seen, ops.constant([1])))
        output, name = ops.slice(mean, [0], [1], [1], [1]), "logits"
    output.output(0).get_tensor().set_names({name})
    for each, its_name in ((token_ids, "input_ids"), (mask, "attention_mask")):
        each.output(0).get_tensor().set_names({its_name})
    ov.save_model(ov.Model([output], [token_ids, mask]), folder / "main" / "openvino_model.xml", compress_to_fp16=False)
    model = ModelEntry(
        folder="main",
        format="openvino",
        weights="fp32",
        geometry=Geometry("toy", 1, 1, 1, WIDTH, WIDTH, LENGTH, size),
        vocab_size=size,
        vocab_sha256=old.manifest.main.vocab_sha256,
        source=old.manifest.main.source,
        text_encoder=TextEncoderEntry(kind, "mean" if kind == "embedding" else None),
    )
    manifest = Manifest(
        schema_version=old.manifest.schema_version,
        minimum_runtime=old.manifest.minimum_runtime,
        created_by=old.manifest.created_by,
        main=model,
        drafters=(),
        tokenizer=type(old.manifest.tokenizer)("main", ()),
        files=list_files(folder),
    )
    write_manifest(folder, manifest)
    return folder


def write_bert(folder: Path, name: str = "BertModel", **changes: Any) -> Any:
    """A tiny random BERT of this class with a WordPiece tokenizer, as a checkpoint; the model, too."""
    import torch
    import transformers

    letters = sorted({*string.ascii_lowercase, *string.digits, *string.punctuation})
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{each}" for each in letters), "sled", "the"]
    tokenizer = transformers.BertTokenizerFast(vocab={piece: i for i, piece in enumerate(pieces)}, model_max_length=64)
    tokenizer.save_pretrained(folder)
    config = transformers.BertConfig(
        vocab_size=len(pieces), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=64, initializer_range=0.5, **changes,
    )  # fmt: skip
    torch.manual_seed(0)
    model = getattr(transformers, name)(config).eval()
    model.save_pretrained(folder)
    return model
