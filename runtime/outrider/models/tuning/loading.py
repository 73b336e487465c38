"""The door of the first load: the models of an engine, compiled in their settings, with what their calls cost.

    loaded, placement = load_models(main, drafts, options, admission.allocate)
    loaded["main"].cost(5)    # seconds of a call of five rows

Devices are chosen, tried in a child process, and replaced if they fail. What is measured at the first load is saved
under each model's identity, and read at later ones.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from outrider.bundle.folder import draft_models_of
from outrider.config import DeviceConfig, format_of_property
from outrider.errors import BundleError, DeviceError, DeviceWarning, ExactnessWarning, OptionError, OutriderError
from outrider.models.backends.processor import may_divide_by_zero, this_processor
from outrider.models.backends.registry import compile_beside, compile_model
from outrider.models.cost.stored import UNMEASURED, cost_of
from outrider.models.tuning.first import first_choice
from outrider.models.tuning.measure.overlap import Contention, measure_contention
from outrider.models.tuning.model_spec import ModelSpec, specs_of
from outrider.models.tuning.placement import Placement, choose_devices, device_beside
from outrider.models.tuning.probe import verdict_of
from outrider.models.tuning.setting import Choice, Setting, settings_for
from outrider.models.tuning.trials import choose, search
from outrider.system.progress import report
from outrider.system.together import reported, together
from outrider.types import CompiledModel

if TYPE_CHECKING:
    from outrider.bundle.folder import Bundle
    from outrider.models.cost.table import CallCost


@dataclass(eq=False, slots=True)
class LoadedModel:
    """A model on its device, ready for requests once its cache is allocated and its calls are timed."""

    spec: ModelSpec  # says where
    choice: Choice  # its setting, and the trials that it was chosen from
    backend: CompiledModel
    cost: CallCost = field(init=False)  # seconds of its calls

    def contention_with(self, draft: LoadedModel) -> Contention:
        """How much slower its calls and a draft model's are at the same time: saved, or measured now.

        Its calls must not run in the background before, and do not run there afterwards.
        """
        one, other = (model.spec.identity.compiled(model.backend) for model in (self, draft))
        file = one.saved("costs", Contention, UNMEASURED, beside=other.key(UNMEASURED))
        contention = file.read()
        if contention is None:
            contention = measure_contention(self.backend, draft.backend)
            file.write(contention)
        return contention

    def time_again(self, repeats: int) -> None:
        """Measure and save the cost of its calls. Not while requests run."""
        self.cost.take(cost_of(self.spec, self.backend, repeats))

    @property
    def identity(self) -> dict[str, Any]:
        """All that its keys and values depend on besides what it reads."""
        key = self.spec.identity.compiled(self.backend).key()
        return key | {"cache": self.backend.cache_precision, "bytes": self.backend.bytes_per_token}

    @property
    def setting(self) -> str:
        """Where and how precisely it runs; of a main model, whether drafts cannot change its text."""
        backend, exact, facts = self.backend, "", self.backend.fingerprint
        group_size = facts.get("DYNAMIC_QUANTIZATION_GROUP_SIZE")
        groups = f" in groups of {group_size}" if group_size else ""
        if self.spec.is_main:
            found = backend.exactness
            is_open = found.is_expected and not found.differences
            exact = ", bit-exact" if found.holds else ", not checked yet" if is_open else ", not bit-exact"
        cache = f"cache {backend.cache_precision}"
        threads = facts.get("INFERENCE_NUM_THREADS") if backend.device == "CPU" else None
        threads = f", {threads} thread{'s' * (threads != '1')}" if threads else ""
        columns = f", products of {int(facts['columns']):,} columns" if "columns" in facts else ""
        return f"{backend.device} {backend.precision}{groups}{exact}, {cache}{threads}{columns}, {backend.runtime}"


def load_models(
    main: ModelSpec,
    drafts: Sequence[ModelSpec],
    options: DeviceConfig,
    allocate: Callable[[dict[str, CompiledModel]], None],
    *,
    can_leave_out: bool = False,
    later: Collection[str] = (),
) -> tuple[dict[str, LoadedModel], Placement]:
    """Compile an engine's models on the devices that `choose_devices` gives, and time their calls.

    Returns them by role, with their devices.

    allocate: is given all of them, which share the memory, and allocates their caches. can_leave_out: leave out a
    drafter that cannot read the main model's cache, with a warning; it was not asked for. later: the roles of draft
    models that the caller loads afterwards.

    A device is tried in a process of its own first, unless it is the CPU or an NPU that is emulated there. A device
    that "auto" chose, or that was named for a draft model, is replaced when it fails, with a warning (`DeviceWarning`).

    Raises:
        OptionError: for a device that is not there.
        BundleError: for a model that is not what the bundle says.
        DeviceError: when the device that was named for the main model, or the CPU, cannot run a model.
    """
    _check_properties(main, drafts, options)
    placement = choose_devices(main, drafts, options)
    _check_layers(main.on(placement.main, options), drafts)
    own = [each for each in drafts if not each.uses_main_cache and each.role not in later]
    loaded, placement = _compile_models(main, own, placement, options)
    loaded |= _compile_beside(loaded["main"], drafts, options, can_leave_out)
    allocate({role: model.backend for role, model in loaded.items()})
    for model in loaded.values():
        model.cost = cost_of(model.spec, model.backend)
    return loaded, placement


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


def _check_layers(main: ModelSpec, drafts: Sequence[ModelSpec]) -> None:
    """Raise DeviceError for a drafter that uses the main model's cache on a device that keeps it to itself."""
    sharing = [spec for spec in drafts if spec.uses_main_cache]
    if sharing and main.support.fixed_shapes:
        does = "is made of some of the main model's layers" if sharing[0].layers else "reads the main model's cache"
        raise DeviceError(
            f"The drafter '{sharing[0].role}' {does}, which NPUW compiles as a whole. "
            "Load with main_device='CPU' or 'GPU', or with another drafter, such as drafter='suffix'."
        )


def _compile_models(
    main: ModelSpec, own: Sequence[ModelSpec], placement: Placement, options: DeviceConfig
) -> tuple[dict[str, LoadedModel], Placement]:
    """Compile the main model and those with a cache of their own. Returns the devices that they are on, too.

    At the same time if they are all for the CPU, and none is to be measured, which must not be disturbed.
    """
    here = [spec.on("CPU", options) for spec in (main, *own)]
    if own and {placement.main, placement.draft} == {"CPU"} and all(map(is_settled, here)):
        made = together([partial(compile_checked, spec) for spec in here])
        return {spec.role: each.result() for spec, each in zip(here, made, strict=True)}, placement
    is_chosen = options.main_device == "auto"
    failures = OutriderError if is_chosen else DeviceError  # the user did not say that the model fits the device
    loaded = {"main": _load_first(main, [placement.main, *(["CPU"] if is_chosen else [])], options, failures)}
    beside = loaded["main"].spec.device
    follows = is_chosen and options.draft_device is None
    failures = OutriderError if follows or options.draft_device == "auto" else DeviceError
    for spec in own:
        instead = device_beside(beside, spec)
        wanted = instead if follows else placement.draft or beside
        loaded[spec.role] = _load_first(spec, [wanted, instead, "CPU"], options, failures)
    found = beside, loaded[own[0].role].spec.device if own else placement.draft
    if found != (placement.main, placement.draft):
        replaced = " and ".join(filter(None, (placement.main, placement.draft)))
        placement = Placement(*found, why=f"{replaced} cannot be used, as warned")
    return loaded, placement


def _load_first(
    spec: ModelSpec, devices: Sequence[str], options: DeviceConfig, failures: type[OutriderError] = DeviceError
) -> LoadedModel:
    """Compile a model on the first of `devices` that runs it. Warns of each failure.

    failures: the errors after which the next device is tried.
    """
    first, *others = dict.fromkeys(devices)
    here = spec.on(first, options)
    try:
        return compile_checked(here)
    except failures as error:
        if first == "CPU" or not others:
            raise
        said = "" if isinstance(error, DeviceError) else f"{spec} does not run on {first}: "
        _warn(f"{said}{str(error).rstrip('.')}. {others[0]} is used instead.")
    return _load_first(spec, others, options, failures)


def compile_checked(spec: ModelSpec) -> LoadedModel:
    """Compile one model on its device, and validate it against the manifest. Raises as `load_models`."""
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
    choice, backend = compile_settled(spec)
    found, geometry = (backend.num_layers, backend.logits_width), spec.model.geometry
    if found != (geometry.num_cached_layers, geometry.logits_width):
        raise BundleError(
            f"The model in {spec.path.parent} has {found[0]} layers and {found[1]:,} logits; "
            f"outrider.json says {geometry.num_cached_layers} and {geometry.logits_width:,}. Export the bundle again."
        )
    return LoadedModel(spec, choice, backend)


def compile_settled(spec: ModelSpec) -> tuple[Choice, CompiledModel]:
    """Compile a model in its setting, which is saved, or found now. Returns both.

    Warns (`ExactnessWarning`) if a main model's rows depend on the batch. Raises as `compile_model`.
    """
    known = spec.saved_choice.read()
    if spec.answers_first if known is None else known.is_enough(answers_first=spec.answers_first):
        if known is None:
            report(f"{spec} is compiled.")
        setting = settings_for(spec)[0] if known is None else known.setting
        make = partial(compile_model, spec, setting)
        backend = make() if spec.is_small else reported(make, f"{spec} is compiled", spec.size)
        choice = known or first_choice(spec, setting, backend)
        backend.use(choice.setting.exactness)
    else:
        # Adapters change no setting: that of the model without them, if it is known.
        alone = dataclasses.replace(spec, adapters=None).saved_choice.read() if spec.adapters else None
        choice, backend = choose(spec, [alone.setting] if alone else settings_for(spec))
    if choice is not known:
        spec.saved_choice.write(choice)
    if spec.is_main and not (choice.setting.exactness.holds or choice.setting.exactness.is_expected):
        warn_of(spec, backend)
    return choice, backend


def warn_of(spec: ModelSpec, backend: CompiledModel) -> None:
    """Warn (`ExactnessWarning`) that a main model's rows depend on the batch."""
    if backend.exactness.differences:
        how = f"logits differ by up to {backend.exactness.largest_difference:.2g} with the other rows of a call"
    else:
        how = "its cache is too small to measure whether logits depend on the other rows of a call"
    if spec.options.precision != "auto":
        remedy = "Leave precision at 'auto'"
    elif backend.cache_precision == "u8":
        remedy = "Leave cache_precision at 'auto'"
    elif backend.precision != "f32":
        remedy = "Load with precision='f32'"
    else:
        remedy = "Load with drafter='none' and one request at a time, or export the model to ONNX,"
    warnings.warn(
        f"{spec} on {backend.device} in {backend.precision}, cache {backend.cache_precision}: {how}, so drafts may "
        f"change the text. {remedy} to avoid this; 'outrider verify' shows by how much.",
        ExactnessWarning,
        stacklevel=3,
    )


def choice_of(spec: ModelSpec) -> Choice:
    """The setting of a model on its device: saved, or found now."""
    if spec.uses_main_cache:
        return _untried(spec)
    known = spec.saved_choice.read()
    is_enough = known is not None and known.is_enough(answers_first=spec.answers_first)
    return known if known and is_enough else compile_settled(spec)[0]


def _untried(spec: ModelSpec) -> Choice:
    """That of what is not compiled alone, of which no settings are tried."""
    own = spec.options
    return Choice(Setting(own.precision, own.cache_precision, num_threads=own.num_threads))


def is_settled(spec: ModelSpec) -> bool:
    """Whether `compile_settled` measures nothing: a model's setting is saved, or is that of the table."""
    known = spec.saved_choice.read()
    return spec.answers_first if known is None else known.is_enough(answers_first=spec.answers_first)


def search_settings(bundle: Bundle, draft_bundle: Bundle, options: DeviceConfig) -> None:
    """Save the fastest setting of each model that runs on the CPU, for later loads. Raises as `load_models`."""
    main, drafts = specs_of(bundle, draft_bundle, draft_models_of(draft_bundle, bundle))
    placement = choose_devices(main, drafts, options)
    places = ((main, placement.main), *((draft, placement.draft) for draft in drafts if not draft.uses_main_cache))
    for spec in (spec.on(device, options) for spec, device in places if device == "CPU"):
        if choice := search(spec):
            spec.saved_choice.write(choice)


def _compile_beside(
    main: LoadedModel, drafts: Sequence[ModelSpec], options: DeviceConfig, can_leave_out: bool
) -> dict[str, LoadedModel]:
    """The drafters, by role, that use the main model's cache: its own layers, or such that read it."""
    from outrider.models.backends.openvino_paged import OpenVINOPaged

    made: dict[str, LoadedModel] = {}
    for spec in drafts:
        if not spec.uses_main_cache:
            continue
        if not isinstance(main.backend, OpenVINOPaged):
            raise AssertionError("the manifest and the device were checked")
        here = spec.on(main.spec.device, options)
        try:
            made[spec.role] = LoadedModel(here, _untried(here), compile_beside(here, main.backend))
        except DeviceError as error:
            if not can_leave_out:
                raise
            _warn(f"The drafter '{spec.role}' is left out: {error}")
    return made


def _warn(message: str) -> None:
    warnings.warn(message, DeviceWarning, stacklevel=2)
