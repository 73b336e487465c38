"""A model that is compiled for measurements: as a whole, or as two slices that stand for it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from concurrent.futures import Future
from typing import TypeAlias

import openvino as ov

from outrider.models.backends.slices import Slices
from outrider.models.cost.measure import measure_pass, time_calls, timed_rows
from outrider.models.cost.table import NEAR, CallCost
from outrider.models.tuning.measure import TRIAL_SEQUENCES, TRIAL_TOKENS, measure_exactness
from outrider.models.tuning.model_spec import ModelSpec
from outrider.models.tuning.setting import Setting
from outrider.types import CompiledModel, Exactness, Rounding, RowRule

Call: TypeAlias = tuple[int, int]  # tokens, and tokens of context

_GAIN = 0.9  # two rows' time for one row's, at most, if calls are to be padded to two
# The same for a draft model, which reads now one token, now two: a change of rows takes time, too.
_NO_SLOWER = 1.05
_PATIENCE = 0.01  # seconds that a call is repeated for, at least
_ROUNDS = 1  # of the measurements of a slice's costs


def compile_for_trials(
    spec: ModelSpec, setting: Setting, graph: ov.Model | bytes | None = None, max_tokens: int = TRIAL_TOKENS
) -> CompiledModel:
    """Compile a model or a slice of it, with a cache for measurements."""
    backend = spec.compile(setting, graph)
    allocate_for_trials(backend, max_tokens)
    return backend


def allocate_for_trials(backend: CompiledModel, max_tokens: int = TRIAL_TOKENS) -> None:
    """Allocate a cache for measurements. With states, it has rows for all sequences that are open at a time."""
    backend.allocate(max_tokens)
    if backend.capabilities.states:
        backend.allocate(max(max_tokens, TRIAL_SEQUENCES * backend.tokens_for(1)))


class Measured:
    """A model that is compiled for measurements in a setting: as a whole, or as two slices that stand for it.

    measured = Measured(spec, setting, spec.slices())
    measured.seconds([(1, NEAR)])    # of the whole model

    both: compile the small slice now, not at its first use. Times are measured once.
    """

    whole: Future[CompiledModel] | None = None  # the model in this setting, if it is compiled beside the slices

    def __init__(self, spec: ModelSpec, setting: Setting, slices: Slices | None = None, *, both: bool = False) -> None:
        self.spec, self.setting, self.slices = spec, setting, slices
        self.main = compile_for_trials(spec, setting, slices.large if slices else None)
        self.rule = RowRule()  # its padding
        self._seconds: dict[bool, dict[Call, float]] = {True: {}, False: {}}  # of the large and the small slice
        if both and slices is not None:
            _ = self.small

    @functools.cached_property
    def small(self) -> CompiledModel:
        """The small slice, compiled at its first use."""
        if self.slices is None:
            raise AssertionError("it is measured as a whole")
        made = compile_for_trials(self.spec, self.setting, self.slices.small)
        made.use(self.main.exactness)
        return made

    def use(self, exactness: Exactness) -> None:
        """Pad calls by this rule from now on, and forget the times with another one."""
        if exactness.rule != self.rule:
            self.rule, self._seconds = exactness.rule, {True: {}, False: {}}
        self.main.use(exactness)
        if "small" in self.__dict__:
            self.small.use(exactness)

    def needed(self) -> Exactness:
        """The padding that makes the setting exact; for a draft model, whose bits do not matter, the fastest one."""
        if not self.spec.is_main:  # rows that are read alone are faster after long texts
            return Exactness(rule=RowRule(separate=bool(self.main.separate_rules)))
        graph = self.spec.onnx_slice()  # that is only timed as a whole, as there is one setting
        return measure_exactness(self.main if graph is None else compile_for_trials(self.spec, self.setting, graph))

    def cheapest(self, exactness: Exactness) -> Exactness:
        """This padding, or two rows a call where that takes no longer, as of some products. It is used from now on.

        Exactness is not affected.
        """
        spec, rule = self.spec, exactness.rule
        if spec.is_main:
            can_pad, most = exactness.holds and rule.call == Rounding() and not rule.dummy_rows, _GAIN
        else:
            can_pad, most = rule.separate and not spec.is_small, _NO_SLOWER
        if can_pad:
            padded = dataclasses.replace(exactness, rule=dataclasses.replace(rule, call=Rounding(2)))
            one, two = (self._seconds_with(each) for each in (exactness, padded))
            exactness = padded if two < most * one else exactness
        self.use(exactness)
        return exactness

    def _seconds_with(self, exactness: Exactness) -> float:
        """Seconds of a call for one token with this padding."""
        self.use(exactness)
        return self.seconds_of_slice((1, NEAR))

    def seconds(self, calls: Iterable[Call]) -> dict[Call, float]:
        """Seconds of the whole model's calls. calls: as `time_calls`."""
        slices = self.slices
        return {
            call: self.seconds_of_slice(call)
            if slices is None
            else slices.layers.whole(self.seconds_of_slice(call, is_large=False), self.seconds_of_slice(call))
            for call in calls
        }

    def seconds_of_slice(self, call: Call, *, is_large: bool = True) -> float:
        """Seconds of a call of one slice, or of the whole model if there are none."""
        known = self._seconds[is_large]
        if call not in known:
            known[call] = self._time(call, is_large=is_large)
        return known[call]

    def time_again(self) -> None:
        """Time all calls once more. The shorter times stay."""
        for is_large, known in self._seconds.items():
            for call in known:
                known[call] = min(known[call], self._time(call, is_large=is_large))

    def cost(self) -> CallCost:
        """The cost of the whole model's calls, from its slices'."""
        spec, slices = self.spec, self.slices
        if slices is None:
            raise AssertionError("a whole model is measured with the cache that it is to have")
        rows, longest = timed_rows(spec.role, self.main), spec.model.geometry.context_length
        small, large = (measure_pass(each, rows, _ROUNDS, max_tokens=longest) for each in (self.small, self.main))
        return small.combined(large, slices.layers.whole, slices.layers.ratios[0])

    def _time(self, call: Call, *, is_large: bool) -> float:
        return time_calls(self.main if is_large else self.small, [call], patience=_PATIENCE)[call]
