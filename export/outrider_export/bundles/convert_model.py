"""Converts one model into its folder of a bundle, and describes it for the manifest."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from outrider.bundle.hashes import sha256_of, sha256_of_all
from outrider.bundle.manifest import (
    MODEL_NAMES,
    PROPOSED_NAME,
    DrafterEntry,
    Format,
    Geometry,
    ModelEntry,
    Source,
    TokenizerEntry,
)
from outrider.errors import ExportError
from outrider.system.together import start
from outrider_export.child import run_child
from outrider_export.describe.geometry import check_ir
from outrider_export.describe.pairing import Pairing
from outrider_export.describe.plan import PARALLEL_PLACES, Plan, parallel_mask
from outrider_export.describe.special_tokens import eos_of, infill_of, token_of_config
from outrider_export.diet.diet import Diet
from outrider_export.encoder_decoder import job as encoder_decoder
from outrider_export.extras import version_of
from outrider_export.onnx.check import check_onnx
from outrider_export.progress import Progress
from outrider_export.sources.gguf_shards import shards_of
from outrider_export.sources.peft_adapter import WEIGHTS
from outrider_export.sources.source import read_json, read_templates
from outrider_export.target import NoRoom, Target
from outrider_export.tokenizers.copy import copy_tokenizer
from outrider_export.tokenizers.marian_tokenizer import is_marian

_FULL = 50_000_000  # bytes; with less free space than this, a failure is reported as a full disk
_PACKAGES = {
    "direct": ("openvino", "openvino-tokenizers", "gguf"),
    "convert": ("openvino", "openvino-tokenizers", "optimum-intel", "nncf", "transformers", "torch"),
    "onnx": ("onnx", "openvino-tokenizers", "gguf"),
}


def convert_model(
    plan: Plan,
    tokenizer: str | None,
    diet: Diet | None,
    target: Target,
    trust_remote_code: bool,
    progress: Progress,
    adapter: Path | None,
    *,
    hashes_source: bool = True,
) -> ModelEntry:
    """Convert one model into the bundle's folder for it, and cut its output matrix to a diet.

    tokenizer: the folder of its own tokenizer, if it has one. adapter: the folder of one to merge into it.
    hashes_source: whether the manifest has the sha256 of a GGUF file.

    Raises:
        ExportError: when it cannot be converted. A full disk is named: the libraries' message is "iostream error".
    """
    try:
        hashes = [] if plan.header is None or not hashes_source else [partial(sha256_of_all, shards_of(plan.path))]
        token_ids = diet.choose(target.new / (tokenizer or "tokenizer"), progress) if diet else None
        with start(hashes) as hashed:  # a conversion does not keep all processors busy
            entry = _convert(plan, target, trust_remote_code, progress, adapter, token_ids)
        digest = hashed[0].result() if hashed else None
        return msgspec.structs.replace(entry, source=msgspec.structs.replace(entry.source, sha256=digest))
    except ExportError as error:
        folder = target.output.parent
        if (free := shutil.disk_usage(folder).free) < _FULL:
            raise NoRoom(
                f"{folder} is full: {free / 1e9:.2f} GB were left when converting the {plan.role} model failed.",
                "Make room, or choose another disk with -o.",
            ) from error
        raise


def _convert(
    plan: Plan,
    target: Target,
    trust_remote_code: bool,
    progress: Progress,
    adapter: Path | None,
    token_ids: NDArray[np.int32] | None,
) -> ModelEntry:
    """Convert one model into the bundle's folder for it.

    adapter: the folder of one to merge into it. token_ids: int32 [n], that its output matrix is cut to.
    """
    folder, geometry = target.new / plan.role, plan.geometry
    what = f"The {plan.role} model {plan.source.id} cannot be converted"
    job: dict[str, Any] = {"output": str(folder), "scratch": str(target.scratch / plan.role)}
    job |= {
        "model": str(plan.path.absolute()),  # links keep their names, which say of parts which they are
        "gguf": plan.header is not None,
        "format": plan.format,
        "weights": plan.weights,
        "trust_remote_code": trust_remote_code,
        "geometry": msgspec.to_builtins(geometry),
        "adapter": None if adapter is None else str(adapter.resolve()),
        "is_draft": plan.role != "main",
    }
    if token_ids is not None:
        job["proposed"] = str(target.scratch / f"{plan.role}-{PROPOSED_NAME}")
        np.save(job["proposed"], token_ids)
    work = f"outrider_export.{'direct' if plan.direct else 'with_torch'}.convert.convert"
    if plan.encoder:
        work = encoder_decoder.WORK
        job |= encoder_decoder.job_of(plan, plan.encoder, target.new)
    if plan.vision is not None:
        work = work if plan.direct else "outrider_export.with_torch.convert_vision.convert"
        job |= {"vision": str(target.new / plan.vision.folder), "layout": plan.vision.layout}
    done = run_child(work, job, what, progress)
    route = "checkpoint" if plan.header is None else f"dequantise {plan.header.quantisation}"
    recipe = {"route": route, "tied_embeddings": str(done["tied_embeddings"]).lower()}
    if plan.chosen:
        recipe["chosen"] = plan.chosen
    if adapter is not None:
        recipe |= {"adapter": adapter.resolve().name, "adapter_sha256": sha256_of(adapter / WEIGHTS)}
    geometry = msgspec.convert(msgspec.to_builtins(geometry) | done.get("layers", {}), Geometry)
    if token_ids is not None:
        geometry = msgspec.structs.replace(geometry, logits_width=len(token_ids))
    if plan.encoder:
        encoder_decoder.check_written(folder, target.new / plan.encoder.folder, geometry)
    else:
        geometry = _check_model(plan.format, folder, geometry)
    packages = _PACKAGES["onnx" if plan.format == "onnx" else "direct" if plan.direct else "convert"]
    return describe_model(plan, geometry, plan.source.kind, recipe | {name: version_of(name) for name in packages})


def _check_model(format: Format, folder: Path, geometry: Geometry) -> Geometry:  # noqa: A002
    """Check that the model in `folder` can be read and has its source's shape, with the windows that it has."""
    check = check_onnx if format == "onnx" else check_ir
    windows = check(folder / MODEL_NAMES[format][0], geometry)
    return msgspec.structs.replace(geometry, sliding_windows=windows)


def convert_tokenizer(plan: Plan, folder: Path, trust_remote_code: bool, progress: Progress) -> None:
    """Copy a model's tokenizer to a new folder and convert it there.

    Raises:
        ExportError: if OpenVINO's form of it would give other tokens or texts. A model that transcribes only writes.
    """
    copy_tokenizer(plan.header, plan.path, folder)
    job = {
        "model": str(folder if is_marian(plan.path) else plan.path.resolve()),
        "tokenizer": str(folder),
        "trust_remote_code": trust_remote_code,
        "decodes_only": plan.encoder is not None and plan.encoder.kind == "audio",
    }
    what = f"The tokenizer of {plan.source.id} cannot be converted"
    run_child("outrider_export.tokenizers.job.work", job, what, progress)


def describe_model(plan: Plan, geometry: Geometry, kind: str, recipe: dict[str, str]) -> ModelEntry:
    """Describe a model in the bundle's folder of its role. kind, recipe: of its source."""
    return ModelEntry(
        folder=plan.role,
        format=plan.format,
        weights=plan.weights,
        geometry=geometry,
        vocab_size=len(plan.vocabulary),
        vocab_sha256=plan.vocabulary.sha256,
        source=Source(id=plan.source.id, kind=kind, revision=plan.source.revision, recipe=recipe),
        encoder=plan.encoder,
        vision=plan.vision,
    )


def describe_tokenizer(plan: Plan, folder: Path) -> TokenizerEntry:
    """Describe the tokenizer of a model, whose files are in a bundle's folder."""
    config = read_json(folder / "tokenizer_config.json")
    return TokenizerEntry(
        folder=folder.name,
        eos_token_ids=eos_of(plan),
        special_token_ids=plan.vocabulary.special_token_ids,
        bos_token_id=token_of_config(config, "bos", plan.vocabulary),
        pad_token_id=token_of_config(config, "pad", plan.vocabulary),
        chat_template=bool(read_templates(folder).by_name),
        infill=infill_of(plan),
    )


def describe_drafter(plan: Plan, entry: ModelEntry, pairing: Pairing, folder: Path) -> DrafterEntry:
    """Describe the draft model in the bundle at `folder`. For another vocabulary, also write its files."""
    mask = parallel_mask(plan) if pairing.vocabulary == "same" else None
    is_cut = (folder / entry.folder / PROPOSED_NAME).is_file()
    drafter = DrafterEntry(
        plan.role,
        "draft_model",
        entry,
        num_proposed_tokens=entry.geometry.logits_width if is_cut else None,
        num_places=None if mask is None else PARALLEL_PLACES,
        mask_token_id=mask,
    )
    if pairing.vocabulary == "same":
        return drafter
    tokenizer = describe_tokenizer(plan, folder / "draft-tokenizer")
    pairing.write(folder / "tokenizer", folder / plan.role, folder / tokenizer.folder)
    return msgspec.structs.replace(
        drafter, vocabulary=pairing.vocabulary, num_shared_tokens=pairing.num_shared_tokens, tokenizer=tokenizer
    )
