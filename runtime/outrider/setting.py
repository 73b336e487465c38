"""The setting of a model: precision, quantisation groups, threads and padding. It is measured at the first load.

    backend = compile_settled(part, "CPU", options)
    backend.exactness.holds

Precisions and quantisation groups differ in speed, and in whether rows have the same bits in any batch. The best one
depends on the processor. So with "auto" they are tried when a model is first loaded. The fastest one that is exact and
close enough to f32 is chosen. On CPUs with four cores or more, fewer threads are tried, too. The result is saved for
the model's files, the device, the options and the libraries' versions.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import openvino as ov

from outrider import saved
from outrider.backends.processor import find_processor
from outrider.config import PRECISIONS
from outrider.errors import DeviceError, ExactnessWarning, one_line
from outrider.measure import TRIAL_TOKENS, measure_exactness, time_calls
from outrider.measure.adapted import Adapted
from outrider.measure.cost import FAR, NEAR
from outrider.part import machine
from outrider.reference import GROUP_SIZE, Reference
from outrider.types import Exactness, Rounding, RowRule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outrider.config import DeviceConfig
    from outrider.part import Part
    from outrider.types import CompiledModel

log = logging.getLogger("outrider")

_THREADS = "INFERENCE_NUM_THREADS"
# Nats: the mean over a text's tokens of KL(logits in f32 without dynamic quantisation ‖ logits). The loss of 8-bit
# weights is of this size. Groups of 32 lose 0.001 to 0.003, of 128 0.004 to 0.008, of 512 0.022 to 0.027.
MAX_KL = 0.01
SMALL = 16_000_000  # bytes of a model's files; below this, trying settings does not pay

# The calls that score a setting, as (tokens, context), and how often each is made. Main model: a prompt of 256 tokens
# and 60 rounds, half of them with drafts. Draft model: as many rounds of three draft tokens. With short and long
# contexts, as the speed of attention depends on the precision, too.
_MAIN_CALLS = {(1, NEAR): 15, (1, FAR): 15, (8, NEAR): 15, (8, FAR): 15, (128, NEAR): 2}
_DRAFT_CALLS = {(1, NEAR): 90, (1, FAR): 90, (128, NEAR): 2}


@dataclass(frozen=True, slots=True)
class Setting:
    """How one model is compiled and called.

    group_size: of dynamic quantisation; None: the device's choice. num_threads: of the CPU; 0: as the options say.
    """

    precision: str
    cache_precision: str
    group_size: int | None = None
    exactness: Exactness = field(default_factory=Exactness)
    num_threads: int = 0

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS or self.cache_precision not in (*PRECISIONS, "u8"):
            raise ValueError(f"a precision is one of {', '.join(PRECISIONS)}")
        if self.group_size is not None and not 0 <= self.group_size <= 1 << 16:
            raise ValueError("a group has from 0 to 65,536 numbers")
        if not 0 <= self.num_threads <= 1 << 12:
            raise ValueError("a CPU has from 0 to 4,096 threads")

    def options(self, own: DeviceConfig) -> DeviceConfig:
        """A model's own options with this setting."""
        properties = dict(own.properties)
        if self.group_size is not None:
            properties[GROUP_SIZE] = self.group_size
        return dataclasses.replace(
            own,
            precision=self.precision,
            cache_precision=self.cache_precision,
            num_threads=self.num_threads or own.num_threads,
            properties=properties,
        )

    @property
    def description(self) -> str:
        """The setting in words, with the measured exactness."""
        found = self.exactness
        if found.holds:
            return f"{self}: drafts leave the text as it is, bit for bit, with {found.rule}"
        if found.differences:
            return f"{self}: drafts may change the text: logits differ by up to {found.largest_difference:.2g}"
        return f"{self}: not measured, so that nothing is said of drafts and text"

    def __str__(self) -> str:
        groups = "" if self.group_size is None else f", groups of {self.group_size}"
        cache = "" if self.cache_precision == self.precision else f", cache {self.cache_precision}"
        threads = f", {self.num_threads} threads" if self.num_threads else ""
        return f"{self.precision}{groups}{cache}{threads}"


@dataclass(frozen=True, slots=True)
class Trial:
    """A setting that was tried. seconds: of calls, by their tokens; score: seconds of a request (`_MAIN_CALLS`).

    kl: see `MAX_KL`; None if a faster setting was chosen before it was measured. verdict: why it was chosen or not.
    """

    setting: Setting
    seconds: dict[int, float]
    score: float
    kl: float | None
    verdict: str


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen setting, and the trials that it was chosen from; none if the options left no choice."""

    setting: Setting
    trials: tuple[Trial, ...] = ()


def compile_settled(part: Part, device: str, options: DeviceConfig) -> CompiledModel:
    """Compile a model in its setting, which is saved, or found now.

    Warns (`ExactnessWarning`) if a main model's rows depend on the batch.

    Raises:
        OptionError, BundleError, DeviceError: as `outrider.backends.load_model` says.
    """
    own = part.options(options, device)
    choice, backend = _choice_of(part, device, own)
    setting = choice.setting
    if backend is None:
        backend = part.compile(setting.options(own), device)
        backend.use(setting.exactness)
    if part.is_main and not setting.exactness.holds:
        if setting.exactness.differences:
            how = f"logits differ by up to {setting.exactness.largest_difference:.2g} with what else is calculated"
        else:
            how = "it has too little room to find out whether logits depend on what else is calculated"
        remedy = "Leave precision at 'auto'" if own.precision != "auto" else "Load with precision='f32'"
        if backend.cache_precision == "u8":
            remedy = "Leave cache_precision at 'auto'"
        warnings.warn(
            f"{part} on {backend.device} in {backend.precision}, cache {backend.cache_precision}: {how}, so drafts may "
            f"change the text. {remedy} to avoid this; 'outrider verify' shows by how much.",
            ExactnessWarning,
            stacklevel=2,
        )
    return backend


def choice_of(part: Part, device: str, options: DeviceConfig) -> Choice:
    """The setting of a model on a device, and its trials: saved, or found now."""
    return _choice_of(part, device, part.options(options, device))[0]


def _choice_of(part: Part, device: str, own: DeviceConfig) -> tuple[Choice, CompiledModel | None]:
    """The same, with the model if it was just compiled in that setting."""
    if part.adapters:
        return _choice_with_adapters(part, device, own)
    key: dict[str, Any] = {"role": part.role if part.is_main else "draft", "files": part.files, "device": device}
    key |= {"asked": part.asked(own, device), **machine(), **part.versions}
    if part.cuts:
        key["cuts"] = part.cuts
    file = saved.SavedValue(saved.FOLDER / "settings", key, Choice)
    if found := file.read():
        return found, None
    choice, backend = _choose(part, device, own)
    file.write(choice)
    return choice, backend


def _choice_with_adapters(part: Part, device: str, own: DeviceConfig) -> tuple[Choice, CompiledModel | None]:
    """The setting of the model without adapters, with its padding if that is enough with them, or another.

    So a row without an adapter has the bits that it has in an engine without adapters, wherever kernels allow that.
    """
    choice = _choice_of(dataclasses.replace(part, adapters=None), device, own)[0]
    gc.collect()
    adapters = part.adapters
    if adapters is None:
        raise AssertionError("the caller has found some")
    key: dict[str, Any] = {
        "files": part.files,
        "device": device,
        "asked": part.asked(own, device),
        "adapters": adapters.shapes,
    }
    key |= {"cuts": part.cuts, **machine(), **part.versions}
    key |= {"setting": str(choice.setting), "rule": str(choice.setting.exactness.rule)}
    file = saved.SavedValue(saved.FOLDER / "settings", key, Exactness)
    known, backend = file.read(), None
    if known is None:
        backend = part.compile(choice.setting.options(own), device)
        backend.allocate(TRIAL_TOKENS)
        known = measure_exactness(Adapted(backend, adapters.names[0]), choice.setting.exactness)
        backend.use(known)
        file.write(known)
    return dataclasses.replace(choice, setting=dataclasses.replace(choice.setting, exactness=known)), backend


def _choose(part: Part, device: str, own: DeviceConfig) -> tuple[Choice, CompiledModel | None]:
    """Time all candidates. Then, the fastest first, measure which are close enough to f32 and exact."""
    candidates = list(_candidates(part, device, own))
    if len(candidates) == 1:
        setting, backend = _settle(part, device, own, candidates[0])
        return Choice(setting), backend
    log.info("%s is loaded on %s for the first time: %d settings are tried.", part, device, len(candidates))
    trials: list[Trial] = []
    for i, candidate in enumerate(candidates, 1):
        log.info("  %d of %d: %s", i, len(candidates), candidate)
        trials.append(_try(part, device, own, candidate))
        gc.collect()
    trials.sort(key=lambda trial: trial.score)
    unpadded = {str(trial.setting): trial for trial in trials}
    reference = Reference(part, device, own)
    found = _examine(part, device, own, trials, reference)
    # If none is exact: the fastest that is near enough to f32. If there is none either: the first candidate.
    fine = min(trials, key=lambda trial: (_RANK.get(trial.verdict, len(_RANK)), trial.score))
    if found is not None:
        base = unpadded[str(fine.setting)]
        fewer = _fewer_threads(part, device, own, base)
        if fewer and fewer[0].score < _MARGIN * base.score:
            examined = fewer[:1]
            made = _examine(part, device, own, examined, reference)
            if made is not None and examined[0].score < _MARGIN * fine.score:
                fine, found = examined[0], made
            fewer[:1] = examined
        trials += fewer
    log.info("  taken: %s", fine.setting)
    return Choice(fine.setting, tuple(trials)), found


_NEVER = 1e9  # seconds of a setting that cannot be used
_MARGIN = 0.95  # smaller gains are within the timings' noise
_EXACT, _CLOSE, _INEXACT, _SLOWER = "exact", "close to f32", "not exact", "slower"
_RANK = {_EXACT: 0, _CLOSE: 0, _INEXACT: 1}


def _try(part: Part, device: str, own: DeviceConfig, setting: Setting) -> Trial:
    """Time a setting without padding."""
    try:
        backend = part.compile(setting.options(own), device)
        backend.allocate(TRIAL_TOKENS)
        seconds = _time(part, backend)
    except DeviceError as error:
        return Trial(setting, {}, _NEVER, None, one_line(error))
    return Trial(setting, seconds, _score(part, seconds), None, _SLOWER)


def _examine(
    part: Part, device: str, own: DeviceConfig, trials: list[Trial], reference: Reference
) -> CompiledModel | None:
    """Measure the accuracy and the padding of the fastest settings, until one is chosen.

    Continues while a slower one may be faster with its own padding. Returns the chosen one, compiled.
    """
    best, taken = _NEVER, None
    for i, trial in enumerate(trials):
        if trial.verdict != _SLOWER or trial.score >= _MARGIN * best:  # padding only adds time
            continue
        log.info("  is it exact? %s" if part.is_main else "  is it close to f32? %s", trial.setting)
        setting, backend = _settle(part, device, own, trial.setting)
        kl = reference.kl(backend)
        if kl > MAX_KL:
            del backend  # free it before the next setting is compiled
            gc.collect()
            trials[i] = dataclasses.replace(trial, kl=kl, verdict=f"too far from f32: a KL divergence above {MAX_KL:g}")
            continue
        seconds, verdict = trial.seconds, _CLOSE
        if part.is_main:
            verdict = _EXACT if setting.exactness.holds else _INEXACT
        if setting.exactness.rule != RowRule():
            seconds = _time(part, backend)
        trials[i] = Trial(setting, seconds, _score(part, seconds), kl, verdict)
        if verdict != _INEXACT and trials[i].score < best:
            best, taken = trials[i].score, backend
        del backend
        gc.collect()
    return taken


def _settle(part: Part, device: str, own: DeviceConfig, setting: Setting) -> tuple[Setting, CompiledModel]:
    """Compile a setting, and find the padding that makes it exact."""
    backend = part.compile(setting.options(own), device)
    backend.allocate(TRIAL_TOKENS)
    if not part.is_main:  # its bits do not matter, and rows read alone are faster behind long texts
        exactness = Exactness(rule=RowRule(separate=bool(backend.separate_rules)))
        backend.use(exactness)
        return dataclasses.replace(setting, exactness=exactness), backend
    exactness = measure_exactness(backend)
    backend.use(exactness)
    if exactness.holds and exactness.rule.call == Rounding() and not exactness.rule.dummy_rows:
        exactness = _faster(backend, exactness)
        backend.use(exactness)
    return dataclasses.replace(setting, exactness=exactness), backend


def _faster(backend: CompiledModel, exactness: Exactness) -> Exactness:
    """Pad calls to two rows if two are faster than one, as some products are. Exactness is not affected."""
    padded = dataclasses.replace(exactness, rule=dataclasses.replace(exactness.rule, call=Rounding(2)))
    seconds = {}
    for each in (exactness, padded):
        backend.use(each)
        seconds[each.rule] = time_calls(backend, [(1, NEAR)], repeats=6)[1, NEAR]
    return padded if seconds[padded.rule] < _MARGIN * seconds[exactness.rule] else exactness


def _candidates(part: Part, device: str, own: DeviceConfig) -> Iterator[Setting]:
    """The settings that the options allow, the likeliest first.

    On other devices than the CPU, compiling may take minutes: there only the device's own choice.
    """
    if part.model.format != "openvino" or device != "CPU":
        yield Setting(own.precision, own.cache_precision)
        return
    in_f32 = part.model.encoder is not None  # whose cache has one precision
    known = ov.Core().get_property(device, "OPTIMIZATION_CAPABILITIES")
    names = {"f32": "FP32", "bf16": "BF16", "f16": "FP16"}
    precisions = [name for name, capability in names.items() if name == "f32" or capability in known]
    is_small = part.size < SMALL
    if own.precision != "auto" or is_small:
        precisions = ["f32" if own.precision == "auto" else own.precision]
    # Groups of 8-bit weights are whole rows; of 4-bit ones mostly 32 or 64, and wider dynamic groups are slow.
    groups: tuple[int | None, ...] = (128, None) if part.model.weights == "int8" else (None, 64)
    if GROUP_SIZE in own.properties or is_small or part.model.weights in ("fp32", "fp16"):
        groups = (None,)
    for precision in precisions:
        for group_size in groups:
            cache = "f32" if in_f32 else precision
            yield Setting(precision, cache if own.cache_precision == "auto" else own.cache_precision, group_size)


def _fewer_threads(part: Part, device: str, own: DeviceConfig, trial: Trial) -> list[Trial]:
    """A setting's trials with fewer CPU threads, the fastest first.

    Tries the performance cores alone, then halves, as long as that is faster. Threads wait for each other at the end
    of each operator. In small models, that may take longer than they save.
    """
    if part.model.format != "openvino" or device != "CPU" or own.num_threads or _THREADS in own.properties:
        return []
    cores = find_processor().cores
    count = cores["performance"] if "performance" in cores else cores.get("cores", 0) // 2
    fewer, best = list[Trial](), trial.score
    while count >= 2:
        setting = dataclasses.replace(trial.setting, num_threads=count)
        log.info("  with fewer threads: %s", setting)
        tried = _try(part, device, own, setting)
        gc.collect()
        fewer.append(tried)
        if tried.score >= _MARGIN * best:
            break
        best, count = tried.score, count // 2
    return sorted(fewer, key=lambda trial: trial.score)


def _time(part: Part, backend: CompiledModel) -> dict[int, float]:
    """Mean seconds of a request's calls (`_MAIN_CALLS`), by their tokens."""
    calls = _calls(part)
    taken = time_calls(backend, list(calls))
    weights = {count: sum(calls[call] for call in calls if call[0] == count) for count, _ in calls}
    return {n: sum(calls[call] * taken[call] for call in calls if call[0] == n) / weights[n] for n in weights}


def _score(part: Part, seconds: dict[int, float]) -> float:
    return sum(times * seconds[count] for (count, _), times in _calls(part).items())


def _calls(part: Part) -> dict[tuple[int, int], int]:
    return _MAIN_CALLS if part.is_main else _DRAFT_CALLS
