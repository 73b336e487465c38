"""Adds a drafter to a bundle: `outrider add`.

    bundle = add_drafter("my-bundle", "my-eagle3", name="eagle3")
    bundle = add_drafter("my-bundle", "a-smaller-model")

The bundle is written anew, with links to the old one's files where the disk allows it, and then takes its place.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.bundle.fit import check_writes
from outrider.bundle.folder import Bundle, read_bundle
from outrider.bundle.manifest import DrafterEntry, ModelEntry
from outrider.errors import ExportError, VocabularyMismatch
from outrider.version import __version__
from outrider_export.bundles.convert_model import convert_model, describe_drafter
from outrider_export.describe.pairing import Pairing
from outrider_export.describe.plan import Plan, check_route, check_weights, make_plan, space_needed
from outrider_export.diet.diet import Diet, check_diet, plan_diet
from outrider_export.extras import check_extra
from outrider_export.heads.formats import kind_of_head, read_head
from outrider_export.heads.packed import PackedDrafter, is_packed, read_packed
from outrider_export.heads.plan import DEFAULT_WEIGHTS, HeadPlan
from outrider_export.heads.write import check_head_weights
from outrider_export.progress import Progress, Silent
from outrider_export.sources.source import Located, architectures_of, fetch, locate, read_json
from outrider_export.target import Target, check_new_name, check_space, rewrite
from outrider_export.tokenizers.vocabulary import Vocabulary
from outrider_export.weights_choice.choice import choose_draft_weights


def add_drafter(
    bundle: str | Path,
    drafter: str | Path,
    *,
    name: str | None = None,
    weights: str | None = None,
    draft_vocab: int | str | None = None,
    draft_vocab_corpus: str | Path | None = None,
    revision: str | None = None,
    progress: Progress | None = None,
    output: Path | None = None,
    replaced: Collection[str] = (),
) -> Bundle:
    """Add a drafter to a bundle in place. Nothing is changed if that fails.

    drafter: a checkpoint folder, hub id or GGUF file in one of the formats of `outrider_export.heads.formats`, a folder
    of `pack`, or a draft model with the main model's vocabulary. name: by default its kind; "draft" for draft models.
    weights: by default "int8"; "int4" for draft models; those of a packed one.
    draft_vocab: the number of tokens that it proposes, or "all", for draft models and those that use the main model's
    output matrix.
    output: a folder for the bundle with the drafter; the given bundle then stays as it is. replaced: names of drafters
    that are left out.

    Raises:
        OptionError: for an invalid option, or a name that is taken.
        BundleError: when the bundle cannot be read.
        VocabularyMismatch: for a draft model with another vocabulary.
        ExportError: when the drafter is unknown, damaged or does not fit, or the bundle cannot be written.
    """
    progress = progress or Silent()
    old = read_bundle(bundle)
    main = old.manifest.main
    check_writes(old.manifest, old.folder)
    if main.encoder is not None:
        raise ExportError(
            f"{old.folder} has an encoder-decoder model, and heads such as EAGLE draft for decoders only. Export it "
            "with a smaller model of its own kind as --draft."
        )
    source = fetch(locate(drafter, revision), False, progress)
    found = _plan(old, source, weights, (draft_vocab, draft_vocab_corpus), progress)
    name = found.kind if name is None else name
    kept = [each for each in old.manifest.drafters if each.name not in replaced]
    if name not in replaced:
        check_name(name, old)

    def change(target: Target) -> dict[str, object]:
        for each in old.manifest.drafters:
            if each not in kept:
                shutil.rmtree(target.new / each.model.folder)
        entry = found.write(target, main, name)
        return {"drafters": (*kept, entry), "minimum_runtime": __version__}

    return rewrite(old, change, progress, output)


def _plan(
    old: Bundle, source: Located, weights: str | None, draft_vocab: tuple[Any, Any], progress: Progress
) -> PackedDrafter | DraftModelPlan | HeadPlan:
    """The plan for a drafter of any kind, which was fetched. draft_vocab: that option, and the corpus."""
    main = old.manifest.main
    if source.fetched.is_dir() and is_packed(source.fetched):
        found = read_packed(source.fetched, main)
        found.check_options(weights, *draft_vocab)
        return found
    asked = check_diet(True, *draft_vocab)
    if is_model(source.fetched):
        return DraftModelPlan.of(old, source, weights, *asked, progress)
    weights = weights or DEFAULT_WEIGHTS
    check_head_weights("weights", weights)
    if main.format == "onnx":
        check_extra("Adding a drafter", main.format)
    eos = old.manifest.tokenizer.eos_token_ids
    return HeadPlan(read_head(source.fetched, main.geometry), source, eos, weights, *asked, progress)


def is_model(path: Path) -> bool:
    """Whether a source is a model that writes text by itself, and no drafter of another kind."""
    if not path.is_dir():
        return kind_of_head(path) is None
    names = architectures_of(read_json(path / "config.json"))
    return kind_of_head(path) is None and any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names)


@dataclass(frozen=True)
class DraftModelPlan:
    """The plan of its conversion."""

    plan: Plan
    pairing: Pairing
    diet: Diet | None
    progress: Progress

    kind = "draft"  # what it is called if nobody says

    @classmethod
    def of(
        cls,
        bundle: Bundle,
        source: Located,
        weights: str | None,
        num_tokens: int | None,
        corpus: list[str],
        progress: Progress,
    ) -> DraftModelPlan:
        """Plan it for a bundle's main model, in that one's format; without `weights`, in the form for this machine if
        the main model's was chosen like that.

        num_tokens, corpus: see `plan_diet`.

        Raises:
            OptionError: for an invalid option.
            VocabularyMismatch: if its vocabulary is not the main model's.
            ExportError: if packages are missing, it is damaged or cannot be exported, or the disk lacks room.
        """
        main = bundle.manifest.main
        check_weights("weights", weights, main.format)
        check_route(source, main.format)
        plan = make_plan("draft", source, main.format, weights)
        if weights is None and "chosen" in main.source.recipe:
            plan = choose_draft_weights(plan, progress)
        vocabulary = Vocabulary.of_folder(bundle.tokenizer_path)
        if vocabulary.tokens != plan.vocabulary.tokens:
            raise VocabularyMismatch(
                f"{source.id} has another vocabulary than {main.source.id}, so it needs a tokenizer of its own. Export "
                f"both together: outrider export {main.source.id} --draft {source.id}"
            )
        pairing = Pairing.same(vocabulary)
        diet = plan_diet(plan, pairing, num_tokens, corpus)
        check_space(bundle.folder.parent, space_needed([plan]))
        return cls(plan, pairing, diet, progress)

    def write(self, target: Target, _: ModelEntry, name: str) -> DrafterEntry:
        """Convert it into the new bundle under this name, and describe it."""
        plan = dataclasses.replace(self.plan, role=name)
        entry = convert_model(plan, None, self.diet, target, False, self.progress, None)
        return describe_drafter(plan, entry, self.pairing, target.new)


def check_name(name: str, bundle: Bundle) -> None:
    """Raise OptionError unless a drafter of the bundle can be called `name`, and its folder, too."""
    check_new_name(name, "a drafter", [each.name for each in bundle.manifest.drafters], bundle.folder / name)
