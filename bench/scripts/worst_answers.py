"""Decodes answers of the worst kind for each kind of drafter, and shows how much slower than plain decoding they are.

    python bench/scripts/worst_answers.py [KIND …]

200 answers of 24 to 128 tokens, with nothing to copy and drafters that are never right, in virtual time: calls as long
as those of a 1.5B and a 0.5B model on two cores, and the host's part of each round. "One engine" answers all of them;
"strangers" are each the first answer of an engine. Exits with 1 if an answer of 16 tokens or more is below 0.97 of
plain decoding's speed, or the mean of the worst hundred below 0.99 in one engine.

Then short answers to long prompts, with drafters that are right mostly and that nobody has tried: which answer is the
first that is drafted, and how fast the last five of ten are. Exits with 1 if it is not among the first three. The
engine is idle between answers; heads cannot use that, so that their answers are longer.

Then answers to prompts of 100 tokens with a draft model that is known to be right mostly, where a part of the answers,
or all, is short, and nobody knows which: each ends by a token of its own. Exits with 1 if all are short, and they are
slower than SHORT_LOWEST.
"""

import functools
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "helpers"))

from outrider.drafters import DraftModel, Ngram, Suffix
from outrider.drafters.controller import Controller
from virtual_time import DRAFT_MS, HEAD_MS, ClockedBackend, Liar, World, cost_of

NUM_ANSWERS, LEAST_TOKENS, MOST_TOKENS, MOST_PROMPT_TOKENS = 200, 24, 128, 60
WRONG, GOOD = 50.0, 0.1  # noise of a drafter that is never right, and of one that is right mostly
LONG_PROMPT_TOKENS, MOST_ANSWERS = 256, 3  # until a good drafter is found
SHORT_TOKENS = {"head": 128}  # of answers that show it; 48 of the others
SHORT_ANSWERS, LONG_ANSWER, NUM_MIXED = ((2, 4), (2, 15)), (64, 200), 100  # least and most tokens; answers
SHORT_SHARES, MIXED_PROMPT_TOKENS = (1.0, 0.9, 0.5, 0.1, 0.0), 100
LOWEST, SHORT_LOWEST, LOWEST_MEAN = 0.97, 0.95, {"one engine": 0.99, "strangers": 0.97}
HOST_SECONDS = 0.6e-3  # of a plain round
DECIDE_SECONDS = {"_batch": 0.05e-3, "_copies": 0.15e-3, "_price": 0.2e-3}  # of the controller, by its functions


class HostedWorld(World):
    """A world in which the host takes time. noise: of all models that draft."""

    host = 0.0

    def __init__(self, names: Sequence[str], noise: float = WRONG, **options: Any) -> None:
        super().__init__(noise, model=False, pauses=True, **options)
        head = ClockedBackend(cost_of(HEAD_MS), noises=[(0, noise)])
        at_once = ClockedBackend(cost_of(DRAFT_MS), noises=[(0, noise)])
        self._others += [head, at_once]
        self.models["head"] = DraftModel(head, context_length=4000, cost=cost_of(HEAD_MS))
        self.models["head"].replays = False  # as of all that read hidden states
        masks = DraftModel(at_once, context_length=4000, cost=cost_of(DRAFT_MS), mask_token_ids=[1] * 7)
        self.models["at once"] = masks
        self._adds(self.main, "submit", functools.partial(float, HOST_SECONDS))
        self.controller = self.controller_of(names)

    def controller_of(self, names: Sequence[str]) -> Controller:
        """A new controller between these models, whose decisions take time."""
        controller = super().controller_of(names)
        for name, seconds in DECIDE_SECONDS.items():
            self._adds(controller, name, functools.partial(float, seconds))
        return controller

    def _adds(self, owner: Any, name: str, seconds: Callable[[], float]) -> None:
        """Let a method of `owner` take this much longer."""
        method = getattr(owner, name)

        def longer(*args: Any, **options: Any) -> Any:
            self.host += seconds()
            return method(*args, **options)

        setattr(owner, name, longer)

    @property
    def seconds(self) -> float:
        return super().seconds + self.host


MODELS: dict[str, Callable[[float], HostedWorld]] = {
    "draft model": lambda noise: HostedWorld(["draft"], noise),
    "small draft model": lambda noise: HostedWorld(["draft"], noise, draft_cost=0.35),
    "head": lambda noise: HostedWorld(["head"], noise),
    "draft in one call": lambda noise: HostedWorld(["at once"], noise),
}
KINDS: dict[str, Callable[[], HostedWorld]] = {
    **{name: functools.partial(new_world, WRONG) for name, new_world in MODELS.items()},
    "copies": lambda: HostedWorld([], copies=Suffix()),
    "prompt lookup": lambda: HostedWorld([], copies=Ngram()),
    "copies: sure and wrong": lambda: HostedWorld([], copies=Liar()),
    "copies, draft model and head": lambda: HostedWorld(["draft", "head"], copies=Suffix()),
}


def speeds(new_world: Callable[[], HostedWorld], *, strangers: bool, num_answers: int = NUM_ANSWERS) -> list[float]:
    """Each answer's speed, where plain decoding's is 1."""
    random_numbers, world, found = random.Random(1), new_world(), list[float]()
    for _ in range(num_answers):
        prompt = [random_numbers.randrange(64) for _ in range(random_numbers.randint(3, MOST_PROMPT_TOKENS))]
        num = random_numbers.randint(LEAST_TOKENS, MOST_TOKENS)
        if strangers:
            world = new_world()
        expected, plain, _ = world.decode(prompt, drafted=False, num=num)
        drafted, seconds, _ = world.decode(prompt, num=num)
        if drafted != expected:
            sys.exit("another text than that of plain decoding")
        found.append(plain / seconds)
    return found


def discovery(world: HostedWorld, num: int) -> tuple[int, float]:
    """Which answer is the first with drafts, and the speed of the last five, where plain decoding's is 1."""
    first, found = 0, list[float]()
    for i in range(1, 11):
        prompt = [(7 * at * at + 3 * i) % 50 for at in range(LONG_PROMPT_TOKENS)]
        _, plain, _ = world.decode(prompt, drafted=False, num=num)
        _, seconds, request = world.decode(prompt, num=num)
        first = first or (i if request.stats.num_drafts else 0)
        found.append(plain / seconds)
    return first, statistics.geometric_mean(found[-5:])


def mixed(short: tuple[int, int], share: float) -> list[tuple[bool, float, float]]:
    """Of answers of which this share is short: whether it is, and the seconds of plain decoding and with drafts."""
    random_numbers, world, found = random.Random(3), HostedWorld(["draft"], GOOD, copies=Suffix()), []
    for i in range(-3, NUM_MIXED):  # after the first three the model is known
        is_short = i >= 0 and random_numbers.random() < share
        num = random_numbers.randint(*(short if is_short else LONG_ANSWER))
        prompt = [random_numbers.randrange(64) for _ in range(MIXED_PROMPT_TOKENS)]
        expected, plain, _ = world.decode(prompt, drafted=False, num=num, ends=True)
        drafted, seconds, _ = world.decode(prompt, num=num, ends=True)
        if drafted != expected:
            sys.exit("another text than that of plain decoding")
        if i >= 0:
            found.append((is_short, plain, seconds))
    return found


def speed_of(answers: Sequence[tuple[bool, float, float]]) -> float:
    """Their speed together, where plain decoding's is 1; 0 if there are none."""
    return sum(plain for _, plain, _ in answers) / sum(seconds for *_, seconds in answers) if answers else 0.0


def main() -> None:
    """Decode the answers of all kinds, or of those whose names contain one of the arguments."""
    failed = False
    print("| drafter | engine | slowest | mean of the worst hundred | mean |\n|---|---|---|---|---|")
    for kind, new_world in KINDS.items():
        if sys.argv[1:] and not any(word in kind for word in sys.argv[1:]):
            continue
        for engine, lowest_mean in LOWEST_MEAN.items():
            found = sorted(speeds(new_world, strangers=engine == "strangers"))
            worst = statistics.mean(found[: NUM_ANSWERS // 2])
            failed |= found[0] < LOWEST or worst < lowest_mean
            print(f"| {kind} | {engine} | {found[0]:.3f} | {worst:.3f} | {statistics.mean(found):.3f} |", flush=True)
    print("\n| drafter that is right mostly | tokens | first with drafts | speed of the last five |\n|---|---|---|---|")
    for kind, new_model in MODELS.items():
        if not sys.argv[1:] or any(word in kind for word in sys.argv[1:]):
            num = SHORT_TOKENS.get(kind, 48)
            first, speed = discovery(new_model(GOOD), num)
            failed |= not 0 < first <= MOST_ANSWERS
            print(f"| {kind} | {num} | {first or 'none'} | {speed:.2f} |", flush=True)
    if not sys.argv[1:] or any(word in "short answers" for word in sys.argv[1:]):
        print(
            "\n| tokens of short answers | their share | their speed | of long ones | of all |\n|---|---|---|---|---|"
        )
        for short in SHORT_ANSWERS:
            for share in SHORT_SHARES:
                answers = mixed(short, share)
                alone = [speed_of([each for each in answers if each[0] == is_short]) for is_short in (True, False)]
                failed |= share == 1.0 and alone[0] < SHORT_LOWEST
                shown = " | ".join(f"{speed:.3f}" if speed else "" for speed in (*alone, speed_of(answers)))
                print(f"| {short[0]} to {short[1]} | {share:.0%} | {shown} |", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
