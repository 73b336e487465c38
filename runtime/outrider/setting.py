"""The setting that a model runs in: what it calculates in, and what its calls are padded to. Measured, not assumed.

    backend = compile_settled(part, "CPU", options)
    backend.exactness.holds

Precisions and quantisation groups differ in speed and in whether rows have the same bits in any company, and which is
best differs from processor to processor. So for "auto" they are tried when a model is first loaded, and the fastest one
that is exact is taken, of those that calculate well enough. What was found is kept: it holds for the model's files, the
device, the options and the libraries' versions.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import openvino as ov

from outrider import kept
from outrider.errors import BundleError, DeviceError, ExactnessWarning, one_line
from outrider.part import machine
from outrider.schedule import TRIAL_TOKENS, measure_exactness, time_calls
from outrider.text import Tokenizer
from outrider.types import Chunk, Exactness

if TYPE_CHECKING:
    from collections.abc import Iterator
    from collections.abc import Sequence as Seq

    from numpy.typing import NDArray

    from outrider.config import DeviceConfig
    from outrider.part import Part
    from outrider.types import CompiledModel

log = logging.getLogger("outrider")

GROUP_SIZE = "DYNAMIC_QUANTIZATION_GROUP_SIZE"
# Nats, the mean over a text's tokens of KL(logits in f32 without dynamic quantisation ‖ logits). What 8-bit weights
# lose is of this size: groups of 32 lose 0.001 to 0.003, of 128 0.004 to 0.008, of 512 0.022 to 0.027.
MAX_KL = 0.01
SMALL = 16_000_000  # bytes of a model's files: below, no setting is worth the time that trying takes

_SAMPLE = """The harbour was quiet when the last boat came in. Two men tied it to the wall and carried the boxes up
the steps, one after the other, without a word. "How many today?" asked the woman at the scale. "Forty-one," said the
older one, "and three of them are small." She wrote the number into her book.

def total(prices: list[float], rate: float = 0.2) -> float:
    \"\"\"The sum of the prices with tax.\"\"\"
    return sum(price * (1 + rate) for price in prices)
"""
_NUM_SAMPLED = 96  # tokens of it that logits are compared on
# Calls of a request to score a setting by: tokens, and how often. A prompt of 256 tokens and 60 rounds of the main
# model, half of them with drafts; or as many rounds of three draft tokens.
_MAIN_CALLS = {1: 30, 4: 15, 8: 15, 128: 2}
_DRAFT_CALLS = {1: 180, 128: 2}


@dataclass(frozen=True, slots=True)
class Setting:
    """How one model is compiled and called.

    group_size: of dynamic quantisation; None leaves it to the device. can_pad_apart: see `RowRule.apart`.
    """

    precision: str
    cache_precision: str
    group_size: int | None = None
    can_pad_apart: bool = False
    exactness: Exactness = field(default_factory=Exactness)

    def options(self, own: DeviceConfig) -> DeviceConfig:
        """A model's own options with this setting."""
        properties = dict(own.properties)
        if self.group_size is not None:
            properties[GROUP_SIZE] = self.group_size
        return dataclasses.replace(
            own, precision=self.precision, cache_precision=self.cache_precision, properties=properties
        )

    def __str__(self) -> str:
        groups = "" if self.group_size is None else f", groups of {self.group_size}"
        return f"{self.precision}{groups}"


@dataclass(frozen=True, slots=True)
class Trial:
    """A setting that was tried. seconds: of calls by their tokens; score: of a request (`_MAIN_CALLS`), in seconds.

    kl: as of `MAX_KL`; None where that was not asked. verdict: what became of it, in words.
    """

    setting: Setting
    seconds: dict[int, float]
    score: float
    kl: float | None
    verdict: str


@dataclass(frozen=True, slots=True)
class Choice:
    """The setting that was chosen, and those that it was chosen from; none where the options left nothing open."""

    setting: Setting
    trials: tuple[Trial, ...] = ()


def compile_settled(part: Part, device: str, options: DeviceConfig) -> CompiledModel:
    """Compile a model in its setting: as it was found before, or now.

    Warns (`ExactnessWarning`) where a main model's rows are not the same in any company.

    Raises:
        OptionError, BundleError, DeviceError: as `outrider.backends.load_model` says.
    """
    own = part.options(options, device)
    choice = choice_of(part, device, options)
    setting = choice.setting
    backend = part.compile(setting.options(own), device, can_pad_apart=setting.can_pad_apart)
    backend.use(setting.exactness)
    if part.is_main and not setting.exactness.holds:
        if setting.exactness.differences:
            how = f"logits differ by up to {setting.exactness.largest_difference:.2g} with what else is calculated"
        else:
            how = "it has too little room to find out whether logits depend on what else is calculated"
        remedy = "Leave precision at 'auto'" if own.precision != "auto" else "Load with precision='f32'"
        if own.cache_precision == "u8":
            remedy = "Leave cache_precision at 'auto'"
        warnings.warn(
            f"{part} on {backend.device} in {backend.precision}, cache {backend.cache_precision}: {how}, so drafts may "
            f"change the text. {remedy} to avoid this; 'outrider verify' shows by how much.",
            ExactnessWarning,
            stacklevel=2,
        )
    return backend


def choice_of(part: Part, device: str, options: DeviceConfig) -> Choice:
    """The setting of a model on a device, and what it was chosen from: as it was found before, or now."""
    own = part.options(options, device)
    key = {"role": part.role if part.is_main else "draft", "files": part.files, "device": device}
    key |= {"asked": part.asked(own, device), **machine(), **part.versions}
    file = kept.Kept(kept.FOLDER / "settings", key, Choice)
    choice = file.read()
    if choice is None:
        choice = _choose(part, device, own)
        file.write(choice)
    return choice


def _choose(part: Part, device: str, own: DeviceConfig) -> Choice:
    candidates = list(_candidates(part, device, own))
    if len(candidates) == 1:
        backend, setting = _settle(part, device, own, candidates[0])
        del backend
        return Choice(setting)
    log.info("%s is loaded on %s for the first time: %d settings are tried.", part, device, len(candidates))
    reference = _Reference(part, device, own)
    trials: list[Trial] = []
    best: Trial | None = None
    for i, candidate in enumerate(candidates, 1):
        log.info("  %d of %d: %s", i, len(candidates), candidate)
        try:
            trial = _try(part, device, own, candidate, reference, best)
        except DeviceError as error:
            trial = Trial(candidate, {}, float("inf"), None, one_line(error))
        trials.append(trial)
        if trial.verdict == _FINE and (best is None or trial.score < best.score):
            best = trial
    if best is None:  # the nearest to exact, where none is
        measured = [trial for trial in trials if trial.setting.exactness.differences] or trials[:1]
        best = min(measured, key=lambda trial: trial.score)
    log.info("  taken: %s", best.setting)
    return Choice(best.setting, tuple(trials))


_FINE = "exact"


def _try(
    part: Part, device: str, own: DeviceConfig, setting: Setting, reference: _Reference, best: Trial | None
) -> Trial:
    """Time a setting; where it is the fastest so far, see how well it calculates, and whether it is exact."""
    backend = part.compile(setting.options(own), device)
    backend.allocate(TRIAL_TOKENS)
    seconds = _time(part, backend)
    score = _score(part, seconds)
    if best and score >= best.score:  # padding would only add to it
        return Trial(setting, seconds, score, None, "slower")
    kl = reference.kl(backend)
    if kl > MAX_KL:
        return Trial(setting, seconds, score, kl, f"too far from f32 (at most {MAX_KL:g})")
    if not part.is_main:
        return Trial(setting, seconds, score, kl, _FINE)
    del backend
    gc.collect()
    backend, setting = _settle(part, device, own, setting)
    if not setting.exactness.holds:
        return Trial(setting, seconds, score, kl, "not exact")
    seconds = _time(part, backend)
    score = _score(part, seconds)
    return Trial(setting, seconds, score, kl, "slower" if best and score >= best.score else _FINE)


def _settle(part: Part, device: str, own: DeviceConfig, setting: Setting) -> tuple[CompiledModel, Setting]:
    """Compile with a setting and find out what padding it takes."""
    backend = part.compile(setting.options(own), device, can_pad_apart=setting.can_pad_apart)
    if not part.is_main:
        return backend, setting
    backend.allocate(TRIAL_TOKENS)
    exactness = measure_exactness(backend)
    backend.use(exactness)
    padded = not exactness.holds or exactness.rule.sequence.least > 1
    if padded and _may_pad_apart(part, device) and not backend.can_pad_apart:
        # Padding the attention alone is cheaper: a sequence's second row then goes through nothing else.
        del backend
        gc.collect()
        return _settle(part, device, own, dataclasses.replace(setting, can_pad_apart=True))
    return backend, dataclasses.replace(setting, exactness=exactness)


def _may_pad_apart(part: Part, device: str) -> bool:
    return part.model.format == "openvino" and device == "CPU"


def _candidates(part: Part, device: str, own: DeviceConfig) -> Iterator[Setting]:
    """What the options leave open, the likeliest to be chosen first.

    On devices other than the CPU, where compiling may take minutes, the device's own choice alone.
    """
    if part.model.format != "openvino" or device != "CPU":
        yield Setting(own.precision, own.cache_precision)
        return
    known = ov.Core().get_property(device, "OPTIMIZATION_CAPABILITIES")
    names = {"f32": "FP32", "bf16": "BF16", "f16": "FP16"}
    precisions = [name for name, capability in names.items() if name == "f32" or capability in known]
    is_small = part.size < SMALL
    if own.precision != "auto" or is_small:
        precisions = ["f32" if own.precision == "auto" else own.precision]
    # Groups of 8-bit weights are whole rows; of 4-bit ones they are of 32 to 128, which dynamic groups should divide.
    groups: tuple[int | None, ...] = (128, None) if part.model.weights == "int8" else (None, 64, 128)
    if GROUP_SIZE in own.properties or is_small or part.model.weights in ("fp32", "fp16"):
        groups = (None,)
    for precision in precisions:
        cache = own.cache_precision
        if cache == "auto":
            cache = "f16" if precision == "f32" else precision
        for group_size in groups:
            yield Setting(precision, cache, group_size)


def _time(part: Part, backend: CompiledModel) -> dict[int, float]:
    return time_calls(backend, list(_MAIN_CALLS if part.is_main else _DRAFT_CALLS))


def _score(part: Part, seconds: dict[int, float]) -> float:
    calls = _MAIN_CALLS if part.is_main else _DRAFT_CALLS
    return sum(calls[count] * seconds[count] for count in seconds)


class _Reference:
    """The logits of a text, in f32 and without dynamic quantisation; calculated when they are first needed."""

    def __init__(self, part: Part, device: str, own: DeviceConfig) -> None:
        self._part, self._device = part, device
        properties = {**own.properties, GROUP_SIZE: 0}
        self._options = dataclasses.replace(own, precision="f32", cache_precision="f32", properties=properties)
        self._token_ids = _sample(part)
        self._logprobs: NDArray[np.float64] | None = None

    def kl(self, backend: CompiledModel) -> float:
        """The mean KL divergence of a backend's distributions from the reference's, in nats."""
        if self._logprobs is None:
            own = self._part.compile(self._options, self._device)
            own.allocate(_NUM_SAMPLED)
            self._logprobs = _logprobs(own, self._token_ids)
        here = _logprobs(backend, self._token_ids)
        return float((np.exp(self._logprobs) * (self._logprobs - here)).sum(axis=1).mean())


def _logprobs(backend: CompiledModel, token_ids: Seq[int]) -> NDArray[np.float64]:
    """Natural logarithms of the next token's probabilities behind each of the tokens: [n, vocab_size]."""
    slot = backend.open(len(token_ids))
    if slot is None:
        raise RuntimeError("settings are tried while nothing runs")
    step = backend.submit([Chunk(slot, token_ids, num_rows=len(token_ids))]).wait()
    logits = np.array([step.logits(i) for i in range(len(token_ids))], dtype=np.float64)
    slot.close()
    logits -= logits.max(axis=1, keepdims=True)
    logprobs: NDArray[np.float64] = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return logprobs


def _sample(part: Part) -> list[int]:
    """Tokens of a text, where the bundle's tokenizer is the model's; else random ones."""
    vocab_size, found = min(part.model.vocab_size, part.model.geometry.logits_width), []
    main = part.bundle.manifest.main
    if part.model.vocab_sha256 == main.vocab_sha256 and part.bundle.tokenizer_path.is_dir():
        try:
            found = [i for i in Tokenizer(part.bundle.tokenizer_path).encode(_SAMPLE) if i < main.vocab_size]
        except BundleError:
            found = []
    if len(found) < _NUM_SAMPLED // 2:
        found = np.random.default_rng(0).integers(vocab_size, size=_NUM_SAMPLED).tolist()
    return found[:_NUM_SAMPLED]
