"""Every answer that may be drawn, with its probability: each random number is followed wherever it may lead."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import numpy as np

from outrider.types import Distribution, Noise


@dataclass
class Way:
    """One way through all that is drawn: each choice as scripted, later ones the first that may be."""

    script: list[int]
    odds: list[list[float]] = field(default_factory=list)
    used: set[Any] = field(default_factory=set)
    last: Distribution | None = None

    def choose(self, probs: Sequence[float]) -> int:
        self.odds.append([*probs])
        at = len(self.odds) - 1
        if at == len(self.script):
            self.script.append(next(i for i, p in enumerate(probs) if p > 0))
        return self.script[at]

    @property
    def probability(self) -> float:
        return float(np.prod([probs[i] for probs, i in zip(self.odds, self.script, strict=True)]))

    def next(self) -> list[int] | None:
        """The script of the next way; None after the last."""
        for at in reversed(range(len(self.script))):
            for i in range(self.script[at] + 1, len(self.odds[at])):
                if self.odds[at][i] > 0:
                    return [*self.script[:at], i]
        return None


@dataclass(frozen=True)
class Uniform:
    """A random number, times `scale`: it serves one test, whether it is below something, or one draw."""

    way: Way
    key: tuple[int, str, int]
    scale: float = 1.0

    def __mul__(self, scale: float) -> "Uniform":
        return replace(self, scale=self.scale * scale)

    def take(self) -> None:
        assert self.key not in self.way.used, "a random number serves twice"
        self.way.used.add(self.key)

    def __lt__(self, bound: float) -> bool:
        self.take()
        accepted = min(1.0, bound / self.scale)
        return not self.way.choose([accepted, 1 - accepted])

    def __ge__(self, bound: float) -> bool:
        return not self < bound


@dataclass(frozen=True)
class Open(Noise):
    """Noise whose numbers are not drawn yet."""

    way: Way = field(default_factory=lambda: Way([]))

    def uniforms(self, position: int, purpose: str, count: int) -> Any:
        return [Uniform(self.way, (position, purpose, i)) for i in range(count)]


def ways(answer: Callable[[Noise], Any], *, drawn: bool = True) -> Iterator[tuple[Way, Any]]:
    """Each answer that may be drawn. answer: makes one with some noise.

    drawn: with each token that may be drawn; otherwise -1 stands for what is drawn, and `Way.last` says from what.
    """
    script: list[int] | None = []
    while script is not None:
        way = Way(script)

        def draw(left: Distribution, uniform: Uniform, way: Way = way) -> int:
            uniform.take()
            if drawn:
                return int(left.token_ids[way.choose(left.probs.tolist())])
            assert way.last is None
            way.last = left
            return -1

        with mock.patch.object(Distribution, "draw", draw):
            made = answer(Open(0, way=way))
        yield way, made
        script = way.next()


def largest_difference(a: dict[tuple[int, ...], float], b: dict[tuple[int, ...], float]) -> float:
    return max(abs(a.get(cell, 0.0) - b.get(cell, 0.0)) for cell in {*a, *b})
