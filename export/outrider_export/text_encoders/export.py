"""The export of an embedding model or a reranker, top to bottom."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.bundle.folder import Bundle
from outrider.bundle.manifest import ModelEntry, Source, TextEncoderKind, TokenizerEntry
from outrider.errors import OptionError
from outrider_export.child import run_child
from outrider_export.describe.plan import TOKENIZER_BYTES
from outrider_export.describe.special_tokens import token_of_config
from outrider_export.extras import check_extra, version_of
from outrider_export.progress import ForModel, Progress
from outrider_export.sources.safetensors import count_weights
from outrider_export.sources.source import Located, fetch, read_json
from outrider_export.target import Target, check_space, publish
from outrider_export.text_encoders.checkpoint import describe
from outrider_export.tokenizers.files import copy_files
from outrider_export.tokenizers.vocabulary import Vocabulary

_FOLDER = "main"
_PACKAGES = ("openvino", "openvino-tokenizers", "optimum-intel", "nncf", "transformers", "torch")
_BYTES = {"int8": 1.05, "int4": 0.75, "fp16": 2.0, "fp32": 4.0}  # of a weight


def check_options(source: Located, kind: TextEncoderKind, others: Mapping[str, object]) -> None:
    """Check that no option is given that such models have not.

    Raises:
        OptionError: naming it.
        ExportError: when packages are missing.
    """
    what = {"embedding": "an embedding model", "rerank": "a reranker"}[kind]
    for name, value in others.items():
        if value not in (None, "none", "openvino"):
            raise OptionError(f"{name}={value!r} is for models that write, and {source.id} is {what}. Leave it out.")
    check_extra(f"Exporting {source.id}, which is {what},", "openvino")


def export_text_encoder(
    source: Located, kind: TextEncoderKind, target: Target, *, weights: str, trust_remote_code: bool, progress: Progress
) -> Bundle:
    """Convert a model that has passed `check_options` into a target that was entered.

    Raises:
        ExportError: when it cannot be read or converted, or the bundle cannot be written.
    """
    told = ForModel(progress, "main")
    source = fetch(source, trust_remote_code, told)
    path = source.fetched
    geometry, entry = describe(path, kind)
    vocabulary, num_weights = Vocabulary.of_folder(path), count_weights(path)
    check_space(target.output.parent, int(num_weights * (_BYTES[weights] + 4.0)) + TOKENIZER_BYTES)
    folder = target.new / _FOLDER
    copy_files(path, folder)
    job: dict[str, Any] = {"model": str(path.resolve()), "trust_remote_code": trust_remote_code}
    what = f"The tokenizer of {source.id} cannot be converted"
    reads = {"tokenizer": str(folder), "encodes_only": True, "pairs": kind == "rerank"}
    run_child("outrider_export.tokenizers.job.work", job | reads, what, told)
    job |= {"kind": kind, "weights": weights, "output": str(folder), "scratch": str(target.scratch)}
    run_child("outrider_export.text_encoders.convert.convert", job, f"{source.id} cannot be converted", told)
    config = read_json(folder / "tokenizer_config.json")
    bos, pad = (token_of_config(config, name, vocabulary) for name in ("bos", "pad"))
    recipe = {"route": "checkpoint"} | {name: version_of(name) for name in _PACKAGES}
    model = ModelEntry(
        folder=_FOLDER,
        format="openvino",
        weights=weights,
        geometry=geometry,
        vocab_size=len(vocabulary),
        vocab_sha256=vocabulary.sha256,
        source=Source(id=source.id, kind=source.kind, revision=source.revision, recipe=recipe),
        text_encoder=entry,
    )
    tokenizer = TokenizerEntry(_FOLDER, (), vocabulary.special_token_ids, bos, pad)
    return publish(target, model, (), tokenizer, progress)
