"""Chooses the form of each model for this machine, when it is exported: the fastest that loses little enough.

    plans = choose_forms(plans, tokenizers, None, None, progress)

It is chosen by slices of the model; see `forms.speed`. A choice is saved for the model's files and the machine, so that
it is made once. A machine that is too busy makes none: then the models get the form for any machine.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from outrider.config import Config
from outrider.errors import DeviceError, ExportError, OptionError, is_installed, one_line
from outrider.models.backends.processor import this_processor
from outrider.models.tuning.identity import versions_of
from outrider.system import saved
from outrider_export.describe.draft_costs import DraftCosts
from outrider_export.describe.plan import SMALL_DRAFT, check_route, check_weights, parallel_mask
from outrider_export.diet.draft_cut import SIZES
from outrider_export.forms.speed import ACCEPTANCE, DRAFT_SHARE, FORMS, ROWS, FormSpeed, FormTrial
from outrider_export.sources.content import stamps_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from outrider.bundle.manifest import Format
    from outrider_export.describe.plan import Plan
    from outrider_export.progress import Progress

PORTABLE: tuple[Format, str] = ("openvino", "int8")  # a main model's form for any machine
_LIBRARY = {"openvino": "OpenVINO", "onnx": "ONNX"}
# Smaller models keep the portable form: in 4 bits they are no faster, and lose more.
LEAST_WEIGHTS = SMALL_DRAFT
# Nats of `FormSpeed.slice_kl`, at most. Of Qwen2.5-Coder-1.5B's slice, int4 has 0.05 to 0.07, and 0.035 of the whole
# model; of SmolLM2-135M's 0.18 to 0.26.
MOST_SLICE_KL = 0.1
# Of the portable form's time, at most: other weights are other texts, and another library has other features.
_GAIN = 0.8
# Of a draft model's tokens that are accepted, int4 loses this share against int8: 85 % became 83 % with the 0.5B of
# the Qwen2.5-Coder pair.
_LOST_IN_INT4 = 0.025
# How many times as fast decoding is at least, for a draft model in another library than the main model's: it computes
# the drafts of simultaneous requests one after another, or reads prompts slower.
_OTHER_LIBRARY = 1.02
_CUT = SIZES[-1]  # tokens of the output matrix that draft models are compared with: most get one of this size


@dataclass(frozen=True)
class FormChoice:
    """A model's form on this machine. why: in words, for the manifest and the user; "" where there was no choice.

    seconds: of the main model's calls, by rows. draft: of the draft model's tokens, by the size of the output matrix.
    """

    format: str
    weights: str
    why: str
    seconds: dict[int, float]
    draft: dict[int, float]

    def __post_init__(self) -> None:
        if (self.format, self.weights) not in FORMS:
            raise ValueError("a form is one that export makes")
        if not all(0 < rows < 1 << 10 and 0 < each < 1e6 for rows, each in self.seconds.items()):
            raise ValueError("a call has rows and takes seconds")
        if not all(0 < size < 1 << 24 and 0 <= each < 1e6 for size, each in self.draft.items()):
            raise ValueError("an output matrix has rows, and a draft token takes seconds")


def may_choose(plan: Plan) -> bool:
    """Whether there is a choice for a model: it can be cut into slices, and is not small."""
    return plan.direct and plan.encoder is None and plan.vision is None and plan.num_weights >= LEAST_WEIGHTS


def machine_key() -> dict[str, str]:
    """What a bundle for this machine depends on besides the model."""
    return this_processor().description | {"onnx": str(all(map(is_installed, ("onnx", "onnxruntime"))))}


def choose_forms(
    plans: Sequence[Plan],
    tokenizers: Sequence[Path],
    draft_format: str | None,
    draft_weights: str | None,
    progress: Progress,
) -> list[Plan]:
    """The plans of a main model and its draft models, with the forms that are chosen for this machine.

    tokenizers: the folder of each one's tokenizer. draft_format, draft_weights: what was asked for; None: nothing.
    """
    main, *drafts = plans
    choice = None
    if may_choose(main):
        main, choice = _choose_main(main, tokenizers[0], progress)
    made = [main]
    for plan, tokenizer in zip(drafts, tokenizers[1:], strict=True):
        draft = plan
        if draft_format is None and _may_have(plan, main.format, draft_weights):
            draft = dataclasses.replace(plan, format=main.format)
        if choice is not None and (draft_format, draft_weights) == (None, None) and may_choose(draft):
            draft = _choose_draft(draft, main, choice, tokenizer, progress)
        made.append(draft)
    return made


def _may_have(plan: Plan, format: Format, weights: str | None) -> bool:  # noqa: A002
    """Whether a model can be converted to a format here, as a draft model with these weights."""
    if format == "onnx" and machine_key()["onnx"] != "True":
        return False
    try:
        check_weights("draft_weights", weights, format)
        check_route("draft", plan.source, format, weights)
    except (ExportError, OptionError):
        return False
    return True


def _choose_main(plan: Plan, tokenizer: Path, progress: Progress) -> tuple[Plan, FormChoice | None]:
    """The plan of a main model in the form that is fastest here, and the choice; None if none could be made."""

    def find() -> FormChoice:
        # int4 in OpenVINO is no match for that in ONNX on any processor that was measured.
        left_out: tuple[tuple[str, str], ...] = (("openvino", "int4"),)
        if not _may_have(plan, "onnx", None):
            left_out = ("onnx", "int8"), ("onnx", "int4")
        with FormTrial(plan, Config(), tokenizer) as trial:
            forms = trial.measure([each for each in FORMS if each not in left_out], ROWS)
            _check(trial)
            draft = DRAFT_SHARE * min(each.seconds[1] for each in forms)  # the same for all
            portable = next(each for each in forms if (each.format, each.weights) == PORTABLE)
            best = portable
            for each in sorted(forms, key=lambda form: _seconds_per_token(form, draft)):
                if _seconds_per_token(each, draft) <= _GAIN * _seconds_per_token(portable, draft):
                    kept = trial.slice_kl([each])[0] if each.weights == "int4" else each
                    if kept.slice_kl is None or kept.slice_kl <= MOST_SLICE_KL:
                        best = kept
                        break
            return FormChoice(best.format, best.weights, _why(best, portable), best.seconds, {})

    choice = _chosen(plan, {"role": "main"}, find, progress)
    return (plan, None) if choice is None else (_as_chosen(plan, choice), choice)


def _choose_draft(plan: Plan, main: Plan, of_main: FormChoice, tokenizer: Path, progress: Progress) -> Plan:
    """The plan of a draft model in the form that makes decoding fastest here; see `_OTHER_LIBRARY`."""
    other: Format = "onnx" if plan.format == "openvino" else "openvino"
    forms: list[tuple[Format, str]] = [(plan.format, "int8"), (plan.format, "int4")]
    if _may_have(plan, other, None):
        forms.append((other, "int4"))  # int8 was slower there, on every processor that was measured

    def find() -> FormChoice:
        with FormTrial(plan, Config(), tokenizer) as trial:
            made = trial.measure(forms, (1,), SIZES)
            _check(trial)
        known = FormSpeed(main.format, main.weights, of_main.seconds, {}, 0, "")
        width = plan.geometry.logits_width

        def seconds(form: FormSpeed) -> float:
            return form.cut[_CUT] if width > _CUT else form.seconds[1]

        def speed(form: FormSpeed) -> float:
            kept = ACCEPTANCE * (1 - _LOST_IN_INT4 if form.weights == "int4" else 1)
            return known.auto(seconds(form), kept) / (1 if form.format == plan.format else _OTHER_LIBRARY)

        best = max(made, key=speed)
        shares = (
            f"{seconds(each) / of_main.seconds[1]:.2f} in {each.weights} in {_LIBRARY[each.format]}" for each in made
        )
        why = f"a token takes this part of a call of the main model: {', '.join(shares)}"
        draft = {size: seconds for size, seconds in best.cut.items() if size < width} | {width: best.seconds[1]}
        return FormChoice(best.format, best.weights, why, {}, draft)

    key = {"role": "draft", "main": _stamps(main), "form": [main.format, main.weights, *forms]}
    choice = _chosen(plan, key, find, progress)
    if choice is None:
        return plan
    costs = DraftCosts(of_main.seconds, choice.draft, measured=True, at_once=parallel_mask(plan) is not None)
    return dataclasses.replace(_as_chosen(plan, choice), costs=costs)


def _check(trial: FormTrial) -> None:
    if not trial.is_settled:
        raise DeviceError("the machine is too busy to time models. Export again when it is idle.")


def _seconds_per_token(form: FormSpeed, draft: float) -> float:
    """Of plain decoding, of decoding with drafts and of reading a prompt, together. draft: of a draft token."""
    return 1 / form.plain + 1 / form.auto(draft) + form.seconds[ROWS[-1]] / ROWS[-1]


def _why(best: FormSpeed, portable: FormSpeed) -> str:
    if best is portable:
        return "no other form is faster enough here"
    one, many = (portable.seconds[rows] / best.seconds[rows] for rows in (1, ROWS[-1]))
    lost = "" if best.slice_kl is None else f", slice KL {best.slice_kl:.3f}"
    return f"{one:.2f} times as fast as int8 in OpenVINO here for a token, {many:.2f} times for {ROWS[-1]}{lost}"


def _chosen(plan: Plan, key: dict[str, Any], find: Callable[[], FormChoice], progress: Progress) -> FormChoice | None:
    """The choice that was saved, or is made now."""
    here = {"versions": versions_of("openvino", "onnxruntime"), **machine_key()}  # other versions have other kernels
    file = saved.SavedValue(saved.FOLDER / "forms", {**key, "rows": ROWS, "model": _stamps(plan), **here}, FormChoice)
    choice = file.read()
    if choice is None:
        progress.phase(f"measure {plan.role}")
        try:
            choice = find()
        except (ExportError, DeviceError) as error:
            progress.note(f"The form of {plan.source.id} is not chosen by this machine: {one_line(error)}")
            return None
        file.write(choice)
    progress.note(f"{plan.source.id} in {choice.weights} in {_LIBRARY[choice.format]}: {choice.why}.")
    return choice


def _as_chosen(plan: Plan, choice: FormChoice) -> Plan:
    return dataclasses.replace(plan, format=cast("Format", choice.format), weights=choice.weights, chosen=choice.why)


def _stamps(plan: Plan) -> list[Any]:
    stamps = [(stamp.name, stamp.size, *stamp.changed) for stamp in stamps_of(plan.path)]
    return [str(plan.path.resolve()), *stamps]
