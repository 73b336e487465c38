"""What drafts for an engine's requests."""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING

from outrider.bundle.manifest import RESERVED_NAMES
from outrider.config import COPYING
from outrider.controller import Auto, Records
from outrider.drafters import DraftModel, Ngram, References, Suffix
from outrider.errors import OptionError, nearest
from outrider.measure import ALONE, LONGEST

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from collections.abc import Sequence as Seq

    from outrider.config import GenerationConfig
    from outrider.drafters import AnswerStore
    from outrider.loading import LoadedModel
    from outrider.measure import Contention, PassCost
    from outrider.types import Drafter


class DrafterRegistry:
    """The drafters that requests choose from, and what controls how far they draft.

        registry = DrafterRegistry(loaded, {"draft": model}, ["draft"], encode=tokenizer.encode)
        drafter, num_assistant_tokens = registry.choose(config)

    loaded: the models by role, "main" and the drafters' names. models: the draft models among them, as drafters.
    bundled: the names of all that the bundle has; with `loaded_with` as the engine's drafter, the others were left on
    disk. encode: a text to the main model's tokens. store: of answers to copy from. contention: of the main model's
    calls and a draft model's. records: of what the drafters have earned that a name stands for; by default they begin
    anew.
    """

    def __init__(
        self,
        loaded: Mapping[str, LoadedModel],
        models: Mapping[str, DraftModel],
        bundled: Seq[str],
        *,
        encode: Callable[[str], list[int]],
        loaded_with: str | None = None,
        store: AnswerStore | None = None,
        contention: Contention = ALONE,
        records: Callable[[str], Records] | None = None,
    ) -> None:
        self.bundled = tuple(bundled)
        self._loaded, self._contention = loaded, contention
        self._loaded_with, self._store = loaded_with, store
        self._named: dict[str, Drafter] = dict(models)  # the bundle's, then the app's
        self._suffix = Suffix()
        self._read_records = records or (lambda _name: Records())
        self._records: dict[str, Records] = {}
        self._controllers: dict[tuple[str, int], Auto] = {}
        self._read = _cached_references(encode)

    @property
    def names(self) -> tuple[str, ...]:
        """What `drafter` can be, besides "auto" and None."""
        return (*self._named, *COPYING)

    @property
    def models(self) -> dict[str, DraftModel]:
        """The bundle's draft models that are loaded."""
        found = {name: self._named.get(name) for name in self.bundled}
        return {name: drafter for name, drafter in found.items() if isinstance(drafter, DraftModel)}

    def add(self, name: str, drafter: Drafter) -> None:
        """Let requests choose an app's own drafter.

        Raises:
            OptionError: for a name that is taken, or none.
        """
        if not isinstance(name, str) or not name:
            raise OptionError(
                f"A drafter cannot be named {name!r}: a name is a text, and not empty. Choose another name."
            )
        if name in (*RESERVED_NAMES, *self.bundled, *self._named):
            raise OptionError(f"A drafter cannot be named {name!r}: that is taken. Choose another name.")
        self._named[name] = drafter

    def find(self, name: str, max_ngram_size: int = 3) -> Drafter:
        """The drafter of this name; "auto" is the bundle's own, else "suffix".

        Raises:
            OptionError: when there is none, or it was left on disk.
        """
        if name == "auto":
            name = next(iter(self.models), "suffix")
        if name == "ngram":
            return Ngram(max_ngram_size)
        if name == "suffix":
            return self._suffix
        if name in self._named:
            return self._named[name]
        if name in self.bundled:
            raise OptionError(
                f"drafter='{name}' was left on disk, as this engine was loaded with drafter={self._loaded_with!r}. "
                f"Load it with drafter='{name}' or 'auto'."
            )
        raise OptionError(f"There is no drafter '{name}' here. {nearest(name, ['auto', *self.names])}")

    def choose(self, config: GenerationConfig) -> tuple[Drafter | None, int]:
        """What drafts for a request, and how many tokens a round it may at most.

        Raises:
            OptionError: when there is no such drafter, or it does not know an option that is meant for it.
        """
        count = config.num_assistant_tokens
        if config.drafter is None or count == 0:
            return None, 0
        drafter = self.find(config.drafter, config.max_ngram_size)
        threshold = config.assistant_confidence_threshold
        if threshold is not None:
            if not isinstance(drafter, DraftModel):
                raise OptionError(
                    f"assistant_confidence_threshold={threshold:g} is for draft models, and drafter={config.drafter!r} "
                    "is none here. Set it to None, or use a bundle that has a draft model."
                )
            return drafter, LONGEST if isinstance(count, str) else count
        if not isinstance(count, str):
            return drafter, count
        if isinstance(drafter, Ngram | Suffix) or self._cost_of(drafter):
            return self._controller(config.drafter, config.max_ngram_size), LONGEST
        return drafter, drafter.num_assistant_tokens  # an app's own knows best

    def reads_references(self, config: GenerationConfig) -> bool:
        """Whether what drafts for such a request copies from `references` and the answer store."""
        return _reads_references(config, self.choose(config)[0])

    def texts(self, config: GenerationConfig, drafter: Drafter | None) -> tuple[References, ...]:
        """What a request may copy from besides its own tokens; `drafter` is what was chosen for it.

        Raises:
            OptionError: for references that nothing would read.
        """
        if _reads_references(config, drafter):
            documents = (self._read(config.references),) if config.references else ()
            return documents + (self._store.references() if self._store else ())
        if config.references and drafter is not None:
            threshold = config.assistant_confidence_threshold
            without = "" if threshold is None else " and without assistant_confidence_threshold"
            raise OptionError(
                f"references are not read with drafter={config.drafter!r} and num_assistant_tokens="
                f"{config.num_assistant_tokens!r} here. Use drafter='suffix', or drafter='auto' with "
                f"num_assistant_tokens='auto'{without}."
            )
        return ()

    @property
    def untried(self) -> list[tuple[DraftModel, Records]]:
        """The draft models of which nothing is known, and where to put down what becomes known."""
        return [(model, self._records_of(name)) for name, model in self.models.items() if self._records_of(name).is_new]

    def _records_of(self, name: str) -> Records:
        """What the drafters that a name stands for have earned."""
        name = next(iter(self.models), "suffix") if name == "auto" else name
        if name not in self._records:
            self._records[name] = self._read_records(name)
            weakref.finalize(self, self._records[name].save, at_once=True)
        return self._records[name]

    def close(self) -> None:
        """Save what is known of the drafters, and let go of them and of their models."""
        for records in self._records.values():
            records.save(at_once=True)
        self._named.clear()
        self._controllers.clear()

    def expect(self, contention: Contention) -> None:
        """From now on, controllers count with this contention."""
        self._contention = contention
        for controller in self._controllers.values():
            controller.contention = contention

    def _cost_of(self, drafter: Drafter) -> PassCost | None:
        """What the calls of a draft model cost, if that was measured."""
        return next((model.cost for role, model in self._loaded.items() if self._named.get(role) is drafter), None)

    def _controller(self, name: str, max_ngram_size: int) -> Auto:
        """What chooses between the drafters that `name` stands for. Requests share what it has learned."""
        key = (name, max_ngram_size)
        if key not in self._controllers:
            found = self.find(name, max_ngram_size)
            model = found if isinstance(found, DraftModel) else None
            made = Auto(
                self._loaded["main"].backend,
                self._loaded["main"].cost,
                copier=self._suffix if name == "auto" else None if model else found,
                model=model,
                draft_cost=self._cost_of(found),
                contention=self._contention,
                records=self._records_of(name),
            )
            self._controllers.setdefault(key, made)
        return self._controllers[key]


def _reads_references(config: GenerationConfig, drafter: Drafter | None) -> bool:
    return config.drafter in ("auto", "suffix") and isinstance(drafter, Auto | Suffix)


def _cached_references(encode: Callable[[str], list[int]]) -> Callable[[tuple[str, ...]], References]:
    """Makes `References` of documents; those that came lately, alone or together, are not read again."""
    read = functools.lru_cache(64)(encode)
    return functools.lru_cache(8)(lambda documents: References([read(document) for document in documents]))
