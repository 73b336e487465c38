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
from outrider.models.cost.table import FAR, NEAR
from outrider.models.tuning.measure import has_groups
from outrider.models.tuning.measured import Measured
from outrider.models.tuning.model_spec import ModelSpec
from outrider.models.tuning.reference import Reference
from outrider.models.tuning.setting import Choice, Setting, Trial, fewer_threads, settings_for
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

_CPU_GROUP_SIZE = 32  # the CPU's own choice
_NEVER = 1e9  # seconds of a setting that cannot be used
_GAIN = 0.9  # of the time of the setting before, at most, that another one takes if it is to be preferred
# The same in another precision. bf16 takes 0.84 to 1.04 of f32's time with SmolLM2 on an AMD processor with AVX-512.
_GAIN_OF_PRECISION = 0.8
_FEW_ROWS = 2  # that calls are padded to at little cost
_PLAIN = 1, 128  # rows of plain rounds' calls, and of prompts'
_MOST_OF_PROMPTS = 1.05  # of the time of the setting before, that prompts take with more columns
_TURNS = 4  # more measurements of two settings, before the second one is preferred
_NUM_SCREENED = 2  # calls that are timed on a slice before all others
_UNTRIED, _EXACT, _CLOSE, _INEXACT, _SLOWER = "not tried", "exact", "close to f32", "not exact", "slower"
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
    trials = search.trials
    # If none is exact: the fastest that was examined. If there is none either: the first candidate.
    taken = best.trial if best else min(trials, key=lambda each: (_RANK.get(each.verdict, len(_RANK)), each.score))
    report(f"{spec} will run in {taken.setting}.")
    # A whole model takes too much memory to be kept.
    return Choice(taken.setting, tuple(trials)), best.measured if best and slices else None


class _Candidate:
    """A setting that may be chosen, and what was found of it so far."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.trial = _untimed(setting, _UNTRIED)
        self.examined: Trial | None = None  # whether it is exact, if that is known before its times
        self.measured: Measured | None = None  # the model in it, compiled
        self.ahead: Future[Any] | None = None  # the same, while another thread compiles it
        self.is_padded = False  # as a setting that is exact with this padding
        self.compared: tuple[str, float, float] | None = None  # with this setting; both scores afterwards


class _Search:
    """The trials of a model's settings, in the order of preference.

    Whether a setting is exact takes longer to measure than its times. So it is measured of the one that would be taken,
    and of the next one if that is not exact, or no longer faster with the padding that makes it exact. Where there are
    slices, it is measured of the first setting while others are compiled: its bits do not depend on the machine's load.
    """

    def __init__(self, spec: ModelSpec, slices: Slices | None, settings: Sequence[Setting]) -> None:
        self._spec, self._slices = spec, slices
        self._candidates = [_Candidate(setting) for setting in settings]
        self._reference = Reference(spec, slices.large if slices else None)
        self._calls = _MAIN_CALLS if spec.is_main else _DRAFT_CALLS

    @property
    def trials(self) -> list[Trial]:
        """All trials so far, in the order of preference."""
        return [each.trial for each in self._candidates if each.trial.verdict != _UNTRIED]

    def prepare(self) -> None:
        """Compile and examine at the same time, before anything is timed, if there are slices.

        One thread compiles: the reference, slices of the settings that will be tried, and the whole model in the first
        of them, which is mostly taken. The other one examines the first setting.
        """
        if self._slices is None:
            return
        report(f"{self._spec} is compiled.")
        settings = [each.setting for each in self._candidates]
        first, *others = (
            each
            for i, each in enumerate(self._candidates)
            if not any(_is_narrower(each.setting, other) for other in settings[:i])
        )
        makes: list[Callable[[], Any]] = [
            self._reference.prepare,
            *(partial(Measured, self._spec, each.setting, self._slices, both=True) for each in others),
            partial(self._spec.compile, first.setting),
        ]
        with start(makes) as (reference, *compiled, whole):
            for each, ahead in zip(others, compiled, strict=True):
                each.ahead = ahead
            with contextlib.suppress(DeviceError):  # which the trial will meet, too
                measured = self._compile(first, both=True)
                measured.whole = whole
                wait([reference])
                report(f"{self._spec} is checked for exactness in {first.setting}")
                first.examined = self._examine(measured)
                for each in others if first.examined.verdict == _EXACT else ():
                    self._pad_as(first.examined.setting.exactness, each)

    def preferred(self) -> _Candidate | None:
        """The first setting that is exact and close to f32, or a later one that is faster enough; None if none is."""
        while (first := self._fastest()) is not None and first.trial.verdict == _SLOWER:
            if not self._time_with_padding(first):
                report(f"{self._spec} is checked for exactness in {first.setting}")
                self._examine_and_time(first)
        for each in self._candidates:
            each.ahead = None
        return first

    def nearest(self) -> _Candidate | None:
        """The setting that is nearest to f32 where all are too far from it, if it is exact; None if not.

        Its exactness is measured, too: a model that loses much in any setting has no other one to run in.
        """
        far = [each for each in self._candidates if each.trial.kl is not None and each.trial.kl > MAX_KL]
        if not far or any(trial.verdict == _INEXACT for trial in self.trials):
            return None
        nearest = min(far, key=lambda each: each.trial.kl or 0.0)
        kl = nearest.trial.kl
        report(f"{self._spec} is checked for exactness in {nearest.setting}")
        self._try(nearest, lambda measured: self._with_times(self._made_exact(measured, kl), measured))
        return nearest if nearest.trial.verdict in _USABLE else None

    def with_columns(self, best: _Candidate) -> _Candidate:
        """The best setting, or it with columns appended to products, if calls then need fewer rows and less time.

        For models whose calls are padded to more rows than two.
        """
        before = best.trial.setting.exactness
        is_padded = best.trial.verdict == _EXACT and before.rule.num_rows([1]) > _FEW_ROWS
        if not is_padded or not self._spec.can_append():
            return best
        wide = self._add(dataclasses.replace(best.setting, exactness=Exactness(), columns=COLUMNS))
        report(f"{self._spec} is measured with columns of zeros: {wide.setting}")

        def measure(measured: Measured) -> Trial:
            if has_groups(measured.main, before.groups):
                return _untimed(wide.setting, _AS_MANY_ROWS)
            return self._with_times(self._examine(measured), measured)

        self._try(wide, measure)
        if wide.trial.verdict != _EXACT:
            return best
        if not (wide.measured and best.measured):
            return wide if _is_faster(wide.trial, best.trial) else best
        for _ in range(_TURNS):  # noise meets both alike, and a load of the machine for a while does not decide
            self._time_both_again(wide, best)
            if _is_faster(wide.trial, best.trial):
                return wide
        return best

    def with_fewer_threads(self, best: _Candidate, counts: Sequence[int]) -> _Candidate:
        """The best setting with these numbers of threads, tried as long as each is faster than the one before."""
        for count in counts:
            fewer = self._add(dataclasses.replace(best.trial.setting, num_threads=count))
            self._time_first(fewer, best, f"{self._spec} is measured with fewer threads: {fewer.setting}")
            self._compare(fewer, best)
            if _gains(fewer.trial, best.trial):
                self._examine_and_time(fewer)
            if fewer.trial.verdict not in _USABLE or not _gains(fewer.trial, best.trial):
                break
            best = fewer
        return best

    def _add(self, setting: Setting) -> _Candidate:
        self._candidates.append(_Candidate(setting))
        return self._candidates[-1]

    def _fastest(self) -> _Candidate | None:
        """The setting that would be taken if all that were not examined yet were exact."""
        best: _Candidate | None = None
        slower: set[str] = set()  # precisions; other groups do not make up for that
        for i, each in enumerate(self._candidates, 1):
            setting = each.setting
            if setting.precision in slower or (best is not None and _is_narrower(setting, best.setting)):
                continue
            what = f"setting {i} of {len(self._candidates)}: {setting}"
            self._time_first(each, best, f"{self._spec} is measured on {self._spec.device}, {what}")
            if each.trial.verdict not in (*_USABLE, _SLOWER):
                continue
            if best is not None:
                self._compare(each, best)
            if best is None or _gains(each.trial, best.trial):
                best = each
            elif best.setting.precision != setting.precision:
                slower.add(setting.precision)
        return best

    def _compare(self, each: _Candidate, best: _Candidate) -> None:
        """Time both again in turns as long as the first one seems faster, so that noise meets both alike.

        Only with the same padding: another one will change the times.
        """
        is_known = each.compared == (str(best.setting), each.trial.score, best.trial.score)
        if is_known or not (each.measured and best.measured) or each.measured.rule != best.measured.rule:
            return
        for _ in range(_TURNS):
            if not _gains(each.trial, best.trial):
                break
            self._time_both_again(each, best)
        each.compared = str(best.setting), each.trial.score, best.trial.score

    def _time_both_again(self, *candidates: _Candidate) -> None:
        """Take the shorter times of two measurements."""
        for each in candidates:
            measured = self._compile(each)
            measured.time_again()
            timed = self._time(measured)
            each.trial = dataclasses.replace(each.trial, seconds=timed.seconds, score=timed.score)

    def _time_with_padding(self, each: _Candidate) -> bool:
        """Time a setting that needs the padding of one that was found exact with it; False: there is none, or twice."""
        exact = next((trial.setting.exactness for trial in self.trials if trial.verdict == _EXACT), Exactness())
        if each.is_padded or exact.rule == RowRule():
            return False
        self._try(each, lambda measured: self._time(measured) if self._pad_as(exact, each) else each.trial)
        return each.is_padded

    def _pad_as(self, exact: Exactness, each: _Candidate) -> bool:
        """Give a setting the padding of one that is exact with it, if it needs the same; False if not.

        It was not measured yet whether the setting is exact with it. But its times will be those with a padding.
        """
        measured = self._compile(each)
        if exact.rule == RowRule() or not has_groups(measured.main, exact.groups):
            return False
        each.is_padded = True
        measured.use(exact)
        return True

    def _time_first(self, each: _Candidate, best: _Candidate | None, what: str) -> None:
        """Measure the times of a setting that was not tried yet. what: reported then."""
        if each.trial.verdict == _UNTRIED:
            report(what)
            if each.examined is not None:
                self._try(each, partial(self._with_times, each.examined))
            else:
                self._try(each, lambda measured: (best and self._screen(measured, best)) or self._time(measured))

    def _try(self, each: _Candidate, measure: Callable[[Measured], Trial]) -> None:
        """Measure a setting. A failure of the device is its verdict."""
        try:
            each.trial = measure(self._compile(each))
        except DeviceError as error:
            each.trial, each.measured = _untimed(each.setting, one_line(error)), None
        gc.collect()

    def _compile(self, each: _Candidate, *, both: bool = False) -> Measured:
        """The model for measurements, if it was not compiled before. Slices are kept, and one whole model at most."""
        if each.measured is None:
            if self._slices is None:
                for other in self._candidates:
                    other.measured = None
                gc.collect()
            ahead, each.ahead = each.ahead, None
            each.measured = ahead.result() if ahead else Measured(self._spec, each.setting, self._slices, both=both)
        return each.measured

    def _screen(self, measured: Measured, best: _Candidate) -> Trial | None:
        """A trial of the slice alone, if that is slower than in the best setting, so that the whole model is, too."""
        if best.measured is None:
            return None
        mine, others = (
            sum(self._calls[call] * each.seconds_of_slice(call) for call in list(self._calls)[:_NUM_SCREENED])
            for each in (measured, best.measured)
        )
        return Trial(measured.setting, {}, mine / others * best.trial.score, None, _SLOWER) if mine >= others else None

    def _time(self, measured: Measured) -> Trial:
        """Time a request's calls."""
        taken = measured.seconds(self._calls)
        means = {}
        for tokens in dict.fromkeys(count for count, _ in self._calls):
            of = {call: times for call, times in self._calls.items() if call[0] == tokens}
            means[tokens] = sum(times * taken[call] for call, times in of.items()) / sum(of.values())
        score = sum(times * taken[call] for call, times in self._calls.items())
        return Trial(measured.setting, means, score, None, _SLOWER)

    def _examine_and_time(self, each: _Candidate) -> None:
        """Examine a setting, and time it with the padding that makes it exact."""
        self._try(each, lambda measured: self._with_times(self._examine(measured), measured))

    def _examine(self, measured: Measured) -> Trial:
        """Measure whether a setting is close to f32 and exact, and give it the padding that makes it so."""
        kl = self._reference.kl(measured.main) if self._spec.is_main else None
        if kl is not None and not kl <= MAX_KL:  # it may be no number
            return _untimed(measured.setting, f"too far from f32: a difference above {MAX_KL:g}", kl)
        return self._made_exact(measured, kl)

    def _made_exact(self, measured: Measured, kl: float | None) -> Trial:
        """Measure whether a setting is exact, and give it the padding that makes it so. kl: what was measured of it."""
        setting = dataclasses.replace(measured.setting, exactness=measured.needed())
        measured.use(setting.exactness)
        return _untimed(
            setting, _CLOSE if not self._spec.is_main else _EXACT if setting.exactness.holds else _INEXACT, kl
        )

    def _with_times(self, examined: Trial, measured: Measured) -> Trial:
        """The trial of a setting that was examined, timed with its padding."""
        setting = examined.setting
        if examined.verdict in _USABLE:
            setting = dataclasses.replace(setting, exactness=measured.cheapest(setting.exactness))
        timed = self._time(measured)
        return dataclasses.replace(examined, setting=setting, seconds=timed.seconds, score=timed.score)


def _untimed(setting: Setting, verdict: str, kl: float | None = None) -> Trial:
    return Trial(setting, {}, _NEVER, kl, verdict)


def _is_narrower(setting: Setting, other: Setting) -> bool:
    """Whether a setting differs in its narrower groups, which is closer to f32, and not faster by a tenth."""
    of_same = setting.precision == other.precision and setting.cache_precision == other.cache_precision
    return of_same and (setting.group_size or _CPU_GROUP_SIZE) < (other.group_size or _CPU_GROUP_SIZE)


def _gains(trial: Trial, best: Trial) -> bool:
    """Whether a setting is so much faster that it is preferred."""
    same = trial.setting.precision == best.setting.precision
    return trial.score < (_GAIN if same else _GAIN_OF_PRECISION) * best.score


def _is_faster(trial: Trial, best: Trial) -> bool:
    """Whether plain rounds are faster enough, and prompts and rounds with drafts not slower."""
    (rounds, prompts), others = ([each.seconds[count] for count in _PLAIN] for each in (trial, best))
    is_faster = rounds < _GAIN * others[0] and prompts < _MOST_OF_PROMPTS * others[1]
    return is_faster and trial.score < best.score


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
