"""Our own modes, and the drafter of one: it uses another drafter every round."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np

from outrider.bundle.kinds import COPYING
from outrider.config import GenerationConfig
from outrider.drafters import Suffix
from outrider.engine.engine import Engine
from outrider.types import NO_DRAFT, Committed, Draft, Drafter, DraftRequest, TokenSequence
from outrider_bench.modes.mode import Run
from outrider_bench.modes.name import ModeName
from outrider_bench.setting import describe_runtimes


class Ours:
    """The engine, with a drafter and its number of draft tokens.

    forgets: whether each run begins without earlier answers, of which a repeated prompt would copy all.
    """

    runtime, num_parallel = "outrider", 8

    def __init__(self, name: ModeName, engine: Engine, *, forgets: bool = False) -> None:
        self.name = name.text
        self.description = _describe(engine, name.kind)
        self._drafter = None if name.kind == "plain" else name.kind
        self._num_assistant_tokens = name.num_assistant_tokens
        self._engine = engine
        self._copier = cast("Suffix", engine.find_drafter("suffix")) if forgets else None
        if any(model.backend.capabilities.fixed for model in engine.draft_models.values()):
            self.num_parallel = 1  # its draft model has one slot, and all requests need drafts
        if name.kind == "shuffled" and name.kind not in engine.drafters:
            engine.add_drafter(name.kind, Shuffled([engine.find_drafter(drafter) for drafter in engine.drafters]))

    def run(self, prompt_token_ids: list[int], config: GenerationConfig) -> Run:
        """Decode one prompt."""
        if self._copier:
            self._copier.forget()
        began = time.perf_counter()
        config = config.replace(drafter=self._drafter)
        if self._num_assistant_tokens is not None:
            config = config.replace(num_assistant_tokens=self._num_assistant_tokens)
        if config.references and not self._engine.reads_references(config):  # other modes may read them
            config = config.replace(references=())
        result = self._engine.generate(prompt_token_ids, config)
        total = time.perf_counter() - began
        self._engine.settle()  # what it does while it is idle would run beside the next mode
        return Run(result.token_ids, result.stats.time_to_first_token, total, result.stats.as_dict())


def _describe(engine: Engine, kind: str) -> str:
    """The models that a mode may use, with their devices and precisions."""
    alone = kind in ("plain", *COPYING)
    used = {f"{name}_device": model for name, model in engine.models.items() if name == "main" or not alone}
    models = [
        f"{role.removesuffix('_device')} model {used[role].weights}, {where}"
        for role, where in engine.setting.items()
        if role in used
    ]
    threads = engine.config.device.num_threads
    models.append(f"{threads or 'the default number of'} threads")
    versions = describe_runtimes(model.format for model in used.values())
    return "; ".join([*models, ", ".join(f"{name} {version}" for name, version in versions.items())])


class Shuffled(Drafter):
    """Chooses one of `drafters` or none, and the draft length, at random for every sequence and round.

    Text that does not change with this drafter does not change with any schedule. The choice is made before anything is
    drafted, so that rejection sampling stays exact.
    """

    num_assistant_tokens = 8

    def __init__(self, drafters: Sequence[Drafter], seed: int = 0) -> None:
        self._drafters = drafters
        self._rng = np.random.default_rng(seed)

    @property
    def seconds(self) -> float:  # type: ignore[override]
        """Time spent in model calls so far."""
        return sum(drafter.seconds for drafter in self._drafters)

    def reserve(self, sequence: TokenSequence, max_tokens: int, num_cached: int = 0) -> bool:
        """Reserve room with all of them; False, without any room, while one has none."""
        if all(drafter.reserve(sequence, max_tokens, num_cached) for drafter in self._drafters):
            return True
        self.release(sequence)
        return False

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """A draft for each request, of a random length up to its limit, from a random drafter."""
        drafts = [NO_DRAFT] * len(requests)
        chosen = self._rng.integers(len(self._drafters) + 1, size=len(requests))
        limits = self._rng.integers(1, [request.limit + 1 for request in requests])
        for number, drafter in enumerate(self._drafters):
            mine = np.flatnonzero(chosen == number).tolist()
            proposed = drafter.propose([replace(requests[i], limit=int(limits[i])) for i in mine])
            for i, draft in zip(mine, proposed, strict=True):
                drafts[i] = draft
        return drafts

    def observe(self, sequence: TokenSequence, committed: Committed) -> None:
        """Pass on to all of them."""
        for drafter in self._drafters:
            drafter.observe(sequence, committed)

    def release(self, sequence: TokenSequence) -> None:
        """Release a sequence with all of them."""
        for drafter in self._drafters:
            drafter.release(sequence)
