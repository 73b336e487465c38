"""Where a small draft model comes from, and where it goes: checkpoint folders, hub ids and GGUF files.

source = open_source("Qwen/Qwen2.5-Coder-0.5B-Instruct", main_vocabulary, "my-main")
head = DraftModel(load_torch(source), token_ids)
save_draft(head, source, Path("drafter"), {"layers": [0, 1, 23]})
"""

from __future__ import annotations

import copy
import json
import shutil
import tempfile
from typing import TYPE_CHECKING, Any

from outrider_export.convert import load_model
from outrider_export.convert_model import copy_tokenizer
from outrider_export.diet import TRAINED_NAME
from outrider_export.distill.draft.vocabulary import check_vocabulary
from outrider_export.plan import check_route, make_plan
from outrider_export.progress import Silent
from outrider_export.sources import fetch, locate
from outrider_export.special_tokens import eos_of

if TYPE_CHECKING:
    from pathlib import Path

    from outrider_export.distill.draft.model import DraftModel
    from outrider_export.plan import Plan
    from outrider_export.progress import Progress
    from outrider_export.vocabulary import Vocabulary


def open_source(
    name: str | Path,
    main: Vocabulary,
    main_id: str,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> Plan:
    """The model `name` that layers are taken out of: fetched and looked at, not loaded.

    Raises:
        ExportError: if it cannot be found or read.
        VocabularyMismatch: if its vocabulary is not the main model's.
    """
    located = locate(name, revision)
    check_route("draft", located, "openvino", "fp32")
    plan = make_plan("draft", fetch(located, trust_remote_code, progress or Silent()), "openvino", "fp32")
    check_vocabulary(main, main_id, plan.vocabulary, located.id)
    return plan


def load_torch(source: Plan, *, trust_remote_code: bool = False) -> Any:
    """The source as a transformers model, in float32."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # its bars would be written through ours
    with tempfile.TemporaryDirectory() as scratch:
        job = {"model": str(source.path), "gguf": source.header is not None, "scratch": scratch, "weights": "fp32"}
        return load_model(job | {"trust_remote_code": trust_remote_code}).eval()


def save_draft(head: DraftModel, source: Plan, folder: Path, training: dict[str, Any]) -> None:
    """Write the folder of a draft model, whole or not at all: a checkpoint in float16 that others read, too.

    Beside the usual files there are draft_vocab.json, the tokens that export has it propose, and training.json.
    """
    new = folder.with_name(folder.name + ".new")
    shutil.rmtree(new, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    copy_tokenizer(source, new)
    _save_weights(head.model, new, list(eos_of(source)))
    if head.token_ids is not None:
        _write_json(new / TRAINED_NAME, {"token_ids": head.token_ids.tolist()})
    _write_json(new / "training.json", training)
    shutil.rmtree(folder, ignore_errors=True)
    new.rename(folder)


def _save_weights(model: Any, folder: Path, eos_token_ids: list[int]) -> None:
    """Weights, config.json and generation_config.json."""
    from transformers import GenerationConfig

    half = copy.deepcopy(model).half()
    half.generation_config = GenerationConfig(eos_token_id=eos_token_ids)
    half.save_pretrained(folder)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content) + "\n", encoding="utf-8")
