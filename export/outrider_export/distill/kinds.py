"""Which kind of drafter to go on with, after each was trained on a part of the data: `--kind auto`.

trials = [Trial("eagle3", [0.5, 0.4], predict(...), hours=0.1), ...]
choose(trials).kind
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider_export.distill.prediction import Prediction  # noqa: TC001 - msgspec reads the types of a Trial

if TYPE_CHECKING:
    from collections.abc import Sequence

SHARE = 0.1  # of the training data


@dataclass(frozen=True)
class Trial:
    """A kind after training on a part of the data. acceptance: on held-out text, of place 1, 2, …"""

    kind: str
    acceptance: list[float]
    prediction: Prediction
    hours: float

    @property
    def gain_per_hour(self) -> float:
        """Speed-up over plain decoding, less 1, for each hour of training."""
        return (self.prediction.speed_up - 1) / max(self.hours, 1e-6)


def choose(trials: Sequence[Trial]) -> Trial:
    """The kind that gains most per hour of training; if none gains anything yet, the one that drafts most tokens."""
    gaining = [each for each in trials if each.prediction.speed_up > 1]
    if gaining:
        return max(gaining, key=lambda each: each.gain_per_hour)
    return max(trials, key=lambda each: _tokens(each.acceptance))


def table(trials: Sequence[Trial]) -> list[list[str]]:
    """Why: the head of the table and its rows, the chosen kind marked."""
    chosen = choose(trials)
    return [
        ["kind", "acceptance by place", "draft tokens", "expected", "hours", "gain per hour", ""],
        *(
            [
                each.kind,
                " ".join(f"{share:.0%}" for share in each.acceptance[:4]),
                str(each.prediction.num_draft_tokens),
                f"{each.prediction.speed_up:.2f}×",
                f"{each.hours:.2f}",
                f"{each.gain_per_hour:.2f}",
                "taken" if each is chosen else "",
            ]
            for each in trials
        ),
    ]


def _tokens(acceptance: Sequence[float]) -> float:
    total, reached = 1.0, 1.0
    for each in acceptance:
        reached *= each
        total += reached
    return total
