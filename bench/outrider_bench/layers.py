"""Finds layers that a drafter made of the main model's own can do without: `outrider tune-layers`.

One run of layers is left out, so that the model is cut into three segments at most. A search for it reads plain
decoding's own answers without these layers, all tokens of one answer in one call, and counts how many of the likeliest
tokens are the answer's (Xia et al. 2024, "SWIFT", section 4.2). The best are then measured with true drafts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise

import msgspec
import numpy as np

from outrider.bundle import Bundle, DrafterEntry, read_bundle
from outrider.bundle.fields import NAME
from outrider.bundle.fit import check_fit
from outrider.bundle.kinds import RESERVED_NAMES
from outrider.bundle.manifest import describe_layers, replace_manifest
from outrider.config import Config
from outrider.drafters import SelfModel
from outrider.drafters.prediction import Costs, SpeedPrediction, best_draft
from outrider.engine.engine import Engine
from outrider.errors import OptionError, RequestError
from outrider.models.backends.openvino_layers import OpenVINOLayers
from outrider.models.backends.openvino_paged import OpenVINOPaged
from outrider.models.cost.slots import open_slot
from outrider.types import Chunk, Slot
from outrider.version import __version__
from outrider_bench.prompts import Task

Layers = tuple[int, ...]

MOST = 8  # draft tokens a round, when the best are measured
_WIDTH = 3  # runs of layers that the search follows at a time
_NUM_MEASURED = 3
_REPEATS = 5  # of every timed call
_HALF, _ONE = "half", "one"  # of the layers: both cut the model before every layer, and show what a layer costs


@dataclass(frozen=True, slots=True)
class DrafterLayers:
    """Layers that a drafter is made of, and what is expected of it.

    agreement: the share of an answer's tokens that are the likeliest without the other layers. cost: of a draft token,
    in target passes of one row. acceptance: for each place, the share of drafts whose token there was accepted; empty
    if only the agreement is known. num_tokens: draft tokens a round that pay most; speed_up: with these, over plain
    decoding.
    """

    layers: Layers
    agreement: float
    cost: float
    num_tokens: int
    speed_up: float
    acceptance: tuple[float, ...] = ()


def probe_engine(bundle: Bundle, config: Config) -> closing[Engine]:
    """An engine that is cut before every layer but the first.

    Raises:
        OptionError: when the main model has no layers that could be left out.
        BundleError, DeviceError: as `Engine`.
    """
    main = bundle.manifest.main
    num_layers = main.geometry.num_layers
    if main.format != "openvino" or num_layers < 2:
        raise OptionError(
            f"tune-layers is for main models of several layers in OpenVINO's format, and that of {bundle.folder} has "
            f"{num_layers} in {main.format}. Export it with '--format openvino', or use another drafter."
        )
    parts = {_HALF: tuple(range(0, num_layers, 2)), _ONE: (0,)}
    drafters = tuple(DrafterEntry(name, "self", main, layers=layers) for name, layers in parts.items())
    probe = Bundle(bundle.folder, msgspec.structs.replace(bundle.manifest, drafters=drafters))
    config = config.replace(drafter="auto", draft_bundle=None, overlap="auto")
    return closing(Engine(probe, config.replace(enable_prefix_caching=False, keep_records=False)))


def find_layers(
    engine: Engine, tasks: Sequence[Task], max_new_tokens: int = 64, progress: Callable[[str], None] = lambda _: None
) -> list[DrafterLayers]:
    """Search for the layers to draft with, on these prompts; the best first. engine: of `probe_engine`.

    progress: is told of each step in a sentence.

    Raises:
        DeviceError: when the device fails.
        RequestError: when a prompt does not fit in the cache, or no prompt has an answer.
    """
    main = engine.main
    if not isinstance(main, OpenVINOPaged):
        raise AssertionError("the format was checked, and the device when the engine was made")
    prices = _Prices.of(engine)
    progress("plain decoding")
    plain = [
        engine.generate(task.token_ids, max_new_tokens=max_new_tokens, drafter=None, temperature=0) for task in tasks
    ]
    answers = [(task.token_ids, each.token_ids) for task, each in zip(tasks, plain, strict=True) if each.token_ids]
    if not answers:
        raise RequestError("No prompt has an answer, so there is nothing to compare with. Give other prompts.")
    with closing(_Reader(main, answers)) as reader:

        def judge(skipped: range) -> DrafterLayers:
            layers = tuple(i for i in range(prices.num_layers) if i not in skipped)
            progress(f"without layers {describe_layers(skipped)}")
            agreement = reader.agreement(layers)
            best = prices.best([agreement] * MOST, len(layers))
            return DrafterLayers(layers, agreement, prices.draft(len(layers)), best.num_draft_tokens, best.speed_up)

        tried = search(prices.num_layers, judge)
    best = sorted(tried, key=lambda each: -each.speed_up)[:_NUM_MEASURED]
    measured = []
    for each in best:
        progress(f"drafts of layers {describe_layers(each.layers)}")
        acceptance = _accepted(engine, main, each.layers, answers)
        given_those_before = [b / a if a else 0.0 for a, b in pairwise((1.0, *acceptance))]
        found = prices.best(given_those_before, len(each.layers))
        measured.append(
            DrafterLayers(each.layers, each.agreement, each.cost, found.num_draft_tokens, found.speed_up, acceptance)
        )
    return sorted(measured, key=lambda each: -each.speed_up)


def search(num_layers: int, judge: Callable[[range], DrafterLayers]) -> list[DrafterLayers]:
    """Judge runs of layers to leave out: each layer but the first, then the best runs with a layer more at either end.

    A run is given up when no longer one can be better: with an agreement of a, and drafts at no cost, a round gives
    1 / (1 − a) tokens, and more layers left out hardly agree more.
    """
    runs = [range(i, i + 1) for i in range(1, num_layers)]
    seen = {*runs}
    tried: list[DrafterLayers] = []
    while runs:
        judged = [(run, judge(run)) for run in runs]
        tried += [found for _, found in judged]
        best = max(found.speed_up for found in tried)
        left = [(run, found) for run, found in judged if found.agreement == 1 or 1 / (1 - found.agreement) > best]
        left.sort(key=lambda each: -each[1].speed_up)
        longer = [
            range(begin, end)
            for run, _ in left[:_WIDTH]
            for begin, end in ((run.start - 1, run.stop), (run.start, run.stop + 1))
            if begin >= 1 and end <= num_layers
        ]
        runs = [*dict.fromkeys(run for run in longer if run not in seen)]
        seen.update(runs)
    return tried


def add_layers(bundle: Bundle, name: str, layers: Layers) -> Bundle:
    """Add a drafter of these layers of the main model to a bundle, in place of an earlier one of that kind and name.

    Raises:
        OptionError: when another drafter has the name.
        BundleError: when the name or the layers are not possible.
    """
    manifest = bundle.manifest
    check_name(bundle, name)
    others = tuple(each for each in manifest.drafters if each.name != name)
    made = DrafterEntry(name, "self", manifest.main, layers=layers)
    manifest = msgspec.structs.replace(manifest, drafters=(*others, made), minimum_runtime=__version__)
    check_fit(manifest)
    replace_manifest(bundle.folder, manifest)
    return read_bundle(bundle.folder)


def check_name(bundle: Bundle, name: str) -> None:
    """Raise OptionError if a drafter of the main model's layers cannot be called `name`."""
    taken = [*RESERVED_NAMES, *(each.name for each in bundle.manifest.drafters if each.traits.design != "layers")]
    if name in taken or not re.fullmatch(NAME, name):
        raise OptionError(
            f"--name {name!r} is no name for a drafter here: it has to be letters, digits, '.', '_' and '-', and other "
            f"than {', '.join(taken)}. Choose another one."
        )


@dataclass(frozen=True, slots=True)
class _Prices:
    """What calls cost, in target passes of one row.

    check: of target passes with 1, 2, … rows. none, each: of a draft token without any layer, and for each layer.
    """

    num_layers: int
    check: list[float]
    none: float
    each: float

    @classmethod
    def of(cls, engine: Engine) -> _Prices:
        """Prices by the measured costs of one layer and of half of them."""
        engine.measure_costs(_REPEATS)
        main = engine.costs["main"]
        plain, by_half, by_one = (engine.costs[name](1) for name in ("main", _HALF, _ONE))
        num_layers = engine.bundle.manifest.main.geometry.num_layers
        num_half = (num_layers + 1) // 2
        # With two layers, half of them is one.
        each = (by_half - by_one) / (num_half - 1) if num_half > 1 else (plain - by_one) / (num_layers - 1)
        check = [main(rows) / plain for rows in range(1, MOST + 2)]
        return cls(num_layers, check, max(by_one - each, 0.0) / plain, max(each, 0.0) / plain)

    def draft(self, num_layers: int) -> float:
        """The price of a draft token that passes through so many layers."""
        return self.none + num_layers * self.each

    def best(self, acceptance: Sequence[float], num_layers: int) -> SpeedPrediction:
        """Of the number of draft tokens a round that pays most, be it slower than plain decoding.

        acceptance: for each place, the chance that a token there is accepted if those before it are.
        """
        costs = Costs(self.check, [k * self.draft(num_layers) for k in range(1, MOST + 1)])
        return best_draft(acceptance, costs)


class _Reader:
    """Prompts that were read once, and their answers, which are read again and again without some layers."""

    def __init__(self, main: OpenVINOPaged, answers: Sequence[tuple[list[int], list[int]]]) -> None:
        self._main, self._answers = main, answers
        self._slots: list[Slot] = []
        for prompt, answer in answers:
            slot = open_slot(main, len(prompt) + len(answer))
            self._slots.append(slot)
            if len(prompt) > 1:
                main.submit([Chunk(slot, prompt[:-1], num_rows=0)]).wait()

    def agreement(self, layers: Layers) -> float:
        """The share of the answers' tokens that are the likeliest, if they are read by these layers."""
        part = OpenVINOLayers(self._main, layers)
        part.allocate(0)
        num_right = 0
        for slot, (prompt, answer) in zip(self._slots, self._answers, strict=True):
            chunk = Chunk(slot, [prompt[-1], *answer[:-1]], len(answer), generated=True)
            rows = part.submit([chunk]).wait().rows(chunk)
            num_right += sum(int(np.argmax(row.full())) == token for row, token in zip(rows, answer, strict=True))
            slot.trim(len(prompt) - 1)
        return num_right / sum(len(answer) for _, answer in self._answers)

    def close(self) -> None:
        for slot in self._slots:
            slot.close()


def _accepted(
    engine: Engine, main: OpenVINOPaged, layers: Layers, answers: Sequence[tuple[list[int], list[int]]]
) -> tuple[float, ...]:
    """For each place, the share of drafts of these layers whose token there is accepted."""
    part = OpenVINOLayers(main, layers)
    part.allocate(0)
    name = f"layers {describe_layers(layers)}"
    engine.add_drafter(name, SelfModel(part, context_length=engine.max_tokens))
    accepted, num_drafts = np.zeros(MOST), 0
    for prompt, answer in answers:
        made = engine.generate(
            prompt, max_new_tokens=len(answer), drafter=name, num_assistant_tokens=MOST, temperature=0
        ).stats
        of_place = made.num_accepted_tokens_per_position[:MOST]
        accepted[: len(of_place)] += of_place
        num_drafts += made.num_drafts
    return tuple((accepted / max(num_drafts, 1)).tolist())
