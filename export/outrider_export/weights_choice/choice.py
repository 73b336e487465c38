"""Chooses each model's format and weights when it is exported: those that win on processors like this one.

    plans = choose_weights(plans, None, None, progress)

They are in `configs/machines.toml`; nothing is measured.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, cast

from outrider.errors import ExportError, OptionError, is_installed
from outrider.models.tuning.machines import this_machine
from outrider_export.describe.plan import SMALL_DRAFT, check_route, check_weights
from outrider_export.direct.own_codes import TYPES_IN_4_BITS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.bundle.manifest import Format
    from outrider_export.describe.plan import Plan
    from outrider_export.progress import Progress

PORTABLE: tuple[Format, str] = ("openvino", "int8")  # a main model's form for any machine
_LIBRARY = {"openvino": "OpenVINO", "onnx": "ONNX"}
# Smaller models keep the portable form: in 4 bits they are no faster, and lose more.
LEAST_WEIGHTS = SMALL_DRAFT
_LEAST_IN_4_BITS = 0.5  # of a main model's weights, where 4 bits are taken


def may_choose(plan: Plan) -> bool:
    """Whether there is a choice for a model: it is converted without PyTorch, is a decoder of text, and not small."""
    return plan.direct and plan.encoder is None and plan.vision is None and plan.num_weights >= LEAST_WEIGHTS


def machine_key() -> dict[str, Any]:
    """What a bundle for this machine depends on besides the model."""
    machine = this_machine()
    return {"main": machine.main, "draft": machine.draft, "draft_vocab": machine.draft_vocab, "onnx": _has_onnx()}


def choose_weights(
    plans: Sequence[Plan], draft_format: str | None, draft_weights: str | None, progress: Progress
) -> list[Plan]:
    """The plans of a main model and its draft models, with formats and weights for this machine.

    draft_format, draft_weights: what was asked for; None: nothing.
    """
    main, *drafts = plans
    is_chosen = may_choose(main)
    if is_chosen:
        main = _with_best(main, this_machine().main, progress)
    made = [main]
    for draft in drafts:
        if draft_format is None and may_have(draft, main.format, draft_weights):
            draft = dataclasses.replace(draft, format=main.format)
        if is_chosen and (draft_format, draft_weights) == (None, None):
            draft = choose_draft_weights(draft, progress)
        made.append(draft)
    return made


def choose_draft_weights(draft: Plan, progress: Progress) -> Plan:
    """The plan of a draft model with the format and weights for this machine; as it is if there is no choice."""
    return _with_best(draft, this_machine().draft, progress) if may_choose(draft) else draft


def _with_best(plan: Plan, forms: Sequence[str], progress: Progress) -> Plan:
    """A plan with the first of these forms that the model can have: its weights are not rounded to 4 bits."""
    for form in forms:
        format_, weights = form.split()
        loses = plan.role == "main" and weights == "int4" and not _has_4_bits(plan)
        if not loses and may_have(plan, cast("Format", format_), None):
            why = f"the fastest on processors like this one ({this_machine().name})"
            progress.note(f"{plan.source.id} in {weights} in {_LIBRARY[format_]}: {why}.")
            return dataclasses.replace(plan, format=cast("Format", format_), weights=weights, chosen=why)
    return plan


def _has_4_bits(plan: Plan) -> bool:
    """Whether most of a file's weights have codes of 4 bits, which int4 keeps."""
    tensors = [] if plan.header is None else plan.header.tensors.values()
    in_4_bits = sum(tensor.num_weights for tensor in tensors if tensor.type in TYPES_IN_4_BITS)
    return in_4_bits > _LEAST_IN_4_BITS * plan.num_weights


def may_have(plan: Plan, format: Format, weights: str | None) -> bool:  # noqa: A002
    """Whether a model can be converted to a format here, with these weights."""
    if format == "onnx" and not _has_onnx():
        return False
    try:
        check_weights("draft_weights", weights, format)
        check_route(plan.source, format)
    except (ExportError, OptionError):
        return False
    return True


def _has_onnx() -> bool:
    return all(map(is_installed, ("onnx", "onnxruntime")))
