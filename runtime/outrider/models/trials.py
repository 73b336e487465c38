"""Chooses a model's setting: precision, quantisation groups, threads and padding.

    found = choose(part, "CPU", own)
    found.choice.setting

Settings differ in speed, and in whether rows have the same bits in any batch. Which one is best depends on the
processor. So they are tried at the first load, on slices of the model where it has some. There is one order of
preference. The first setting that is exact and close enough to f32 is taken, unless a later one is faster by a tenth: a
smaller gain is within the timings' noise, and another setting is another text.
"""

from __future__ import annotations

import dataclasses
import gc
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from outrider.errors import DeviceError, one_line
from outrider.models.backends.processor import limit_on, may_divide_by_zero, widens_f16
from outrider.models.measure import measure_exactness
from outrider.models.measure.cost import FAR, NEAR
from outrider.models.measured import Subject
from outrider.models.part import SMALL, this_processor
from outrider.models.reference import Reference
from outrider.models.setting import GROUP_SIZE, Choice, Setting, Trial
from outrider.system.core import new_core
from outrider.system.progress import report
from outrider.system.together import together
from outrider.types import Exactness, Rounding, RowRule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from collections.abc import Sequence as Seq
    from concurrent.futures import Future

    from outrider.config import DeviceConfig
    from outrider.models.measured import Measured
    from outrider.models.part import Part
    from outrider.types import CompiledModel

_THREADS = "INFERENCE_NUM_THREADS"
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
_NUM_SCREENED = 2  # calls that are timed on a slice before all others
_EXACT, _CLOSE, _INEXACT, _SLOWER = "exact", "close to f32", "not exact", "slower"
_RANK = {_EXACT: 0, _CLOSE: 0, _INEXACT: 1}


@dataclass
class Found:
    """The choice, and the model as it was measured in that setting; None where it was not kept.

    whole: the whole model in that setting, if it was compiled beside slices.
    """

    choice: Choice
    measured: Measured | None
    whole: CompiledModel | None = None


def choose(part: Part, device: str, own: DeviceConfig) -> Found:
    """Try the settings that the options allow, in the order of preference.

    Raises:
        OptionError, BundleError, DeviceError: as `Part.compile`, if there is only one setting.
    """
    subject = Subject(part, device, own, part.slices(device))
    candidates = list(_candidates(part, device, own))
    num_threads = _fewer_threads(part, device, own)
    if len(candidates) == 1 and (part.is_main or part.size < SMALL or not num_threads):
        return _only(subject, candidates[0])
    search = _Search(subject, Reference(subject))
    search.compile_ahead(candidates)
    slower: set[str] = set()  # precisions; other groups do not make up for that
    for i, candidate in enumerate(candidates, 1):
        if candidate.precision in slower:
            continue
        report(f"{part} is measured on {device}, setting {i} of {len(candidates)}: {candidate}")
        trial = search.try_setting(candidate)
        if trial.verdict == _SLOWER and search.best and search.best.setting.precision != candidate.precision:
            slower.add(candidate.precision)
    if search.best is not None:
        search.try_fewer_threads(search.best, num_threads)
    # If none is exact: the fastest that is near enough to f32. If there is none either: the first candidate.
    fallback = min(search.trials, key=lambda trial: (_RANK.get(trial.verdict, len(_RANK)), trial.score))
    best = search.best or fallback
    report(f"{part} runs in {best.setting}.")
    return Found(Choice(best.setting, tuple(search.trials)), search.measured, search.whole_in(best.setting))


class _Search:
    """The trials of a model's settings. best: the preferred one so far; measured: its slices, if there are any."""

    def __init__(self, subject: Subject, reference: Reference) -> None:
        self._subject, self._part, self._reference = subject, subject.part, reference
        self._calls = _MAIN_CALLS if subject.part.is_main else _DRAFT_CALLS
        self.trials: list[Trial] = []
        self.best: Trial | None = None
        self.measured: Measured | None = None
        self._ahead: dict[str, Future[Any]] = {}
        self._whole: tuple[str, Future[Any]] | None = None

    def compile_ahead(self, settings: Seq[Setting]) -> None:
        """Compile at the same time, before anything is timed, what trials of these settings need, if there are slices.

        That is the whole model in the first of them, which is mostly taken, the slices of all, and the reference.
        """
        if self._subject.slices is None:
            return
        report(f"{self._part} is compiled.")
        first = settings[0]
        makes: list[Callable[[], Any]] = [
            partial(self._part.compile, first.options(self._subject.own), self._subject.device),
            *(partial(self._subject.compile, each, both=each is first) for each in settings),
        ]
        if self._part.is_main:
            makes.append(self._reference.prepare)
        whole, *others = together(makes)
        self._whole = str(first), whole
        self._ahead = dict(zip(map(str, settings), others, strict=False))

    def whole_in(self, setting: Setting) -> CompiledModel | None:
        """The whole model, if it was compiled in this setting."""
        if self._whole is None or self._whole[0] != str(setting):
            return None
        whole: CompiledModel = self._whole[1].result()
        return whole

    def try_setting(self, setting: Setting) -> Trial:
        """Try a setting, and prefer it if it is the first that can be, or faster enough."""
        try:
            measured = self._compile(setting)
            trial = self._screen(measured) or self._examine(measured)
            if trial.verdict in (_EXACT, _CLOSE) and self._gains(trial) and self._gains_again(trial):
                # A whole model takes too much memory to be kept beside those that are tried next.
                self.best, self.measured = trial, measured if self._subject.slices else None
            del measured
        except DeviceError as error:
            trial = Trial(setting, {}, _NEVER, None, one_line(error))
        gc.collect()
        self.trials.append(trial)
        return trial

    def try_fewer_threads(self, trial: Trial, counts: Seq[int]) -> None:
        """Try these numbers of threads, as long as each is faster than the one before."""
        for count in counts:
            setting = dataclasses.replace(trial.setting, num_threads=count)
            report(f"{self._part} is measured with fewer threads: {setting}")
            if self.try_setting(setting) is not self.best:
                break

    def _compile(self, setting: Setting) -> Measured:
        """The model for measurements, if it was not compiled at the start."""
        ahead = self._ahead.pop(str(setting), None)
        measured: Measured = ahead.result() if ahead else self._subject.compile(setting)
        return measured

    def _gains(self, trial: Trial) -> bool:
        return self.best is None or trial.score < _GAIN * self.best.score

    def _gains_again(self, trial: Trial) -> bool:
        """Whether it still gains if the best one so far is timed again, as the machine may have been busy before."""
        if self.best is not None and self.measured is not None:
            self.measured.time_again()
            timed = self._time(self.measured)
            self.best = dataclasses.replace(self.best, seconds=timed.seconds, score=timed.score)
        return self._gains(trial)

    def _screen(self, measured: Measured) -> Trial | None:
        """A trial of the slice alone, if that is slower than in the best setting, so that the whole model is, too."""
        if self.best is None or self.measured is None:
            return None
        mine, others = (
            sum(self._calls[call] * each.seconds_of_slice(call) for call in list(self._calls)[:_NUM_SCREENED])
            for each in (measured, self.measured)
        )
        return Trial(measured.setting, {}, mine / others * self.best.score, None, _SLOWER) if mine >= others else None

    def _time(self, measured: Measured) -> Trial:
        """Time a request's calls."""
        taken = measured.seconds(self._calls)
        means = {}
        for tokens in dict.fromkeys(count for count, _ in self._calls):
            of = {call: times for call, times in self._calls.items() if call[0] == tokens}
            means[tokens] = sum(times * taken[call] for call, times in of.items()) / sum(of.values())
        score = sum(times * taken[call] for call, times in self._calls.items())
        return Trial(measured.setting, means, score, None, _SLOWER)

    def _examine(self, measured: Measured) -> Trial:
        """Measure whether a setting is close to f32 and exact, and time it with the padding that makes it exact.

        It is timed before, too, if there is another one that it has to be faster than.
        """
        if self.best is not None and not self._gains(trial := self._time(measured)):
            return trial
        setting, is_main = measured.setting, self._part.is_main
        kl = self._reference.kl(measured.main) if is_main else None
        if kl is not None and not kl <= MAX_KL:  # it may be no number
            verdict = f"too far from f32: a KL divergence above {MAX_KL:g}"
        else:
            setting = dataclasses.replace(setting, exactness=_exactness(self._part, measured))
            verdict = _CLOSE if not is_main else _EXACT if setting.exactness.holds else _INEXACT
        return dataclasses.replace(self._time(measured), setting=setting, kl=kl, verdict=verdict)


def _only(subject: Subject, setting: Setting) -> Found:
    """The only setting that a model may have."""
    part, whole = subject.part, None
    if subject.slices is None:
        measured = subject.compile(setting)
    else:
        report(f"{part} is measured on {subject.device}: {setting}")
        makes: list[Callable[[], Any]] = [
            partial(subject.compile, setting, both=True),
            partial(part.compile, setting.options(subject.own), subject.device),
        ]
        measured, whole = (made.result() for made in together(makes))
    setting = dataclasses.replace(setting, exactness=_exactness(part, measured))
    return Found(Choice(setting), measured, whole)


def _exactness(part: Part, measured: Measured) -> Exactness:
    """Find the padding that makes a setting exact, and use it from now on."""
    if not part.is_main:  # its bits do not matter, and rows read alone are faster behind long texts
        exactness = Exactness(rule=RowRule(separate=bool(measured.main.separate_rules)))
    else:
        exactness = measure_exactness(measured.main)
        if exactness.holds and exactness.rule.call == Rounding() and not exactness.rule.dummy_rows:
            exactness = _faster(measured, exactness)
    measured.use(exactness)
    return exactness


def _faster(measured: Measured, exactness: Exactness) -> Exactness:
    """Pad calls to two rows if two are faster than one, as some products are. Exactness is not affected."""
    padded = dataclasses.replace(exactness, rule=dataclasses.replace(exactness.rule, call=Rounding(2)))
    seconds = {}
    for each in (exactness, padded):
        measured.use(each)
        seconds[each.rule] = measured.seconds_of_slice((1, NEAR))
    return padded if seconds[padded.rule] < _GAIN * seconds[exactness.rule] else exactness


def _fewer_threads(part: Part, device: str, own: DeviceConfig) -> list[int]:
    """Numbers of threads to try: the performance cores alone, then halves.

    Threads wait for each other at the end of each operator. In small models, that may take longer than they save.
    """
    if part.model.format != "openvino" or device != "CPU" or own.num_threads or _THREADS in own.properties:
        return []
    cores = this_processor().cores
    count = cores["performance"] if "performance" in cores else cores.get("cores", 0) // 2
    halves = (count >> n for n in range(count.bit_length()))
    return [each for each in halves if each >= 2]


def _candidates(part: Part, device: str, own: DeviceConfig) -> Iterator[Setting]:
    """The settings that the options allow, in the order of preference.

    On other devices than the CPU, compiling may take minutes: there only the device's own choice.
    """
    if part.model.format != "openvino" or device != "CPU":
        yield Setting(own.precision, own.cache_precision)
        return
    in_f32 = part.model.encoder is not None  # whose cache has one precision
    known = new_core().get_property(device, "OPTIMIZATION_CAPABILITIES")
    names = {"f32": "FP32", "bf16": "BF16", "f16": "FP16"}
    if widens_f16(this_processor()):
        del names["f16"]
    precisions = [
        name for name, capability in names.items() if name == "f32" or (capability in known and not limit_on(name))
    ]
    processor, weights = this_processor(), part.model.weights
    precisions = [name for name in precisions if not may_divide_by_zero(processor, name, weights, own.num_threads)]
    is_small = part.size < SMALL
    if own.precision != "auto" or is_small or not part.is_main:  # a draft model's bits do not matter
        precisions = ["f32" if own.precision == "auto" else own.precision]
    # Groups of 8-bit weights are whole rows; of 4-bit ones mostly 32 or 64, and wider dynamic groups are slow.
    groups: tuple[int | None, ...] = (128, None) if part.model.weights == "int8" else (None, 64)
    if GROUP_SIZE in own.properties or is_small or part.model.weights in ("fp32", "fp16"):
        groups = (None,)
    for precision in precisions:
        for group_size in groups if part.is_main else groups[:1]:
            cache = "f32" if in_f32 else precision
            yield Setting(precision, cache if own.cache_precision == "auto" else own.cache_precision, group_size)
