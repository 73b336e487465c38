"""Where a small draft model comes from, and where it goes: checkpoint folders, hub ids and GGUF files.

source = open_source("Qwen/Qwen2.5-Coder-0.5B-Instruct", main_vocabulary, "my-main")
head = TrainedDraftModel(load_torch(source), token_ids)
save_draft(head, source, Path("drafter"), {"layers": [0, 1, 23]})
"""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.errors import VocabularyMismatch
from outrider_distill.data import TrainingBatch
from outrider_distill.draft.layers import Cut, choose_layers, cut_layers
from outrider_distill.draft.model import TrainedDraftModel
from outrider_distill.train.files import written_whole
from outrider_distill.train.fit import find_device
from outrider_export.describe.plan import Plan, check_route, make_plan
from outrider_export.describe.special_tokens import eos_of
from outrider_export.diet.diet import TRAINED_NAME, choose_by_counts
from outrider_export.progress import Progress
from outrider_export.sources.source import fetch, locate
from outrider_export.tokenizers.copy import copy_tokenizer
from outrider_export.tokenizers.vocabulary import Vocabulary
from outrider_export.with_torch.convert import load_model


def open_source(
    name: str | Path,
    main: Vocabulary,
    main_id: str,
    progress: Progress,
) -> Plan:
    """The model `name` that layers are taken out of: fetched and looked at, not loaded.

    Raises:
        ExportError: if it cannot be found or read.
        VocabularyMismatch: if its vocabulary is not the main model's.
    """
    located = locate(name)
    check_route(located, "openvino")
    plan = make_plan("draft", fetch(located, False, progress), "openvino", "fp32")
    check_vocabulary(main, main_id, plan.vocabulary, located.id)
    return plan


def load_torch(source: Plan) -> Any:
    """The source as a transformers model, in float32."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # its bars would be written through ours
    with tempfile.TemporaryDirectory() as scratch:
        job = {"model": str(source.path), "gguf": source.header is not None, "scratch": scratch, "weights": "fp32"}
        return load_model(job | {"trust_remote_code": False}).eval()


def save_draft(head: TrainedDraftModel, source: Plan, folder: Path, training: dict[str, Any]) -> None:
    """Write the folder of a draft model, whole or not at all: a checkpoint in float16 that others read, too.

    Beside the usual files there are draft_vocab.json, the tokens that export has it propose, and training.json.
    """
    from transformers import GenerationConfig

    half = copy.deepcopy(head.model).half()
    half.generation_config = GenerationConfig(eos_token_id=list(eos_of(source)))
    with written_whole(folder) as new:
        copy_tokenizer(source.header, source.path, new)
        half.save_pretrained(new)
        if head.token_ids is not None:
            _write_json(new / TRAINED_NAME, {"token_ids": head.token_ids.tolist()})
        _write_json(new / "training.json", training)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content) + "\n", encoding="utf-8")


def check_vocabulary(main: Vocabulary, main_id: str, draft: Vocabulary, draft_id: str) -> None:
    """Check that two models have the same tokens: distributions of one are to be learned by the other.

    Raises:
        VocabularyMismatch: with the first token that differs.
    """
    if main.tokens == draft.tokens:
        return
    pairs = enumerate(zip(main.tokens, draft.tokens, strict=False))
    differs = next((f"token {i} is {a!r} and {b!r}" for i, (a, b) in pairs if a != b), None)
    differs = differs or f"they have {len(main):,} and {len(draft):,} tokens"
    raise VocabularyMismatch(
        f"{draft_id} cannot learn from {main_id}: their vocabularies differ ({differs}). Choose a smaller model of the "
        f"same family with --from, or pair them as they are: outrider export {main_id} --draft {draft_id}"
    )


def start_draft(
    source: Plan,
    counts: NDArray[np.int64],
    batches: Sequence[TrainingBatch],
    *,
    num_layers: int | None,
    num_tokens: int | None,
    progress: Progress,
    within: Sequence[int] | None = None,
) -> tuple[TrainedDraftModel, Cut]:
    """The source, cut to `num_layers` layers (None: all) and the tokens that the main model says.

    counts: int64 [n], how often it says each. batches: some thousand tokens of its answers, to choose layers by.
    num_tokens: 0 for all, None for 32,768 where the vocabulary is twice as large. within: the layers of a larger cut,
    which the search goes on from.

    Raises:
        OptionError: for more layers than there are, or fewer tokens than are always proposed.
        ExportError: for a source whose layers cannot be taken out, or whose logits are scaled or capped.
    """
    chosen = choose_by_counts(source.vocabulary, eos_of(source), num_tokens, counts, progress)
    token_ids = None if chosen is None else torch.from_numpy(chosen.astype(np.int64))
    model = load_torch(source)
    if within is not None:
        cut_layers(model, within)
    device, half = find_device()
    proposed, read = None if token_ids is None else token_ids.to(device), [each.to(device) for each in batches]
    with half():
        cut = choose_layers(model.to(device), read, num_layers, token_ids=proposed, tell=progress.note)
    cut_layers(model.to("cpu"), cut.kept)
    if within is not None:
        cut = Cut(tuple(within[i] for i in cut.kept), cut.kl)
    return TrainedDraftModel(model, token_ids), cut


def restore_draft(source: Plan, kept: Sequence[int], token_ids: Sequence[int] | None) -> TrainedDraftModel:
    """What `start_draft` has made of the source, with the source's weights."""
    model = load_torch(source)
    cut_layers(model, kept)
    return TrainedDraftModel(model, None if token_ids is None else torch.tensor(token_ids))
