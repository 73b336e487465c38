"""`outrider devices`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from outrider.bundle.folder import draft_models_of
from outrider.cli.console import out, print_json, table
from outrider.cli.opening import draft_option, open_model
from outrider.cli.options import json_option, load_options, read_options
from outrider.engine.opening import open_draft_bundle
from outrider.errors import OptionError

if TYPE_CHECKING:
    from outrider.bundle.folder import Bundle
    from outrider.config import Config
    from outrider.models.backends.devices import Device
    from outrider.models.backends.processor import ProcessorFacts
    from outrider.models.tuning.model_spec import ModelSpec

LIBRARIES = {"openvino": "OpenVINO", "onnx": "ONNX Runtime"}


@click.command()
@click.argument("bundle", metavar="[MODEL]", required=False)
@draft_option
@click.option("--again", is_flag=True, help="Delete the saved results, and test the devices again.")
@load_options
@json_option
def devices(bundle: str | None, draft: str | None, again: bool, as_json: bool, **options: Any) -> None:
    """List the devices, and which models each can run.

    With MODEL (a bundle, a .gguf file, a checkpoint folder or a hub id), it is loaded on every device but the CPU that
    may run it, and so is its draft model. Each load runs in a process of its own, so that a crashing driver does no
    harm. The results are saved. The other options are those of loading a model; the output ends with the devices that
    they give the models.
    """
    from outrider.models.backends.devices import find_devices
    from outrider.models.backends.processor import find_processor
    from outrider.models.tuning.probe import forget

    config = read_options(options, measure="first")
    if draft and not bundle:
        raise OptionError(f"--draft {draft} needs its MODEL. Name both, or none.")
    if again:
        forget()
    found = find_devices()
    processor = find_processor()
    tried: list[dict[str, Any]] = []
    placement: dict[str, Any] = {}
    if bundle:
        opened = open_model(bundle, draft, quiet=as_json, config=config)
        tried, placement = _try_models(opened, config, found)
    if as_json:
        listed = [asdict(device) | {"runtime": LIBRARIES[device.format]} for device in found]
        more = {"models": tried, "placement": placement} if bundle else {}
        print_json({"devices": listed, "cores": processor.cores, "processor": asdict(processor), **more})
        return
    _print_devices(found, processor)
    if bundle:
        _print_models(tried)
        out.print(f"\nWith these options: {_placement_text(placement)}")


def _try_models(bundle: Bundle, config: Config, found: list[Device]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A row for each model on each device of its library, and the placement by the options."""
    from outrider.models.tuning.model_spec import specs_of
    from outrider.models.tuning.placement import choose_devices

    draft_bundle = open_draft_bundle(bundle, config.device)
    main, drafts = specs_of(bundle, draft_bundle, draft_models_of(draft_bundle, bundle))
    rows = [
        _try_model(spec, device, config)
        for spec in (main, *drafts)
        for device in found
        if device.format == spec.model.format and device.full_name
    ]
    return rows, asdict(choose_devices(main, drafts, config.device))


def _try_model(spec: ModelSpec, device: Device, config: Config) -> dict[str, Any]:
    """Whether a device runs a model, and the memory that it takes there, in bytes."""
    from outrider.models.tuning.probe import verdict_of

    reason = device.why_not(spec.role)
    works: bool | None = reason is None
    if works and device.name != "CPU":
        verdict = verdict_of(spec.on(device.name, config.device))
        works, reason = verdict.works, verdict.reason or None
    setting = None
    if device.name == "CPU":
        from outrider.models.tuning.loading import choice_of

        setting = choice_of(spec.on(device.name, config.device)).setting
    precision = setting.cache_precision if setting else _cache_precision(spec, device, config)
    if precision == "auto":
        precision = _cache_precision(spec, device, config)
    geometry = spec.model.geometry
    return {
        "role": spec.role,
        "weights": spec.model.weights,
        "size": spec.size,
        "device": device.name,
        "runtime": LIBRARIES[device.format],
        "works": works,
        "reason": reason,
        "cache_precision": precision,
        "cache_bytes_per_token": None if precision is None else int(geometry.numbers_per_token * _BYTES[precision]),
        "free": device.free,
        "setting": None if setting is None else asdict(setting) | {"exact": setting.exactness.holds},
        "says": None if setting is None else setting.description if spec.is_main else str(setting),
    }


# 8-bit blocks also have a scale and an offset.
_BYTES = {"f32": 4.0, "bf16": 2.0, "f16": 2.0, "u8": 1.2}


def _cache_precision(spec: ModelSpec, device: Device, config: Config) -> str | None:
    """The cache's precision; None if unknown."""
    from outrider.models.backends.npu_sizes import CACHE_KINDS
    from outrider.models.backends.processor import precision_of_device
    from outrider.system.core import new_core

    asked = config.device.cache_precision, config.device.precision
    if spec.model.format == "onnx":
        return "f32"  # as exported
    if device.fixed:  # an NPU, whose cache has a precision of its own
        return CACHE_KINDS.get(asked[0], asked[0])
    chosen = next((each for each in asked if each != "auto"), None)
    return chosen or precision_of_device(new_core(), device.name) or None


def _print_devices(found: list[Device], processor: ProcessorFacts) -> None:
    made = table(
        "device", "runtime", "name", "memory", "free", "precisions", "driver", "main model", "draft model", text=9
    )
    for device in (each for each in found if each.full_name):
        made.add_row(
            device.name,
            LIBRARIES[device.format],
            device.full_name,
            _gigabytes(device.memory),
            _gigabytes(device.free),
            " ".join(device.precisions) or "the model's",
            device.driver or "-",
            "no" if device.not_for_main else "yes",
            "no" if device.not_for_draft else "yes",
        )
    out.print(made)
    out.print()
    said: dict[tuple[str, str], list[str]] = {}
    for device in found:
        for remark in {device.not_for_main, device.not_for_draft, device.remark} - {None}:
            said.setdefault((LIBRARIES[device.format], str(remark)), []).append(device.name)
    for (library, remark), names in said.items():
        out.print(f"{', '.join(names)} ({library}): {remark}.", style="dim")
    for name, value in processor.description.items():
        out.print(f"{name}: {value}", style="dim")


def _print_models(rows: list[dict[str, Any]]) -> None:
    headings = ("model", "weights", "size", "device", "runtime", "runs", "cache", "per token", "free memory holds")
    made = table(*headings, text=len(headings))
    for row in rows:
        per_token, free = row["cache_bytes_per_token"], row["free"]
        room = (free - row["size"]) / per_token if free and per_token else None
        made.add_row(
            row["role"],
            row["weights"],
            _gigabytes(row["size"]),
            row["device"],
            row["runtime"],
            {True: "yes", False: "no", None: "not tried"}[row["works"]],
            row["cache_precision"] or "-",
            f"{per_token / 1e3:.0f} kB" if per_token else "-",
            "-" if room is None else f"{room:,.0f} tokens" if room > 0 else "not the model",
        )
    out.print()
    out.print(made)
    for row in rows:
        for said in (row["reason"], row["says"]):
            if said:
                out.print(f"{row['role']} on {row['device']}, {row['runtime']}: {said}.", style="dim")


def _placement_text(placement: dict[str, Any]) -> str:
    draft = f", draft model on {placement['draft']}" if placement["draft"] else ""
    return f"main model on {placement['main']}{draft} ({placement['why']})."


def _gigabytes(size: int | None) -> str:
    return "-" if size is None else f"{size / 1e9:.1f} GB"
