"""The whole distillation, top to bottom: plan, bundle, data, comparison of kinds, training, result.

    options = Options("my-bundle", Path("my-drafter"), kind="eagle3", num_tokens=500_000, hours=2)
    print(distill(options, tell=print).folder)

Each stage leaves what it has made in the work folder, and is skipped where that is there. So whatever was stopped or
killed goes on with the same command.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from filelock import FileLock, Timeout

from outrider.bundle import Bundle
from outrider.bundle.folder import read_bundle
from outrider.bundle.manifest import MANIFEST_NAME
from outrider.config.files import user_path
from outrider.drafters.prediction import Costs, SpeedPrediction, predict
from outrider.errors import ExportError
from outrider.system.files import reading, write_whole
from outrider_distill.answers import DataProgress, write_data
from outrider_distill.card import card, describe
from outrider_distill.data import Data, Recipe, num_tokens_in, tap_names
from outrider_distill.plan import DistillCandidate, DistillPlan, Options, check_options, freeze, make_the_plan
from outrider_distill.prediction import SHARE, DistillTrial, choose, grown, shortfall, writing_speed
from outrider_distill.progress import Live, Stopping, signals_elsewhere
from outrider_distill.prompts import general_prompts, read_prompts, texts_in
from outrider_distill.start import Drafters
from outrider_distill.train.fit import FURTHER_RATE, Stopped, Training, fit, num_batches
from outrider_export.bundles.drafters import add_drafter
from outrider_export.bundles.export import export_bundle
from outrider_export.extras import check_extra
from outrider_export.heads.onnx_main import tap
from outrider_export.progress import Progress, Silent
from outrider_export.target import Target, rewrite

T = TypeVar("T")

EPOCHS = 4
_DATA_HOURS = 0.45  # of all hours, at most: a token is written about as fast as a cut draft model is trained on it
_TRIAL_HOURS = 0.15  # the same of the comparison of kinds, all together
_KEPT = 0.6  # of what is written: the rest are prompts that the model makes, and texts that are left out
_TIMED_STEPS, _TIMED_ACCEPTANCE = 4, 0.7  # of a draft token, late in a training, when more places are reached


@dataclass(frozen=True)
class DistillResult:
    """What was made. folder: of the drafter. shortfall: why it does not pay; "" if it does. report: training.json."""

    folder: Path
    kind: str
    prediction: SpeedPrediction
    shortfall: str
    report: dict[str, Any]


def distill(
    options: Options,
    *,
    progress: Progress | None = None,
    tell: Callable[[str], None] = lambda _: None,
    status: Callable[[str], None] | None = None,
    wait: Callable[[Stopping], float] = lambda _: 0.0,
) -> DistillResult:
    """Make a drafter for a main model, at `options.output`; go on where an earlier run ended.

    progress: of the main model's export. tell: gets lines for the user. status: gets lines that replace the one before.
    wait: called between steps; the seconds that it returns after waiting are none of `options.hours`.

    Raises:
        OptionError: for an invalid option, or another one than the work was begun with.
        ExportError: when something cannot be read, written or trained, the disk lacks room, or another process does
            the same.
        BundleError, DeviceError: as `outrider.load`.
        Stopped: after Ctrl-C or SIGTERM, with a checkpoint.
    """
    check_options(options)
    check_extra("Distilling a drafter", "openvino")
    progress = progress or Silent()
    plan = freeze(make_the_plan(options, progress), options.work / "plan.json")
    with alone(options.work), signals_elsewhere():
        result = _distill(options, plan, progress, tell, status, wait)
    if not options.keep_work:
        shutil.rmtree(options.work, ignore_errors=True)
    return result


def _distill(
    options: Options,
    plan: DistillPlan,
    progress: Progress,
    tell: Callable[[str], None],
    status: Callable[[str], None] | None,
    wait: Callable[[Stopping], float],
) -> DistillResult:
    """All of it, in the work folder that is there."""
    live = Live(plan.lines(), tell, status)
    bundle = _bundle_of(options, live, progress)
    run = _Run(options, bundle, live, progress, wait)
    run.write_data()
    candidate = run.choose()
    head, report = run.train(candidate)
    costs = run.costs
    prediction = predict(report["held_out_acceptance_by_place"], costs)
    more = {"prediction": asdict(prediction), "costs": asdict(costs), "trials": [asdict(each) for each in run.trials]}
    training = describe(options, plan, bundle, report, run.hours, **more)
    folder = run.finish(candidate, head, training)
    tell(
        f"{options.output}: {report['held_out_tokens_per_round']:.2f} tokens per round on held-out text, "
        f"{prediction.speed_up:.2f} times the speed of plain decoding expected here."
    )
    _publish(options, folder, tell)
    return DistillResult(options.output, candidate.kind, prediction, shortfall(prediction, costs, training), training)


@contextmanager
def alone(work: Path) -> Iterator[None]:
    """Raise ExportError if another process is at work in the folder, which is made."""
    try:
        work.mkdir(parents=True, exist_ok=True)
        with FileLock(work / "lock", timeout=0):
            yield
    except Timeout:
        raise ExportError(
            f"Another outrider distill or improve is running in {work}. Wait until it has ended."
        ) from None


def _bundle_of(options: Options, live: Live, progress: Progress) -> Bundle:
    """The main model as a bundle: as it was given, or made in the work folder."""
    folder = options.work / "bundle"
    if not (user_path(options.main) / MANIFEST_NAME).is_file():
        if not folder.exists():
            live.stage("Exporting the main model")
            export_bundle(options.main, output=folder, for_this_machine=False, progress=progress)
        return read_bundle(folder)
    given = read_bundle(user_path(options.main))
    main = given.manifest.main
    if main.format != "onnx" or not options.taps:
        return given

    # A graph in ONNX gives its hidden states if they are outputs in its file.
    def change(target: Target) -> dict[str, object]:
        path = target.new / given.model_path(main).relative_to(given.folder)
        tap(path, tap_names(main.geometry.num_layers), main.geometry.hidden_size)
        return {}

    return rewrite(given, change, Silent(), folder)


def _publish(options: Options, folder: Path, tell: Callable[[str], None]) -> None:
    """Give the result its name, and add it to a bundle if that is asked."""
    folder.rename(options.output)
    if options.into is not None:
        add_drafter(options.into, options.output, name=options.output.name)
        tell(f"{options.into} now has the drafter {options.output.name!r}.")


class _Run:
    """The stages that share the main model, the data and the drafters."""

    def __init__(
        self, options: Options, bundle: Bundle, live: Live, progress: Progress, wait: Callable[[Stopping], float]
    ) -> None:
        self._options, self._work, self._wait = options, options.work, wait
        self._bundle, self._live, self._progress = bundle, live, progress
        self.trials: list[DistillTrial] = []
        self.hours: dict[str, float] = self._stored("hours", dict[str, float], dict)

    def write_data(self) -> None:
        """Write the data that is not there yet."""
        options = self._options
        num_tokens = self._stored("num_tokens", int, self._num_tokens)
        recipe = Recipe(num_tokens, options.taps, options.seed)
        prompts = general_prompts() if options.prompts is None else read_prompts(options.prompts)
        excluded = [] if options.excluded is None else texts_in(options.excluded)
        self._live.stage("Writing data")
        with Stopping() as stopped, _Clock(self, "data") as clock:

            def wrote(state: DataProgress) -> None:
                self._live.wrote(state)
                if self._stops(stopped, clock):
                    raise Stopped(f"The same command continues with {state.num_safe:,} tokens of data.")

            state = write_data(
                options.data, self._bundle, recipe, prompts=prompts, excluded=excluded, progress=wrote,
                is_late=lambda: clock.hours > _DATA_HOURS * options.hours,
            )  # fmt: skip
        self._live.wrote(state)

    def choose(self) -> DistillCandidate:
        """What to train: the only candidate, or the best of a comparison."""
        candidates = self._options.candidates
        if len(candidates) == 1:
            return candidates[0]
        budget = _TRIAL_HOURS * self._options.hours / len(candidates)
        for each in candidates:
            self.trials.append(self._stored(f"trial-{each.name}", DistillTrial, partial(self._try, each, budget)))
            self._live.tell(str(self.trials[-1]))
        return candidates[self.trials.index(choose(self.trials))]

    def train(self, candidate: DistillCandidate) -> tuple[Any, dict[str, Any]]:
        """The trained drafter, and what training.json says of it."""
        self._live.stage(f"Training {candidate.name}")
        return self._fit(candidate, 1.0, self._hours_left, "training")

    @property
    def _hours_left(self) -> float:
        """For training on all data."""
        return max(self._options.hours - sum(self.hours.get(stage, 0.0) for stage in ("data", "trials")), 0.0)

    @property
    def costs(self) -> Costs:
        """What drafting with the kind costs here that was trained last."""
        if self._live.costs is None:
            raise AssertionError("training comes first")
        return self._live.costs

    def finish(self, candidate: DistillCandidate, head: Any, training: dict[str, Any]) -> Path:
        """The result's folder, still in the work folder, with its card."""
        folder = self._work / "result"
        self._drafters.save(candidate, head, folder, training)
        (folder / "README.md").write_text(card(training), encoding="utf-8")
        return folder

    @cached_property
    def _data(self) -> Data:
        """What `write_data` has written."""
        return Data(self._options.data)

    @cached_property
    def _drafters(self) -> Drafters:
        return Drafters(self._bundle, self._data, self._options.seed, self._work, self._progress)

    def _num_tokens(self) -> int:
        """As many tokens as were asked for, or as the hours allow beside those of earlier rounds."""
        speed, there = _KEPT * writing_speed(self._bundle), num_tokens_in(self._options.data)
        wanted, possible = self._options.num_tokens, there + int(speed * 3600 * self._options.hours * _DATA_HOURS)
        hours = max(min(wanted, possible) - there, 0) / speed / 3600
        self._live.tell(f"Data: about {hours:.2f} hours, {speed:.0f} tokens per second; {there:,} tokens are there.")
        if possible < wanted:
            self._live.tell(
                f"Only {possible:,} of {wanted:,} tokens of data fit in {self._options.hours:g} hours with training. "
                "Raise --hours."
            )
        return max(min(wanted, possible), 1)

    def _try(self, candidate: DistillCandidate, hours: float) -> DistillTrial:
        """Train a candidate on a part of the data."""
        self._live.stage(f"Trying {candidate.name} on {SHARE:.0%} of the data")
        _, report = self._fit(candidate, SHARE, hours, "trials")
        acceptance, took = report["held_out_acceptance_by_place"], report["hours"]
        left = (1 - _TRIAL_HOURS) * self._options.hours - self.hours.get("data", 0.0)
        possible = int(left / max(took, 1e-3) * report["steps"])
        expected = grown(report["curve"], min(possible, _planned_steps(report["kind"], self._data)))
        replaced = self._replaced(candidate, report["curve"][0]["acceptance"])
        return DistillTrial(candidate.name, acceptance, expected, predict(expected, self.costs), took, replaced)

    def _replaced(self, candidate: DistillCandidate, acceptance: list[float]) -> float:
        """The speed-up of what a candidate takes the place of; 1 if there is none. acceptance: at its start."""
        if not candidate.replaces:
            return 1.0
        if candidate.is_whole:
            return predict(acceptance, self.costs).speed_up
        both = zip(self._options.candidates, self.trials, strict=False)
        return next(trial.replaced for each, trial in both if each.is_whole and each.source == candidate.source)

    def _stops(self, stopped: Stopping, clock: _Clock) -> bool:
        """Between steps: wait as long as it is asked for, store the hours, and say whether to stop."""
        clock.skip(self._wait(stopped))
        clock.tick()
        return stopped()

    def _fit(self, candidate: DistillCandidate, share: float, hours: float, stage: str) -> tuple[Any, dict[str, Any]]:
        """Train a drafter on a share of the data for these hours at most."""
        data, head = self._data, self._drafters.start(candidate)
        name = candidate.name if share == 1 else f"{candidate.name}-trial"
        costs = self._stored(f"costs-{candidate.name}", Costs, lambda: self._drafters.measure(candidate, head))
        self._live.costs = costs
        steps = self._stored(f"steps-{name}", int, lambda: _num_steps(head, data, share, hours))
        if (planned := _planned_steps(head.kind, data, share)) > steps:
            left = f"{hours:.1f} hours" if hours >= 1 else f"{60 * hours:.0f} minutes"
            self._live.tell(f"Only {steps:,} of {planned:,} steps fit in the remaining {left}. Raise --hours.")
        with Stopping() as stopped, _Clock(self, stage) as clock:
            report = fit(
                head,
                data,
                num_steps=steps,
                seed=self._options.seed,
                share=share,
                learning_rate=FURTHER_RATE[candidate.kind] if candidate.is_whole else None,
                is_trained=candidate.is_trained,
                checkpoint=self._work / "checkpoint" / f"{name}.pt",
                stopped=partial(self._stops, stopped, clock),
                watch=self._live,
            )
        return head, report

    def _stored(self, name: str, kind: type[T], make: Callable[[], T]) -> T:
        """What was measured or decided before, or is now: the work goes on with the same numbers."""
        path = self._work / f"{name}.json"
        if path.exists():
            with reading(str(path), "Delete it.", ExportError):
                return msgspec.json.decode(path.read_bytes(), type=kind)
        made = make()
        self.store(name, made)
        return made

    def store(self, name: str, value: Any) -> None:
        """Write a file of the work folder, whole or not at all."""
        path = self._work / f"{name}.json"
        try:
            write_whole(path, msgspec.json.encode(value))
        except OSError as error:
            raise ExportError(f"{path} cannot be written: {error.strerror}. Make room.") from error


class _Clock:
    """Counts a stage's hours over all runs."""

    def __init__(self, run: _Run, stage: str) -> None:
        self._run, self._stage = run, stage
        self._before = run.hours.get(stage, 0.0)
        self._began = self._stored = time.monotonic()

    def __enter__(self) -> _Clock:
        return self

    def __exit__(self, *_: object) -> None:
        self._store()

    @property
    def hours(self) -> float:
        """Of the stage until now."""
        return self._before + (time.monotonic() - self._began) / 3600

    def skip(self, seconds: float) -> None:
        """Leave these out."""
        self._began += seconds

    def tick(self) -> None:
        """Store the hours now and then, so that a kill loses few."""
        if time.monotonic() - self._stored > 20:
            self._store()

    def _store(self) -> None:
        self._stored = time.monotonic()
        self._run.hours[self._stage] = self.hours
        self._run.store("hours", self._run.hours)


def _planned_steps(kind: str, data: Data, share: float = 1.0) -> int:
    """Steps of `EPOCHS` epochs."""
    return EPOCHS * num_batches(kind, data, share)


def _num_steps(head: Any, data: Data, share: float, hours: float) -> int:
    """Steps of `EPOCHS` epochs, or as many as the hours allow: a few are timed on the head, which is then as before."""
    planned = _planned_steps(head.kind, data, share)
    before = {name: each.detach().clone() for name, each in head.named_parameters() if each.requires_grad}
    training = Training(head, data, planned, 0, share, None)
    training.reach.acceptance.fill_(_TIMED_ACCEPTANCE)
    training.train_batch()
    began = time.monotonic()
    for _ in range(_TIMED_STEPS):
        training.train_batch()
    seconds = (time.monotonic() - began) / _TIMED_STEPS
    head.to("cpu").load_state_dict(before, strict=False)
    return max(min(planned, int(3600 * hours / seconds)), 1)
