"""A draft model that is added to a bundle."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider.errors import VocabularyMismatch
from outrider_export.convert_model import convert_model, describe_drafter
from outrider_export.diet import plan_diet
from outrider_export.heads.formats import kind_of
from outrider_export.pairing import Pairing
from outrider_export.plan import Plan, check_route, check_weights, make_plan, space_needed
from outrider_export.sources import architectures_of, read_json
from outrider_export.target import check_space
from outrider_export.vocabulary import Vocabulary

if TYPE_CHECKING:
    from pathlib import Path

    from outrider.bundle import Bundle
    from outrider.bundle.manifest import DrafterEntry, ModelEntry
    from outrider_export.diet import Diet
    from outrider_export.progress import Progress
    from outrider_export.sources import Located
    from outrider_export.target import Target


def is_model(path: Path) -> bool:
    """Whether a source is a model that writes text by itself, and no drafter of another kind."""
    if not path.is_dir():
        return True
    names = architectures_of(read_json(path / "config.json"))
    return kind_of(path) is None and any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names)


@dataclass(frozen=True)
class DraftModel:
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
    ) -> DraftModel:
        """Plan it for a bundle's main model, in the main model's format.

        num_tokens, corpus: see `plan_diet`.

        Raises:
            OptionError: for an invalid option.
            VocabularyMismatch: if its vocabulary is not the main model's.
            ExportError: if packages are missing, it is damaged or cannot be exported, or the disk lacks room.
        """
        main = bundle.manifest.main
        check_weights("weights", weights, main.format)
        check_route("draft", source, main.format, weights)
        plan = make_plan("draft", source, main.format, weights)
        vocabulary = Vocabulary.of_folder(bundle.tokenizer_path)
        if vocabulary.tokens != plan.vocabulary.tokens:
            raise VocabularyMismatch(
                f"{source.id} has another vocabulary than {main.source.id}, so it needs a tokenizer of its own. Export "
                f"both together: outrider export {main.source.id} --draft {source.id}"
            )
        pairing = Pairing.same(vocabulary)
        diet = plan_diet(plan, pairing, num_tokens, corpus, progress)
        check_space(bundle.folder.parent, space_needed([plan]))
        return cls(plan, pairing, diet, progress)

    def write(self, target: Target, _: ModelEntry, name: str) -> DrafterEntry:
        """Convert it into the new bundle under this name, and describe it."""
        plan = dataclasses.replace(self.plan, role=name)
        entry = convert_model(plan, None, self.diet, target, False, self.progress, None)
        return describe_drafter(plan, entry, self.pairing, self.diet, target.new)
