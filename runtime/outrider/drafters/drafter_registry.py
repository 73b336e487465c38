"""An engine's drafters by name, and the policies that choose between them."""

import functools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence

from outrider.bundle.kinds import COPYING, RESERVED_NAMES
from outrider.config import GenerationConfig
from outrider.decoding import own
from outrider.drafters import AnswerStore, Ngram, References, Suffix
from outrider.drafters.controller import KNOWN_TOKENS, Controller, Fixed, ModelRecord, Record, Records
from outrider.errors import OptionError, nearest
from outrider.models.cost.table import LONGEST
from outrider.models.tuning.loading import LoadedModel
from outrider.models.tuning.measure.overlap import ALONE, Contention
from outrider.models.tuning.model_spec import ModelSpec
from outrider.system import saved
from outrider.system.plugins import plugins
from outrider.tokens.verifiers import Greedy
from outrider.types import Drafter, DraftPolicy, EncoderSource, Proposer


class DrafterRegistry:
    """Finds what a request's options name: drafters, their policy, and the texts that they may copy from.

        registry = DrafterRegistry(loaded, {"draft": model}, ["draft"], encode=tokenizer.encode)
        policy, num_assistant_tokens = registry.policy_for(config)

    loaded: the models by role, including "main". models: the bundle's loaded draft models, by name. bundled: the names
    of all draft models of the bundle. loaded_with: the engine's drafter; other draft models were not loaded. encode:
    tokenizes a text for the main model. store: answers to copy from. contention: of the main model's and a draft
    model's calls. records: reads the drafters' records; by default they start empty.
    """

    def __init__(
        self,
        loaded: Mapping[str, LoadedModel],
        models: Mapping[str, Drafter],
        bundled: Sequence[str],
        *,
        encode: Callable[[str], list[int]],
        loaded_with: str | None = None,
        store: AnswerStore | None = None,
        contention: Contention = ALONE,
        records: Callable[[], Records] = Records,
    ) -> None:
        self.bundled = tuple(bundled)
        self._loaded, self._contention = loaded, contention
        self._loaded_with, self._store = loaded_with, store
        self.models = dict(models)
        self.loading: Mapping[str, threading.Event] = {}  # draft models that are yet to come, by name
        self.may_draft = True  # False: not before rows are measured to be exact, or no more, as they are not
        self._own: dict[str, Drafter] = {}  # the app's own
        self._suffix = suffix = Suffix()
        self._copiers: dict[str, Callable[[int], Drafter]] = {"ngram": Ngram, "suffix": lambda _: suffix}  # no cycle
        self._read_records = records
        self._shared: Records | None = None  # of all other drafters, once they are read
        self._saving: weakref.finalize[..., DrafterRegistry] | None = None  # of these, unless it is closed before
        self._records: dict[str, Records] = {}  # of the app's own drafters
        self._making = threading.Lock()  # of the shared records: requests are prepared in several threads
        self._controllers: dict[tuple[str, int], Controller] = {}
        self._read = _cached_references(encode)

    @property
    def names(self) -> tuple[str, ...]:
        """The values of the option `drafter`, besides "auto" and None."""
        others = (name for name in plugins("drafters") if name not in self._own)
        return (*self.models, *self.loading, *self._own, *COPYING, *others)

    def wait(self) -> None:
        """Wait for draft models that are being loaded. Not in the thread that answers."""
        for each in [*self.loading.values()]:
            each.wait()

    def join(self, name: str, model: Drafter) -> None:
        """Let requests use a draft model that was loaded, also those that run. Between two rounds."""
        self.models = {**self.models, name: model}  # other threads read it
        self.leave_out(name)
        for (by, _), controller in self._controllers.items():
            if by == "auto":
                controller.add(name, model)

    def leave_out(self, name: str) -> None:
        """Wait no more for a draft model."""
        self.loading = {other: each for other, each in self.loading.items() if other != name}

    def add(self, name: str, drafter: Proposer) -> None:
        """Let requests choose an app's own drafter.

        Raises:
            OptionError: for a name that is taken or empty.
        """
        if not isinstance(name, str) or not name:
            raise OptionError(
                f"A drafter cannot be named {name!r}: a name is a text, and not empty. Choose another name."
            )
        if name in (*RESERVED_NAMES, *self.bundled, *self._own):
            raise OptionError(f"A drafter cannot be named {name!r}: that is taken. Choose another name.")
        self._own[name] = own.guarded(drafter, name)

    def find(self, name: str, max_ngram_size: int = 3) -> Drafter:
        """The drafter of this name; "auto" is the bundle's own, else "suffix".

        Raises:
            OptionError: when there is none, or it was left on disk.
        """
        if name == "auto":
            name = next(iter(self.models), "suffix")
        if name in COPYING:
            return self._copiers[name](max_ngram_size)
        if name in self.models:
            return self.models[name]
        if name in self._own or self._take_plugin(name):
            return self._own[name]
        if name in self.bundled and self._loaded_with == "auto":
            raise OptionError(
                f"drafter='{name}' was left out, as it does not run beside this main model: a warning said why when it "
                f"was loaded. Use another drafter, such as 'suffix'."
            )
        if name in self.bundled:
            raise OptionError(
                f"drafter='{name}' was left on disk, as this engine was loaded with drafter={self._loaded_with!r}. "
                f"Load it with drafter='{name}' or 'auto'."
            )
        raise OptionError(f"There is no drafter '{name}' here. {nearest(name, ['auto', *self.names])}")

    def _take_plugin(self, name: str) -> bool:
        """Add the drafter that another package brings under this name; False if none does."""
        with self._making:
            if name not in self._own and name not in self.bundled and (brought := plugins("drafters").get(name)):
                self.add(name, brought.load()())
            return name in self._own

    def name_of(self, drafter: Drafter) -> str:
        """The name that requests have for a drafter."""
        named = {**self.models, **self._own}
        name = next((name for name, each in named.items() if each is drafter), drafter.name)
        return name or type(drafter).__name__

    def policy_for(self, config: GenerationConfig) -> tuple[DraftPolicy | None, int]:
        """A request's policy, and the most draft tokens of a round.

        Raises:
            OptionError: when there is no such drafter, or it does not support an option that was given.
        """
        count = config.num_assistant_tokens
        if config.drafter is None or count == 0:
            return None, 0
        threshold = config.assistant_confidence_threshold
        if self.loading and config.drafter == "auto" and isinstance(count, str) and threshold is None:
            if not self.may_draft:
                return None, 0
            return self._controller("auto", config.max_ngram_size, self._suffix), LONGEST
        self.wait()
        drafter = self.find(config.drafter, config.max_ngram_size)
        if not self.may_draft:
            return None, 0
        if threshold is not None:
            if not drafter.takes_rules:
                raise OptionError(
                    f"assistant_confidence_threshold={threshold:g} is for draft models, and drafter={config.drafter!r} "
                    "is not one. Set it to None, or use a bundle that has a draft model."
                )
            return Fixed(drafter), LONGEST if isinstance(count, str) else count
        if not isinstance(count, str):
            return Fixed(drafter), count
        if drafter.is_priced:
            return self._controller(config.drafter, config.max_ngram_size, drafter), LONGEST
        return Fixed(drafter), drafter.num_assistant_tokens  # an app's own drafter decides

    def reads_references(self, config: GenerationConfig) -> bool:
        """Whether drafts for such a request are copied from `references` and the answer store."""
        return self._reads_references(self.policy_for(config)[0])

    def _reads_references(self, policy: DraftPolicy | None) -> bool:
        return policy is not None and any(drafter is self._suffix for drafter in policy.drafters)

    def texts(
        self, config: GenerationConfig, policy: DraftPolicy | None, source: EncoderSource | None = None
    ) -> tuple[References, ...]:
        """The texts that a request may copy from, besides its own tokens. policy: the request's.

        source: what an encoder reads; summaries and corrections copy its text.

        Raises:
            OptionError: for references that no drafter of the policy reads.
        """
        if self._reads_references(policy):
            documents = (self._read(config.references),) if config.references else ()
            if source is not None and source.token_ids:
                documents = (References([source.token_ids]), *documents)
            return documents + (self._store.references() if self._store and config.earlier_answers else ())
        if config.references and policy is not None:
            threshold = config.assistant_confidence_threshold
            without = "" if threshold is None else " and without assistant_confidence_threshold"
            raise OptionError(
                f"references are not read with drafter={config.drafter!r} and num_assistant_tokens="
                f"{config.num_assistant_tokens!r} here. Use drafter='suffix', or drafter='auto' with "
                f"num_assistant_tokens='auto'{without}."
            )
        return ()

    def unknown_models(self) -> list[tuple[Drafter, ModelRecord]]:
        """Models that can draft ended answers again and are unknown in greedy decoding, with their records."""
        able = {name: model for name, model in self.models.items() if model.is_priced and model.replays}
        if not able:
            return []  # whose records need not be read
        records = self._records_of("auto")
        found = [(model, records.of_model(Greedy(), name)) for name, model in able.items()]
        return [(model, record) for model, record in found if record.share.weight < KNOWN_TOKENS]

    def save_records(self) -> None:
        """Write the records of all but the app's own drafters, if there are any."""
        if self._shared is not None:
            self._shared.save(at_once=True)

    def _records_of(self, name: str) -> Records:
        """The records of a drafter: an app's own has its own, all others share one, which is saved."""
        if name in self._own:
            return self._records.setdefault(name, Records())  # the name may stand for another drafter tomorrow
        with self._making:
            if self._shared is None:
                self._shared = self._read_records()
                self._saving = weakref.finalize(self, self._shared.save, at_once=True)
            return self._shared

    def close(self) -> None:
        """Save the records, and drop the drafters and their models."""
        self.save_records()
        if self._saving is not None:
            self._saving.detach()
        self.models.clear()
        self._own.clear()
        self._controllers.clear()

    def expect(self, contention: Contention) -> None:
        """Use this contention in all controllers from now on."""
        self._contention = contention
        for controller in self._controllers.values():
            controller.contention = contention

    def _controller(self, name: str, max_ngram_size: int, drafter: Drafter) -> Controller:
        """The controller for the drafters that `name` stands for. All requests share it.

        drafter: the one with that name. With "auto", the controller may choose copies too.
        """
        key = (name, max_ngram_size)
        if key not in self._controllers:
            priced = {each: model for each, model in self.models.items() if model.is_priced}
            free = drafter if drafter.is_free else None
            made = Controller(
                self._loaded["main"].backend,
                self._loaded["main"].cost,
                copier=self._suffix if name == "auto" else free,
                models=priced if name == "auto" else {} if drafter.is_free else {name: drafter},
                contention=self._contention,
                records=self._records_of(name),
            )
            self._controllers.setdefault(key, made)
        return self._controllers[key]


def _cached_references(encode: Callable[[str], list[int]]) -> Callable[[tuple[str, ...]], References]:
    """A function that makes `References` of documents, and caches the latest."""
    read = functools.lru_cache(64)(encode)
    return functools.lru_cache(8)(lambda documents: References([read(document) for document in documents]))


# What a model proposes, and what is accepted of it, hardly depends on how it is run.
_FACTS_OF_CALLS = ("device", "options", "machine", "features", "cuts", "adapters")


def records_of(keep: bool, specs: Mapping[str, ModelSpec], adapters: Mapping[str, str]) -> Records:
    """The records of drafters with these models, in a file if `keep`. adapters: their hashes, by name."""
    if not keep:
        return Records(adapters=adapters)
    key = {role: spec.identity.key(_FACTS_OF_CALLS) for role, spec in specs.items()}
    return Records(saved.SavedValue(saved.FOLDER / "records", key, dict[str, Record]), adapters)
