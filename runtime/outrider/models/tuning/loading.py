"""Loads a bundle's models onto devices: chooses devices, tries them in a child process, replaces those that fail."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from outrider.config import DeviceConfig, format_of_property
from outrider.errors import BundleError, DeviceError, DeviceWarning, OptionError, OutriderError
from outrider.models.backends import Support
from outrider.models.backends.devices import find_device, find_devices, free_memory, largest_tensor, resolve_auto
from outrider.models.backends.memory import system_memory
from outrider.models.backends.processor import may_divide_by_zero, this_processor
from outrider.models.tuning.model_spec import ModelSpec
from outrider.models.tuning.probe import Job, Verdict, try_apart
from outrider.models.tuning.settled import compile_settled, is_settled
from outrider.system import saved
from outrider.system.core import new_core
from outrider.system.together import together
from outrider.types import CompiledModel

_AUTO = "auto chooses the first GPU that runs the model, otherwise the CPU"


@dataclass(frozen=True, slots=True)
class Placement:
    """The devices of the main and the draft model, and why these, in a sentence. draft: None without a draft model."""

    main: str
    draft: str | None
    why: str

    def named_in(self, options: DeviceConfig) -> DeviceConfig:
        """The options with these devices in place of "auto" and "AUTO"."""
        return dataclasses.replace(options, main_device=self.main, draft_device=self.draft or options.draft_device)


Compiled: TypeAlias = tuple[ModelSpec, CompiledModel]  # the spec says where


def compile_models(
    main: ModelSpec, drafts: Sequence[ModelSpec], options: DeviceConfig, *, can_leave_out: bool = False
) -> tuple[dict[str, Compiled], Placement]:
    """Compile the models on the devices that `choose_devices` gives. Returns them by role, with their devices.

    can_leave_out: leave out a drafter that cannot read the main model's cache, with a warning; it was not asked for.

    A device is tried in a process of its own first, unless it is the CPU or an NPU that is emulated there. A device
    that "auto" chose, or that was named for a draft model, is replaced when it fails, with a warning (`DeviceWarning`).

    Raises:
        OptionError: for a device that is not there.
        BundleError: for a model that is not what the bundle says.
        DeviceError: when the device that was named for the main model, or the CPU, cannot run a model.
    """
    _check_properties(main, drafts, options)
    own = [spec for spec in drafts if not spec.uses_main_cache]
    placement = choose_devices(main, drafts, options)
    _check_layers(main, placement.main, drafts)
    if (at_once := _load_at_once([main, *own], placement, options)) is not None:
        return at_once | _sharing(at_once["main"], drafts, options, can_leave_out), placement
    is_chosen = options.main_device == "auto"
    failures = OutriderError if is_chosen else DeviceError  # the user did not say that the model fits the device
    loaded = {"main": _load_first(main, [placement.main, *(["CPU"] if is_chosen else [])], options, failures)}
    beside = loaded["main"][0].device
    follows = is_chosen and options.draft_device is None
    failures = OutriderError if follows or options.draft_device == "auto" else DeviceError
    for spec in own:
        device = _beside(beside, spec) if follows else placement.draft or beside
        instead = ["CPU"] if device == "CPU" or not find_device(beside, spec.model.format) else [beside, "CPU"]
        loaded[spec.role] = _load_first(spec, [device, *instead], options, failures)
    found = beside, loaded[own[0].role][0].device if own else None
    loaded |= _sharing(loaded["main"], drafts, options, can_leave_out)
    if found != (placement.main, placement.draft):
        wanted = " and ".join(filter(None, (placement.main, placement.draft)))
        placement = Placement(*found, why=f"{wanted} cannot be used, as warned")
    return loaded, placement


def _load_at_once(
    parts: Sequence[ModelSpec], placement: Placement, options: DeviceConfig
) -> dict[str, Compiled] | None:
    """Compile models at the same time.

    None if they are not all for the CPU, or one is to be measured, which must not be disturbed.
    """
    devices = {placement.main, placement.draft or placement.main}
    here = [spec.on("CPU", options) for spec in parts]
    if len(parts) == 1 or devices != {"CPU"} or not all(map(is_settled, here)):
        return None
    loading = together([partial(compile_checked, spec) for spec in here])
    return {spec.role: (spec, each.result()) for spec, each in zip(here, loading, strict=True)}


def compile_checked(spec: ModelSpec) -> CompiledModel:
    """Compile one model on its device, and validate it against the manifest. Raises as `compile_models`."""
    own, support, device = spec.options, spec.support, spec.device
    emulated = support.fixed_shapes and own.properties.get("NPUW_DEVICES") == "CPU"
    is_doubtful = support.tries_settings and may_divide_by_zero(
        this_processor(), own.precision, spec.model.weights, own.num_threads
    )
    if (device != "CPU" and not emulated) or is_doubtful:
        verdict = verdict_of(spec)
        if verdict.works is False:
            remedy = "Load with precision='f32', or with more threads. " if is_doubtful else ""
            raise DeviceError(
                f"{spec} does not run on {device}: {verdict.reason}. {remedy}"
                "When that is fixed, test it again with 'outrider devices --again'."
            )
    backend = compile_settled(spec)
    found, geometry = (backend.num_layers, backend.logits_width), spec.model.geometry
    if found != (geometry.num_cached_layers, geometry.logits_width):
        raise BundleError(
            f"The model in {spec.path.parent} has {found[0]} layers and {found[1]:,} logits; "
            f"outrider.json says {geometry.num_cached_layers} and {geometry.logits_width:,}. Export the bundle again."
        )
    return backend


def forget() -> None:
    """Delete the saved verdicts, so that all devices are tried again."""
    saved.forget("verdicts")


def verdict_of(spec: ModelSpec) -> Verdict:
    """Whether a device runs a model. It is tried in a child process, now or at an earlier start; see `probe.Job`."""
    device = spec.device
    if not device.startswith("NPU") and find_device(device, spec.model.format) is None:  # an NPU can be emulated
        return Verdict(works=None, reason="there is no such device")
    file = spec.identity.saved("verdicts", Verdict, ["features", "cuts", "adapters"])  # the child changes no graph
    verdict = file.read()
    if verdict is None or verdict.works is None:  # "could not be tried" is not saved
        job = Job(str(spec.bundle.folder.resolve()), spec.role, spec.model, device, spec.compile_options)
        verdict = try_apart(job)
        if verdict.works is not None:
            file.write(verdict)
    return verdict


def choose_devices(main: ModelSpec, drafts: Sequence[ModelSpec], options: DeviceConfig) -> Placement:
    """The devices that `options` name; for "auto" the first GPU that runs the model, otherwise the CPU.

    A GPU is tried in a process of its own (see `verdict_of`). Warns (`DeviceWarning`) of one that fails.
    """
    draft = next((spec for spec in drafts if not spec.uses_main_cache), None)
    main_device = _resolved(main, options.main_device, options)
    draft_device = None
    if draft and options.draft_device is not None:
        draft_device = _resolved(draft, options.draft_device, options)
    elif draft:
        draft_device = _beside(main_device, draft) if options.main_device == "auto" else main_device
    is_chosen = "auto" in (options.main_device, options.draft_device if draft else None)
    return Placement(main_device, draft_device, why=_AUTO if is_chosen else "as asked for")


def check_room(backends: Iterable[CompiledModel], max_tokens: int) -> None:
    """Raise DeviceError if a device has less memory than its models' full caches of `max_tokens` would take.

    This is done at load, as in OpenVINO GenAI: later, a system that runs out of memory slows down, and drivers abort.
    The memory of ONNX Runtime's devices other than the CPU is unknown.
    """
    core = new_core()
    wanted: dict[str, float] = {}
    for backend in backends:
        device, size = backend.device, max_tokens * backend.bytes_per_token
        if not size or (device != "CPU" and backend.runtime != "OpenVINO"):
            continue
        wanted[device] = wanted.get(device, 0.0) + size
        most, each = largest_tensor(core, device), size / max(2 * backend.num_layers, 1)
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


def _load_first(
    spec: ModelSpec, devices: Sequence[str], options: DeviceConfig, failures: type[OutriderError] = DeviceError
) -> Compiled:
    """Compile a model on the first of `devices` that runs it. Warns of each failure.

    failures: the errors after which the next device is tried.
    """
    first, *others = dict.fromkeys(devices)
    here = spec.on(first, options)
    try:
        return here, compile_checked(here)
    except failures as error:
        if first == "CPU" or not others:
            raise
        said = "" if isinstance(error, DeviceError) else f"{spec} does not run on {first}: "
        _warn(f"{said}{str(error).rstrip('.')}. {others[0]} is used instead.")
    return _load_first(spec, others, options, failures)


def _resolved(spec: ModelSpec, name: str, options: DeviceConfig) -> str:
    """The device that an option's value stands for, for this model."""
    if name == "AUTO":
        return resolve_auto(new_core())
    if name != "auto":
        return name
    for device in find_devices():
        kind = device.name.split(".")[0]
        # An NPU limits prompts and answers: it has to be named.
        if kind in ("CPU", "NPU") or device.format != spec.model.format or device.why_not(spec.role):
            continue
        verdict = verdict_of(spec.on(device.name, options))
        if verdict.works is not False:
            return device.name
        _warn(f"{spec} does not run on {device.name}: {verdict.reason}. It is not chosen.")
    return "CPU"


def _beside(main_device: str, draft: ModelSpec) -> str:
    """A draft model's device where "auto" chose the main model's: that one if it runs the draft's format."""
    return main_device if find_device(main_device, draft.model.format) else "CPU"


def _check_layers(main: ModelSpec, device: str, drafts: Sequence[ModelSpec]) -> None:
    """Raise DeviceError for a drafter that uses the main model's cache on a device that keeps it to itself."""
    sharing = [spec for spec in drafts if spec.uses_main_cache]
    if sharing and Support.of(main.model, device).fixed_shapes:
        does = "is made of some of the main model's layers" if sharing[0].layers else "reads the main model's cache"
        raise DeviceError(
            f"The drafter '{sharing[0].role}' {does}, which NPUW compiles as a whole. "
            "Load with main_device='CPU' or 'GPU', or with another drafter, such as drafter='suffix'."
        )


def _sharing(
    main: Compiled, drafts: Sequence[ModelSpec], options: DeviceConfig, can_leave_out: bool
) -> dict[str, Compiled]:
    """The models, by role, of drafters that use the main model's cache: its own layers, or such that read it."""
    from outrider.models.backends.openvino_paged import OpenVINOPaged

    whole, backend = main
    made: dict[str, Compiled] = {}
    for spec in drafts:
        if not spec.uses_main_cache:
            continue
        if not isinstance(backend, OpenVINOPaged):
            raise AssertionError("the manifest and the device were checked")
        here = spec.on(whole.device, options)
        try:
            made[spec.role] = here, here.compile_beside(backend)
        except DeviceError as error:
            if not can_leave_out:
                raise
            _warn(f"The drafter '{spec.role}' is left out: {error}")
    return made


def _check_properties(main: ModelSpec, drafts: Sequence[ModelSpec], options: DeviceConfig) -> None:
    """Raise OptionError for a property that fits no model of its role."""
    for option, parts in (
        ("properties", [main, *drafts]),
        ("main_properties", [main]),
        ("draft_properties", list(drafts)),
    ):
        formats = sorted({spec.model.format for spec in parts})
        for name in getattr(options, option) if parts else ():
            if (wanted := format_of_property(name)) not in formats:
                raise OptionError(
                    f"{option} has {name!r}, which is for models in {wanted}, and these are in "
                    f"{' and '.join(formats)}. Leave it out."
                )


def _warn(message: str) -> None:
    warnings.warn(message, DeviceWarning, stacklevel=2)
