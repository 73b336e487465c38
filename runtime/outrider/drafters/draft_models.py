"""Makes drafters of a bundle's draft models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outrider.drafters import DraftModel, HiddenModel, MarkovHead, MaskTokens, SelfModel, Subset, load_vocabulary
from outrider.inputs.text import Tokenizer, check_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from outrider.bundle import Bundle
    from outrider.bundle.manifest import DrafterEntry
    from outrider.config import SchedulerConfig
    from outrider.models.loading import LoadedModel
    from outrider.types import TextTokenizer


def check_tokenizers(bundle: Bundle, entries: Iterable[DrafterEntry]) -> None:
    """Raise BundleError if a draft model's own tokenizer is missing. Called before models are loaded."""
    for entry in entries:
        if entry.vocabulary != "same" and entry.tokenizer:
            check_tokenizer(bundle.folder / entry.tokenizer.folder)


def as_drafter(
    entry: DrafterEntry,
    loaded: LoadedModel,
    bundle: Bundle,
    scheduler: SchedulerConfig,
    tokenizer: TextTokenizer,
    own: TextTokenizer | None = None,
) -> DraftModel | MaskTokens:
    """Make a drafter of a bundle's draft model. Its cache must be allocated.

    loaded: the draft model, or for mask tokens the main model. tokenizer: the main model's. own: the draft model's own
    tokenizer; by default the bundle's.
    """
    if entry.kind == "masks":
        return MaskTokens(entry.num_places or 1)
    vocabulary = subset = None
    if entry.vocabulary != "same" and entry.tokenizer:
        own = own or Tokenizer(bundle.folder / entry.tokenizer.folder)
        vocabulary = load_vocabulary(bundle, entry, tokenizer, own)
    if entry.num_proposed_tokens:
        subset = Subset(bundle.read_proposed(entry), entry.model.vocab_size)
    shared: dict[str, Any] = {
        "context_length": min(entry.model.geometry.context_length, loaded.backend.max_tokens),
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "max_round_seconds": scheduler.max_round_seconds,
        "subset": subset,
        "reuse": scheduler.enable_prefix_caching,
        "cost": loaded.cost,
    }
    backend, features, num_places = loaded.backend, entry.features, entry.num_places or 1
    if entry.kind == "draft_model":
        masks = [] if entry.mask_token_id is None else [entry.mask_token_id] * (num_places - 1)
        return DraftModel(backend, vocabulary=vocabulary, mask_token_ids=masks, **shared)
    if entry.kind == "self":
        return SelfModel(backend, **shared)
    if entry.kind == "dspark":
        head = MarkovHead.read(bundle.model_path(entry.model), shared.pop("subset"), entry.model.vocab_size)
        return HiddenModel.block(backend, features, [entry.mask_token_id or 0] * num_places, head, **shared)
    if entry.mask_token_id is not None:
        return HiddenModel.block(backend, features, [entry.mask_token_id] * num_places, **shared)
    if entry.num_places:
        return HiddenModel.places(backend, features, num_places, at_once=entry.kind != "hydra", **shared)
    # EAGLE-3 has its own hidden states behind the main model's; EAGLE and MTP have them in their place.
    num_states = len(features) + (entry.kind == "eagle3")
    return HiddenModel.module(backend, features, num_states * entry.model.geometry.hidden_size, **shared)
