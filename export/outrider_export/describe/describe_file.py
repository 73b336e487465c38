"""What is in a GGUF file, by its header alone: `outrider inspect model.gguf`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from outrider.errors import ExportError
from outrider_export.describe.plan import make_plan, why_not_direct
from outrider_export.describe.special_tokens import eos_of, infill_of
from outrider_export.sources.gguf_file import GGUFHeader, is_array
from outrider_export.sources.gguf_reader import read_header
from outrider_export.sources.gguf_shards import shards_of
from outrider_export.sources.source import locate
from outrider_export.tokenizers.gguf_tokenizer import is_sentencepiece, name_of


def describe_gguf(path: Path) -> dict[str, Any]:
    """The content of a GGUF file, and what an export makes of it, with None for what it does not say.

    path: of the file, one of its parts, or a folder with one. Nothing is converted, and nothing written.

    Raises:
        ExportError: when its header cannot be read.
    """
    located = locate(path)
    header = read_header(located.fetched)
    files = shards_of(header.path)
    types = Counter(tensor.type for tensor in header.tensors.values())
    context = header.value(".context_length")
    found: dict[str, Any] = {
        "file": str(header.path),
        "files": len(files),
        "bytes": header.num_bytes,
        "name": name_of(header) or None,
        "license": _said(header, "general.license"),
        "architecture": header.architecture,
        "weights": sum(tensor.num_weights for tensor in header.tensors.values()),
        "quantization": header.quantisation,
        "tensors": dict(types.most_common()),
        "layers": header.num_layers,
        "mtp_layers": header.num_modules,
        "context_length": context if isinstance(context, int) else None,
        "tokenizer": "SentencePiece" if is_sentencepiece(header) else _said(header, "tokenizer.ggml.model"),
        "pre_tokenizer": _said(header, "tokenizer.ggml.pre"),
        "chat_template": any(key.startswith("tokenizer.chat_template") for key in header.metadata),
    }
    try:
        plan = make_plan("main", located, "openvino", None)
    except ExportError as error:
        return found | {"refused": str(error)}
    tokens = plan.vocabulary.tokens
    return found | {
        "vocabulary": len(plan.vocabulary),
        "ends_with": [tokens[token_id] for token_id in eos_of(plan)],
        "fills_in": infill_of(plan) is not None,
        "becomes": plan.weights,
        "becomes_bytes": plan.final_bytes,
        "needs_pytorch_for": why_not_direct(located.id, header, {}, trust_remote_code=False),
    }


def _said(header: GGUFHeader, key: str) -> str | None:
    value = header.value(key)
    return None if value is None or is_array(value) else str(value)
