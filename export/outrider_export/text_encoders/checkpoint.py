"""What the checkpoint of an embedding model or a reranker says of itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from outrider.bundle.manifest import Geometry, Pooling, TextEncoderEntry, TextEncoderKind
from outrider.errors import ExportError
from outrider_export.describe.geometry import geometry_of_config
from outrider_export.progress import Progress, Silent
from outrider_export.sources.source import POOLING, Located, architectures_of, configuring, fetch, read_json

# What sentence-transformers writes beside config.json: its modules, the pooling, how texts are read, and prompts.
MODULES, TEXTS, PROMPTS = "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"
FILES = ("config.json", MODULES, POOLING, TEXTS, PROMPTS)
_POOLINGS: dict[str, Pooling] = {"cls": "cls", "mean": "mean", "lasttoken": "last_token"}
_SPELLINGS = {"cls_token": "cls", "mean_tokens": "mean"}  # of older versions, one field for each
_KNOWN_MODULES = ("Transformer", "Pooling", "Normalize")
# Encoders whose class says that they have no head: a checkpoint of one is an embedding model.
_ENCODERS = (
    "BertModel", "RobertaModel", "XLMRobertaModel", "MPNetModel", "DistilBertModel", "ModernBertModel",
    "NomicBertModel", "AlbertModel", "ElectraModel", "CamembertModel", "DebertaV2Model", "NewModel",
)  # fmt: skip
_OFFSET = ("roberta", "xlm-roberta", "camembert")  # positions begin after the padding token's id


def kind_of_text_encoder(source: Located, progress: Progress | None = None) -> TextEncoderKind | None:
    """What a checkpoint makes of texts; None for a model that writes. Of a hub id, only small files are downloaded.

    Raises:
        ExportError: when it is a classifier that is no reranker, or cannot be reached.
    """
    if source.kind == "gguf":
        return None
    folder = fetch(source, False, progress or Silent(), FILES).fetched
    with configuring(folder / "config.json"):
        config = read_json(folder / "config.json")
        names = architectures_of(config)
        if any(name.endswith("ForSequenceClassification") for name in names):
            labels = config.get("id2label")
            count = config.get("num_labels", len(labels) if isinstance(labels, dict) else 2)
            if count != 1:
                raise ExportError(
                    f"{source.id} is a classifier of {count} labels. Outrider runs rerankers, which have one: the "
                    "relevance of a text."
                )
            return "rerank"
    return "embedding" if (folder / MODULES).is_file() or any(name in _ENCODERS for name in names) else None


def describe(folder: Path, kind: TextEncoderKind) -> tuple[Geometry, TextEncoderEntry]:
    """The shape of a model, and what it makes of texts.

    Raises:
        ExportError: when it is made in a way that openvino-genai's pipelines have not.
    """
    config = read_json(folder / "config.json")
    geometry = geometry_of_config(config, folder)
    with configuring(folder):
        length = geometry.context_length
        if config.get("model_type") in _OFFSET:
            length -= int(config.get("pad_token_id") or 0) + 1
        for name, key in ((TEXTS, "max_seq_length"), ("tokenizer_config.json", "model_max_length")):
            longest = read_json(folder / name).get(key)
            if isinstance(longest, int) and longest > 0:
                length = min(length, longest)
        entry = TextEncoderEntry(kind)
        if kind == "embedding":
            lowercase = bool(read_json(folder / TEXTS).get("do_lower_case"))
            entry = TextEncoderEntry(kind, _pooling_of(folder), lowercase, _prompt_of(folder))
        return msgspec.structs.replace(geometry, context_length=length), entry


def _pooling_of(folder: Path) -> Pooling:
    """How the hidden states of a text become one vector; without sentence-transformers' files the first token's."""
    modules = [str(each.get("type", "")).rpartition(".")[2] for each in _modules(folder)]
    if others := [name for name in modules if name not in _KNOWN_MODULES]:
        raise ExportError(
            f"{folder} has a module {others[0]}, which openvino-genai's pipeline has not: it pools hidden states "
            "and normalises. Choose another embedding model, such as BAAI/bge-small-en-v1.5."
        )
    config = read_json(folder / POOLING)
    old = (name.removeprefix("pooling_mode_") for name, value in config.items() if value is True)
    chosen = [_SPELLINGS.get(name, name) for name in old if f"pooling_mode_{name}" in config]
    if isinstance(named := config.get("pooling_mode"), str):
        chosen = [named]
    if len(chosen) > 1 or not {*chosen} <= _POOLINGS.keys():
        raise ExportError(
            f"{folder / POOLING} pools by {' and '.join(chosen)}; openvino-genai's pipeline pools by one of "
            f"{', '.join(_POOLINGS)}. Choose another embedding model, such as BAAI/bge-small-en-v1.5."
        )
    return _POOLINGS[chosen[0]] if chosen else "cls"


def _prompt_of(folder: Path) -> str:
    """What sentence-transformers puts before a text that no prompt is named for.

    Raises:
        ExportError: when its tokens are no part of the embedding.
    """
    config = read_json(folder / PROMPTS)
    prompt = str((config.get("prompts") or {}).get(config.get("default_prompt_name")) or "")
    if prompt and read_json(folder / POOLING).get("include_prompt") is False:
        raise ExportError(
            f"{folder / POOLING} leaves the prompt {prompt!r} out of a text's embedding (include_prompt), which "
            "openvino-genai's pipeline does not. Choose another embedding model, such as BAAI/bge-small-en-v1.5."
        )
    return prompt


def _modules(folder: Path) -> list[dict[str, Any]]:
    path = folder / MODULES
    if not path.is_file():
        return []
    found = json.loads(path.read_text(encoding="utf-8"))
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []
