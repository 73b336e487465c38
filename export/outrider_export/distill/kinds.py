"""Which kind of drafter to go on with, after each was trained on a part of the data: `--kind auto`.

trials = [Trial("eagle3", [0.5, 0.4], predict(...), hours=0.1, hours_in_all=1.0), ...]
choose(trials, hours=8.0).kind
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
    """A kind after training on a part of the data.

    acceptance: on held-out text, of place 1, 2, … hours: of this training. hours_in_all: training on all data takes.
    """

    kind: str
    acceptance: list[float]
    prediction: Prediction
    hours: float
    hours_in_all: float

    @property
    def gain(self) -> float:
        """Speed-up over plain decoding, less 1."""
        return self.prediction.speed_up - 1

    def worth(self, hours: float) -> float:
        """The gain, less where these hours are too few for all data: then kinds compare by their gain per hour."""
        return self.gain * min(hours / max(self.hours_in_all, 1e-6), 1.0)


def choose(trials: Sequence[Trial], hours: float) -> Trial:
    """The kind that gains most in the hours that are left; if none gains yet, the one that drafts most tokens."""
    gaining = [each for each in trials if each.gain > 0]
    if gaining:
        return max(gaining, key=lambda each: each.worth(hours))
    return max(trials, key=lambda each: _tokens(each.acceptance))


def table(trials: Sequence[Trial], hours: float) -> list[list[str]]:
    """Why: the head of the table and its rows, the chosen kind marked."""
    chosen = choose(trials, hours)
    return [
        ["kind", "acceptance by place", "draft tokens", "expected", "hours", "hours for all data", ""],
        *(
            [
                each.kind,
                " ".join(f"{share:.0%}" for share in each.acceptance[:4]),
                str(each.prediction.num_draft_tokens),
                f"{each.prediction.speed_up:.2f}×",
                f"{each.hours:.2f}",
                f"{each.hours_in_all:.2f} of {hours:.2f}",
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
