"""The whole export, top to bottom: locate, plan, compare, convert, describe, commit."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path

from outrider.bundle.folder import Bundle, read_bundle
from outrider.bundle.hashes import list_files
from outrider.bundle.manifest import (
    SCHEMA_VERSION,
    DrafterEntry,
    Manifest,
    ModelEntry,
    TextEncoderKind,
    write_manifest,
)
from outrider.config.files import user_path
from outrider.errors import ExportError, OptionError
from outrider.system.files import usable
from outrider.version import __version__
from outrider_export.bundles.convert_model import convert_model, convert_tokenizer, describe_drafter, describe_tokenizer
from outrider_export.describe.pairing import Pairing, pair_vocabularies
from outrider_export.describe.plan import DEFAULT_WEIGHTS as MAIN_WEIGHTS
from outrider_export.describe.plan import (
    Plan,
    check_format,
    check_route,
    check_weights,
    fetch_config,
    make_plan,
    space_needed,
)
from outrider_export.describe.special_tokens import eos_of
from outrider_export.diet.diet import Diet, check_diet, plan_diet
from outrider_export.diet.draft_cut import AutomaticCut
from outrider_export.encoder_decoder import job as encoder_decoder
from outrider_export.heads.formats import read_head
from outrider_export.heads.own import find_own, may_have_own
from outrider_export.heads.plan import DEFAULT_WEIGHTS, HeadPlan, is_head
from outrider_export.heads.write import check_head_weights
from outrider_export.progress import ForModel, Progress, Silent
from outrider_export.sources.peft_adapter import read_adapter
from outrider_export.sources.source import NONE, Located, check_packages, fetch, locate
from outrider_export.target import NoRoom, Target, check_space
from outrider_export.text_encoders.checkpoint import kind_of_text_encoder
from outrider_export.text_encoders.export import check_options, export_text_encoder
from outrider_export.weights_choice.choice import PORTABLE, choose_weights


def export_bundle(
    main: str | Path,
    draft: str | Path | None = None,
    *,
    output: str | Path,
    format: str | None = None,  # noqa: A002 - the option's name
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
    for_this_machine: bool = True,
    progress: Progress | None = None,
) -> Bundle:
    """Export a main model, and a draft model for it, to a bundle at `output`; see the package's docstring.

    A model whose own files have an MTP module gets it as its drafter, unless `draft` names another, or is "none".

    format: "openvino" or "onnx". draft_format: for the draft model; by default the main model's. weights: by default
    "int8"; draft_weights: by default "int4", or "int8" where there are fewer than 200 million; "keep" leaves a GGUF
    file's weights unconverted. for_this_machine: a model without these options gets the form that wins
    on processors like this one, if it is not small; see `outrider_export.weights_choice.choice`. False: the defaults
    above, in OpenVINO. draft_vocab: the number of tokens that the draft model proposes, or "all"; by default as many as
    `configs/machines.toml` says, if that saves a tenth of a draft token. draft_vocab_corpus: a file of typical
    text to choose them by. See `outrider_export.diet`. adapter: the folder of a LoRA adapter, which is merged into the
    main model.

    Raises:
        OptionError: for an invalid option.
        VocabularyMismatch: if the draft model has no token in common with the main model.
        ExportError: if a model cannot be found, read or converted, or the bundle cannot be written.
    """
    check_packages()
    progress = progress or Silent()
    is_free = for_this_machine and format is None and weights is None
    main_form = check_format("format", format or PORTABLE[0])
    draft_form = check_format("draft_format", draft_format or main_form)
    check_weights("weights", weights, main_form)
    check_weights("draft_weights", draft_weights, draft_form)
    source = locate(main, revision)
    kind = None if weights == "keep" else kind_of_text_encoder(source, ForModel(progress, "main"))
    if kind is not None:
        return _export_text_encoder(
            source, kind, weights, Path(output), trust_remote_code, overwrite, progress,
            draft=draft, format=main_form, draft_vocab=draft_vocab, adapter=adapter,
        )  # fmt: skip
    named = [("main", source, main_form, weights)]
    takes_own = draft is None and may_have_own(named[0][1])
    draft = None if draft == NONE else draft
    if draft is not None:
        named.append(("draft", locate(draft, draft_revision), draft_form, draft_weights))
    merged = None if adapter is None else check_adapter(adapter, weights)
    num_tokens, corpus = check_diet(draft is not None or takes_own, draft_vocab, draft_vocab_corpus)
    for role, source, form, asked in named:
        is_model = role == "main" or asked == "keep"
        if is_model or not is_head(fetch_config(source)):
            check_route(role, source, form, asked, trust_remote_code=trust_remote_code)
    try:
        with Target(Path(output), overwrite) as target:
            for leftover in target.leftovers:
                progress.note(f"{leftover} was left behind by an export that was killed; it can be deleted.")
            fetched = [
                (role, fetch(source, trust_remote_code, ForModel(progress, role)), form, asked)
                for role, source, form, asked in named
            ]
            for (role, found, form, asked), (_, source, *_) in zip(fetched, named, strict=True):
                if found.kind != source.kind:
                    check_route(role, found, form, asked, trust_remote_code=trust_remote_code)
            drafter = fetched.pop()[1] if draft is not None and is_head(fetched[1][1]) else None
            if drafter is not None:  # before configurations are read
                check_head_weights("draft_weights", draft_weights or DEFAULT_WEIGHTS)
            plans = [
                make_plan(role, source, form, asked, trust_remote_code=trust_remote_code)
                for role, source, form, asked in fetched
            ]
            if merged is not None and (plans[0].encoder or (plans[0].vision and not plans[0].direct)):
                raise ExportError(
                    f"The adapter {merged} cannot be merged into {plans[0].source.id}: adapters are for models that "
                    "are decoders of text alone. Export it without --adapter."
                )
            encoder_decoder.check_pair(plans[0], plans[1:], draft_vocab, has_head=drafter is not None)
            head = _plan_head(plans[0], drafter, draft_weights, num_tokens, corpus, progress, takes_own=takes_own)
            if draft is None and head is None:
                check_diet(False, draft_vocab, draft_vocab_corpus)
            if is_free:
                plans = choose_weights(plans, draft_format, draft_weights, progress)
            pairings = [pair_vocabularies(plans[0], plan, progress) for plan in plans[1:]]
            diets: list[Diet | AutomaticCut | None] = [None] + [
                None if plan.encoder else plan_diet(plan, pairing, num_tokens, corpus, progress)
                for plan, pairing in zip(plans[1:], pairings, strict=True)
            ]
            check_space(target.output.parent, space_needed(plans))
            # A draft model has its own tokenizer only with another vocabulary.
            folders = ["tokenizer", *(None if p.vocabulary == "same" else "draft-tokenizer" for p in pairings)]
            encoders = [encoder_decoder.place_encoder(plan, plans[0], progress) for plan in plans]
            plans = [dataclasses.replace(p, encoder=encoder) for p, encoder in zip(plans, encoders, strict=True)]
            for plan, folder in zip(plans, folders, strict=True):
                if folder is not None:  # before the weights, which take minutes
                    convert_tokenizer(plan, target.new / folder, trust_remote_code, ForModel(progress, plan.role))
            entries = [
                convert_model(
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
            added = []
            if head is not None:
                try:
                    added.append(head.write(target, entries[0], head.kind))
                except ExportError as error:
                    if drafter is not None:
                        raise
                    shutil.rmtree(target.new / head.kind, ignore_errors=True)
                    progress.note(f"The model's own MTP module is left out. {error}")
            finish(target, plans, entries, pairings, progress, added)
    except OSError as error:
        raise NoRoom(f"{output} cannot be written: {error}.", "Choose another folder with -o.") from error
    return read_bundle(target.output)


def _export_text_encoder(
    source: Located,
    kind: TextEncoderKind,
    weights: str | None,
    output: Path,
    trust_remote_code: bool,
    overwrite: bool,
    progress: Progress,
    **others: object,
) -> Bundle:
    """The export of a model that writes no text. others: options that such models have not."""
    check_options(source, kind, weights, others)
    try:
        with Target(output, overwrite) as target:
            weights = weights or MAIN_WEIGHTS["main"]
            return export_text_encoder(
                source, kind, target, weights=weights, trust_remote_code=trust_remote_code, progress=progress
            )
    except OSError as error:
        raise NoRoom(f"{output} cannot be written: {error}.", "Choose another folder with -o.") from error


def _plan_head(
    main: Plan,
    drafter: Located | None,
    weights: str | None,
    num_tokens: int | None,
    corpus: list[str],
    progress: Progress,
    *,
    takes_own: bool,
) -> HeadPlan | None:
    """The plan of a drafter that reads hidden states; None without one.

    drafter: its checkpoint, if one is named. takes_own: whether one in the main model's own files is taken.

    Raises as `read_head` and `HeadPlan.of`.
    """
    options = eos_of(main), weights, num_tokens, corpus, progress
    if drafter is not None:
        return HeadPlan.of(read_head(drafter.fetched, main.geometry), drafter, *options)
    own = find_own(main, progress) if takes_own else None
    if own is None:
        return None
    check_head_weights("draft_weights", weights or DEFAULT_WEIGHTS)
    head = HeadPlan.of(own.read(main.geometry), main.source, *options)
    progress.note(f"Its own MTP module comes along as drafter '{head.kind}'. --draft none leaves it out.")
    return head


def finish(
    target: Target,
    plans: list[Plan],
    entries: list[ModelEntry],
    pairings: list[Pairing],
    progress: Progress,
    added: Sequence[DrafterEntry] = (),
) -> None:
    """Describe the written models and tokenizers, write the manifest, and commit the bundle.

    plans, entries: the main model's first, then the drafters'. pairings: of the drafters. added: drafters that
    are described already.
    """
    tokenizer = describe_tokenizer(plans[0], target.new / "tokenizer")
    drafters = [
        describe_drafter(plan, entry, pairing, target.new)
        for plan, entry, pairing in zip(plans[1:], entries[1:], pairings, strict=True)
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
