"""Takes one part of the controller away after the other, and shows what that costs.

    python bench/scripts/ablation.py [NAME …]

Decodes the same scenarios with the whole controller and without each part, in virtual time, and prints a table: the
geometric mean of the scenarios' speed-ups over plain decoding, the slowest scenario, and those that lose and gain most
without the part. Takes some minutes, so it is run by hand when the controller changes. A part that changes nothing has
no place there.
"""

import __future__

import importlib
import inspect
import statistics
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "helpers"))

from outrider.drafters import Ngram, Suffix
from outrider.types import Draft, DraftRequest
from virtual_time import Liar, World

Noises = float | tuple[tuple[int, float], ...]
Periods = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Part:
    """In a function or property of a module, `old` becomes `new`; without `old`, a constant does."""

    name: str
    module: str
    place: str
    old: str
    new: str


@dataclass(frozen=True)
class Scenario:
    """Answers to decode, and the world for it.

    noise: of the draft model; None: there is none. answers: tokens of prompt and answer, one after the other.
    together: answers in a batch. strangers: whether each batch is the first one of a new controller. known: whether the
    controller has the records of an earlier answer. ends: whether answers, one at a time, end by a token of their own,
    so that nobody knows how many tokens they get. options: of the world. changes: what is done to each world first.
    """

    name: str
    noise: Noises | None
    answers: tuple[tuple[int, int], ...] = ((3, 200), (5, 200))
    copier: type[Ngram | Suffix] | None = Suffix
    periods: Periods = ()
    together: int = 1
    strangers: bool = False
    known: bool = False
    ends: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    changes: Callable[[World], None] = lambda _: None

    @property
    def prompts(self) -> list[list[int]]:
        """Those of all answers."""
        return [[(7 * i + 5 * at) % 64 for at in range(size)] for i, (size, _) in enumerate(self.answers)]

    def batches(self, drafted: bool) -> list[tuple[list[list[int]], list[float]]]:
        """The texts of each batch, and the seconds until each of them was there."""
        world, done = self._world(), []
        if self.known:
            world.decode((9,), drafted, 150)
        for begin in range(0, len(self.answers), self.together):
            if self.strangers:
                world = self._world()
            batch = self.answers[begin : begin + self.together]
            prompts = self.prompts[begin : begin + self.together]
            if self.ends:
                text, seconds, _ = world.decode(prompts[0], drafted, batch[0][1], ends=True)
                done.append(([text], [seconds]))
            else:
                done.append(world.decode_together(prompts, drafted, [num for _, num in batch]))
        return done

    def _world(self) -> World:
        copies = self.copier() if self.copier else False
        noise, has_model = (0.0, False) if self.noise is None else (self.noise, True)
        options = {"pauses": True, **self.options}
        world = World(noise, copies=copies, model=has_model, periods=self.periods, **options)
        self.changes(world)
        return world


class LateCopies(Ngram):
    """Its copies are sure and wrong in answers to short prompts."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        is_short = requests[0].sequence.num_prompt_tokens < 5
        return Liar().propose(requests) if is_short else super().propose(requests)


SMALL = {"draft_cost": 0.35}  # a draft model that is eight times as fast as the main model
GOOD, MEDIOCRE, BAD, WRONG = 0.2, 0.6, 1.5, 50.0  # noise of draft models
STRANGERS = tuple((3 + i, 12 + 4 * i) for i in range(8))
YES_OR_NO = ((100, 2), (110, 3), (120, 2))
SOME_SHORT = (*YES_OR_NO, (100, 120))
TURNS = tuple((40 * i, (0, 20)[i % 2]) for i in range(6))
PARTLY = ((0, GOOD), (200, WRONG))  # the noise of a draft model that is wrong after long prompts
LONG = ((3, 400), (5, 400))
EQUAL = tuple((3 + i, 150) for i in range(8))
FAR = tuple((200 + 5 * i, 150) for i in range(4))
SHORT_TURNS = tuple((15 * i, (0, 5)[i % 2]) for i in range(20))
MIXED = ((3, 120), (40, 60), (90, 150), (5, 40))

SCENARIOS = [
    Scenario("model: always right", 0.0),
    Scenario("model: good", GOOD, copier=Ngram),
    Scenario("model: good, small", GOOD, options=SMALL),
    Scenario("model: mediocre", MEDIOCRE),
    Scenario("model: mediocre, small", MEDIOCRE, options=SMALL),
    Scenario("model: bad, small", BAD, options=SMALL),
    Scenario("model: wrong", WRONG),
    Scenario("model: turns wrong", ((0, GOOD), (100, WRONG)), options=SMALL),
    Scenario("model: turns good", ((0, WRONG), (100, GOOD)), answers=((3, 300), (5, 300)), options=SMALL),
    Scenario("model: now good, now wrong", tuple((50 * i, (GOOD, WRONG)[i % 2]) for i in range(8)), options=SMALL),
    Scenario("copies: right", None, periods=((0, 30),)),
    Scenario("copies: right mostly", None, periods=((0, -30),)),
    Scenario("copies: right mostly, prompt lookup", None, periods=((0, -30),), copier=Ngram),
    Scenario("copies: wrong", None),
    Scenario("copies: wrong, prompt lookup", None, copier=Ngram),
    Scenario("copies: now right, now wrong", None, periods=TURNS),
    Scenario("copies: now right, now wrong, prompt lookup", None, periods=TURNS, copier=Ngram),
    Scenario("copies: right for a few tokens", None, periods=SHORT_TURNS),
    Scenario("copies: right for a few tokens, prompt lookup", None, periods=SHORT_TURNS, copier=Ngram),
    Scenario("copies: sure and wrong", None, copier=Liar),
    Scenario("copies: right in the second answer", None, periods=((0, 30),), copier=LateCopies),
    Scenario("copies and model: now copies", GOOD, periods=((0, 0), (60, 25), (150, 0)), options=SMALL),
    Scenario("copies and model: copies only", WRONG, periods=((0, 30),)),
    Scenario("copies and model: now long copies", GOOD, LONG, periods=((60, 40), (360, 0)), options=SMALL),
    Scenario("prompt: good model", GOOD, answers=((120, 60),) * 6, known=True),
    Scenario("prompt: mediocre model", MEDIOCRE, answers=((120, 60),) * 6, known=True),
    Scenario("prompt: good model, short answers", GOOD, answers=((120, 8),) * 6, known=True),
    Scenario("prompt: good model, short answers that end", GOOD, answers=YES_OR_NO * 8, known=True, ends=True),
    Scenario(
        "prompt: good model, short and long ones", GOOD, answers=(*YES_OR_NO, (100, 120)) * 5, known=True, ends=True
    ),
    Scenario("prompt: strangers, wrong model", WRONG, answers=((120, 40),) * 4, strangers=True),
    Scenario("long prompt: good model", GOOD, answers=((800, 200), (700, 200)), options=SMALL),
    Scenario("long prompt: short answers", GOOD, answers=((800, 16), (700, 16), (600, 20), (750, 12)), options=SMALL),
    Scenario("long prompt: wrong model", WRONG, answers=((800, 100), (700, 100)), options=SMALL),
    Scenario("long prompt: copies", GOOD, answers=((400, 100), (500, 100)), periods=((300, 40),), options=SMALL),
    Scenario("strangers: good model", GOOD, answers=STRANGERS, strangers=True, options=SMALL),
    Scenario("strangers: wrong model", WRONG, answers=STRANGERS, strangers=True),
    Scenario("strangers: wrong copies", None, answers=STRANGERS, strangers=True, copier=Ngram),
    Scenario("short answers: good model", GOOD, answers=STRANGERS, options=SMALL),
    Scenario("short answers: wrong model", WRONG, answers=STRANGERS),
    Scenario("batch of 2: good model", GOOD, answers=((3, 120), (5, 150)), together=2, options=SMALL),
    Scenario("batch of 4: good model, mixed lengths", GOOD, answers=MIXED, together=4, options=SMALL),
    Scenario("batch of 4: copies and mediocre model", MEDIOCRE, answers=MIXED, together=4, periods=((60, 25),)),
    Scenario("batch of 8: mediocre model", MEDIOCRE, answers=MIXED * 2, together=8, options=SMALL),
    Scenario("batch of 4: new good model", GOOD, EQUAL[:4], together=4, options=SMALL),
    Scenario("batch of 4: known good model", GOOD, EQUAL[:4], together=4, known=True, options=SMALL),
    Scenario("batch of 8: known good model", GOOD, EQUAL, together=8, known=True, options=SMALL),
    Scenario("batch of 4: good model for two", PARTLY, EQUAL[:2] + FAR[:2], together=4, known=True, options=SMALL),
    Scenario("batch of 4: good model for three", PARTLY, EQUAL[:3] + FAR[:1], together=4, known=True, options=SMALL),
    Scenario("batch of 8: good model for four", PARTLY, EQUAL[:4] + FAR[:4], together=8, known=True, options=SMALL),
    Scenario(
        "batch of 4: model turns wrong", ((0, GOOD), (80, WRONG)), EQUAL[:4], together=4, known=True, options=SMALL
    ),
    Scenario("machine: main model slower", MEDIOCRE, options={"scale": 1.6, "draft_scale": 1.0}),
    Scenario("machine: draft model slower", MEDIOCRE, options={"scale": 1.0, "draft_scale": 2.0, **SMALL}),
    Scenario("machine: prepares shapes", MEDIOCRE, periods=((100, 25),), options={"change": 0.008, **SMALL}),
    Scenario("machine: prepares shapes, copies", None, periods=TURNS, options={"change": 0.02}, copier=Ngram),
    Scenario("machine: prepares shapes, wrong copies", None, options={"change": 0.02}, copier=Ngram),
    Scenario("machine: prepares shapes, mostly right copies", None, periods=((0, -30),), options={"change": 0.02}),
]

PARTS = [
    Part(name, module, place, *([""] * (2 - len(change)) + change))
    for module, parts in tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")).items()
    for name, (place, *change) in parts.items()
]


@contextmanager
def without(part: Part) -> Iterator[None]:
    """Take the part away meanwhile."""
    owner: Any = importlib.import_module(f"outrider.{part.module}")
    names = vars(owner)
    *path, name = part.place.split(".")
    for each in path:
        owner = getattr(owner, each)
    if part.old:
        found: Any = vars(owner)[name]
        function: Any = found.fget if isinstance(found, property) else found
        text = textwrap.dedent(inspect.getsource(function))
        if text.count(part.old) != 1:
            sys.exit(f"{part.name}: {part.place} has {text.count(part.old)} times {part.old!r}; update it.")
        made: dict[str, Any] = {}
        flags = __future__.annotations.compiler_flag
        exec(compile(text.replace(part.old, part.new), part.place, "exec", flags), names, made)  # noqa: S102
        new = made[name]
    else:
        new = eval(part.new)  # noqa: S307
    with patch.object(owner, name, new):
        yield


def speed_ups(plain: Sequence[list[tuple[list[list[int]], list[float]]]]) -> list[float]:
    """Each scenario's, with the controller as it is now. Its text does not depend on it."""
    found = []
    for scenario, expected in zip(SCENARIOS, plain, strict=True):
        drafted = scenario.batches(drafted=True)
        if [texts for texts, _ in drafted] != [texts for texts, _ in expected]:
            sys.exit(f"{scenario.name}: another text than that of plain decoding")
        found.append(sum(sum(seconds) for _, seconds in expected) / sum(sum(seconds) for _, seconds in drafted))
    return found


def main() -> None:
    """Take away all parts, or those whose names contain one of the arguments."""
    chosen = [part for part in PARTS if not sys.argv[1:] or any(word in part.name for word in sys.argv[1:])]
    plain = [scenario.batches(drafted=False) for scenario in SCENARIOS]
    whole = speed_ups(plain)
    print("| without | mean | change | slowest | loses most | gains most |\n|---|---|---|---|---|---|")

    def show(name: str, found: list[float]) -> None:
        changes = [(new / old - 1, scenario.name) for new, old, scenario in zip(found, whole, SCENARIOS, strict=True)]
        mean = statistics.geometric_mean(found)
        change = mean / statistics.geometric_mean(whole) - 1
        ends = [f"{share:+.1%} {where}" if abs(share) > 0.0005 else "" for share, where in (min(changes), max(changes))]
        slowest = f"{min(found):.3f} {SCENARIOS[found.index(min(found))].name}"
        print(f"| {name} | {mean:.3f} | {change:+.1%} | {slowest} | {' | '.join(ends)} |", flush=True)

    show("nothing", whole)
    for part in chosen:
        with without(part):
            show(part.name, speed_ups(plain))


if __name__ == "__main__":
    main()
