"""Makes the drafters of a bundle's entries, by the design of their kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from outrider.bundle import Bundle
from outrider.bundle.kinds import Design
from outrider.bundle.manifest import DrafterEntry
from outrider.config import SchedulerConfig
from outrider.drafters.assistant_model import AssistantModel
from outrider.drafters.draft_model import DraftModel
from outrider.drafters.hidden_model import HiddenModel
from outrider.drafters.markov import MarkovHead
from outrider.drafters.self_model import SelfModel
from outrider.drafters.vocabulary import Subset, load_vocabulary
from outrider.inputs.text import Tokenizer
from outrider.models.tuning.loading import LoadedModel
from outrider.types import CompiledModel, TextTokenizer

Maker = Callable[[DrafterEntry, CompiledModel, Bundle, dict[str, Any]], DraftModel]


def make_drafter(
    loaded: LoadedModel,
    scheduler: SchedulerConfig,
    tokenizer: TextTokenizer,
    own: TextTokenizer | None = None,
) -> DraftModel:
    """Make a drafter of a draft model. Its cache must be allocated.

    tokenizer: the main model's. own: the draft model's own tokenizer; by default the bundle's.
    """
    entry, bundle = loaded.spec.drafter, loaded.spec.bundle
    if entry is None:
        raise ValueError(f"{loaded.spec} is no draft model")
    vocabulary = subset = None
    if entry.vocabulary != "same" and entry.tokenizer:
        own = own or Tokenizer(bundle.folder / entry.tokenizer.folder)
        vocabulary = load_vocabulary(bundle, entry, tokenizer, own)
    if entry.num_proposed_tokens:
        subset = Subset(bundle.read_proposed(entry), entry.model.vocab_size)
    options: dict[str, Any] = {
        "context_length": min(entry.model.geometry.context_length, loaded.backend.max_tokens),
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "max_round_seconds": scheduler.max_round_seconds,
        "vocabulary": vocabulary,
        "subset": subset,
        "reuse": scheduler.enable_prefix_caching,
        "cost": loaded.cost,
    }
    return _MAKERS[entry.traits.design](entry, loaded.backend, bundle, options)


def _model(entry: DrafterEntry, backend: CompiledModel, _: Bundle, options: dict[str, Any]) -> DraftModel:
    """A draft model; one with masks drafts them all in one call."""
    masks = [] if entry.mask_token_id is None else [entry.mask_token_id] * ((entry.num_places or 1) - 1)
    return DraftModel(backend, mask_token_ids=masks, **options)


def _layers(entry: DrafterEntry, backend: CompiledModel, _: Bundle, options: dict[str, Any]) -> DraftModel:  # noqa: ARG001
    return SelfModel(backend, **options)


def _reader(entry: DrafterEntry, backend: CompiledModel, _: Bundle, options: dict[str, Any]) -> DraftModel:
    return AssistantModel(backend, entry.features, **options)


def _block(entry: DrafterEntry, backend: CompiledModel, bundle: Bundle, options: dict[str, Any]) -> DraftModel:
    """A block of masks. A Markov head maps its tokens itself, so that they need no subset."""
    head = None
    if entry.traits.has_markov_head:
        head = MarkovHead.read(bundle.model_path(entry.model), options["subset"], entry.model.vocab_size)
        options = options | {"subset": None}
    masks = [entry.mask_token_id or 0] * (entry.num_places or 1)
    return HiddenModel.block(backend, entry.features, masks, head, **options)


def _module(entry: DrafterEntry, backend: CompiledModel, _: Bundle, options: dict[str, Any]) -> DraftModel:
    num_states = len(entry.features) + entry.traits.keeps_own_states
    return HiddenModel.module(backend, entry.features, num_states * entry.model.geometry.hidden_size, **options)


_MAKERS: dict[Design, Maker] = {
    "model": _model, "layers": _layers, "reader": _reader, "module": _module, "block": _block,
}  # fmt: skip
