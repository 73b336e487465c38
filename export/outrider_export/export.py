"""The whole export, top to bottom: locate, plan, compare, convert, describe, commit."""

from __future__ import annotations

import dataclasses
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from outrider import __version__
from outrider.bundle.folder import Bundle, read_bundle
from outrider.bundle.hashes import list_files, sha256_of
from outrider.bundle.manifest import (
    MODEL_NAMES,
    SCHEMA_VERSION,
    DrafterEntry,
    Geometry,
    Manifest,
    ModelEntry,
    Source,
    TokenizerEntry,
    write_manifest,
)
from outrider.config.files import user_path
from outrider.errors import ExportError, OptionError
from outrider.files import usable
from outrider_export.adapters.peft_format import WEIGHTS, read_adapter
from outrider_export.child import run_child
from outrider_export.diet import check_diet, plan_diet, put_on_diet
from outrider_export.encoder_decoder import job as encoder_decoder
from outrider_export.geometry import check_ir
from outrider_export.gguf_tokenizer import write_tokenizer
from outrider_export.heads.plan import HeadPlan, is_head
from outrider_export.onnx_check import check_onnx
from outrider_export.pairing import pair_vocabularies
from outrider_export.plan import (
    PARALLEL_PLACES,
    Plan,
    check_format,
    check_route,
    check_weights,
    make_plan,
    parallel_mask,
    space_needed,
)
from outrider_export.progress import ForModel, Silent
from outrider_export.sources import CHAT_TEMPLATES, TOKENIZER_FILES, fetch, locate, read_json
from outrider_export.special_tokens import eos_of, token_of_config
from outrider_export.target import Target, check_space

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from outrider.bundle.manifest import Format
    from outrider_export.diet import Diet
    from outrider_export.pairing import Pairing
    from outrider_export.progress import Progress

_CONVERTERS = {"openvino": "convert", "onnx": "convert_onnx"}
_FULL = 50_000_000  # bytes; with less free space than this, a failure is reported as a full disk
_PACKAGES = {
    "keep": ("openvino", "openvino-genai", "openvino-tokenizers"),
    "convert": ("openvino", "openvino-tokenizers", "optimum-intel", "nncf", "transformers", "torch"),
    "onnx": ("onnxruntime-genai", "onnxruntime", "onnx", "transformers", "torch"),
}


def export_bundle(
    main: str | Path,
    draft: str | Path | None = None,
    *,
    output: str | Path,
    format: str = "openvino",  # noqa: A002 - the option's name
    draft_format: str | None = None,
    weights: str | None = None,
    draft_weights: str | None = None,
    draft_vocab: int | str | None = None,
    draft_vocab_corpus: str | Path | None = None,
    revision: str | None = None,
    draft_revision: str | None = None,
    adapter: str | Path | None = None,
    trust_remote_code: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Bundle:
    """Export a main model, and a draft model for it, to a bundle at `output`; see the package's docstring.

    format: "openvino" or "onnx". draft_format: for the draft model; by default the main model's. weights: by default
    "int8"; draft_weights: by default "int4"; "keep" leaves a GGUF file's weights unconverted. draft_vocab: the number
    of tokens that the draft model proposes, or "all". draft_vocab_corpus: a file of typical text to choose them by. See
    `outrider_export.diet`. adapter: the folder of a LoRA adapter, which is merged into the main model; see
    `outrider_export.adapters`.

    Raises:
        OptionError: for an invalid option.
        VocabularyMismatch: if the draft model has no token in common with the main model.
        ExportError: if a model cannot be found, read or converted, or the bundle cannot be written.
    """
    progress = progress or Silent()
    main_form, draft_form = check_format("format", format), check_format("draft_format", draft_format or format)
    check_weights("weights", weights, main_form)
    check_weights("draft_weights", draft_weights, draft_form)
    named = [("main", locate(main, revision), main_form, weights)]
    if draft is not None:
        named.append(("draft", locate(draft, draft_revision), draft_form, draft_weights))
    merged = None if adapter is None else check_adapter(adapter, weights)
    num_tokens, corpus = check_diet(draft is not None, draft_vocab, draft_vocab_corpus)
    for role, source, form, asked in named:
        check_route(role, source, form, asked)
    try:
        with Target(Path(output), overwrite) as target:
            for leftover in target.leftovers:
                progress.note(f"{leftover} was left behind by an export that was killed; it can be deleted.")
            fetched = [
                (role, fetch(source, trust_remote_code, ForModel(progress, role)), form, asked)
                for role, source, form, asked in named
            ]
            head = None
            if draft is not None and is_head(fetched[1][1]):
                head = HeadPlan.of(fetched.pop()[1], draft_weights, num_tokens, corpus)
            plans = [make_plan(role, source, form, asked) for role, source, form, asked in fetched]
            if merged is not None and (plans[0].encoder or plans[0].vision):
                raise ExportError(
                    f"The adapter {merged} cannot be merged into {plans[0].source.id}: adapters are for models that "
                    "are decoders of text alone. Export it without --adapter."
                )
            encoder_decoder.check_pair(plans[0], plans[1:], draft_vocab, has_head=head is not None)
            if head is not None:
                head.read(plans[0])
            pairings = [pair_vocabularies(plans[0], plan, progress) for plan in plans[1:]]
            diets = [None] + [
                None if plan.encoder else plan_diet(plan, pairing, num_tokens, corpus, progress)
                for plan, pairing in zip(plans[1:], pairings, strict=True)
            ]
            check_space(target.output.parent, space_needed(plans))
            # A draft model has its own tokenizer only with another vocabulary.
            folders = ["tokenizer", *(None if p.vocabulary == "same" else "draft-tokenizer" for p in pairings)]
            encoders = [encoder_decoder.place_encoder(p, plans[0], progress) if p.encoder else None for p in plans]
            plans = [dataclasses.replace(p, encoder=encoder) for p, encoder in zip(plans, encoders, strict=True)]
            entries = [
                _convert_or_explain(
                    plan,
                    folder,
                    diet,
                    target,
                    trust_remote_code,
                    ForModel(progress, plan.role),
                    merged if plan.role == "main" else None,
                )
                for plan, folder, diet in zip(plans, folders, diets, strict=True)
            ]
            added = [] if head is None else [head.write(target.new, entries[0], progress)]
            finish(target, plans, entries, pairings, diets, progress, added)
    except OSError as error:
        raise ExportError(f"{output} cannot be written: {error}.") from error
    return read_bundle(target.output)


def finish(
    target: Target,
    plans: list[Plan],
    entries: list[ModelEntry],
    pairings: list[Pairing],
    diets: list[Diet | None],
    progress: Progress,
    added: Seq[DrafterEntry] = (),
) -> None:
    """Describe the written models and tokenizers, write the manifest, and commit the bundle.

    plans, entries, diets: the main model's first, then the drafters'. pairings: of the drafters. added: drafters that
    are described already.
    """
    tokenizer = _describe_tokenizer(plans[0], target.new / "tokenizer")
    drafters = [
        _describe_drafter(plan, entry, pairing, diet, target.new)
        for plan, entry, pairing, diet in zip(plans[1:], entries[1:], pairings, diets[1:], strict=True)
    ]
    progress.phase("hash", sum(p.stat().st_size for p in target.new.rglob("*") if p.is_file()))
    write_manifest(
        target.new,
        Manifest(
            schema_version=SCHEMA_VERSION,
            minimum_runtime=__version__,
            created_by=f"outrider {__version__}",
            main=entries[0],
            drafters=(*drafters, *added),
            tokenizer=tokenizer,
            files=list_files(target.new, progress.advance),
        ),
    )
    read_bundle(target.new)
    target.commit()


def check_adapter(adapter: str | Path, weights: str | None) -> Path:
    """The folder of an adapter that is to be merged, before anything is converted.

    Raises:
        OptionError: with weights that are not converted.
        ExportError: when it is no adapter, or damaged.
    """
    if weights == "keep":
        raise OptionError(
            f"adapter={str(adapter)!r} is merged into weights that are converted, and weights='keep' leaves them as "
            "they are. Choose int8, int4, fp16 or fp32, or add it to the bundle: outrider add BUNDLE FOLDER."
        )
    folder = usable(user_path(adapter))
    read_adapter(folder)
    return folder


def _convert_or_explain(
    plan: Plan,
    tokenizer: str | None,
    diet: Diet | None,
    target: Target,
    trust_remote_code: bool,
    progress: Progress,
    adapter: Path | None,
) -> ModelEntry:
    """`_convert`, with a clear error for a full disk: the libraries' message is "iostream error"."""
    try:
        entry = _convert(plan, tokenizer, target, trust_remote_code, progress, adapter)
        return _cut(entry, diet, tokenizer, target, progress) if diet else entry
    except ExportError as error:
        folder = target.output.parent
        if (free := shutil.disk_usage(folder).free) < _FULL:
            raise ExportError(
                f"{folder} is full: {free / 1e9:.2f} GB were left when converting the {plan.role} model failed. Make "
                "room, or choose another disk with -o."
            ) from error
        raise


def _convert(
    plan: Plan,
    tokenizer: str | None,
    target: Target,
    trust_remote_code: bool,
    progress: Progress,
    adapter: Path | None = None,
) -> ModelEntry:
    """Convert one model into the bundle's folder for it, and its tokenizer into the folder `tokenizer`, if any.

    adapter: the folder of one to merge into it.
    """
    folder, geometry = target.new / plan.role, plan.geometry
    what = f"The {plan.role} model {plan.source.id} cannot be converted"
    job: dict[str, Any] = {"output": str(folder), "scratch": str(target.scratch / plan.role)}
    if tokenizer:
        copy_tokenizer(plan, target.new / tokenizer)
        job["tokenizer"] = str(target.new / tokenizer)
    if plan.weights == "keep":
        recipe = {"route": "keep"}
        run_child("outrider_export.keep", job | {"gguf": str(plan.path.resolve())}, what, progress)
    else:
        job |= {
            "model": str(plan.path.resolve()),
            "gguf": plan.header is not None,
            "weights": plan.weights,
            "trust_remote_code": trust_remote_code,
            "geometry": msgspec.to_builtins(geometry),
            "adapter": None if adapter is None else str(adapter.resolve()),
        }
        module = f"outrider_export.{_CONVERTERS[plan.format]}"
        if plan.encoder:
            module = encoder_decoder.MODULE
            job |= encoder_decoder.job_of(plan, plan.encoder, target.new)
        if plan.vision is not None:
            module = "outrider_export.convert_vision"
            job["vision"] = str(target.new / plan.vision.folder)
        done = run_child(module, job, what, progress)
        route = "checkpoint" if plan.header is None else f"dequantise {plan.header.quantisation}"
        recipe = {"route": route, "tied_embeddings": str(done["tied_embeddings"]).lower()}
        if adapter is not None:
            recipe |= {"adapter": adapter.resolve().name, "adapter_sha256": sha256_of(adapter / WEIGHTS)}
        geometry = msgspec.convert(msgspec.to_builtins(geometry) | done.get("layers", {}), Geometry)
    if plan.encoder:
        encoder_decoder.check_written(folder, target.new / plan.encoder.folder, geometry)
    else:
        geometry = _check_model(plan.format, folder, geometry)
    return ModelEntry(
        folder=plan.role,
        format=plan.format,
        weights=plan.header.quantisation if plan.header and plan.weights == "keep" else plan.weights,
        geometry=geometry,
        vocab_size=len(plan.vocabulary),
        vocab_sha256=plan.vocabulary.sha256,
        source=_describe_source(plan, recipe, progress),
        encoder=plan.encoder,
        vision=plan.vision,
    )


def _cut(entry: ModelEntry, diet: Diet, tokenizer: str | None, target: Target, progress: Progress) -> ModelEntry:
    """Cut a converted draft model's output matrix; `tokenizer` is the folder of its own tokenizer, if it has one."""
    token_ids = diet.choose(target.new / (tokenizer or "tokenizer"), progress)
    progress.phase("cut")
    folder, whole = target.new / entry.folder, target.scratch / f"whole-{entry.folder}"
    folder.rename(whole)
    put_on_diet(entry.format, whole, folder, token_ids)
    geometry = msgspec.structs.replace(entry.geometry, logits_width=len(token_ids))
    geometry = _check_model(entry.format, folder, geometry)
    return msgspec.structs.replace(entry, geometry=geometry)


def _check_model(format: Format, folder: Path, geometry: Geometry) -> Geometry:  # noqa: A002
    """Check that the model in `folder` can be read and has its source's shape, with the windows that it has."""
    check = check_onnx if format == "onnx" else check_ir
    windows = check(folder / MODEL_NAMES[format][0], geometry)
    return msgspec.structs.replace(geometry, sliding_windows=windows)


def copy_tokenizer(plan: Plan, folder: Path) -> None:
    """Copy a model's tokenizer files to a new folder."""
    if plan.header is not None:
        write_tokenizer(plan.header, folder)
        return
    folder.mkdir()
    for name in TOKENIZER_FILES:
        if (plan.path / name).is_file():
            shutil.copyfile(plan.path / name, folder / name)


def _describe_source(plan: Plan, recipe: dict[str, str], progress: Progress) -> Source:
    packages = _PACKAGES["onnx" if plan.format == "onnx" else "keep" if plan.weights == "keep" else "convert"]
    digest = None
    if plan.header is not None:
        progress.phase("hash", plan.path.stat().st_size)
        digest = sha256_of(plan.path, progress.advance)
    return Source(
        id=plan.source.id,
        kind=plan.source.kind,
        revision=plan.source.revision,
        sha256=digest,
        recipe=recipe | {name: _version(name) for name in packages},
    )


def _describe_tokenizer(plan: Plan, folder: Path) -> TokenizerEntry:
    config = read_json(folder / "tokenizer_config.json")
    return TokenizerEntry(
        folder=folder.name,
        eos_token_ids=eos_of(plan),
        special_token_ids=plan.vocabulary.special_token_ids,
        bos_token_id=token_of_config(config, "bos", plan.vocabulary),
        pad_token_id=token_of_config(config, "pad", plan.vocabulary),
        chat_template="chat_template" in config or any((folder / name).exists() for name in CHAT_TEMPLATES),
    )


def _describe_drafter(plan: Plan, entry: ModelEntry, pairing: Pairing, diet: Diet | None, folder: Path) -> DrafterEntry:
    """Describe the draft model in the bundle at `folder`. For another vocabulary, also write its files."""
    mask = parallel_mask(plan) if pairing.vocabulary == "same" else None
    drafter = DrafterEntry(
        "draft",
        "draft_model",
        entry,
        num_proposed_tokens=entry.geometry.logits_width if diet else None,
        num_places=None if mask is None else PARALLEL_PLACES,
        mask_token_id=mask,
    )
    if pairing.vocabulary == "same":
        return drafter
    tokenizer = _describe_tokenizer(plan, folder / "draft-tokenizer")
    pairing.write(folder / "tokenizer", folder / plan.role, folder / tokenizer.folder)
    return msgspec.structs.replace(
        drafter, vocabulary=pairing.vocabulary, num_shared_tokens=pairing.num_shared_tokens, tokenizer=tokenizer
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
