"""Predicts a pair's speed on another machine, from the times of that machine's calls.

A discrete-event simulation of the real loop. The models run here, so tokens, drafts, outcomes and the controller are
real. Only the times are the profile's (see `outrider_bench.simulation.profiles`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from outrider.config import GenerationConfig
from outrider.decoding.loop import step
from outrider.decoding.scheduler import Scheduler
from outrider.decoding.slots import admit, release
from outrider.drafters import DraftModel
from outrider.drafters.drafter_registry import DrafterRegistry
from outrider.engine.engine import Engine
from outrider.errors import OptionError, OutriderError
from outrider.models.measure import Contention, PassCost
from outrider.types import NO_PROMPT, Backend, Chunk, Prompt, Slot, Step
from outrider_bench.modes.make import make_modes
from outrider_bench.modes.mode import Mode, Run
from outrider_bench.modes.name import ModeName
from outrider_bench.prompts import Task
from outrider_bench.simulation.profiles import Profile

_INSTANT = 1e-9  # seconds: a shorter rest of a call is a rounding error


def measure_profile(engine: Engine, host: float, repeats: int = 3) -> Profile:
    """Measure this machine's profile. host: seconds per round, from the caller. Not while requests run."""
    name, _ = draft_model_of(engine)
    engine.measure_costs(repeats)
    main, draft = replace(engine.costs["main"]), replace(engine.costs[name])  # copies: the engine adapts its own
    return Profile("this machine", main, draft, engine.measure_contention(name), host)


def draft_model_of(engine: Engine) -> tuple[str, DraftModel]:
    """The bundle's draft model, with its name.

    Raises:
        OptionError: when it has none, or it was not loaded.
    """
    name = next(iter([*engine.draft_models, *engine.bundled_drafters]), None)
    if name is not None:
        engine.find_drafter(name)
    if name not in engine.draft_models:
        raise OptionError(f"{engine.bundle.folder} has no draft model, and simulate needs two models.")
    return name, engine.draft_models[name]


def check_modes(modes: Seq[str]) -> None:
    """Check that modes can be simulated: "plain", "auto", "draft" and "draft:N", as in `outrider_bench.modes`.

    Raises:
        OptionError: for another one, or one that drafts no tokens.
    """
    for mode in modes:
        _parse(mode)


def _parse(mode: str) -> ModeName:
    name = ModeName.parse(mode)
    counts = name.number is not None
    if name.bundle or name.kind not in ("plain", "auto", "draft") or (counts and name.kind != "draft"):
        raise OptionError(f"Mode '{mode}' cannot be simulated: choose from plain, auto, draft and draft:N.")
    if name.num_assistant_tokens == 0:
        raise OptionError(f"Mode '{mode}' drafts nothing: give 1 token or more, or choose plain.")
    return name


class _Clock:
    """The time of a host that drives two devices, in seconds.

    check_left: rest of the running target pass, if it ran alone. check_ended: the time when the last one ended.
    """

    def __init__(self, contention: Contention) -> None:
        self.now = 0.0
        self.check_left = 0.0
        self.check_ended = 0.0
        self._contention = contention

    def draft(self, seconds: float) -> None:
        """Run the draft device while the host waits. A running target pass continues meanwhile."""
        slow, left = self._contention, self.check_left * self._contention.check
        together = min(seconds * slow.draft, left)
        self.check_left -= together / slow.check
        if left and left - together < _INSTANT:
            self.check_left, self.check_ended = 0.0, self.now + together
        self.now += together + seconds - together / slow.draft

    def wait(self) -> None:
        if self.check_left:
            self.now += self.check_left
            self.check_left, self.check_ended = 0.0, self.now


class _Simulated:
    """A real model with a profile's times."""

    def __init__(self, backend: Backend, cost: PassCost, clock: _Clock, *, is_main: bool) -> None:
        self.clock, self.is_main = clock, is_main
        self.seconds = 0.0
        self._backend, self._cost = backend, cost
        self.vocab_size, self.max_tokens = backend.vocab_size, backend.max_tokens
        # The profile's times are of calls as they are: the padding of the device that computes is not in them.
        self.capabilities = replace(backend.capabilities, steady=None)

    def open(self, max_tokens: int, prompt: Prompt = NO_PROMPT) -> Slot | None:
        return self._backend.open(max_tokens, prompt)

    def clear_prefixes(self) -> None:
        self._backend.clear_prefixes()

    def submit(self, chunks: Seq[Chunk]) -> _Pending:
        context = sum(chunk.slot.length for chunk in chunks) / len(chunks)
        seconds = self._cost.together([len(chunk.token_ids) for chunk in chunks], context)
        pending = _Pending(self, self._backend.submit(chunks).wait(), self.clock.now)
        if self.is_main:
            self.clock.check_left = seconds
        else:
            self.clock.draft(seconds)
        return pending


@dataclass(slots=True)
class _Pending:
    backend: _Simulated
    step: Step
    began: float

    @property
    def done(self) -> bool:
        return not self.backend.is_main or self.backend.clock.check_left <= 0

    def wait(self) -> Step:
        clock = self.backend.clock
        if self.backend.is_main:
            clock.wait()
        # As for calls in the background: the device's own time, even if the host waits later.
        self.backend.seconds += (clock.check_ended if self.backend.is_main else clock.now) - self.began
        return self.step


def simulate(
    engine: Engine, profile: Profile, prompt_token_ids: list[int], config: GenerationConfig, mode: str, *, overlap: bool
) -> Run:
    """Decode one prompt in a mode (see `check_modes`) at a profile's times. Not while requests run.

    All seconds are the profile's, also in the statistics.

    Raises:
        OptionError: for another mode, or without a draft model.
        OutriderError: when the request fails.
    """
    name, clock = _parse(mode), _Clock(profile.contention)
    drafter_name, real = draft_model_of(engine)
    main = _Simulated(engine.main, profile.main, clock, is_main=True)
    # Copies of costs, which follow the calls: the devices stay as they are.
    model = real.on(_Simulated(real.backend, profile.draft, clock, is_main=False), replace(profile.draft))
    config = config.replace(drafter={"plain": None, "auto": "auto", "draft": drafter_name}[name.kind])
    if name.num_assistant_tokens:
        config = config.replace(num_assistant_tokens=name.num_assistant_tokens)
    part: dict[str, Any] = {"backend": main, "cost": replace(profile.main)}
    loaded, models = {"main": replace(engine.loaded["main"], **part)}, {drafter_name: model}
    registry = DrafterRegistry(loaded, models, [*models], encode=engine.tokenizer.encode, contention=profile.contention)
    request = engine.prepare(prompt_token_ids, config)
    request.policy, _ = registry.policy_for(config)
    request.ahead = overlap and request.policy is not None and request.policy.goes_ahead
    if not admit(request, main):
        raise OutriderError("The caches have no room: nothing is simulated while requests run.")
    first, scheduler = None, Scheduler(engine.config.scheduler.max_num_batched_tokens)
    try:
        while not request.ended:
            step(main, [request], scheduler)
            clock.now += profile.host
            if first is None and request.stats.num_generated_tokens:
                first = _Spent.by(clock, main, model)
    finally:
        release(request)
    if request.error:
        raise request.error
    last = _Spent.by(clock, main, model)
    first, stats = first or last, request.stats
    stats.time_to_first_token = first.now
    stats.decode_seconds = last.now - first.now
    stats.check_seconds = last.checking - first.checking
    stats.draft_seconds = last.drafting - first.drafting
    stats.ahead_seconds = last.ahead - first.ahead
    stats.host_seconds = stats.decode_seconds - stats.check_seconds - stats.draft_seconds
    return Run(request.result().token_ids, first.now, last.now, stats.as_dict())


class _Spent(NamedTuple):
    """Seconds so far."""

    now: float
    checking: float
    drafting: float
    ahead: float

    @classmethod
    def by(cls, clock: _Clock, main: _Simulated, model: DraftModel) -> _Spent:
        return cls(clock.now, main.seconds, model.seconds, model.ahead_seconds)


def compare(
    engine: Engine,
    tasks: Seq[Task],
    modes: list[str],
    profile: Profile | None = None,
    advance: Callable[[], None] = lambda: None,
) -> tuple[Profile, list[dict[str, Any]]]:
    """Predict every mode, with and without overlap. Without a profile, also measure the modes and this machine.

    Returns the profile, and for each mode the tokens per second, as geometric means over the prompts. "measured" is 0
    with a given profile. Speed-ups are predicted ones, relative to the first mode.

    Raises:
        OptionError: for a mode that cannot be simulated, or without a draft model. Raised before anything runs.
    """
    check_modes(modes)
    draft_model_of(engine)
    config = engine.config.generation
    host = 0.0
    if profile is None:
        real = make_modes(modes, engine)
        stats = real[0].run(tasks[0].token_ids, config).stats
        host = float(stats["host_seconds"]) / max(stats["num_rounds"], 1)
    kinds = [(mode, overlap) for mode in modes for overlap in ((False,) if mode == "plain" else (False, True))]
    speeds: dict[tuple[str, bool], list[tuple[float, float]]] = {kind: [] for kind in kinds}
    for task in tasks:
        found = profile or measure_profile(engine, host)  # between the runs, as machines vary
        measured = dict.fromkeys(kinds, 0.0) if profile else _measure(engine, real, kinds, task)
        for mode, overlap in kinds:
            run = simulate(engine, found, task.token_ids, config, mode, overlap=overlap)
            speeds[mode, overlap].append((run.tokens_per_second, measured[mode, overlap]))
        advance()
    means = {kind: tuple(_mean(column) for column in zip(*pairs, strict=True)) for kind, pairs in speeds.items()}
    first = means[kinds[0]][0]
    rows = [
        {
            "mode": mode + (", overlapped" if overlap else ""),
            "predicted": predicted,
            "speed_up": predicted / first if first else 0.0,
            "measured": measured_mean,
        }
        for (mode, overlap), (predicted, measured_mean) in means.items()
    ]
    return found, rows


def _measure(
    engine: Engine, modes: Seq[Mode], kinds: Seq[tuple[str, bool]], task: Task
) -> dict[tuple[str, bool], float]:
    """Tokens per second of each mode, with and without overlap, on this machine."""
    runs, overlapped = {mode.name: mode.run for mode in modes}, engine.overlaps
    measured = {}
    try:
        for mode, overlap in kinds:
            engine.overlaps = overlap
            measured[mode, overlap] = runs[mode](task.token_ids, engine.config.generation).tokens_per_second
    finally:
        engine.overlaps = overlapped
    return measured


def _mean(values: Seq[float]) -> float:
    """The geometric mean; 0 if a value is 0."""
    return math.exp(sum(map(math.log, values)) / len(values)) if all(values) else 0.0
