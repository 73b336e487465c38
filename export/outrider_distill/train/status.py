"""Where a training is, and who is told."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Evaluation:
    """Acceptance on held-out text after a number of steps. acceptance: of place 1, 2, …, if all before are accepted."""

    step: int
    num_tokens: int  # of answers trained on, so far
    loss: float
    acceptance: list[float]
    tokens_per_round: float  # if as many are drafted as there are places


@dataclass(frozen=True)
class TrainingStatus:
    """Where a training is. loss: a running mean. seconds: trained in all, in earlier runs too."""

    kind: str
    step: int
    num_steps: int
    epoch: int
    num_tokens: int
    loss: float
    seconds: float
    evaluations: list[Evaluation]

    @property
    def seconds_left(self) -> float:
        """At the speed so far."""
        return self.seconds / max(self.step, 1) * (self.num_steps - self.step)


class Watch:
    """Is told how training goes on. This one tells nobody."""

    def stepped(self, status: TrainingStatus) -> None:
        """After every step."""

    def evaluated(self, status: TrainingStatus) -> None:
        """After every evaluation, the last in `status.evaluations`."""
