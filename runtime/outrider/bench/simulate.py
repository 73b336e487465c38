"""What a pair of models would do on another machine, predicted from what its calls take there.

    profile = read_profile("core-ultra.toml")
    simulate(engine, profile, prompt_token_ids, config, "auto", overlap=True).tokens_per_second

A discrete-event simulation of the real loop: the models run here, so that tokens, drafts and what becomes of them are
real, and so is the controller; only the clock is the profile's. A profile is TOML, in milliseconds::

    name = "GPU and NPU"
    [main]                      # rows: [..], near and far: a call's time with 256 and 2,048 tokens of context
    rows = [1, 4, 16]
    near = [30, 31, 36]
    far = [33, 34, 40]
    [draft]
    …
    [contention]                # how many times as long a call takes while the other model's runs
    check = 1.1
    draft = 1.2
    [host]
    round = 0.6                 # between a check and the next, besides drafting
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec

from outrider.bench.modes import ModeName, Run, make_modes
from outrider.drafters import DraftModel, Suffix
from outrider.errors import OptionError, OutriderError, one_line
from outrider.loop import step
from outrider.schedule import LONGEST, Auto, Contention, PassCost

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as Seq
    from pathlib import Path

    from outrider.bench.prompts import Task
    from outrider.config import GenerationConfig
    from outrider.engine import Engine
    from outrider.types import Backend, Chunk, Slot, Step


class _Calls(msgspec.Struct, forbid_unknown_fields=True):
    rows: tuple[int, ...]
    near: tuple[float, ...]
    far: tuple[float, ...] | None = None

    def cost(self) -> PassCost:
        near = tuple(ms / 1000 for ms in self.near)
        return PassCost(self.rows, near, tuple(ms / 1000 for ms in self.far) if self.far else near)


class _Contention(msgspec.Struct, forbid_unknown_fields=True):
    check: float = 1.0
    draft: float = 1.0


class _Host(msgspec.Struct, forbid_unknown_fields=True):
    round: float = 0.5


class _File(msgspec.Struct, forbid_unknown_fields=True):
    main: _Calls
    draft: _Calls
    name: str = ""
    contention: _Contention = msgspec.field(default_factory=_Contention)
    host: _Host = msgspec.field(default_factory=_Host)


@dataclass(frozen=True, slots=True)
class Profile:
    """What calls take on a machine. host: seconds a round that neither device works."""

    name: str
    main: PassCost
    draft: PassCost
    contention: Contention
    host: float


def read_profile(path: Path) -> Profile:
    """A profile from a file.

    Raises:
        OptionError: when it is not there, or not of the form above.
    """
    try:
        file = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8-sig")), _File)
        costs = file.main.cost(), file.draft.cost()
    except FileNotFoundError as error:
        raise OptionError(f"There is no profile {path}.") from error
    except (OSError, ValueError, tomllib.TOMLDecodeError) as error:  # msgspec's errors are ValueErrors
        raise OptionError(f"Profile {path} cannot be read: {one_line(error)}.") from error
    contention = Contention(file.contention.check, file.contention.draft)
    return Profile(file.name or path.stem, *costs, contention, file.host.round / 1000)


def measure_profile(engine: Engine, host: float, repeats: int = 3) -> Profile:
    """This machine's profile; `host` seconds a round are the reader's to know. Not while requests run."""
    name, _ = draft_model_of(engine)
    engine.measure_costs(repeats)
    return Profile("this machine", engine.costs["main"], engine.costs[name], engine.measure_contention(name), host)


def draft_model_of(engine: Engine) -> tuple[str, DraftModel]:
    """The bundle's draft model, with its name.

    Raises:
        OptionError: when none is loaded.
    """
    for name in engine.bundled_drafters:
        if name in engine.drafters and isinstance(model := engine.find_drafter(name), DraftModel):
            return name, model
    raise OptionError(f"{engine.bundle.folder} has no draft model, and two models are what is simulated.")


class _Clock:
    """Time of a host that drives two devices, in seconds. `check_left`: of the main model's call, were it alone."""

    def __init__(self, contention: Contention) -> None:
        self.now = 0.0
        self.check_left = 0.0
        self._contention = contention

    def draft(self, seconds: float) -> None:
        """The draft device works and the host waits for it; the main device goes on with its call, if it has one."""
        slow = self._contention
        together = min(seconds * slow.draft, self.check_left * slow.check)
        self.check_left -= together / slow.check
        self.now += together + seconds - together / slow.draft

    def wait(self) -> None:
        """The host waits for the main device."""
        self.now += self.check_left
        self.check_left = 0.0


class _Simulated:
    """A real model's tokens at a profile's times."""

    def __init__(self, backend: Backend, cost: PassCost, clock: _Clock, *, is_main: bool) -> None:
        self.clock, self.is_main = clock, is_main
        self.seconds = 0.0
        self._backend, self._cost = backend, cost
        self.vocab_size, self.capabilities = backend.vocab_size, backend.capabilities
        self.max_tokens = backend.max_tokens

    def open(self, max_tokens: int) -> Slot | None:
        return self._backend.open(max_tokens)

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
        if self.backend.is_main:
            self.backend.clock.wait()
        self.backend.seconds += self.backend.clock.now - self.began
        return self.step


def simulate(
    engine: Engine, profile: Profile, prompt_token_ids: list[int], config: GenerationConfig, mode: str, *, overlap: bool
) -> Run:
    """Decode one prompt in a mode, "plain", "auto" or "draft:N", at a profile's times. Not while requests run.

    Raises:
        OptionError: for another mode, or without a draft model.
        OutriderError: what the request failed of.
    """
    name, clock = ModeName.parse(mode), _Clock(profile.contention)
    if name.kind not in ("plain", "auto", "draft"):
        raise OptionError(f"Mode '{mode}' cannot be simulated: choose from plain, auto and draft:N.")
    costs = replace(profile.main), replace(profile.draft)  # the controller adapts them
    _, real = draft_model_of(engine)
    main = _Simulated(engine.main, costs[0], clock, is_main=True)
    model = real.on(_Simulated(real.backend, profile.draft, clock, is_main=False))
    auto = Auto(main, costs[0], copier=Suffix(), model=model, draft_cost=costs[1], contention=profile.contention)
    drafter = {"plain": None, "auto": auto, "draft": model}[name.kind]
    request = engine.prepare(prompt_token_ids, config.replace(drafter=None))
    request.drafter, request.ahead_drafter = drafter, drafter if overlap else None
    request.num_assistant_tokens = LONGEST if drafter is auto else name.num_assistant_tokens or 3
    if not request.admit(main):
        raise OutriderError("The caches have no room: nothing is simulated while requests run.")
    try:
        first = None
        while not request.ended:
            step(main, [request], engine.config.scheduler.max_num_batched_tokens)
            clock.now += profile.host
            if first is None and request.stats.num_generated_tokens:
                first = clock.now
    finally:
        request.release()
    if request.error:
        raise request.error
    return Run(request.result().token_ids, first or clock.now, clock.now, request.stats.as_dict())


def compare(
    engine: Engine,
    tasks: Seq[Task],
    modes: list[str],
    profile: Profile | None = None,
    advance: Callable[[], None] = lambda: None,
) -> tuple[Profile, list[dict[str, Any]]]:
    """Predict every mode, apart and overlapped; without a profile, measure the modes and the machine's own as well.

    Returns the profile, and for each mode the tokens a second, as geometric means over the prompts; "measured" is 0
    where nothing was. Speed-ups are of what was predicted, against the first mode.
    """
    overlapped = engine.overlaps
    config = engine.config.generation
    real = {mode.name: mode for mode in make_modes(modes, engine)}
    host = 0.0
    if profile is None:
        stats = real[modes[0]].run(tasks[0].token_ids, config).stats
        host = float(stats["host_seconds"]) / max(stats["num_rounds"], 1)
    kinds = [(mode, overlap) for mode in modes for overlap in ((False,) if mode == "plain" else (False, True))]
    speeds: dict[tuple[str, bool], list[tuple[float, float]]] = {kind: [] for kind in kinds}
    for task in tasks:
        measured = dict.fromkeys(kinds, 0.0)
        if profile is None:
            for mode, engine.overlaps in kinds:
                measured[mode, engine.overlaps] = real[mode].run(task.token_ids, config).tokens_per_second
            engine.overlaps = overlapped
        found = profile or measure_profile(engine, host)  # beside the runs: machines sway
        for mode, overlap in kinds:
            run = simulate(engine, found, task.token_ids, config, mode, overlap=overlap)
            speeds[mode, overlap].append((run.tokens_per_second, measured[mode, overlap]))
        advance()
    means = {kind: tuple(_mean(column) for column in zip(*pairs, strict=True)) for kind, pairs in speeds.items()}
    rows = [
        {
            "mode": mode + (", overlapped" if overlap else ""),
            "predicted": predicted,
            "speed_up": predicted / means[kinds[0]][0],
            "measured": measured_mean,
        }
        for (mode, overlap), (predicted, measured_mean) in means.items()
    ]
    return found, rows


def _mean(values: Seq[float]) -> float:
    """The geometric mean; 0 where a value is."""
    return math.exp(sum(map(math.log, values)) / len(values)) if all(values) else 0.0
