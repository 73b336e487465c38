"""The drafters of an engine by name, and what chooses between them for a request."""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING

from outrider.bundle.manifest import RESERVED_NAMES
from outrider.config import COPYING
from outrider.controller import Controller, Fixed, Records
from outrider.drafters import Ngram, References, Suffix
from outrider.errors import OptionError, nearest
from outrider.measure import ALONE, LONGEST
from outrider.types import is_priced

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from collections.abc import Sequence as Seq

    from outrider.config import GenerationConfig
    from outrider.drafters import AnswerStore, DraftModel
    from outrider.loading import LoadedModel
    from outrider.measure import Contention
    from outrider.types import Drafter, DraftPolicy, PricedDrafter


class DrafterRegistry:
    """Finds what a request's options name: drafters, what chooses between them, and what they may copy from.

        registry = DrafterRegistry(loaded, {"draft": model}, ["draft"], encode=tokenizer.encode)
        policy, num_assistant_tokens = registry.policy_for(config)

    loaded: the models by role, "main" among them. models: the bundle's draft models that are loaded, by name.
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
        self.models = dict(models)
        self._own: dict[str, Drafter] = {}  # the app's
        self._suffix = Suffix()
        self._read_records = records or (lambda _name: Records())
        self._records: dict[str, Records] = {}
        self._controllers: dict[tuple[str, int], Controller] = {}
        self._read = _cached_references(encode)

    @property
    def names(self) -> tuple[str, ...]:
        """What `drafter` can be, besides "auto" and None."""
        return (*self.models, *self._own, *COPYING)

    def add(self, name: str, drafter: Drafter) -> None:
        """Let requests choose an app's own drafter.

        Raises:
            OptionError: for a name that is taken, or none.
        """
        if not isinstance(name, str) or not name:
            raise OptionError(
                f"A drafter cannot be named {name!r}: a name is a text, and not empty. Choose another name."
            )
        if name in (*RESERVED_NAMES, *self.bundled, *self._own):
            raise OptionError(f"A drafter cannot be named {name!r}: that is taken. Choose another name.")
        self._own[name] = drafter

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
        if name in self.models:
            return self.models[name]
        if name in self._own:
            return self._own[name]
        if name in self.bundled:
            raise OptionError(
                f"drafter='{name}' was left on disk, as this engine was loaded with drafter={self._loaded_with!r}. "
                f"Load it with drafter='{name}' or 'auto'."
            )
        raise OptionError(f"There is no drafter '{name}' here. {nearest(name, ['auto', *self.names])}")

    def policy_for(self, config: GenerationConfig) -> tuple[DraftPolicy | None, int]:
        """What says what drafts for a request, and how many tokens a round that may be at most.

        Raises:
            OptionError: when there is no such drafter, or it does not know an option that is meant for it.
        """
        count = config.num_assistant_tokens
        if config.drafter is None or count == 0:
            return None, 0
        drafter = self.find(config.drafter, config.max_ngram_size)
        threshold = config.assistant_confidence_threshold
        if threshold is not None:
            if not getattr(drafter, "takes_rules", False):
                raise OptionError(
                    f"assistant_confidence_threshold={threshold:g} is for draft models, and drafter={config.drafter!r} "
                    "is none here. Set it to None, or use a bundle that has a draft model."
                )
            return Fixed(drafter), LONGEST if isinstance(count, str) else count
        if not isinstance(count, str):
            return Fixed(drafter), count
        if is_priced(drafter):
            return self._controller(config.drafter, config.max_ngram_size, drafter), LONGEST
        return Fixed(drafter), drafter.num_assistant_tokens  # an app's own knows best

    def reads_references(self, config: GenerationConfig) -> bool:
        """Whether what drafts for such a request copies from `references` and the answer store."""
        return self._reads_references(self.policy_for(config)[0])

    def _reads_references(self, policy: DraftPolicy | None) -> bool:
        return policy is not None and any(drafter is self._suffix for drafter in policy.drafters)

    def texts(self, config: GenerationConfig, policy: DraftPolicy | None) -> tuple[References, ...]:
        """What a request may copy from besides its own tokens; `policy` is what was found for it.

        Raises:
            OptionError: for references that nothing would read.
        """
        if self._reads_references(policy):
            documents = (self._read(config.references),) if config.references else ()
            return documents + (self._store.references() if self._store else ())
        if config.references and policy is not None:
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
        self.models.clear()
        self._own.clear()
        self._controllers.clear()

    def expect(self, contention: Contention) -> None:
        """From now on, controllers count with this contention."""
        self._contention = contention
        for controller in self._controllers.values():
            controller.contention = contention

    def _controller(self, name: str, max_ngram_size: int, drafter: PricedDrafter) -> Controller:
        """What chooses between the drafters that `name` stands for. Requests share what it has learned.

        drafter: the one that was found by that name; "auto" stands for copies besides.
        """
        key = (name, max_ngram_size)
        if key not in self._controllers:
            free = drafter if drafter.is_free else None
            made = Controller(
                self._loaded["main"].backend,
                self._loaded["main"].cost,
                copier=self._suffix if name == "auto" else free,
                model=None if drafter.is_free else drafter,
                contention=self._contention,
                records=self._records_of(name),
            )
            self._controllers.setdefault(key, made)
        return self._controllers[key]


def _cached_references(encode: Callable[[str], list[int]]) -> Callable[[tuple[str, ...]], References]:
    """Makes `References` of documents; those that came lately, alone or together, are not read again."""
    read = functools.lru_cache(64)(encode)
    return functools.lru_cache(8)(lambda documents: References([read(document) for document in documents]))
