"""Chooses a model's setting: precision, quantisation groups, threads and padding.

Settings differ in speed, and in whether rows have the same bits in any batch. Which one is best depends on the
processor. So they are tried at the first load, on slices of the model where it has some. There is one order of
preference. The first setting that is exact and close enough to f32 is taken, unless a later one is faster by a tenth,
or by a fifth in another precision. Times of two loads differ by smaller gains, and another precision is another text.
"""

import contextlib
import dataclasses
import gc
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

from outrider.errors import DeviceError, one_line
from outrider.models.backends.columns import COLUMNS
from outrider.models.backends.slices import Slices
from outrider.models.tuning.candidates import fewer_threads, settings_for
from outrider.models.tuning.measure import has_groups
from outrider.models.tuning.measure.cost import FAR, NEAR
from outrider.models.tuning.measured import Measured
from outrider.models.tuning.model_spec import ModelSpec
from outrider.models.tuning.reference import Reference
from outrider.models.tuning.setting import Choice, Setting, Trial
from outrider.system.progress import report
from outrider.system.together import start, together
from outrider.types import Exactness, RowRule

# Nats: the mean over a text's tokens of KL(logits in f32 without dynamic quantisation ‖ logits). The loss of 8-bit
# weights is of this size. Groups of 32 lose 0.001 to 0.003, of 128 0.004 to 0.008, of 512 0.022 to 0.027. On slices
# these are 0.001, 0.001 to 0.003 and 0.003 to 0.008: there, this limit finds only settings that are far off.
MAX_KL = 0.01

# The calls that score a setting, as (tokens, context), and how often each is made. Main model: a prompt of 256 tokens
# and 60 rounds, half of them with drafts. Draft model: as many rounds of three draft tokens. With short and long
# contexts, as the speed of attention depends on the precision, too.
_MAIN_CALLS = {(1, NEAR): 15, (8, NEAR): 15, (1, FAR): 15, (8, FAR): 15, (128, NEAR): 2}
_DRAFT_CALLS = {(1, NEAR): 90, (1, FAR): 90, (128, NEAR): 2}

_NEVER = 1e9  # seconds of a setting that cannot be used
_GAIN = 0.9  # of the time of the setting before, at most, that another one takes if it is to be preferred
# The same in another precision. bf16 takes 0.84 to 1.04 of f32's time with SmolLM2 on an AMD processor with AVX-512.
_GAIN_OF_PRECISION = 0.8
_FEW_ROWS = 2  # that calls are padded to at little cost
_PLAIN = 1, 128  # rows of plain rounds' calls, and of prompts'
_MOST_OF_PROMPTS = 1.05  # of the time of the setting before, that prompts take with more columns
_TURNS = 4  # more measurements of two settings, before the second one is preferred
_NUM_SCREENED = 2  # calls that are timed on a slice before all others
_EXACT, _CLOSE, _INEXACT, _SLOWER = "exact", "close to f32", "not exact", "slower"
_AS_MANY_ROWS = "calls need as many rows"
_USABLE = (_EXACT, _CLOSE)
_RANK = {_EXACT: 0, _CLOSE: 0, _INEXACT: 1}


def choose(spec: ModelSpec) -> tuple[Choice, Measured | None]:
    """Try the settings that the options allow, in the order of preference. Raises as `ModelSpec.compile`.

    Returns the choice, and the model as it was measured in that setting; None where it was not kept.
    """
    slices = spec.slices()
    candidates = list(settings_for(spec))
    num_threads = fewer_threads(spec)
    if len(candidates) == 1 and (spec.is_main or spec.is_small or not num_threads):
        return _only(spec, slices, candidates[0])
    search = _Search(spec, slices, candidates)
    search.prepare()
    best = search.preferred() or search.nearest()
    if best is not None:
        best = search.with_fewer_threads(search.with_columns(best), num_threads)
    # If none is exact: the fastest that was examined. If there is none either: the first candidate.
    trials = search.trials
    setting = (best or min(trials, key=lambda trial: (_RANK.get(trial.verdict, len(_RANK)), trial.score))).setting
    report(f"{spec} will run in {setting}.")
    return Choice(setting, tuple(trials)), search.kept(setting) if best is not None else None


class _Search:
    """The trials of a model's settings, in the order of preference.

    Whether a setting is exact takes longer to measure than its times. So it is measured of the one that would be taken,
    and of the next one if that is not exact, or no longer faster with the padding that makes it exact. Where there are
    slices, it is measured of the first setting while others are compiled: its bits do not depend on the machine's load.
    """

    def __init__(self, spec: ModelSpec, slices: Slices | None, settings: Sequence[Setting]) -> None:
        self._spec, self._slices, self._settings = spec, slices, settings
        self._reference = Reference(spec, slices.large if slices else None)
        self._calls = _MAIN_CALLS if spec.is_main else _DRAFT_CALLS
        self._trials: dict[str, Trial] = {}
        self._kept: dict[str, Measured] = {}
        self._scores: dict[tuple[str, str], tuple[float, float]] = {}  # of two settings when they had been compared
        self._examined: dict[str, Trial] = {}  # without times
        self._padded: set[str] = set()
        self._ahead: dict[str, Future[Any]] = {}

    @property
    def trials(self) -> list[Trial]:
        """All trials so far, in the order of preference."""
        return list(self._trials.values())

    def prepare(self) -> None:
        """Compile and examine at the same time, before anything is timed, if there are slices.

        One thread compiles: the reference, slices of the settings that will be tried, and the whole model in the first
        of them, which is mostly taken. The other one examines the first setting.
        """
        if self._slices is None:
            return
        report(f"{self._spec} is compiled.")
        first, *others = self._settings
        others = [each for i, each in enumerate(others, 1) if not any(map(each.is_narrower, self._settings[:i]))]
        makes: list[Callable[[], Any]] = [
            self._reference.prepare,
            *(partial(Measured, self._spec, each, self._slices, both=True) for each in others),
            partial(self._spec.compile, first),
        ]
        with start(makes) as (reference, *compiled, whole):
            self._ahead = dict(zip(map(str, others), compiled, strict=True))
            with contextlib.suppress(DeviceError):  # which the trial will meet, too
                measured = self._compile(first, both=True)
                measured.whole = whole
                wait([reference])
                report(f"{self._spec} is checked for exactness in {first}")
                examined = self._examined[str(first)] = self._examine(measured)
                for each in others if examined.verdict == _EXACT else ():
                    self._pad_as(examined.setting.exactness, self._compile(each))

    def kept(self, setting: Setting) -> Measured | None:
        """The slices that were measured in this setting. A whole model takes too much memory to be kept."""
        return self._kept.get(str(setting)) if self._slices else None

    def preferred(self) -> Trial | None:
        """The first setting that is exact and close to f32, or a later one that is faster enough; None if none is."""
        while (first := self._fastest()) is not None and first.verdict == _SLOWER:
            if not self._timed_with_padding(first):
                report(f"{self._spec} is checked for exactness in {first.setting}")
                self._examined_and_timed(first.setting)
        self._ahead.clear()
        return first

    def nearest(self) -> Trial | None:
        """The setting that is nearest to f32 where all are too far from it, if it is exact; None if not.

        Its exactness is measured, too: a model that loses much in any setting has no other one to run in.
        """
        far = [trial for trial in self.trials if trial.kl is not None and trial.kl > MAX_KL]
        if not far or any(trial.verdict == _INEXACT for trial in self.trials):
            return None
        nearest = min(far, key=lambda trial: trial.kl or 0.0)
        report(f"{self._spec} is checked for exactness in {nearest.setting}")
        self._try(nearest.setting, lambda measured: self._with_times(self._made_exact(measured, nearest.kl), measured))
        trial = self._trials[str(nearest.setting)]
        return trial if trial.verdict in _USABLE else None

    def with_columns(self, best: Trial) -> Trial:
        """The best trial, or one with columns appended to products, if calls then need fewer rows and less time.

        For models whose calls are padded to more rows than two.
        """
        before = best.setting.exactness
        is_padded = best.verdict == _EXACT and before.rule.num_rows([1]) > _FEW_ROWS
        if not is_padded or not self._spec.can_append():
            return best
        setting = dataclasses.replace(best.setting, exactness=Exactness(), columns=COLUMNS)
        report(f"{self._spec} is measured with columns of zeros: {setting}")

        def measure(measured: Measured) -> Trial:
            if has_groups(measured.main, before.groups):
                return Trial(setting, {}, _NEVER, None, _AS_MANY_ROWS)
            return self._with_times(self._examine(measured), measured)

        self._try(setting, measure)
        trial = self._trials[str(setting)]
        if trial.verdict != _EXACT:
            return best
        if not {str(setting), str(best.setting)} <= {*self._kept}:
            return trial if self._is_faster(trial, best) else best
        for _ in range(_TURNS):  # noise meets both alike, and a load of the machine for a while does not decide
            trial, best = self._timed_again(trial), self._timed_again(best)
            if self._is_faster(trial, best):
                return trial
        return best

    def _is_faster(self, trial: Trial, best: Trial) -> bool:
        """Whether plain rounds are faster enough, and prompts and rounds with drafts not slower."""
        (rounds, prompts), others = ([each.seconds[count] for count in _PLAIN] for each in (trial, best))
        is_faster = rounds < _GAIN * others[0] and prompts < _MOST_OF_PROMPTS * others[1]
        return is_faster and trial.score < best.score

    def with_fewer_threads(self, best: Trial, counts: Sequence[int]) -> Trial:
        """The best trial with these numbers of threads, tried as long as each is faster than the one before."""
        for count in counts:
            setting = dataclasses.replace(best.setting, num_threads=count)
            trial = self._timed(setting, best, f"{self._spec} is measured with fewer threads: {setting}")
            trial, best = self._compared(trial, best)
            if self._gains(trial, best):
                trial = self._examined_and_timed(setting)
            if trial.verdict not in _USABLE or not self._gains(trial, best):
                break
            best = trial
        return best

    def _fastest(self) -> Trial | None:
        """The setting that would be taken if all that were not examined yet were exact."""
        best: Trial | None = None
        slower: set[str] = set()  # precisions; other groups do not make up for that
        for i, setting in enumerate(self._settings, 1):
            if setting.precision in slower or (best is not None and setting.is_narrower(best.setting)):
                continue
            what = f"{self._spec} is measured on {self._spec.device}, setting {i} of {len(self._settings)}: {setting}"
            trial = self._timed(setting, best, what)
            if trial.verdict not in (*_USABLE, _SLOWER):
                continue
            if best is not None:
                trial, best = self._compared(trial, best)
            if best is None or self._gains(trial, best):
                best = trial
            elif best.setting.precision != setting.precision:
                slower.add(setting.precision)
        return best

    def _compared(self, trial: Trial, best: Trial) -> tuple[Trial, Trial]:
        """Both trials, timed again in turns as long as the first one seems faster, so that noise meets both alike.

        Only with the same padding: another one will change the times.
        """
        names = str(trial.setting), str(best.setting)
        kept = [self._kept.get(name) for name in names]
        is_known = self._scores.get(names) == (trial.score, best.score)
        if is_known or None in kept or len({each.rule for each in kept if each}) > 1:
            return trial, best
        for _ in range(_TURNS):
            if not self._gains(trial, best):
                break
            trial, best = self._timed_again(trial), self._timed_again(best)
        self._scores[names] = trial.score, best.score
        return trial, best

    def _timed_again(self, trial: Trial) -> Trial:
        """The trial with the shorter times of two measurements."""
        name = str(trial.setting)
        measured = self._kept[name]
        measured.time_again()
        timed = self._time(measured)
        self._trials[name] = dataclasses.replace(trial, seconds=timed.seconds, score=timed.score)
        return self._trials[name]

    def _timed_with_padding(self, trial: Trial) -> bool:
        """Time a setting that needs the padding of one that was found exact with it; False: there is none, or twice."""
        exact = next((each.setting.exactness for each in self.trials if each.verdict == _EXACT), Exactness())
        found = False

        def measure(measured: Measured) -> Trial:
            nonlocal found
            found = self._pad_as(exact, measured)
            return self._time(measured) if found else trial

        self._try(trial.setting, measure)
        return found

    def _pad_as(self, exact: Exactness, measured: Measured) -> bool:
        """Give a setting the padding of one that is exact with it, if it needs the same; False if not, or if it had it.

        It was not measured yet whether the setting is exact with it. But its times will be those with a padding.
        """
        name = str(measured.setting)
        if exact.rule == RowRule() or name in self._padded or not has_groups(measured.main, exact.groups):
            return False
        self._padded.add(name)
        measured.use(exact)
        return True

    def _gains(self, trial: Trial, best: Trial) -> bool:
        same = trial.setting.precision == best.setting.precision
        return trial.score < (_GAIN if same else _GAIN_OF_PRECISION) * best.score

    def _timed(self, setting: Setting, best: Trial | None, what: str) -> Trial:
        """The trial of a setting; if there is none yet, its times alone. what: reported if it is timed now."""
        name = str(setting)
        if name not in self._trials:
            report(what)
            if (examined := self._examined.get(name)) is not None:
                self._try(setting, partial(self._with_times, examined))
            else:
                self._try(setting, lambda measured: (best and self._screen(measured, best)) or self._time(measured))
        return self._trials[name]

    def _try(self, setting: Setting, measure: Callable[[Measured], Trial]) -> None:
        """Measure a setting. A failure of the device is its verdict."""
        name = str(setting)
        try:
            measured = self._compile(setting)
            self._trials[name] = measure(measured)
        except DeviceError as error:
            self._trials[name] = Trial(setting, {}, _NEVER, None, one_line(error))
            self._kept.pop(name, None)
        gc.collect()

    def _compile(self, setting: Setting, *, both: bool = False) -> Measured:
        """The model for measurements, if it was not compiled before. Slices are kept, and one whole model at most."""
        name = str(setting)
        if name not in self._kept:
            if self._slices is None:
                self._kept.clear()
                gc.collect()
            ahead = self._ahead.pop(name, None)
            self._kept[name] = ahead.result() if ahead else Measured(self._spec, setting, self._slices, both=both)
        return self._kept[name]

    def _screen(self, measured: Measured, best: Trial) -> Trial | None:
        """A trial of the slice alone, if that is slower than in the best setting, so that the whole model is, too."""
        other = self._kept.get(str(best.setting))
        if other is None:
            return None
        mine, others = (
            sum(self._calls[call] * each.seconds_of_slice(call) for call in list(self._calls)[:_NUM_SCREENED])
            for each in (measured, other)
        )
        return Trial(measured.setting, {}, mine / others * best.score, None, _SLOWER) if mine >= others else None

    def _time(self, measured: Measured) -> Trial:
        """Time a request's calls."""
        taken = measured.seconds(self._calls)
        means = {}
        for tokens in dict.fromkeys(count for count, _ in self._calls):
            of = {call: times for call, times in self._calls.items() if call[0] == tokens}
            means[tokens] = sum(times * taken[call] for call, times in of.items()) / sum(of.values())
        score = sum(times * taken[call] for call, times in self._calls.items())
        return Trial(measured.setting, means, score, None, _SLOWER)

    def _examined_and_timed(self, setting: Setting) -> Trial:
        """The trial of a setting that is examined now, and timed with the padding that makes it exact."""
        self._try(setting, lambda measured: self._with_times(self._examine(measured), measured))
        return self._trials[str(setting)]

    def _examine(self, measured: Measured) -> Trial:
        """Measure whether a setting is close to f32 and exact, and give it the padding that makes it so."""
        kl = self._reference.kl(measured.main) if self._spec.is_main else None
        if kl is not None and not kl <= MAX_KL:  # it may be no number
            return Trial(measured.setting, {}, _NEVER, kl, f"too far from f32: a difference above {MAX_KL:g}")
        return self._made_exact(measured, kl)

    def _made_exact(self, measured: Measured, kl: float | None) -> Trial:
        """Measure whether a setting is exact, and give it the padding that makes it so. kl: what was measured of it."""
        setting = dataclasses.replace(measured.setting, exactness=measured.needed())
        measured.use(setting.exactness)
        verdict = _CLOSE if not self._spec.is_main else _EXACT if setting.exactness.holds else _INEXACT
        return Trial(setting, {}, _NEVER, kl, verdict)

    def _with_times(self, examined: Trial, measured: Measured) -> Trial:
        """The trial of a setting that was examined, timed with its padding."""
        setting = examined.setting
        if examined.verdict in _USABLE:
            setting = dataclasses.replace(setting, exactness=measured.cheapest(setting.exactness))
        timed = self._time(measured)
        return dataclasses.replace(examined, setting=setting, seconds=timed.seconds, score=timed.score)


def _only(spec: ModelSpec, slices: Slices | None, setting: Setting) -> tuple[Choice, Measured]:
    """The only setting that a model may have."""
    said = f"{spec} is measured on {spec.device}: {setting}"
    if slices is None:
        measured = Measured(spec, setting)
        if not spec.is_small:
            report(said)
    else:
        report(said)
        makes: list[Callable[[], Any]] = [
            partial(Measured, spec, setting, slices, both=True),
            partial(spec.compile, setting),
        ]
        made, whole = together(makes)
        measured = made.result()
        measured.whole = whole
    setting = dataclasses.replace(setting, exactness=measured.cheapest(measured.needed()))
    return Choice(setting), measured
