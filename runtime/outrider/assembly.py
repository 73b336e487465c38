"""Opens a bundle and makes what an engine consists of: models, drafters, the preparation of requests, their queue.

parts = assemble(read_bundle("my-pair"), Config())
request = parts.preparation.request("Why is the sky blue?", parts.config.generation)
*_, last = parts.queue.run(request)
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

from outrider.admission import Admission
from outrider.bundle.folder import draft_models_of, read_bundle
from outrider.config import COPYING, Config, GenerationConfig
from outrider.controller import trial
from outrider.draft_models import as_drafter, check_tokenizers
from outrider.drafter_registry import DrafterRegistry, records_of
from outrider.drafters import AnswerStore
from outrider.errors import OptionError
from outrider.grammar import Grammars
from outrider.loading import LoadedModel, contention_of, cost_of, load_parts
from outrider.measure import pays
from outrider.part import Part, parts_of
from outrider.preparation import Preparation, check_adapter
from outrider.request_queue import RequestQueue
from outrider.setting import SMALL, log
from outrider.text import Tokenizer
from outrider.vision import Vision

if TYPE_CHECKING:
    from outrider.bundle.folder import Bundle
    from outrider.config import DeviceConfig
    from outrider.loading import Placement
    from outrider.types import TextTokenizer


@dataclasses.dataclass(frozen=True)
class Parts:
    """What an engine consists of.

    config: with the devices that "auto" has become. device: as the models were loaded with. adapters: of the LoRA
    adapters that are loaded, by name, a hash of the files.
    """

    config: Config
    device: DeviceConfig
    tokenizer: TextTokenizer
    placement: Placement
    loaded: dict[str, LoadedModel]
    adapters: dict[str, str]
    admission: Admission
    registry: DrafterRegistry
    preparation: Preparation
    queue: RequestQueue

    def pays_to_overlap(self, wanted: bool | str) -> bool:
        """Whether draft models are to draft during target passes. With "auto" measured costs decide.

        Raises:
            OptionError: when it is wanted, and no draft model is loaded.
        """
        able = [self.loaded[name] for name, model in self.registry.models.items() if model.goes_ahead]
        if not able or not wanted:
            if wanted is True:
                raise OptionError("overlap=True needs a draft model, and none is loaded. Leave it at 'auto'.")
            return False
        main, draft = self.loaded["main"], able[0]
        contention = contention_of(main.part, main.backend, draft.part, draft.backend)
        self.registry.expect(contention)
        return wanted is True or pays(main.cost, draft.cost, contention)

    def try_drafters(self, *, overlaps: bool) -> None:
        """Measure the acceptance of draft models before the first answer, once per bundle."""
        main = self.loaded["main"].part
        hears = main.model.encoder is not None and main.model.encoder.kind == "audio"  # the trial prompts are texts
        if not self.config.scheduler.keep_records or main.size < SMALL or hears:
            return
        config = GenerationConfig(max_new_tokens=trial.NUM_TOKENS, drafter=None)
        for name, model, records in self.registry.untried:
            log.info("Trying the drafter '%s' on %d prompts.", name, len(trial.PROMPTS))
            for prompt in trial.PROMPTS:
                request = self.preparation.request(prompt, config, overlaps=overlaps)
                request.policy = trial.Trial(model, records.of_model(request.verifier, name))
                request.num_assistant_tokens = trial.NUM_DRAFT_TOKENS
                request.reuse, request.save = False, None
                for _ in self.queue.run(request):
                    pass
            records.save(at_once=True)


def assemble(
    bundle: Bundle,
    config: Config,
    *,
    tokenizer: TextTokenizer | None = None,
    draft_tokenizer: TextTokenizer | None = None,
) -> Parts:
    """Compile a bundle's models and make the rest. The tokenizers take the place of the bundle's own.

    Raises:
        OptionError, BundleError, DeviceError: as `outrider.load`.
    """
    tokenizer = tokenizer or Tokenizer(bundle.tokenizer_path)
    scheduler, manifest = config.scheduler, bundle.manifest
    store = None
    if scheduler.answer_store is not None:
        store = AnswerStore(scheduler.answer_store, manifest.main.vocab_sha256)

    # The draft models may be those of another bundle, in another format perhaps.
    device = config.device
    draft_bundle = bundle if device.draft_bundle is None else read_bundle(device.draft_bundle)
    bundled = draft_models_of(draft_bundle, bundle)
    wanted = config.generation.drafter
    named = [entry for entry in bundled if entry.name == wanted]
    entries = () if wanted in (None, *COPYING) else named or bundled
    if draft_tokenizer is None:
        check_tokenizers(draft_bundle, entries)

    main, drafts = parts_of(bundle, draft_bundle, [entry.name for entry in entries], device.adapters)
    names = main.adapters.names if main.adapters else ()
    adapters = {each.name: bundle.sha256_of(each.folder) for each in manifest.adapters if each.name in names}
    check_adapter(config.generation.adapter, names)

    count = config.generation.num_assistant_tokens
    if device.npu_window is None and not isinstance(count, str):
        device = dataclasses.replace(device, npu_window=count + 1)
    backends, placement = load_parts(main, drafts, device)
    config = config.replace(main_device=placement.main, draft_device=placement.draft or device.draft_device)
    admission = Admission(manifest, backends, scheduler.cache_size)
    admission.allocate()
    loaded = {
        part.role: LoadedModel(part, backends[part.role], cost_of(part, backends[part.role]))
        for part in (main, *drafts)
    }

    masks = [Part(entry.name, draft_bundle, entry.model, entry) for entry in entries if entry.kind == "masks"]
    make = functools.partial(
        as_drafter, bundle=draft_bundle, scheduler=scheduler, tokenizer=tokenizer, own=draft_tokenizer
    )
    registry = DrafterRegistry(
        loaded,
        {entry.name: make(entry, loaded.get(entry.name, loaded["main"])) for entry in entries},
        [entry.name for entry in bundled],
        encode=tokenizer.encode,
        loaded_with=wanted,
        store=store,
        records=functools.partial(records_of, scheduler.keep_records, (main, *drafts, *masks), adapters),
    )
    preparation = Preparation(
        loaded,
        tokenizer,
        manifest.tokenizer,
        admission,
        registry,
        Grammars(bundle.tokenizer_path, manifest.main.vocab_size, manifest.tokenizer.eos_token_ids),
        adapters,
        store=store,
        reuse=scheduler.enable_prefix_caching,
        vision=Vision.of(bundle, loaded["main"].backend),
    )
    queue = RequestQueue(loaded["main"].backend, scheduler.max_num_batched_tokens)
    return Parts(config, device, tokenizer, placement, loaded, adapters, admission, registry, preparation, queue)
