"""Opens a bundle and makes what an engine consists of: models, drafters, the preparation of requests, their queue."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial

from outrider.bundle import Bundle
from outrider.bundle.folder import draft_models_of
from outrider.bundle.kinds import COPYING
from outrider.config import Config, DeviceConfig, SchedulerConfig
from outrider.config.files import user_path
from outrider.decoding.admission import Admission
from outrider.decoding.idle import IdleJob
from outrider.decoding.large_pages import LargePages
from outrider.decoding.measuring import CheckExactness, MeasureCosts
from outrider.decoding.request_queue import RequestQueue
from outrider.decoding.row_budget import RowBudget
from outrider.drafters import AnswerStore, DraftModel
from outrider.drafters.bundled import make_drafter
from outrider.drafters.drafter_registry import DrafterRegistry, records_of
from outrider.engine.joining import PENDING, Joining
from outrider.engine.opening import open_draft_bundle
from outrider.engine.preparation import Preparation
from outrider.engine.prompts import Prompts, check_adapter
from outrider.engine.trial_answers import TrialAnswers
from outrider.errors import OptionError
from outrider.inputs.text import Tokenizer, check_tokenizer, pieces_of
from outrider.inputs.text.template_use import start_templates
from outrider.inputs.text.tokenizer import guarded
from outrider.inputs.vision import Vision
from outrider.models.kv import PREFIXES, PrefixStore, StoredModel
from outrider.models.tuning.loading import LoadedModel, load_models
from outrider.models.tuning.measure.overlap import pays
from outrider.models.tuning.model_spec import ModelSpec, specs_of
from outrider.models.tuning.placement import Placement
from outrider.system.core import prepare_arrays
from outrider.system.files import shown, why
from outrider.system.progress import report
from outrider.tokens.grammar import Grammars
from outrider.types import CompiledModel, TextTokenizer

_BYTES = 4  # of a number in f32


@dataclasses.dataclass(frozen=True)
class EngineParts:
    """What an engine consists of. config: with the devices that "auto" has become."""

    bundle: Bundle  # the whole pair's, if only its main model was given, and that was not enough
    config: Config
    tokenizer: TextTokenizer
    placement: Placement
    preparation: Preparation  # has the models and the drafters
    queue: RequestQueue

    def pays_to_overlap(self, wanted: bool | str) -> bool:
        """Whether draft models are to draft during target passes. With "auto" measured costs decide.

        On one device they do not: its calls share what they are bound by, or wait for each other.

        Raises:
            OptionError: when it is wanted, and no draft model is loaded.
        """
        loaded, registry = self.preparation.loaded, self.preparation.registry
        able = [loaded[name] for name, model in registry.models.items() if model.goes_ahead]
        if not able or not wanted:
            if wanted is True:
                raise OptionError("overlap=True needs a draft model, and none is loaded. Leave it at 'auto'.")
            return False
        main, draft = loaded["main"], able[0]
        if wanted == "auto" and main.backend.device == draft.backend.device:
            return False
        contention = main.contention_with(draft)
        registry.expect(contention)
        return wanted is True or pays(main.cost, draft.cost, contention)


def assemble(
    bundle: Bundle,
    config: Config,
    *,
    tokenizer: TextTokenizer | None = None,
    draft_tokenizer: TextTokenizer | None = None,
) -> EngineParts:
    """Compile a bundle's models and make the rest; raises as `load`. The tokenizers take the place of its own."""
    scheduler = config.scheduler
    models = _models_of(bundle, config)
    bundle, manifest = models.bundle, models.bundle.manifest
    report(f"Loading {bundle.folder}.")
    draft_tokenizer = None if draft_tokenizer is None else guarded(draft_tokenizer)
    _check_tokenizers(bundle, models.drafts, tokenizer, draft_tokenizer)
    store = None
    if scheduler.answer_store is not None:
        store = AnswerStore(scheduler.answer_store, manifest.main.vocab_sha256)
    prepare_arrays()
    admission = Admission(manifest, scheduler.cache_size)
    with ThreadPoolExecutor(2) as pool:  # OpenVINO prepares graphs meanwhile
        made = pool.submit(_tokenizers_of, bundle, tokenizer, scheduler)
        # The templates' process takes longer to start than to lay a prompt out.
        begun = [pool.submit(start_templates)] if tokenizer is None and manifest.tokenizer.chat_template else []
        loaded, placement = _load(models, admission, lambda: (wait([made]), wait(begun)))
    public, tokenizer = made.result()
    config = dataclasses.replace(config, device=placement.named_in(config.device))

    make = partial(make_drafter, scheduler=scheduler, tokenizer=tokenizer, own=draft_tokenizer)
    registry = models.registry(loaded, make, tokenizer, store, keep_records=scheduler.keep_records)
    prefixes, backend = _prefix_store(scheduler, bundle, loaded), loaded["main"].backend
    prompts = Prompts(
        loaded,
        tokenizer,
        manifest.tokenizer,
        admission,
        models.adapters,
        Vision.of(bundle, backend, scheduler.image_memory),
        finds_openings=scheduler.enable_prefix_caching and backend.capabilities.states,
    )
    preparation = Preparation(
        loaded,
        prompts,
        registry,
        Grammars(bundle.tokenizer_path, manifest.main.vocab_size, manifest.tokenizer.eos_token_ids),
        store=store,
        prefixes=prefixes,
        reuse=scheduler.enable_prefix_caching,
    )
    # A main model in fixed shapes runs one request at a time.
    fixed, cost = backend.capabilities.fixed, loaded["main"].cost
    rows = RowBudget(scheduler.max_num_batched_tokens, scheduler.max_round_seconds, None if fixed else cost)
    queue = RequestQueue(backend, rows, prefixes, _idle_jobs(preparation, rows, scheduler), cost)
    Joining(
        preparation, queue, make=make, stored=lambda model: _stored(bundle, model.spec.role, model, loaded["main"])
    ).start(models.later, bundle, models.device)
    return EngineParts(bundle, config, public, placement, preparation, queue)


@dataclasses.dataclass(frozen=True)
class _Models:
    """The models that an engine consists of, before any is compiled."""

    bundle: Bundle
    main: ModelSpec
    drafts: Sequence[ModelSpec]
    bundled: Sequence[str]  # the names of all draft models of the bundle; those of `drafts` are loaded
    adapters: Mapping[str, str]  # a hash of each of the main model's, by name
    device: DeviceConfig
    loaded_with: str | None  # the engine's drafter
    later: Sequence[ModelSpec]  # of `drafts`: those that are loaded while the engine answers
    later_bytes: float  # of a token in the caches of these, and of a draft model that is not converted yet

    def registry(
        self,
        loaded: dict[str, LoadedModel],
        make: Callable[[LoadedModel], DraftModel],
        tokenizer: TextTokenizer,
        store: AnswerStore | None,
        *,
        keep_records: bool,
    ) -> DrafterRegistry:
        """The drafters of those that are loaded, and the others."""
        specs = {spec.role: spec for spec in (self.main, *self.drafts)}
        return DrafterRegistry(
            loaded,
            {spec.role: make(loaded[spec.role]) for spec in self.drafts if spec.role in loaded},
            self.bundled,
            encode=lambda text: [token_id for piece in pieces_of(text) for token_id in tokenizer.encode(piece)],
            loaded_with=self.loaded_with,
            store=store,
            records=partial(records_of, keep_records, specs, self.adapters),
        )


def _load(
    models: _Models, admission: Admission, ready: Callable[[], object]
) -> tuple[dict[str, LoadedModel], Placement]:
    """Compile the models that are there from the start; see `load_models`.

    ready: is called before calls are timed, and returns when nothing else runs.
    """

    def allocate(backends: dict[str, CompiledModel]) -> None:
        ready()
        admission.allocate(backends, models.later_bytes)

    is_named = models.loaded_with in [spec.role for spec in models.drafts]
    later = [spec.role for spec in models.later]
    return load_models(models.main, models.drafts, models.device, allocate, can_leave_out=not is_named, later=later)


def _models_of(bundle: Bundle, config: Config) -> _Models:
    """Which models an engine has, by its options.

    The draft models may be those of another bundle. A pair's bundle is made now, in the place of its main model's, if
    its draft model cannot join later. Raises as `open_bundle`.
    """
    device, wanted, count = config.device, config.generation.drafter, config.generation.num_assistant_tokens
    draft_bundle = open_draft_bundle(bundle, device)
    bundled = draft_models_of(draft_bundle, bundle)
    named = [entry for entry in bundled if entry.name == wanted]
    entries = () if wanted in (None, *COPYING) else named or bundled
    main, drafts = specs_of(bundle, draft_bundle, entries, device.adapters)
    names = main.adapters.names if main.adapters else ()
    check_adapter(config.generation.adapter, names)
    if device.npu_window is None and not isinstance(count, str):
        device = dataclasses.replace(device, npu_window=count + 1)
    # Those are loaded while the engine answers that are on the CPU and read tokens alone.
    may_join = config.drafts_may_join and main.on("CPU", device).answers_first
    if bundle.pair is not None and not (may_join and device.draft_bundle is None):
        return _models_of(bundle.pair.make(), config)
    own = [spec.on("CPU", device) for spec in drafts if spec.drafter and spec.drafter.kind == "draft_model"]
    later = [spec for spec in own if may_join and spec.answers_first]
    waiting = [spec.model.geometry for spec in later] + ([bundle.pair.draft] if bundle.pair else [])
    return _Models(
        bundle,
        main,
        drafts,
        [*(entry.name for entry in bundled), *([PENDING] if bundle.pair else [])],
        {each.name: bundle.sha256_of(each.folder) for each in bundle.manifest.adapters if each.name in names},
        device,
        wanted,
        later,
        sum(_BYTES * geometry.numbers_per_token for geometry in waiting),
    )


def _check_tokenizers(
    bundle: Bundle, drafts: Sequence[ModelSpec], own: TextTokenizer | None, own_of_draft: TextTokenizer | None
) -> None:
    """Raise for a tokenizer that is missing, before models are loaded. own, own_of_draft: the app's."""
    if own is None:
        check_tokenizer(bundle.tokenizer_path)
    for spec in drafts if own_of_draft is None else ():
        if (entry := spec.drafter) and entry.vocabulary != "same" and entry.tokenizer:
            check_tokenizer(spec.bundle.folder / entry.tokenizer.folder)


def _idle_jobs(preparation: Preparation, rows: RowBudget, scheduler: SchedulerConfig) -> list[IdleJob]:
    """What is done while no request runs. What is to be measured first is measured now."""
    loaded, registry, main = preparation.loaded, preparation.registry, preparation.loaded["main"]
    jobs: list[IdleJob] = []
    if main.choice.setting.exactness.is_expected:
        if main.choice.waits:
            registry.may_draft = False
            report("Nothing is drafted until the engine was idle, and has measured that this changes no text.")
        jobs.append(CheckExactness(main, partial(setattr, registry, "may_draft")))
    jobs.append(MeasureCosts(loaded))
    if scheduler.keep_records:
        trial = TrialAnswers(preparation, rows)
        if main.spec.answers_first:
            jobs.append(trial)
        else:
            trial.go_on(main.backend, lambda: False)
    return [*jobs, LargePages(sum(model.spec.size for model in loaded.values()))]


def _prefix_store(scheduler: SchedulerConfig, bundle: Bundle, loaded: dict[str, LoadedModel]) -> PrefixStore | None:
    """The store of these models' prefix caches, if one is wanted. Raises OptionError if it cannot be had."""
    if scheduler.prefix_store is None or not scheduler.enable_prefix_caching:
        return None
    main = loaded["main"]
    if main.backend.prefixes is None:
        raise OptionError(
            f"prefix_store={scheduler.prefix_store!r} is for decoders on a CPU or GPU, and the main model's "
            f"cache on {main.backend.device} cannot be read. Leave it out."
        )
    folder = PREFIXES if scheduler.prefix_store == "auto" else user_path(scheduler.prefix_store)
    models = {role: _stored(bundle, role, model, main) for role, model in loaded.items()}
    try:
        return PrefixStore(folder, models, int(scheduler.prefix_store_size * 1e9))
    except OSError as error:
        raise OptionError(
            f"prefix_store={shown(folder)!r} cannot be made: {why(error)}. Name a folder that can be written."
        ) from error


def _stored(bundle: Bundle, role: str, model: LoadedModel, main: LoadedModel) -> StoredModel:
    about = {"bundle": bundle.folder.resolve().name, "model": role, "setting": model.setting}
    return StoredModel(model.backend, model.identity | {"main": main.identity}, about)


def _tokenizers_of(
    bundle: Bundle, given: TextTokenizer | None, scheduler: SchedulerConfig
) -> tuple[TextTokenizer, TextTokenizer]:
    """The app's tokenizer, or the bundle's, which refuses prompts without room: as apps see it, and as it is used."""
    if given is not None:
        return given, guarded(given)
    main = bundle.manifest.main
    context_length = max(main.geometry.context_length, main.encoder.context_length if main.encoder else 0)
    own = Tokenizer(
        bundle.tokenizer_path, context_length, special_tokens_in_content=scheduler.special_tokens_in_content
    )
    return own, own
