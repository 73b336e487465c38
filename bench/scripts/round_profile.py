"""Shows where the host's time of a round goes, with toy models whose calls take next to none.

    PYTHONPATH=runtime python bench/scripts/round_profile.py [DRAFTER]

Answers run one after the other, without drafts or with this drafter. Of each part of a round prints how often it is
called, its microseconds and those without the parts that it calls. A clock around a part adds about half a microsecond.
For an idle machine, so it is run by hand.
"""

import functools
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import outrider
from outrider.testing import ToyTokenizer, save_toy_bundle

NUM_TOKENS, NUM_ANSWERS = 200, 20
PARTS = {
    "decoding.worker": ["Worker._receive", "Worker._round", "Worker._settle", "seconds_of", "step"],
    "decoding.scheduler": ["Scheduler.ready", "Scheduler.round", "Scheduler.took"],
    "decoding.loop": ["propose", "submit", "fill_masks", "draft_ahead"],
    "decoding.row_budget": ["RowBudget.share"],
    "decoding.reading": ["Reading.commit", "verify"],
    "decoding.answer": ["Answer.commit", "Answer.publish"],
    "drafters.controller.controller": ["Controller.choose", "Controller.drafted", "Controller.observe"],
    "drafters.draft_model": ["DraftModel.propose", "DraftModel.observe"],
    "drafters.suffix": ["Suffix.propose"],
    "models.backends.openvino_paged": ["OpenVINOPaged._submit", "OpenVINOPaged.finish"],
    "models.backends.paged_call": ["PagedCall.of", "PagedCall.inputs"],
    "models.backends.paged_tensors": ["BoundInputs.set"],
    "models.backends.paged_step": ["Outputs.step"],
    "models.backends.infer_calls": ["InferCalls.start", "InferCalls.wait"],
    "decoding.measuring": ["MeasureCosts.spent"],
    "models.cost.table": ["CallCost.observe"],
    "tokens.sampling.sampler": ["LogitsSampler.best"],
}


class Profile:
    """By part the number of calls, seconds, and seconds without the parts within."""

    def __init__(self) -> None:
        self.parts: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        self._within: list[float] = []

    def watch(self, module: str, name: str) -> None:
        """Measure a function, or a method as "Class.method"."""
        owner: Any = import_module(f"outrider.{module}")
        *classes, last = name.split(".")
        for each in classes:
            owner = getattr(owner, each)
        found = vars(owner)[last]
        if isinstance(found, classmethod):
            setattr(owner, last, classmethod(self._timed(name, found.__func__)))
        else:
            setattr(owner, last, self._timed(name, found))

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **options: Any) -> Any:
            self._within.append(0.0)
            began = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                took, within, part = time.perf_counter() - began, self._within.pop(), self.parts[name]
                part[0], part[1], part[2] = part[0] + 1, part[1] + took, part[2] + took - within
                if self._within:
                    self._within[-1] += took

        return timed


def main() -> None:
    """Measure."""
    drafter, profile, num_rounds = sys.argv[1] if len(sys.argv) > 1 else None, Profile(), 0
    for module, names in PARTS.items():
        for name in names:
            profile.watch(module, name)
    with tempfile.TemporaryDirectory() as folder:
        config = outrider.Config().replace(cache_size=0.005, num_threads=1)
        engine = outrider.Engine(save_toy_bundle(Path(folder)), config, tokenizer=ToyTokenizer())
        for i in range(NUM_ANSWERS + 1):
            answer = engine.generate([1, 2, 3], max_new_tokens=NUM_TOKENS, ignore_eos=True, drafter=drafter)
            if i:
                num_rounds += answer.stats.num_rounds
            else:  # compiles kernels
                profile.parts.clear()
        engine.close()
    for name, (calls, whole, own) in sorted(profile.parts.items(), key=lambda part: -part[1][2]):
        whole, own = (1e6 * seconds / num_rounds for seconds in (whole, own))
        print(f"{name:24} {calls / num_rounds:5.2f} calls {whole:8.1f} µs, {own:8.1f} without its parts")


if __name__ == "__main__":
    main()
