"""Bringing a bundle's models onto devices: which, tried apart first, and what is used instead of what fails."""

from __future__ import annotations

import dataclasses
import gc
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import openvino as ov

from outrider import kept
from outrider.backends import on_npu
from outrider.backends.devices import find_device, find_devices, free_memory, largest_tensor, resolve_auto
from outrider.backends.memory import system_memory
from outrider.backends.probe import Job, Verdict, try_apart
from outrider.config import format_of_property
from outrider.errors import BundleError, DeviceError, DeviceWarning, OptionError, OutriderError
from outrider.measure import (
    DRAFT_ROWS,
    MAIN_ROWS,
    Contention,
    PassCost,
    check_pass,
    contexts_of,
    measure_contention,
    measure_pass,
)
from outrider.part import NPU_SIZES, describe, parts_of
from outrider.placement import PairCost, Placement, choose, named
from outrider.setting import compile_settled

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from collections.abc import Sequence as Seq

    from outrider.backends.devices import Device
    from outrider.bundle.folder import Bundle
    from outrider.config import DeviceConfig
    from outrider.part import Part
    from outrider.placement import Pair
    from outrider.types import CompiledModel

_TRIAL_TOKENS = 4096  # of the cache while costs are compared


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A bundle's model on a device. cost: seconds of its calls."""

    part: Part
    backend: CompiledModel
    cost: PassCost


def load_parts(
    main: Part, drafts: Seq[Part], options: DeviceConfig, *, overlap: bool = False
) -> tuple[dict[str, CompiledModel], Placement]:
    """Compile the models on the devices that `options` name or leave to be chosen; by role, and where they are and why.

    A device is tried in a process of its own first, unless it is the CPU or an NPU that is emulated there. Warns
    (`DeviceWarning`) of every device that was wanted and is not used. overlap: the draft model may draft ahead while
    the main model checks.

    Raises:
        OptionError: for a device that is not there.
        BundleError: for a model that is not what the bundle says.
        DeviceError: when the device that was named for the main model, or the CPU, cannot run a model.
    """
    _check_properties(main, drafts, options)
    placement = place(main, drafts[0] if drafts else None, options, overlap=overlap)
    instead = [] if options.main_device != "auto" else ["CPU"]
    loaded = {"main": _load_first(main, [placement.main, *instead], options)}
    beside = loaded["main"][1]
    for part in drafts:
        device = placement.draft or beside
        instead = ["CPU"] if device == "CPU" or not find_device(beside, part.model.format) else [beside, "CPU"]
        loaded[part.role] = _load_first(part, [device, *instead], options)
    backends = {role: backend for role, (backend, _) in loaded.items()}
    found = beside, loaded[drafts[0].role][1] if drafts else None
    if found != (placement.main, placement.draft):
        why = f"{named(placement.main, placement.draft)} could not be had, as was warned"
        placement = Placement(*found, why=why)
    return backends, placement


def load_part(part: Part, device: str, options: DeviceConfig) -> CompiledModel:
    """Compile one model on one device, and compare it with what the manifest says; `load_parts` says what it raises."""
    emulated = on_npu(part.model, device) and options.of(part.role).properties.get("NPUW_DEVICES") == "CPU"
    if device != "CPU" and not emulated:
        verdict = judge(part, device, options)
        if verdict.works is False:
            raise DeviceError(
                f"{part} does not run on {device}: {verdict.reason}. "
                "Once that is mended, have it tried again with 'outrider devices --again'."
            )
    backend = compile_settled(part, device, options)
    found, geometry = (backend.num_layers, backend.logits_width), part.model.geometry
    if found != (geometry.num_layers, geometry.logits_width):
        raise BundleError(
            f"The model in {part.path.parent} has {found[0]} layers and {found[1]:,} logits; "
            f"outrider.json says {geometry.num_layers} and {geometry.logits_width:,}. Export the bundle again."
        )
    return backend


def forget() -> None:
    """Have all devices tried, and pairs of them chosen, anew."""
    kept.forget("verdicts", "placements")


def judge(part: Part, device: str, options: DeviceConfig) -> Verdict:
    """Whether a device runs a model with these options, as a process of its own found out, now or at an earlier start.

    A verdict holds for the device with its driver, the model's files, the options and the libraries' versions.
    """
    found = find_device(device, part.model.format)
    if found is None and not device.startswith("NPU"):  # which can be emulated
        return Verdict(works=None, reason="there is no such device")
    identity = found.identity if found else {"device": device, "format": part.model.format}
    asked = part.asked(options.of(part.role), device)
    key = {**identity, "role": part.role, "files": part.files, "options": asked, **part.versions}
    file = kept.Kept(kept.FOLDER / "verdicts", key, Verdict)
    verdict = file.read()
    if verdict is None or verdict.works is None:  # which is not kept
        own = part.options(options, device)
        job = Job(str(part.path.resolve()), part.model, device, own, part.is_main)
        verdict = try_apart(job)
        if verdict.works is not None:
            file.write(verdict)
    return verdict


def place(main: Part, draft: Part | None, options: DeviceConfig, *, overlap: bool = False) -> Placement:
    """Where the models should run: the devices that are named, or, for "auto", the quickest pair as measured.

    What was chosen is kept: it holds for the devices with their drivers and the verdicts on them, the models, the
    options and the versions.
    """
    asked = options.main_device, options.draft_device or options.main_device
    asked = _resolved(asked[0]), _resolved(asked[1])
    if "auto" not in asked:
        return Placement(asked[0], asked[1] if draft else None, why="as asked for")
    here = find_devices()
    mains = _fitting(main, asked[0], here)
    draft_devices = _fitting(draft, asked[1], here) if draft else [None]
    if len(mains) * len(draft_devices) == 1:
        return Placement(mains[0], draft_devices[0], why="there is no other device that could run them")
    left_out = () if any(device.fixed for device in here) else NPU_SIZES
    open_to = [(main, mains)] + ([(draft, draft_devices)] if draft else [])
    key = {
        "devices": [device.identity for device in here],
        "parts": [{"role": part.role, "files": part.files, **part.versions} for part, _ in open_to],
        "works": [[judge(part, n, options).works for n in names if n and n != "CPU"] for part, names in open_to],
        "options": {name: value for name, value in dataclasses.asdict(options).items() if name not in left_out},
        "overlap": overlap,
    }
    file = kept.Kept(kept.FOLDER / "placements", key, Placement)
    placement = file.read()
    if placement is None or placement.main not in mains or placement.draft not in draft_devices:
        placement = choose(_measure_pairs(main, draft, mains, draft_devices, options), overlap=overlap)
        file.write(placement)
    return placement


def settle(bundle: Bundle, draft_bundle: Bundle, options: DeviceConfig, *, overlap: bool = False) -> DeviceConfig:
    """The options with the devices that "auto" and "AUTO" stand for: for what has to name them."""
    main, drafts = parts_of(bundle, draft_bundle)
    placement = place(main, drafts[0] if drafts else None, options, overlap=overlap)
    draft_device = placement.draft or options.draft_device
    return dataclasses.replace(options, main_device=placement.main, draft_device=draft_device)


def cost_of(part: Part, backend: CompiledModel, repeats: int | None = None) -> PassCost:
    """What a model's calls cost here: as it was measured before, or, with `repeats` or for the first time, now.

    It is measured anew, too, where the cache has room for a longer context than it had then.
    """
    file = kept.Kept(kept.FOLDER / "costs", describe(part, backend), PassCost)
    known = file.read()
    rows = _rows_of(part.role, backend)
    longest = part.model.geometry.context_length
    far = contexts_of(backend, rows, longest)[1]
    if known is not None and not _can_be(known, backend, rows, longest):
        known = None
    fits = known is not None and far <= known.contexts[1] and known.contexts[0] + known.rows[0] <= backend.max_tokens
    if known is not None and fits and not repeats:
        cost = known
        check_pass(backend, cost)
    else:
        cost = measure_pass(backend, rows, repeats, max_tokens=longest)
        if repeats or known is None or known.contexts[1] <= far:  # what a larger cache has shown holds for it still
            file.write(cost)
    cost.one_call, cost.rule = backend.capabilities.one_call, backend.capabilities.rows
    return cost


def least_tokens(backends: Mapping[str, CompiledModel]) -> int:
    """Tokens that the caches have to hold for the models' calls to be timed. backends: by the models' roles."""
    return max(backend.tokens_for(_rows_of(role, backend)[-1]) for role, backend in backends.items())


def _rows_of(role: str, backend: CompiledModel) -> tuple[int, ...]:
    """The numbers of rows with which a model's calls are timed."""
    rule = backend.capabilities.rows
    return tuple(sorted({rule.num_rows([n]) for n in (MAIN_ROWS if role == "main" else DRAFT_ROWS)}))


def _can_be(known: PassCost, backend: CompiledModel, rows: Seq[int], longest: int) -> bool:
    """Whether a cost that was kept can have been measured for this model, with these rows and `longest` at most."""
    fixed = backend.capabilities.fixed
    alike = known.rows[:2] == (1, fixed.window) if fixed else known.rows == rows
    return alike and known.contexts[1] < max(longest, backend.max_tokens)


def contention_of(main: Part, backend: CompiledModel, draft: Part, other: CompiledModel) -> Contention:
    """How much slower calls of a main and a draft model get at the same time: as measured before, or now.

    The main model's calls are not to run in the background when this is called, and do not afterwards.
    """
    key = {part.role: describe(part, its) for part, its in ((main, backend), (draft, other))}
    file = kept.Kept(kept.FOLDER / "costs", key, Contention)
    contention = file.read()
    if contention is None:
        contention = measure_contention(backend, other)
        file.write(contention)
    return contention


def check_room(backends: Iterable[CompiledModel], max_tokens: int) -> None:
    """Raise DeviceError where a device has less memory than its models' caches would take, filled with `max_tokens`.

    Up front, as OpenVINO GenAI does it: a system that runs out of memory later slows down first, and a driver aborts.
    ONNX Runtime's devices other than the CPU do not say what they have.
    """
    core = ov.Core()
    wanted: dict[str, float] = {}
    for backend in backends:
        device, size = backend.device, max_tokens * backend.bytes_per_token
        if device != "CPU" and backend.runtime != "OpenVINO":
            continue
        wanted[device] = wanted.get(device, 0.0) + size
        most, each = largest_tensor(core, device), size / (2 * backend.num_layers)
        if most is not None and each > most:
            raise DeviceError(
                f"{device} makes no tensor above {most / 1e9:.2f} GB, and the keys of a layer may take "
                f"{each / 1e9:.2f} GB. Lower cache_size."
            )
    for device, size in wanted.items():
        room = system_memory()[0] if device == "CPU" else free_memory(core, device)
        if room is not None and size > room:
            has = f"{room / 1e9:.2f} GB of memory" + ("" if device == "CPU" else " left")
            raise DeviceError(f"{device} has {has}, and the cache may take {size / 1e9:.2f} GB. Lower cache_size.")


def _load_first(part: Part, devices: Seq[str], options: DeviceConfig) -> tuple[CompiledModel, str]:
    """Compile a model on the first of `devices` that runs it, with a warning for each before it; and which it was."""
    first, *others = dict.fromkeys(devices)
    try:
        return load_part(part, first, options), first
    except DeviceError as error:
        if first == "CPU" or not others:
            raise
        _warn(f"{str(error).rstrip('.')}. {others[0]} is used instead.")
    return _load_first(part, others, options)


def _resolved(name: str) -> str:
    return resolve_auto(ov.Core()) if name == "AUTO" else name


def _fitting(part: Part, name: str, here: Seq[Device]) -> list[str]:
    """The devices that a model may go to: the one that is named, or, for "auto", all that run it."""
    if name != "auto":
        return [name]
    found = [device for device in here if device.format == part.model.format]
    # An NPU as main device would limit every request: it has to be named.
    fit = [d.name for d in found if not d.why_not(part.role) and not (d.fixed and part.role == "main")]
    if not fit:
        reasons = "; ".join(f"{device.name}: {device.why_not(part.role)}" for device in found)
        raise DeviceError(f"{part} runs on no device here. {reasons}.")
    return fit


def _measure_pairs(
    main: Part, draft: Part | None, mains: Seq[str], draft_devices: Seq[str | None], options: DeviceConfig
) -> dict[Pair, PairCost]:
    """What each pair of devices that works costs, alone and side by side.

    Where no device runs the draft model, the main model's devices as without one.
    """
    costs: dict[Pair, PairCost] = {}
    plain: dict[Pair, PairCost] = {}
    is_open = [name == "auto" for name in (options.main_device, options.draft_device or options.main_device)]
    for main_device in mains:
        backend = _load_for_trial(main, main_device, options, must=main_device == "CPU" or not is_open[0])
        if backend is None:
            continue
        alone = PairCost(cost_of(main, backend), None)
        for draft_device in draft_devices:
            plain[main_device, draft_device] = alone
            if draft is None or draft_device is None:
                continue
            must = draft_device == "CPU"
            if other := _load_for_trial(draft, draft_device, options, must=must, is_open=is_open[1]):
                costs[main_device, draft_device] = dataclasses.replace(
                    alone, draft=cost_of(draft, other), contention=contention_of(main, backend, draft, other)
                )
            other = None
        backend = None
        gc.collect()  # the next device's model may need the memory
    return costs or plain


def _load_for_trial(
    part: Part, device: str, options: DeviceConfig, *, must: bool, is_open: bool = True
) -> CompiledModel | None:
    """A model with a small cache; None, with a warning, where the device fails that is no `must`.

    is_open: nobody has named the device, so that it may be one that is not for this model or these options.
    """
    try:
        backend = load_part(part, device, options)
        backend.allocate(_TRIAL_TOKENS)
    except OutriderError as error:
        if must or not (is_open or isinstance(error, DeviceError)):
            raise
        said = "" if isinstance(error, DeviceError) else f"{part} cannot go to {device}: "
        _warn(f"{said}{str(error).rstrip('.')}. It is left out of the choice.")
        return None
    return backend


def _check_properties(main: Part, drafts: Seq[Part], options: DeviceConfig) -> None:
    """Raise OptionError for what is for none of the models, or for a property not for those of its role."""
    if options.top_logits not in ("auto", 0) and all(part.model.format != "openvino" for part in (main, *drafts)):
        raise OptionError(
            f"top_logits={options.top_logits} is for models in OpenVINO's format, and these are in onnx. Leave it out."
        )
    for option, parts in (
        ("properties", [main, *drafts]),
        ("main_properties", [main]),
        ("draft_properties", list(drafts)),
    ):
        formats = sorted({part.model.format for part in parts})
        for name in getattr(options, option) if parts else ():
            if (wanted := format_of_property(name)) not in formats:
                raise OptionError(
                    f"{option} has {name!r}, which is for models in {wanted}, and these are in "
                    f"{' and '.join(formats)}. Leave it out."
                )


def _warn(message: str) -> None:
    warnings.warn(message, DeviceWarning, stacklevel=2)
