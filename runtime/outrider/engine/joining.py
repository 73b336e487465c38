"""Loads draft models while the engine answers already. What they draft changes no text, so they may join any answer."""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from functools import partial
from threading import Event, Thread, main_thread
from typing import TYPE_CHECKING

from outrider.bundle.folder import draft_models_of
from outrider.decoding.answer import isolated
from outrider.decoding.idle import harmless
from outrider.errors import DeviceWarning, EngineClosed, one_line
from outrider.models.cost.measure import timer
from outrider.models.cost.stored import cost_of
from outrider.models.tuning.loading import compile_checked
from outrider.models.tuning.model_spec import specs_of
from outrider.system.progress import report, report_details

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from outrider.bundle.folder import Bundle, PairToMake
    from outrider.config import DeviceConfig
    from outrider.decoding.answer import Answer
    from outrider.decoding.request_queue import RequestQueue
    from outrider.drafters import DraftModel
    from outrider.engine.preparation import Preparation
    from outrider.models.kv import StoredModel
    from outrider.models.tuning.loading import LoadedModel
    from outrider.models.tuning.model_spec import ModelSpec

PENDING = "draft"  # the name of a draft model that is not converted yet
_HEAD_START_SECONDS, _LOOK_SECONDS = 1.0, 0.02  # for the first request, if there is one


@dataclass(frozen=True)
class Joining:
    """What it takes to load draft models later.

    make: makes a drafter of a loaded model. stored: the model as `PrefixStore` saves it.
    """

    preparation: Preparation
    queue: RequestQueue
    make: Callable[[LoadedModel], DraftModel]
    stored: Callable[[LoadedModel], StoredModel]

    def start(self, specs: Sequence[ModelSpec], bundle: Bundle, device: DeviceConfig) -> None:
        """Load these models, one after the other, in a thread that ends with them; or convert and load a pair's."""
        finds = {spec.role: partial(spec.on, "CPU", device) for spec in specs}
        if bundle.pair is not None:
            report("The draft model is converted beside the answers, and to the end if the program ends before that.")
            finds[PENDING] = partial(self._converted, bundle, bundle.pair, device)
        self.preparation.registry.loading = {role: Event() for role in finds}
        Thread(target=self._load_all, args=(finds,), name="outrider-joining").start()

    @property
    def _is_wanted(self) -> bool:
        """Whether the engine is open, and the program has not come to its end: Python waits for this thread there."""
        return self.queue.is_open and main_thread().is_alive()

    def _load_all(self, finds: Mapping[str, Callable[[], ModelSpec]]) -> None:
        report_details()
        for role, find in finds.items():
            self._load(role, find, self.preparation.registry.loading[role])

    def _load(self, role: str, find: Callable[[], ModelSpec], done: Event) -> None:
        """Load one model, and have the engine's thread take it."""
        loaded, registry = self.preparation.loaded, self.preparation.registry
        admission, prefixes = self.preparation.prompts.admission, self.preparation.prefixes
        try:
            self._wait_for_first_call()
            spec = find()
            if not self._is_wanted:
                raise EngineClosed
            model = compile_checked(spec)
            admission.allocate_beside(model.backend)
            model.cost = cost_of(spec, model.backend)
            with timer(model.backend, 2) as call:
                call(1, 0)  # the first call packs its weights
            drafter = self.make(model)
        except Exception as error:  # requests are answered without it
            registry.leave_out(role)
            done.set()
            if self._is_wanted:
                warnings.warn(f"The draft model '{role}' is left out: {one_line(error)}.", DeviceWarning, stacklevel=2)
            return

        def join(running: Sequence[Answer]) -> None:
            loaded[role] = model
            admission.backends[role] = model.backend
            if prefixes is not None:
                with harmless("A draft model's prefixes cannot be saved"):
                    prefixes.add(role, self.stored(model))
            registry.join(role, drafter)
            for answer in running:
                if drafter in answer.request.drafters:
                    with isolated(answer):
                        drafter.reserve(answer.sequence, len(answer.sequence) + answer.num_left)
            done.set()

        self.queue.call(join)
        while not done.wait(_LOOK_SECONDS):
            if not self._is_wanted:
                done.set()

    def _wait_for_first_call(self) -> None:
        """Let the first prompt go first, if it comes in a moment: the processor is the main model's until then."""
        main, until = self.preparation.loaded["main"], time.monotonic() + _HEAD_START_SECONDS
        while not main.backend.seconds and (self.queue.is_busy or time.monotonic() < until):
            time.sleep(_LOOK_SECONDS)

    def _converted(self, bundle: Bundle, to_make: PairToMake, device: DeviceConfig) -> ModelSpec:
        """The draft model of the pair that a bundle belongs to. The next start has what is converted after the end."""
        has_ended = to_make.begin()
        while not has_ended():
            if not self._is_wanted:
                raise EngineClosed
            time.sleep(_LOOK_SECONDS)
        pair = to_make.make()
        (spec,) = specs_of(bundle, pair, draft_models_of(pair, bundle))[1]
        return spec.on("CPU", device)
