"""`outrider tune-weights`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from outrider.bundle.folder import as_folder
from outrider.bundle.manifest import MANIFEST_NAME
from outrider.cli.console import out, print_json, table
from outrider.cli.export import Bars, terminable
from outrider.cli.options import export_half, json_option, read_options, weights_options
from outrider.cli.progress import progress_line
from outrider.errors import OptionError


@click.command()
@click.argument("model", metavar="MODEL")
@click.option("--draft", metavar="DRAFT", help="Draft model whose slices are timed, too: a file, folder or hub id.")
@weights_options
@json_option
def tune_weights(model: str, draft: str | None, as_json: bool, **options: Any) -> None:
    """Say with which weights to export a model for this machine.

    MODEL is a .gguf file, a checkpoint folder or a hub id. Slices of it are exported to OpenVINO and ONNX in int8 and
    int4, and timed on the CPU. That says how fast the whole model would be in each, how large, and which loses less.
    Slices of --draft are timed with its whole output matrix and with smaller ones.
    """
    with export_half():
        from outrider_export.describe.plan import make_plan
        from outrider_export.sources.source import fetch, locate
        from outrider_export.weights_choice.speed import (
            ACCEPTANCE,
            CUTS,
            DRAFT_SHARE,
            FORMS,
            ROWS,
            FormSpeed,
            FormTrial,
        )
    config = read_options(options)
    if (folder := as_folder(model)).is_dir() and (folder / MANIFEST_NAME).is_file():
        raise OptionError(
            f"{model} is a bundle, whose weights are chosen already. Name the model that it was made of: a checkpoint "
            "folder, a hub id or a .gguf file."
        )

    def predict(role: str, name: str) -> tuple[list[FormSpeed], dict[str, str], bool]:
        with terminable(), Bars(quiet=as_json) as bars:
            source = fetch(locate(name), trust_remote_code=False, progress=bars)
        plan = make_plan(role, source, "openvino", None)
        with progress_line("Measuring weights.", quiet=as_json), FormTrial(plan, config) as trial:
            if role == "main":
                forms = trial.slice_kl(trial.measure(FORMS, ROWS))
            else:
                forms = trial.measure(FORMS, (1,), [n for n in CUTS if n < plan.geometry.logits_width])
            return forms, {form: str(error) for form, error in trial.left_out.items()}, trial.is_settled

    forms, left_out, is_settled = predict("main", model)
    drafts: list[FormSpeed] = []
    if draft is not None:
        drafts, _, draft_is_settled = predict("draft", draft)
        is_settled &= draft_is_settled
    one = min((each.seconds[1] for each in drafts), default=DRAFT_SHARE * min(each.seconds[1] for each in forms))
    autos = [each.auto(one) for each in forms]
    best = max(forms, key=lambda each: each.plain), max(zip(autos, forms, strict=True), key=lambda pair: pair[0])[1]
    commands = [f"outrider export {model} --format {each.format} --weights {each.weights} -o DIR" for each in best]
    if as_json:
        rows = [asdict(each) | {"plain": each.plain, "auto": auto} for each, auto in zip(forms, autos, strict=True)]
        found = {"forms": rows, "drafts": [asdict(each) for each in drafts], "left_out": left_out}
        print_json(found | {"is_settled": is_settled, "plain": commands[0], "auto": commands[1]})
        return
    counts = list(forms[0].seconds)
    title = f"{model}, predicted from slices: milliseconds of a call by tokens, tokens/s"
    made = table("weights", "format", *map(str, counts), "plain", "auto", "MB", "slice KL", title=title, text=2)
    for each, auto in zip(forms, autos, strict=True):
        made.add_row(
            each.weights,
            each.format,
            *(f"{1000 * each.seconds[n]:.1f}" for n in counts),
            f"{each.plain:.1f}",
            f"{auto:.1f}",
            f"{each.num_bytes / 1e6:,.0f}",
            f"{each.slice_kl:.4f}",
        )
    out.print(made)
    how = f"whose token takes {DRAFT_SHARE} of the fastest call of one token" if draft is None else f"as {draft}"
    out.print(
        f"auto: with a draft model {how}, and is accepted with a chance of {ACCEPTANCE}. MB: of the weights, on disk "
        "and at least in memory. slice KL: how far the probabilities of a slice are from those of its 16-bit weights "
        "(KL divergence). It compares forms, and is not the whole model's: see docs/export.md.",
        style="dim",
    )
    if drafts:
        cuts = [*drafts[0].cut]
        title = f"{draft}, predicted from slices: milliseconds of a draft token, by the tokens that it proposes"
        made = table("weights", "format", "all", *(f"{n:,}" for n in cuts), title=title, text=2)
        for each in drafts:
            seconds = (each.seconds[1], *each.cut.values())
            made.add_row(each.weights, each.format, *(f"{1000 * taken:.1f}" for taken in seconds))
        out.print(made)
    for form, why in left_out.items():
        out.print(f"Left out: {form}. {why}")
    if not is_settled:
        out.print("The machine was busy: times of the same calls differ. Repeat this when it is idle.")
    for mode, command in zip(("plain decoding", "auto"), commands, strict=True):
        out.print(f"Fastest for {mode}: {command}", soft_wrap=True)
