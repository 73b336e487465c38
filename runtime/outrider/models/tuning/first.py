"""What a first start takes instead of measuring: a setting of the table, and guesses of what calls cost.

    choice = first_choice(spec, setting, backend)    # of a model that is compiled
    cost = expected_cost(spec, rows, contexts, backend.bytes_per_token)    # for plain decoding, until calls are timed

Measured while the engine is idle: see `outrider.decoding.measuring`.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from outrider.models.cost.table import CallCost
from outrider.models.tuning.machines import this_machine
from outrider.models.tuning.setting import Choice
from outrider.types import Exactness, Rounding, RowRule

if TYPE_CHECKING:
    from outrider.models.tuning.machines import Machine
    from outrider.models.tuning.model_spec import ModelSpec
    from outrider.models.tuning.setting import Setting
    from outrider.types import CompiledModel

_IN_EIGHTS, _MOST_ROWS = Rounding(8, 8), 64  # hold on all processors that were measured, in any precision
_CHEAP_ROW = 0.1  # of a call: what a row of padding may take in a draft model, whose bits do not matter
# Guesses: bytes of weights that a second of a call reads, and of a first one packs; what another number of rows costs.
_BYTES_A_SECOND, _PACKED_A_SECOND, _CHANGE_SHARE = 12e9, 1.5e9, 0.1


def first_choice(spec: ModelSpec, setting: Setting, backend: CompiledModel) -> Choice:
    """The first setting that the options allow, which the model is compiled in, with this machine's rule."""
    setting = dataclasses.replace(setting, exactness=expected_exactness(spec, backend))
    return Choice(setting, waits=spec.is_main and not _is_known(spec, this_machine()))


def has_rule(spec: ModelSpec, setting: Setting) -> bool:
    """Whether the table has a rule for a setting that is the least padding, as far as it is known."""
    on_cpu = spec.device == "CPU" and spec.model.encoder is None
    return on_cpu and this_machine().rows > 0 and setting.precision in ("auto", "f32")


def expected_exactness(spec: ModelSpec, backend: CompiledModel) -> Exactness:
    """The table's rule for a model that is compiled in a setting.

    The rule of a draft model is the fastest one: its bits do not change a text.
    """
    machine = this_machine()
    if not spec.is_main:
        few = (spec.device != "CPU" or machine.added_row < _CHEAP_ROW) and not spec.is_small
        rule = RowRule(separate=True, call=Rounding(2 if few else 1)) if backend.separate_rules else RowRule()
        return Exactness(rule=rule)
    return Exactness(rule=_rule_of(machine, backend), is_expected=True)


def _is_known(spec: ModelSpec, machine: Machine) -> bool:
    """Whether rows were measured to be exact by the rule on such a machine, in this form. Not those of experts."""
    geometry, form = spec.model.geometry, f"{spec.model.format} {spec.model.weights}"
    needed = {form, "states"} if any(geometry.layer_states) else {form}
    return needed <= machine.exact and not geometry.num_experts and not spec.asked["properties"]


def _rule_of(machine: Machine, backend: CompiledModel) -> RowRule:
    """The rule of a main model's rows on a machine: each row of an answer alone, where the backend can."""
    by, most = (Rounding(machine.rows), machine.most_rows) if machine.rows else (_IN_EIGHTS, _MOST_ROWS)
    if machine.columns and backend.few_rows_differ:
        by = dataclasses.replace(by, least=max(by.least, _IN_EIGHTS.least))
    most = most if backend.can_divide else 0
    if not backend.separate_rules:
        call = by if by.multiple > 1 else Rounding()
        return RowRule(sequence=by, call=call, logits=by, most=most)
    separate = backend.separate_rules[0]
    call = dataclasses.replace(by, least=max(by.least, separate.call.least))
    return dataclasses.replace(separate, sequence=by, call=call, logits=by, most=most)


def expected_cost(
    spec: ModelSpec, rows: tuple[int, ...], contexts: tuple[int, int], bytes_per_token: float
) -> CallCost:
    """A guess of what calls cost, by the bytes that they read, which nobody is sure of."""
    one = max(spec.size, 1) / _BYTES_A_SECOND
    near = [one * (1 + this_machine().added_row * (count - 1)) for count in rows]
    more = (contexts[1] - contexts[0]) * bytes_per_token / _BYTES_A_SECOND
    is_paged = spec.support.paged
    return CallCost(
        rows,
        tuple(near),
        tuple(each + more for each in near),
        contexts,
        change=_CHANGE_SHARE * one if is_paged else 0.0,
        first=spec.size / _PACKED_A_SECOND if is_paged else 0.0,
        calls=(0,) * len(rows),
    )
