"""What a drafter will be worth on this machine, before it is finished.

    costs = measure_drafter(bundle, head_folder, scratch)     # of an untrained head: weights cost what they cost
    outrider.drafters.prediction.predict([0.6, 0.5, 0.4], costs).speed_up

Costs are measured by the engine as the controller will use them; acceptance comes from held-out text.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

import outrider
from outrider.bundle import Bundle
from outrider.drafters.prediction import Costs, SpeedPrediction, needed
from outrider.engine.engine import Engine
from outrider.models.cost.table import NEAR
from outrider_export.bundles.drafters import add_drafter

_WORTH, _GOOD = 1.05, 1.2  # speed-ups from which a drafter is worth using, and worth the work
_FIRST_STEPS = 4  # in which a training learns as much as later while their number doubles
_BATCHES = (16, 32, 64)  # texts written at the same time


def shortfall(found: SpeedPrediction, costs: Costs, training: Mapping[str, Any]) -> str:
    """Why a drafter is not worth using, and what would make it so; "" where it is. training: as in training.json."""
    if found.speed_up >= _WORTH:
        return ""
    acceptance, tokens = training["held_out_acceptance_by_place"], training["data_answer_tokens"]
    said = (
        f"The drafter is not worth using yet: {found.speed_up:.2f} × plain decoding is expected here, and "
        f"{acceptance[0]:.0%} of first draft tokens are accepted. "
    )
    if (share := needed(_GOOD, costs)) is None:
        return f"{said}No acceptance rate would give {_GOOD} × here, as drafting takes too long."
    return (
        f"{said}{_GOOD} × needs {share:.0%} at every position: train on more tokens than {tokens:,}, with --tokens and "
        "--hours, and with --prompts like those of your app. Drafters for general text are trained on millions."
    )


def measure_drafter(bundle: Bundle, drafter: Path, scratch: Path) -> Costs:
    """The costs of a drafter, given as a checkpoint folder, as it runs in a copy of the bundle."""
    folder, name = scratch / "priced", "priced"
    try:
        add_drafter(bundle.folder, drafter, name=name, output=folder)
        with _open(folder, name) as engine:
            return Costs.of(engine.costs["main"], engine.draft_models[name])
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def writing_speed(bundle: Bundle) -> float:
    """Tokens per second that the main model writes in batches, as far as its calls go."""
    with _open(bundle.folder, None) as engine:
        cost = engine.costs["main"]
        return max(count / cost.together([1] * count, NEAR) for count in _BATCHES)


def _open(folder: Path, drafter: str | None) -> Engine:
    """An engine for measurements, with this drafter or none."""
    return outrider.load(
        folder, drafter=drafter, enable_prefix_caching=False, keep_records=False, measure="first", overlap=False
    )


SHARE = 0.1  # of the training data


@dataclass(frozen=True)
class DistillTrial:
    """A kind after training on a part of the data.

    acceptance: on held-out text, of place 1, 2, … expected: the same after the whole training, see `grown`, which the
    prediction is made of. hours: of this training. replaced: speed-up of the drafter whose place it takes; 1 if it adds
    to those that are there, of which the controller takes the best in each round.
    """

    kind: str
    acceptance: list[float]
    expected: list[float]
    prediction: SpeedPrediction
    hours: float
    replaced: float = 1.0

    @property
    def gain(self) -> float:
        """Speed-up over plain decoding, less that of what it replaces."""
        return self.prediction.speed_up - self.replaced

    def __str__(self) -> str:
        now, later = (" ".join(f"{share:.0%}" for share in shares) for shares in (self.acceptance, self.expected))
        gives = f"{self.prediction.speed_up:.2f}× with {self.prediction.num_draft_tokens} draft tokens"
        return f"{self.kind}: accepted by position {now}; after training {later} are expected, {gives}"


def grown(curve: Sequence[Mapping[str, Any]], num_steps: int) -> list[float]:
    """Acceptance by place after so many steps, by a training's evaluations after fewer (`training.json` has such).

    Acceptance grows with the logarithm of the steps, and no more than half of what is rejected yet is accepted then.
    """
    first, last = curve[0], max(curve, key=lambda each: float(each["tokens_per_round"]))

    def log(step: int) -> float:
        return math.log1p(step / _FIRST_STEPS)

    if last["step"] == first["step"] or num_steps <= last["step"]:
        return list(last["acceptance"])
    growth = (log(num_steps) - log(last["step"])) / (log(last["step"]) - log(first["step"]))
    pairs = zip(first["acceptance"], last["acceptance"], strict=True)
    return [round(end + min(growth * max(end - begin, 0.0), (1 - end) / 2), 4) for begin, end in pairs]


def choose(trials: Sequence[DistillTrial]) -> DistillTrial:
    """The kind that is to gain most; where several gain as much, such as nothing, the one that drafts most tokens."""
    return max(trials, key=lambda each: (each.gain, sum(accumulate(each.expected, mul))))
