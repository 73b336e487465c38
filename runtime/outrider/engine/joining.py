"""Loads draft models while the engine answers already. What they draft changes no text, so they may join any answer."""

from __future__ import annotations

import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event
from typing import TYPE_CHECKING

from outrider.decoding.answer import isolated
from outrider.decoding.idle import harmless
from outrider.errors import DeviceWarning, one_line
from outrider.models.tuning.costs import cost_of
from outrider.models.tuning.loading import compile_checked
from outrider.models.tuning.measure.slots import open_slot, random_tokens
from outrider.types import Chunk

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from outrider.decoding.answer import Answer
    from outrider.decoding.request_queue import RequestQueue
    from outrider.drafters import DraftModel
    from outrider.engine.preparation import Preparation
    from outrider.models.kv import StoredModel
    from outrider.models.tuning.loading import LoadedModel
    from outrider.models.tuning.model_spec import ModelSpec

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

    def start(self, specs: Sequence[ModelSpec]) -> None:
        """Load these models, one after the other, in a thread that ends with them."""
        registry = self.preparation.registry
        registry.loading = {spec.role: Event() for spec in specs}
        pool = ThreadPoolExecutor(1, thread_name_prefix="outrider-joining")
        for spec in specs:
            pool.submit(self._load, spec, registry.loading[spec.role])
        pool.shutdown(wait=False)

    def _load(self, spec: ModelSpec, done: Event) -> None:
        """Load one model, and have the engine's thread take it."""
        loaded, registry = self.preparation.loaded, self.preparation.registry
        admission, prefixes = self.preparation.prompts.admission, self.preparation.prefixes
        try:
            _wait_for_first_call(loaded["main"])
            model = compile_checked(spec)
            admission.allocate_beside(model.backend)
            model.cost = cost_of(spec, model.backend)
            _pack(model)
            drafter = self.make(model)
        except Exception as error:  # requests are answered without it
            registry.leave_out(spec.role)
            done.set()
            if self.queue.is_open:
                warnings.warn(f"{spec} is left out: {one_line(error)}.", DeviceWarning, stacklevel=2)
            return

        def join(running: Sequence[Answer]) -> None:
            loaded[spec.role] = model
            admission.backends[spec.role] = model.backend
            if prefixes is not None:
                with harmless("A draft model's prefixes cannot be saved"):
                    prefixes.add(spec.role, self.stored(model))
            registry.join(spec.role, drafter)
            for answer in running:
                if drafter in answer.request.drafters:
                    with isolated(answer):
                        drafter.reserve(answer.sequence, len(answer.sequence) + answer.num_left)
            done.set()

        self.queue.call(join)
        while not done.wait(_LOOK_SECONDS):
            if not self.queue.is_open:
                done.set()


def _wait_for_first_call(main: LoadedModel) -> None:
    """Let the first prompt go first: the processor is the main model's until then, for a moment."""
    until = time.monotonic() + _HEAD_START_SECONDS
    while not main.backend.seconds and time.monotonic() < until:
        time.sleep(_LOOK_SECONDS)


def _pack(model: LoadedModel) -> None:
    """Make a model's first call, which packs its weights."""
    slot = open_slot(model.backend, 2)
    model.backend.submit([Chunk(slot, random_tokens(model.backend, 1), 1, generated=True)]).wait()
    slot.close()
