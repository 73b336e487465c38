"""The whole export, top to bottom: locate, plan, compare, convert, describe, commit."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from outrider.bundle.folder import Bundle
from outrider.bundle.manifest import DrafterEntry, Format, Geometry, ModelEntry, TextEncoderKind
from outrider.config.files import user_path
from outrider.errors import ExportError
from outrider.system.files import usable
from outrider.system.together import start
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
from outrider_export.encoder_decoder import job as encoder_decoder
from outrider_export.heads.formats import read_head
from outrider_export.heads.own import find_own
from outrider_export.heads.plan import DEFAULT_WEIGHTS, HeadPlan, is_head
from outrider_export.heads.write import check_head_weights
from outrider_export.progress import ForModel, Notes, Progress, Silent
from outrider_export.sources.peft_adapter import read_adapter
from outrider_export.sources.source import NONE, Located, check_packages, fetch, locate
from outrider_export.target import NoRoom, Target, check_space, publish
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
    "int8"; draft_weights: by default "int4", or "int8" where there are fewer than 200 million. for_this_machine: a
    model without these options gets the form that wins on processors like this one, if it is not small; see
    `outrider_export.weights_choice.choice`. False: the defaults above, in OpenVINO. draft_vocab: the number of tokens
    that the draft model proposes, or "all"; by default as many as `configs/machines.toml` says, if that saves a tenth
    of a draft token. draft_vocab_corpus: a file of typical text to choose them by. See `outrider_export.diet`.
    adapter: the folder of a LoRA adapter, which is merged into the main model.

    Raises:
        OptionError: for an invalid option.
        VocabularyMismatch: if the draft model has no token in common with the main model.
        ExportError: if a model cannot be found, read or converted, or the bundle cannot be written.
    """
    options = {name: value for name, value in locals().items() if name not in ("output", "progress")}
    return Export(ExportRequest(**options), Path(output), progress or Silent()).run()


@dataclass(frozen=True)
class ExportRequest:
    """What `export_bundle` is asked for; see there. The last two are the cache's."""

    main: str | Path
    draft: str | Path | None = None
    format: str | None = None
    draft_format: str | None = None
    weights: str | None = None
    draft_weights: str | None = None
    draft_vocab: int | str | None = None
    draft_vocab_corpus: str | Path | None = None
    revision: str | None = None
    draft_revision: str | None = None
    adapter: str | Path | None = None
    trust_remote_code: bool = False
    overwrite: bool = False
    for_this_machine: bool = True
    main_from: Bundle | None = None  # of the same main model, whose files are taken over
    hashes_sources: bool = True  # whether the manifest has the sha256 of GGUF files


class Export:
    """One export, stage by stage."""

    def __init__(self, request: ExportRequest, output: Path, progress: Progress) -> None:
        self.request, self.output, self.progress = request, output, progress
        self._drafter: Located | None = None  # that reads hidden states, if `draft` names one
        self._head: HeadPlan | None = None

    def run(self) -> Bundle:
        """Do all stages. Raises as `export_bundle`."""
        check_packages()
        request = self.request
        main_form = check_format("format", request.format or PORTABLE[0])
        draft_form = check_format("draft_format", request.draft_format or main_form)
        check_weights("weights", request.weights, main_form)
        check_weights("draft_weights", request.draft_weights, draft_form)
        source = locate(request.main, request.revision)
        kind = kind_of_text_encoder(source, ForModel(self.progress, "main"))
        if kind is not None:
            return self._text_encoder(source, kind, main_form)
        asked = [_Asked("main", source, main_form, request.weights)]
        if request.draft not in (None, NONE):
            draft = locate(request.draft, request.draft_revision)
            asked.append(_Asked("draft", draft, draft_form, request.draft_weights))
        self._adapter = None if request.adapter is None else check_adapter(request.adapter)
        self._takes_own = request.draft is None
        has_draft = len(asked) > 1 or self._takes_own
        self._diet = check_diet(has_draft, request.draft_vocab, request.draft_vocab_corpus)
        for each in asked:
            if each.role == "main" or not is_head(fetch_config(each.source)):
                self._check_route(each)
        with _writing(self.output), Target(self.output, request.overwrite) as target:
            for leftover in target.leftovers:
                self.progress.note(f"{leftover} was left behind by an export that was killed; it can be deleted.")
            plans = self._plan(asked)
            return self._write(target, plans)

    def draft_geometry(self) -> Geometry | None:
        """The draft model's, of a pair with the default options; None if it cannot join a compiled main model.

        Raises as `export_bundle` for a pair that cannot be exported.
        """
        request, form = self.request, PORTABLE[0]
        source, draft = locate(request.main, request.revision), locate(request.draft or "", request.draft_revision)
        if kind_of_text_encoder(source) is not None:
            return None
        self._adapter, self._takes_own, self._diet = None, False, check_diet(True, None, None)
        main, *drafts = self._plan([_Asked("main", source, form, None), _Asked("draft", draft, form, None)])
        if not drafts or main.encoder:  # a head, which reads the main model's hidden states
            return None
        pair_vocabularies(main, drafts[0], self.progress)
        return drafts[0].geometry

    def _text_encoder(self, source: Located, kind: TextEncoderKind, form: str) -> Bundle:
        """The export of a model that writes no text."""
        request = self.request
        others = {"draft": request.draft, "format": form, "draft_vocab": request.draft_vocab}
        check_options(source, kind, {**others, "adapter": request.adapter})
        with _writing(self.output), Target(self.output, request.overwrite) as target:
            return export_text_encoder(
                source,
                kind,
                target,
                weights=request.weights or MAIN_WEIGHTS["main"],
                trust_remote_code=request.trust_remote_code,
                progress=self.progress,
            )

    def _check_route(self, asked: _Asked) -> None:
        trusts = self.request.trust_remote_code
        check_route(asked.source, asked.format, trust_remote_code=trusts)

    def _plan(self, asked: list[_Asked]) -> list[Plan]:
        """Fetch the models, and plan the conversion of each."""
        request, progress = self.request, self.progress
        fetched = []
        for each in asked:
            found = fetch(each.source, request.trust_remote_code, ForModel(progress, each.role))
            fetched.append(dataclasses.replace(each, source=found))
            if found.kind != each.source.kind:
                self._check_route(fetched[-1])
        if len(fetched) > 1 and is_head(fetched[1].source):  # before configurations are read
            self._drafter = fetched.pop().source
            check_head_weights("draft_weights", request.draft_weights or DEFAULT_WEIGHTS)
        trusts = request.trust_remote_code
        plans = [
            make_plan(each.role, each.source, each.format, each.weights, trust_remote_code=trusts) for each in fetched
        ]
        if self._adapter is not None and (plans[0].encoder or (plans[0].vision and not plans[0].direct)):
            raise ExportError(
                f"The adapter {self._adapter} cannot be merged into {plans[0].source.id}: adapters are for models that "
                "are decoders of text alone. Export it without --adapter."
            )
        encoder_decoder.check_pair(plans[0], plans[1:], request.draft_vocab, has_head=self._drafter is not None)
        self._head = self._plan_head(plans[0])
        if request.draft in (None, NONE) and self._head is None:
            check_diet(False, request.draft_vocab, request.draft_vocab_corpus)
        if request.for_this_machine and request.format is None and request.weights is None:
            plans = choose_weights(plans, request.draft_format, request.draft_weights, progress)
        return plans

    def _plan_head(self, main: Plan) -> HeadPlan | None:
        """The plan of a drafter that reads hidden states: the named one, or that in the main model's own files.

        Raises as `read_head` and `HeadPlan`.
        """
        weights = self.request.draft_weights or DEFAULT_WEIGHTS
        options = eos_of(main), weights, *self._diet, self.progress
        if self._drafter is not None:
            return HeadPlan(read_head(self._drafter.fetched, main.geometry), self._drafter, *options)
        own = find_own(main, self.progress) if self._takes_own else None
        if own is None:
            return None
        check_head_weights("draft_weights", weights)
        head = HeadPlan(own.read(main.geometry), main.source, *options)
        self.progress.note(f"Its own MTP module comes along as drafter '{head.kind}'. --draft none leaves it out.")
        return head

    def _write(self, target: Target, plans: list[Plan]) -> Bundle:
        """Convert tokenizers and models, and finish the bundle."""
        progress = self.progress
        pairings = [pair_vocabularies(plans[0], plan, progress) for plan in plans[1:]]
        diets = [
            None if plan.encoder else plan_diet(plan, pairing, *self._diet)
            for plan, pairing in zip(plans[1:], pairings, strict=True)
        ]
        check_space(target.output.parent, space_needed(plans))
        # A draft model has its own tokenizer only with another vocabulary.
        folders = ["tokenizer", *(None if p.vocabulary == "same" else "draft-tokenizer" for p in pairings)]
        encoders = [encoder_decoder.place_encoder(plan, plans[0], progress) for plan in plans]
        plans = [dataclasses.replace(p, encoder=encoder) for p, encoder in zip(plans, encoders, strict=True)]
        entries = []
        with start(self._tokenizers(target, plans, folders)) as tokenizers:
            for plan, folder, diet in zip(plans, folders, [None, *diets], strict=True):
                if diet is not None or not plan.direct:  # PyTorch takes minutes
                    for each in tokenizers:
                        each.result()
                entries.append(self._convert(target, plan, folder, diet))
        for each in tokenizers:
            each.result()
        added = []
        if self._head is not None:
            try:
                added.append(self._head.write(target, entries[0], self._head.kind))
                target.forget("main")  # in ONNX, hidden states become outputs
            except ExportError as error:
                if self._drafter is not None:
                    raise
                shutil.rmtree(target.new / self._head.kind, ignore_errors=True)
                progress.note(f"The model's own MTP module is left out. {error}")
        return finish(target, plans, entries, pairings, progress, added)

    def _tokenizers(self, target: Target, plans: list[Plan], folders: list[str | None]) -> list[Callable[[], None]]:
        """What converts the tokenizers, in another thread; that of another bundle is taken over now."""
        made: list[Callable[[], None]] = []
        for plan, folder in zip(plans, folders, strict=True):
            if folder is None:
                continue
            if (other := self._other(plan)) is not None:
                target.take_over(other, folder)
                continue
            ForModel(self.progress, plan.role).phase("tokenizer")
            trusts, notes = self.request.trust_remote_code, Notes(self.progress)
            made.append(partial(convert_tokenizer, plan, target.new / folder, trusts, notes))
        return made

    def _convert(self, target: Target, plan: Plan, folder: str | None, diet: Diet | None) -> ModelEntry:
        """Convert one model, and begin to hash its files; or take it over from another bundle."""
        if (other := self._other(plan)) is not None:
            target.take_over(other, plan.role)
            return other.manifest.main
        progress, adapter = ForModel(self.progress, plan.role), self._adapter if plan.role == "main" else None
        request = self.request
        entry = convert_model(
            plan,
            folder,
            diet,
            target,
            request.trust_remote_code,
            progress,
            adapter,
            hashes_source=request.hashes_sources,
        )
        target.hash(entry.folder)
        return entry

    def _other(self, plan: Plan) -> Bundle | None:
        """The bundle whose main model is this one, as it is planned."""
        other = self.request.main_from if plan.role == "main" else None
        if other is None or plan.encoder or plan.vision:
            return None
        main = other.manifest.main
        return other if (main.format, main.weights) == (plan.format, plan.weights) else None


@dataclass(frozen=True)
class _Asked:
    """One model of a request. weights: as asked for."""

    role: str
    source: Located
    format: Format
    weights: str | None


@contextmanager
def _writing(output: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise NoRoom(f"{output} cannot be written: {error}.", "Choose another folder with -o.") from error


def finish(
    target: Target,
    plans: list[Plan],
    entries: list[ModelEntry],
    pairings: list[Pairing],
    progress: Progress,
    added: Sequence[DrafterEntry] = (),
) -> Bundle:
    """Describe the written models and tokenizers, and publish the bundle.

    plans, entries: the main model's first, then the drafters'. pairings: of the drafters. added: drafters that
    are described already.
    """
    tokenizer = describe_tokenizer(plans[0], target.new / "tokenizer")
    drafters = [
        describe_drafter(plan, entry, pairing, target.new)
        for plan, entry, pairing in zip(plans[1:], entries[1:], pairings, strict=True)
    ]
    return publish(target, entries[0], (*drafters, *added), tokenizer, progress)


def check_adapter(adapter: str | Path) -> Path:
    """The folder of an adapter that is to be merged, before anything is converted.

    Raises:
        ExportError: when it is no adapter, or damaged.
    """
    folder = usable(user_path(adapter))
    read_adapter(folder)
    return folder
