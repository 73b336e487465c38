"""What an engine consists of: compiled models and drafters, their settings and costs, and what measures them."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Self, cast

from outrider.bundle.folder import Bundle
from outrider.bundle.manifest import ModelEntry
from outrider.config import Config, GenerationConfig
from outrider.config.files import user_path
from outrider.decoding.own import inner
from outrider.decoding.trace import Trace
from outrider.drafters import DraftModel
from outrider.engine.assembly import assemble
from outrider.errors import OptionError
from outrider.inputs.reasoning import ReasoningFormat
from outrider.inputs.tools import ToolFormat
from outrider.inputs.vision import Vision
from outrider.models.cost.table import CallCost
from outrider.models.tuning.setting import Choice
from outrider.system.processes import spare
from outrider.system.progress import report
from outrider.types import Backend, CacheUse, CompiledModel, Drafter, Proposer, TextTokenizer


class CompiledBundle:
    """A bundle whose models are compiled; `Engine` answers requests with them."""

    def __init__(
        self,
        bundle: Bundle,
        config: Config | None = None,
        *,
        tokenizer: TextTokenizer | None = None,
        draft_tokenizer: TextTokenizer | None = None,
    ) -> None:
        config = config or Config()
        parts = assemble(bundle, config, tokenizer=tokenizer, draft_tokenizer=draft_tokenizer)
        self.bundle = parts.bundle
        self.config = parts.config
        self.tokenizer = parts.tokenizer
        self.placement = parts.placement
        self._preparation, self._queue = parts.preparation, parts.queue
        self._registry, self._admission = parts.preparation.registry, parts.preparation.prompts.admission
        self.loaded = parts.preparation.loaded  # read as a list: `close` empties it, perhaps in another thread
        spare(self, self._admission.backends)
        self._tracing = Lock()
        self._overlaps = False
        self.overlaps = parts.pays_to_overlap(self.config.scheduler.overlap)

    @property
    def _main(self) -> CompiledModel:
        return self.loaded["main"].backend

    @property
    def drafters(self) -> tuple[str, ...]:
        """The names that `drafter` can have, besides "auto" and None."""
        return self._registry.names

    @property
    def bundled_drafters(self) -> tuple[str, ...]:
        """The names of the draft models that come with the bundle."""
        return self._registry.bundled

    @property
    def adapters(self) -> tuple[str, ...]:
        """The LoRA adapters that are loaded, which `adapter` can be, besides None."""
        return tuple(self._preparation.prompts.adapters)

    def add_drafter(self, name: str, drafter: Proposer) -> None:
        """Add a drafter of your own, for requests with `drafter=name`. Its interface is `outrider.types.Drafter`.

        The text is the main model's, whatever the drafter proposes: a bad drafter only costs time.

        Raises:
            OptionError: for a name that is taken or empty.
        """
        self._registry.add(name, drafter)

    def find_drafter(self, name: str, max_ngram_size: int = 3) -> Drafter:
        """The drafter of this name; raises as `DrafterRegistry.find`."""
        self._registry.wait()
        return cast("Drafter", inner(self._registry.find(name, max_ngram_size)))

    def reads_references(self, config: GenerationConfig) -> bool:
        """Whether drafts for such a request are copied from `references` and the answer store."""
        return self._registry.reads_references(config)

    @property
    def tool_format(self) -> ToolFormat | None:
        """How the model writes calls of functions; None if its chat template has no known format.

        content, calls = engine.tool_format.parse(result.text)
        """
        return ToolFormat.of_tokenizer(self.tokenizer)

    @property
    def reasoning_format(self) -> ReasoningFormat | None:
        """How the model writes its reasoning; None if its chat template has no known form.

        reasoning, content = engine.reasoning_format.parse(result.text, opened=result.thinks)
        """
        return ReasoningFormat.of_tokenizer(self.tokenizer)

    @property
    def draft_models(self) -> dict[str, DraftModel]:
        """The bundle's draft models that are loaded, by name; heads and modules among them."""
        self._registry.wait()
        return cast("dict[str, DraftModel]", dict(self._registry.models))

    @property
    def vision(self) -> Vision | None:
        """The bundle's vision encoder, with the layout of prompts with images; None for a bundle of text."""
        return self._preparation.prompts.vision

    @property
    def has_failed(self) -> bool:
        """Whether a model's device has failed, so that the bundle has to be loaded again.

        After a draft model's, requests that do not use it are still answered: `is_working`.
        """
        return any(model.backend.has_failed for model in list(self.loaded.values()))

    @property
    def is_working(self) -> bool:
        """Whether requests can be answered: the engine is open, and the main model's device has not failed."""
        main = self.loaded.get("main")
        return self._queue.is_open and main is not None and not main.backend.has_failed

    @property
    def models(self) -> dict[str, ModelEntry]:
        """The models that are loaded, "main" and by the drafters' names."""
        return {role: model.spec.model for role, model in list(self.loaded.items())}

    @property
    def overlaps(self) -> bool:
        """Whether draft models draft during target passes. Must not be set while requests run."""
        return self._overlaps

    @overlaps.setter
    def overlaps(self, wanted: bool) -> None:
        if wanted != self._overlaps:
            self.settle()
            self._main.run_in_background(wanted)
        self._overlaps = wanted

    @property
    def main(self) -> Backend:
        """The main model's backend, for measurements. Must not be called while requests run."""
        self._queue.check_open()
        self.settle()
        return self._main

    @property
    def has_states(self) -> bool:
        """Whether layers of the main model keep states; False once the engine is closed."""
        main = self.loaded.get("main")
        return main is not None and main.backend.capabilities.states

    @property
    def setting(self) -> dict[str, str]:
        """Each model's device and precision; for the main model also whether its rows are exact, and the padding."""
        return {f"{role}_device": model.setting for role, model in list(self.loaded.items())}

    @property
    def choices(self) -> dict[str, Choice]:
        """Each model's setting, and the settings that it was chosen from."""
        self._registry.wait()
        return {role: model.choice for role, model in list(self.loaded.items())}

    @property
    def costs(self) -> dict[str, CallCost]:
        """The costs of the models' calls, by role. They adapt to the machine's speed."""
        self._registry.wait()
        return {role: model.cost for role, model in list(self.loaded.items())}

    @property
    def cache(self) -> dict[str, CacheUse]:
        """Each model's prefix-cache occupancy and hit statistics, by role."""
        return {role: model.backend.cache for role, model in list(self.loaded.items())}

    @property
    def max_tokens(self) -> int:
        """Most tokens of one request's prompt and answer: the model's context, or what fits in the cache."""
        self._queue.check_open()
        return self._admission.max_tokens

    def settle(self) -> None:
        """Wait for work that is done while no request runs: ended answers are read again for the next turns.

        Returns at once while a request runs. Measurements need it, apps do not.
        """
        self._queue.settle()

    def learn(self, seconds: float = 5.0) -> None:
        """Wait until draft models that are unknown have drafted the ended answer again, or for so many seconds.

        An engine does so while it is idle, and a program that ends after its answer never is. Call it right after that.
        Returns at once while a request runs. A draft model that is still loading learns nothing.
        """
        self._queue.settle(time.monotonic() + seconds)

    @contextmanager
    def _if_open(self) -> Iterator[None]:
        """Say that the engine is closed where another thread closes it meanwhile, and drops what this needs."""
        self._queue.check_open()
        try:
            yield
        except Exception:
            self._queue.check_open()
            raise

    def close(self) -> None:
        """End all requests with a RequestError, and drop the models.

        Later calls of the engine raise a RequestError. Closing twice does no harm. An engine that is garbage-collected
        closes itself.
        """
        self._queue.close()
        self._registry.close()
        self._preparation.grammars.close()
        if self._preparation.store is not None:
            self._preparation.store.flush()
        self.loaded.clear()
        self._admission.backends.clear()
        if self.vision is not None:
            self.vision.encoder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def trace(self, path: str | Path) -> Iterator[None]:
        """Write a timeline of the requests that begin in the block, for ui.perfetto.dev; see `outrider.decoding.trace`.

            with engine.trace("out.json"):
                engine.generate("Why is the sky blue?")

        Outside such a block nothing is timed.

        Raises:
            OptionError: when the file cannot be written, or the engine is being traced already.
        """
        if not self._tracing.acquire(blocking=False):
            raise OptionError(f"{path} gets no trace: this engine is being traced already. End the other trace first.")
        try:
            labels = (f"{role}: {where}" for role, where in self.setting.items())
            models = {role: model.backend for role, model in list(self.loaded.items())}
            self._queue.observer = trace = Trace(user_path(path), models, labels)
            try:
                yield
            finally:
                self._queue.observer = None
                trace.close()
        finally:
            self._tracing.release()

    def measure_costs(self, repeats: int) -> None:
        """Measure the costs of the models' calls again, and save them. Not while requests run."""
        self._queue.check_open()
        self.settle()
        for role, model in list(self.loaded.items()):
            report(f"The {role} model is timed.")
            model.time_again(repeats)
