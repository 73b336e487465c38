"""Our own modes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, cast

from outrider.config import COPYING
from outrider_bench.modes.mode import Run
from outrider_bench.modes.shuffled import Shuffled
from outrider_bench.setting import describe_runtimes

if TYPE_CHECKING:
    from outrider.config import GenerationConfig
    from outrider.drafters import Suffix
    from outrider.engine.engine import Engine
    from outrider_bench.modes.name import ModeName


class Ours:
    """The engine, with a drafter and its number of draft tokens.

    forgets: whether each run begins without what earlier answers said: to a prompt that comes back, all of the answer.
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
