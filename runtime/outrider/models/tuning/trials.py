"""Chooses the setting of a model by measuring it: the first that is exact, or on request the fastest.

    choice, backend = choose(spec)          # at a load, where no table says it
    best, trials = search([spec])           # `outrider tune --search`
    best, trials = search([int8, int4])     # the same in two forms

Settings have an order of preference, which begins with that of the table of processors. A later one is taken if it is
faster by a tenth, or by a fifth in another precision: times of two searches differ by smaller gains, and another
precision is another text.
"""

from __future__ import annotations

import dataclasses
import gc
from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.errors import BundleError, DeviceError, one_line
from outrider.inputs.text import Tokenizer
from outrider.models.cost.measure import time_calls
from outrider.models.cost.slots import Adapted, copied_rows, open_slot
from outrider.models.cost.table import FAR, NEAR
from outrider.models.tuning.first import expected_exactness, has_rule
from outrider.models.tuning.measure import (
    TRIAL_SEQUENCES,
    TRIAL_TOKENS,
    check_exactness,
    measure_exactness,
)
from outrider.models.tuning.setting import Choice, Setting, Trial, fewer_threads, settings_for
from outrider.system.progress import report
from outrider.types import Chunk, Exactness, RowRule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from outrider.models.tuning.model_spec import ModelSpec
    from outrider.types import CompiledModel

# Nats: the mean over a text's tokens of KL(logits in f32 without dynamic quantisation ‖ logits). The loss of 8-bit
# weights is of this size. Groups of 32 lose 0.001 to 0.003, of 128 0.004 to 0.01, of 512 0.022 to 0.027. The first
# setting may lose more, as loads take it unasked, and others may lose as much.
MAX_KL = 0.01

# The calls that score a setting, as (tokens, context), and how often each is made. Main model: a prompt of 256 tokens
# and 60 rounds, half of them with drafts. Draft model: as many rounds of three draft tokens. With short and long
# contexts, as the speed of attention depends on the precision, too.
_MAIN_CALLS = {(1, NEAR): 15, (8, NEAR): 15, (1, FAR): 15, (8, FAR): 15, (128, NEAR): 2}
_DRAFT_CALLS = {(1, NEAR): 90, (1, FAR): 90, (128, NEAR): 2}

_PATIENCE = 0.1  # seconds that a call is repeated for, at least
TAKEN = "exact, and the fastest so far"
_NEVER = 1e9  # seconds of a setting that cannot be used
_GAIN = 0.9  # of the time of the setting before, at most, that another one takes if it is to be preferred
# The same in another precision or form. bf16 takes 0.84 to 1.04 of f32's time with SmolLM2 on an AMD with AVX-512.
_GAIN_OF_PRECISION = 0.8

SAMPLE = """The harbour was quiet when the last boat came in. Two men tied it to the wall and carried the boxes up
the steps, one after the other, without a word. "How many today?" asked the woman at the scale. "Forty-one," said the
older one, "and three of them are small." She wrote the number into her book, and under it the date, as she had done
for twenty years. Then she looked at the sky. "It will be less tomorrow," she said. "Go home and sleep."

def total(prices: list[float], rate: float = 0.2) -> float:
    \"\"\"The sum of the prices with tax.\"\"\"
    return sum(price * (1 + rate) for price in prices)
"""
_NUM_SAMPLED, _NUM_LEFT_OUT = 48, 16  # tokens of it that are read; the first of these are not compared


def choose(spec: ModelSpec, base: Setting | None = None) -> tuple[Choice, CompiledModel]:
    """The first setting that the options allow in which rows are exact, or the first of all; and the model in it.

    base: that of the model without its adapters, the only one then. Raises as `ModelSpec.compile`.
    """
    settings = [base] if base else [*settings_for(spec)]
    found: list[Choice] = []
    for setting in settings:
        if not spec.is_small:
            report(f"{spec} is measured on {spec.device}: {setting}")
        backend = compile_for_trials(spec, setting)
        found.append(Choice(dataclasses.replace(setting, exactness=_needed(spec, setting, backend))))
        if not spec.is_main or found[-1].setting.exactness.holds or len(settings) == 1:
            return found[-1], backend
        del backend  # there is room for one
        gc.collect()
    backend = compile_for_trials(spec, found[0].setting)
    backend.use(found[0].setting.exactness)
    return found[0], backend


def search(specs: Sequence[ModelSpec], whole: ModelSpec | None = None) -> tuple[Trial | None, list[Trial]]:
    """The fastest setting of a model that is exact and close to f32, if there is one, and all that were tried.

    specs: the model in the forms that it may have, the preferred one first. whole: the form that others of a main model
    are compared with; by default the first.
    """
    reference = Reference(whole or specs[0]) if specs[0].is_main else None
    trials: list[Trial] = []
    best: Trial | None = None

    def takes(spec: ModelSpec, setting: Setting) -> bool:
        nonlocal best
        report(f"{spec} is measured on {spec.device} in {form_of(spec)}, {setting}")
        trials.append(_tried(spec, setting, best, reference))
        gc.collect()  # there is room for one
        is_best = trials[-1].verdict == TAKEN
        best = trials[-1] if is_best else best
        return is_best

    for spec in specs:
        for setting in settings_for(spec):
            takes(spec, setting)
    if best is not None:
        spec = next(each for each in specs if form_of(each) == best.form)
        for count in fewer_threads(spec):
            if not takes(spec, dataclasses.replace(best.setting, num_threads=count)):
                break
    return best, trials


def _tried(spec: ModelSpec, setting: Setting, best: Trial | None, reference: Reference | None) -> Trial:
    """Time a setting, and judge it if it is faster enough than the best one so far. A failure is its verdict."""
    try:
        backend = compile_for_trials(spec, setting)
        trial = _timed(spec, setting, backend)
        if not _gains(trial, best):
            return trial
        kl = reference.kl(backend) if reference else None
        if kl is not None and best is not None and not kl <= max(MAX_KL, best.kl or 0.0):  # it may be no number
            return dataclasses.replace(trial, kl=kl, verdict=f"too far from f32: a difference above {MAX_KL:g}")
        setting = dataclasses.replace(setting, exactness=_needed(spec, setting, backend))
        if spec.is_main and not setting.exactness.holds:
            return dataclasses.replace(trial, setting=setting, kl=kl, verdict="not exact")
        trial = dataclasses.replace(_timed(spec, setting, backend), kl=kl)  # with its padding
        return dataclasses.replace(trial, verdict=TAKEN) if _gains(trial, best) else trial
    except DeviceError as error:
        return Trial(form_of(spec), setting, {}, _NEVER, None, one_line(error))


def _timed(spec: ModelSpec, setting: Setting, backend: CompiledModel) -> Trial:
    """Time a request's calls."""
    calls = _MAIN_CALLS if spec.is_main else _DRAFT_CALLS
    longest = spec.model.geometry.context_length - backend.capabilities.rows.num_spare
    within = {(count, context): (count, max(min(context, longest - count), 0)) for count, context in calls}
    found = time_calls(backend, [*within.values()], _PATIENCE)
    taken = {call: found[within[call]] for call in calls}
    means = {}
    for tokens in dict.fromkeys(count for count, _ in calls):
        of = {call: times for call, times in calls.items() if call[0] == tokens}
        means[tokens] = sum(times * taken[call] for call, times in of.items()) / sum(of.values())
    score = sum(times * taken[call] for call, times in calls.items())
    return Trial(form_of(spec), setting, means, score, None, "not enough faster")


def _gains(trial: Trial, best: Trial | None) -> bool:
    """Whether a setting is so much faster that it is preferred."""
    if best is None:
        return True
    same = (trial.form, trial.setting.precision) == (best.form, best.setting.precision)
    return trial.score < (_GAIN if same else _GAIN_OF_PRECISION) * best.score


def _needed(spec: ModelSpec, setting: Setting, backend: CompiledModel) -> Exactness:
    """The padding that makes a main model's rows exact, which is used from now on; a draft model's fastest.

    That of the setting or of the table is tried before all others.
    """
    known = setting.exactness
    if known.rule == RowRule() and (not spec.is_main or has_rule(spec, setting)):
        known = expected_exactness(spec, backend)
    found = Exactness(known.groups, known.rule)
    if spec.is_main:
        rows: Any = Adapted(backend, spec.adapters.names[0]) if spec.adapters else backend
        if known.rule != RowRule():
            backend.use(found)
            found = dataclasses.replace(found, differences=check_exactness(rows))
        if not found.holds:
            found = measure_exactness(rows)
    backend.use(found)
    return found


def form_of(spec: ModelSpec) -> str:
    """A model's format and weights, as the table of processors has them."""
    return f"{spec.model.format} {spec.model.weights}"


def compile_for_trials(spec: ModelSpec, setting: Setting, max_tokens: int = TRIAL_TOKENS) -> CompiledModel:
    """Compile a model with a cache for measurements, which has states for all sequences that are open at a time."""
    backend = spec.compile(setting)
    backend.allocate(max_tokens)
    if backend.capabilities.states:
        backend.allocate(max(max_tokens, TRIAL_SEQUENCES * backend.tokens_for(1)))
    return backend


class Reference:
    """A model's log-probabilities after a text in f32 without dynamic quantisation: how far others are from them.

    reference = Reference(spec)    # compiles the model, reads the text, and frees the model
    reference.kl(backend)
    """

    def __init__(self, spec: ModelSpec) -> None:
        self._token_ids = _sample(spec)
        backend = compile_for_trials(spec, Setting("f32", "f32", group_size=0), 2 * _NUM_SAMPLED)  # and padding
        self._logprobs = self._read(backend)

    def kl(self, backend: CompiledModel) -> float:
        """The mean KL divergence of a backend's distributions from the reference's, in nats."""
        apart = self._logprobs - self._read(backend)
        return float((np.exp(self._logprobs) * apart).sum(axis=1, dtype=np.float64).mean())

    def _read(self, backend: CompiledModel) -> NDArray[np.float32]:
        """The next token's log-probabilities, float32 [n, vocab_size], after all tokens but the first few.

        The first few are left out: they attract all attention, whatever they are.
        """
        count = len(self._token_ids) - _NUM_LEFT_OUT
        with closing(open_slot(backend, len(self._token_ids))) as slot:
            chunk = Chunk(slot, self._token_ids, num_rows=count)
            logits = np.array(copied_rows(backend.submit([chunk]).wait(), chunk), dtype=np.float32)
        logits -= logits.max(axis=1, keepdims=True)
        logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True, dtype=np.float64)).astype(np.float32)
        return logits


def _sample(spec: ModelSpec) -> list[int]:
    """Tokens of a text if the bundle's tokenizer is the model's; otherwise random tokens."""
    vocab_size, found = min(spec.model.vocab_size, spec.model.geometry.logits_width), []
    main = spec.bundle.manifest.main
    if spec.model.vocab_sha256 == main.vocab_sha256 and spec.bundle.tokenizer_path.is_dir():
        try:
            found = [i for i in Tokenizer(spec.bundle.tokenizer_path).encode(SAMPLE) if i < main.vocab_size]
        except BundleError:
            found = []
    if len(found) < _NUM_SAMPLED // 2:
        found = np.random.default_rng(0).integers(vocab_size, size=_NUM_SAMPLED).tolist()
    return found[:_NUM_SAMPLED]
