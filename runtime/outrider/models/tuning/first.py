"""What a first start takes instead of measuring: a setting of the table, and guesses of what calls cost.

    choice, backend = first_choice(spec)    # compiled
    cost = expected_cost(spec, backend)     # for plain decoding, until calls are timed

Measured while the engine is idle: see `outrider.decoding.measuring`.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from outrider.models.backends.columns import COLUMNS, can_append, num_dependent
from outrider.models.backends.taps import read_ir
from outrider.models.cost.measure import contexts_of, timed_rows
from outrider.models.cost.table import CallCost
from outrider.models.tuning.machines import this_machine
from outrider.models.tuning.setting import Choice, settings_for
from outrider.system.core import new_core
from outrider.types import Exactness, Rounding, RowRule

if TYPE_CHECKING:
    from outrider.models.tuning.machines import Machine
    from outrider.models.tuning.model_spec import ModelSpec
    from outrider.types import CompiledModel

_IN_EIGHTS, _MOST_ROWS = Rounding(8, 8), 64  # hold on all processors that were measured, in any precision
_CHEAP_ROW = 0.1  # of a call: what a row of padding may take in a draft model, whose bits do not matter
# Guesses: bytes of weights that a second of a call reads, and of a first one packs; what another number of rows costs.
_BYTES_A_SECOND, _PACKED_A_SECOND, _CHANGE_SHARE = 12e9, 1.5e9, 0.1


def first_choice(spec: ModelSpec) -> tuple[Choice, CompiledModel]:
    """The first setting that the options allow, with this machine's rule, and the model in it. Raises as `compile`.

    The rule of a draft model is the fastest one: its bits do not change a text.
    """
    machine, setting, depends = this_machine(), next(iter(settings_for(spec))), False
    if spec.is_main and machine.columns and spec.support.paged:
        model = read_ir(new_core(), spec.path)
        appends = can_append(model)
        depends = num_dependent(model, appended=appends) > 0
        setting = dataclasses.replace(setting, columns=COLUMNS if appends else 0)
    backend = spec.compile(setting)
    if not spec.is_main:
        few = machine.added_row < _CHEAP_ROW and not spec.is_small
        rule = RowRule(separate=True, call=Rounding(2 if few else 1)) if backend.separate_rules else RowRule()
        exactness = Exactness(rule=rule)
    else:
        exactness = Exactness(rule=_rule_of(machine, backend, depends=depends), is_expected=True)
    backend.use(exactness)
    setting = dataclasses.replace(setting, exactness=exactness)
    return Choice(setting, waits=spec.is_main and not _is_known(spec, machine)), backend


def _is_known(spec: ModelSpec, machine: Machine) -> bool:
    """Whether rows were measured to be exact by the rule on such a machine, in this form. Not those of experts."""
    geometry, form = spec.model.geometry, f"{spec.model.format} {spec.model.weights}"
    needed = {form, "states"} if any(geometry.layer_states) else {form}
    return needed <= machine.exact and not geometry.num_experts and not spec.asked["properties"]


def _rule_of(machine: Machine, backend: CompiledModel, *, depends: bool) -> RowRule:
    """The rule of a main model's rows on a machine: each row of an answer alone, where the backend can.

    depends: whether there are products whose rows depend on how few they are; see `columns`.
    """
    by, most = (Rounding(machine.rows), machine.most_rows) if machine.rows else (_IN_EIGHTS, _MOST_ROWS)
    if depends:
        by = dataclasses.replace(by, least=max(by.least, _IN_EIGHTS.least))
    most = most if backend.can_divide else 0
    if not backend.separate_rules:
        call = by if by.multiple > 1 else Rounding()
        return RowRule(sequence=by, call=call, logits=by, most=most)
    separate = backend.separate_rules[0]
    call = dataclasses.replace(by, least=max(by.least, separate.call.least))
    return dataclasses.replace(separate, sequence=by, call=call, logits=by, most=most)


def expected_cost(spec: ModelSpec, backend: CompiledModel) -> CallCost:
    """A guess of what calls cost, by the bytes that they read, which nobody is sure of."""
    rows, longest = timed_rows(spec.role, backend), spec.model.geometry.context_length
    contexts = contexts_of(backend, rows, longest)
    one = max(spec.size, 1) / _BYTES_A_SECOND
    near = [one * (1 + this_machine().added_row * (count - 1)) for count in rows]
    more = (contexts[1] - contexts[0]) * backend.bytes_per_token / _BYTES_A_SECOND
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
