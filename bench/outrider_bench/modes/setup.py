"""What the engines of a comparison are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from outrider.bundle.folder import Bundle, draft_models_of
from outrider.bundle.manifest import DrafterEntry, ModelEntry
from outrider.config import Config
from outrider.engine.opening import open_bundle, open_draft_bundle
from outrider.errors import OptionError
from outrider.types import TextTokenizer
from outrider_bench.modes.name import ModeName


@dataclass(frozen=True)
class Setup:
    """What the engines of a comparison are made of. `tokenizer` replaces the bundle's own in ours."""

    bundle: Bundle
    config: Config
    peer_models: Mapping[str, Path] = field(default_factory=dict)  # by peer: a folder or file of its own format
    tokenizer: TextTokenizer | None = None

    @cached_property
    def draft_bundle(self) -> Bundle:
        """The bundle with the draft models: another one if the options name it."""
        return open_draft_bundle(self.bundle, self.config.device)

    @property
    def drafters(self) -> tuple[DrafterEntry, ...]:
        """The drafters that have files."""
        return draft_models_of(self.draft_bundle, self.bundle)

    @property
    def draft_models(self) -> tuple[DrafterEntry, ...]:
        """The drafters that are models of their own: other runtimes have those."""
        return tuple(each for each in self.drafters if each.traits.design == "model")

    @property
    def models(self) -> dict[str, ModelEntry]:
        """All models, "main" and by the drafters' names."""
        return {"main": self.bundle.manifest.main} | {drafter.name: drafter.model for drafter in self.drafters}

    def on(self, name: ModeName) -> Setup:
        """The same with the bundle that a mode runs on.

        Raises:
            OptionError: when it was not given, or has another tokenizer.
            BundleError: when it cannot be read.
        """
        if not name.bundle:
            return self
        folder = self.peer_models.get(name.bundle)
        if folder is None:
            raise OptionError(f"Mode '{name.text}' needs a bundle: give it as --peer-model {name.bundle}=FOLDER.")
        bundle = open_bundle(folder)
        theirs, ours = (
            (one.manifest.main.vocab_size, one.manifest.tokenizer.special_token_ids) for one in (bundle, self.bundle)
        )
        if theirs != ours:
            raise OptionError(f"{folder} has other tokens than {self.bundle.folder}. Leave mode '{name.text}' out.")
        return replace(self, bundle=bundle, config=self.config.replace(draft_bundle=None))
