"""Shows what drafts could reach at most, and what the controller loses against that.

    python bench/scripts/attainable.py limit                # by formula
    python bench/scripts/attainable.py regret [NAME …]      # in virtual time; takes some minutes

limit: the best speed over plain decoding with a draft model whose tokens are accepted with the same chance each, and
the length of drafts that has it (Leviathan et al. 2022, section 3); then the speed if each draft ended before its first
wrong token: no rule that ends drafts can be better. For what a draft token and the rows of a target pass take.

regret: in the scenarios of ablation.py, how much longer `auto` takes than the best drafter and length of 1 to 12 tokens
that are fixed for a scenario and known in hindsight, plain decoding among them. Then the controller knows more, one
thing after the other: records of the same answers; with no limits to what may be lost, and nothing tried; and, for
models, the share of tokens around the next one that are accepted, those to come included.
"""

import contextlib
import copy
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
from ablation import SCENARIOS, Scenario  # type: ignore[import-not-found]  # it adds the path of virtual_time

from outrider.drafters.controller import Fixed
from outrider.drafters.controller import controller as choice
from outrider.drafters.controller.ledger import Account, Ledger
from outrider.drafters.prediction import Costs, predict
from virtual_time import World

Texts = Mapping[tuple[int, ...], list[int]]  # tokens of prompts, and of these with their answers

STEPS = (0.22, 0.28, 0.35)  # plain passes that a draft token takes
ROWS = {1: 1.0, 2: 1.0, 3: 1.05, 4: 1.1, 8: 1.15}  # plain passes that a target pass of so many rows takes
ACCEPTANCES = (0.4, 0.5, 0.55, 0.6, 0.7, 0.8, 0.9)
LONGEST = 7  # draft tokens
LENGTHS = (1, 2, 3, 4, 6, 8, 12)
NUM_SHOWN = 12  # scenarios
AROUND = 16  # tokens before and after the next one


def limit() -> None:
    """Print the best speed for each acceptance and each cost of a draft token."""
    check = np.interp(range(1, LONGEST + 2), [*ROWS], [*ROWS.values()])
    print(f"| accepted | {' | '.join(f'{step} of a pass' for step in STEPS)} |\n|{'---|' * (len(STEPS) + 1)}")
    for share in ACCEPTANCES:
        found, kept = [], share ** np.arange(LONGEST + 1)
        chances = kept * (1 - share)  # of so many accepted tokens
        chances[-1] = kept[-1]
        for step in STEPS:
            drafting = step * np.arange(LONGEST + 1)
            best = predict([share] * LONGEST, Costs([*check], [*drafting[1:]]))
            foreseen = kept.sum() / (chances @ (drafting + check))
            found.append(f"{best.speed_up:.2f} ({best.num_draft_tokens}), {foreseen:.2f}")
        print(f"| {share} | {' | '.join(found)} |")


def fixed(name: str, count: int) -> Callable[[World], None]:
    """Has a drafter always draft so many tokens."""

    def change(world: Any) -> None:
        drafters = {"draft": world.model, "copies": world._copier}
        world.controller, world.longest = Fixed(drafters[name]), count

    return change


def share_around(world: World, told: Sequence[int], at: int, known: dict[int, bool]) -> float:
    """The share of the tokens around this place that the draft model proposes, if all before them are right."""
    places = range(max(at - AROUND, 1), min(at + AROUND, len(told)))
    for place in places:
        if place not in known:
            known[place] = int(world.draft.logits_after(told[:place]).argmax()) == told[place]
    return sum(known[place] for place in places) / len(places)


def tell_shares(world: Any, texts: Texts) -> None:
    """Tell the controller how many tokens around the next one are accepted, each time that it plans a model's draft."""
    plan = world.controller._plan_model
    found: dict[tuple[int, ...], dict[int, bool]] = {}

    def plan_model(name: str, request: Any, answer: Any, *others: Any) -> Any:
        prompt = tuple(request.sequence.token_ids[: request.sequence.num_prompt_tokens])
        if prompt in texts:
            known = found.setdefault(prompt, {})
            answer.models[name].share.mean = share_around(world, texts[prompt], len(request.sequence), known)
        return plan(name, request, answer, *others)

    world.controller._plan_model = plan_model


def seconds_of(scenario: Scenario, change: Callable[[World], None]) -> float:
    """Of all answers of a scenario."""
    return sum(sum(seconds) for _, seconds in replace(scenario, changes=change).batches(drafted=True))


def measure(scenario: Scenario) -> tuple[str, list[float]]:
    """The best that is fixed; and the speeds of it, of the controller, and of one that knows more and more."""
    expected, worlds = scenario.batches(drafted=False), list[World]()
    plain = sum(sum(seconds) for _, seconds in expected)
    names = [*(["draft"] if scenario.noise is not None else []), *(["copies"] if scenario.copier else [])]
    choices = {f"{name}:{count}": seconds_of(scenario, fixed(name, count)) for name in names for count in LENGTHS}
    choices["plain"] = plain
    best = min(choices, key=lambda name: choices[name])
    told = [text for texts, _ in expected for text in texts]
    texts = {tuple(prompt): [*prompt, *text] for prompt, text in zip(scenario.prompts, told, strict=True)}
    found = [choices[best], seconds_of(scenario, worlds.append)]

    def know(world: World) -> None:
        world.controller.records = copy.deepcopy(worlds[-1].controller.records)

    def know_shares(world: World) -> None:
        know(world)
        tell_shares(world, texts)

    found.append(seconds_of(scenario, know))
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(Account, "limit", lambda *_: float("inf")))
        stack.enter_context(patch.object(Ledger, "is_open", lambda *_: True))
        stack.enter_context(patch.object(choice, "should_try", lambda *_, **__: False))
        found += [seconds_of(scenario, know), seconds_of(scenario, know_shares)]
    return best, [plain / seconds for seconds in found]


def regret(words: Sequence[str]) -> None:
    """Print the scenarios that lose most, and the means of all."""
    chosen = [each for each in SCENARIOS if not words or any(word in each.name for word in words)]
    found = {scenario.name: measure(scenario) for scenario in chosen}
    print("| scenario | best fixed | its speed | auto | auto loses | with records | no limits | shares known |")
    print(f"|{'---|' * 8}")
    by_regret = sorted(found, key=lambda name: found[name][1][1] / found[name][1][0])
    for name in by_regret[:NUM_SHOWN]:
        best, (top, *speeds) = found[name]
        shown = " | ".join(f"{top / each - 1:+.1%}" for each in speeds)
        print(f"| {name} | {best} | {top:.2f} | {speeds[0]:.2f} | {shown} |")
    tops, *others = zip(*(speeds for _, speeds in found.values()), strict=True)
    lost = [[top / each - 1 for top, each in zip(tops, own, strict=True)] for own in others]
    means = [statistics.geometric_mean(1 + each for each in own) - 1 for own in lost]
    losses = [statistics.mean(max(each, 0.0) for each in own) for own in lost]
    for name, each in (("mean", means), ("mean, 0 where it is faster", losses), ("worst", [*map(max, lost)])):
        print(f"| {name} | | | | {' | '.join(f'{value:+.1%}' for value in each)} |")


if __name__ == "__main__":
    if sys.argv[1:2] == ["limit"]:
        limit()
    else:
        regret(sys.argv[2:])
