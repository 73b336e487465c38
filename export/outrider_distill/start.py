"""Starts and writes drafters of each kind: heads on the main model's hidden states, and cut draft models.

drafters = Drafters(bundle, data, options, work, progress)
head = drafters.start("eagle3")
drafters.save(head, folder, training)
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from outrider.bundle import Bundle
from outrider.drafters.prediction import Costs
from outrider.system.files import reading, write_whole
from outrider_distill.data import Data
from outrider_distill.draft.files import open_source, restore_draft, save_draft, start_draft
from outrider_distill.main_model import read_teacher
from outrider_distill.plan import Options, head_folder
from outrider_distill.prediction import measure_draft, measure_head
from outrider_distill.train.files import load, save
from outrider_distill.train.fit import start_head
from outrider_distill.train.layers import Teacher
from outrider_export.describe.plan import Plan
from outrider_export.progress import Progress
from outrider_export.sources.source import read_json
from outrider_export.tokenizers.vocabulary import Vocabulary

_LAYER_TOKENS, _LAYER_BATCH = 2048, 1024  # of the training data, to choose layers by


class Drafters:
    """For one main model and its data. What was chosen for a cut draft model is kept in the work folder."""

    def __init__(self, bundle: Bundle, data: Data, options: Options, work: Path, progress: Progress) -> None:
        self._bundle, self._data, self._options = bundle, data, options
        self._work, self._progress = work, progress
        self._configs: dict[str, dict[str, Any]] = {}

    def start(self, kind: str) -> Any:
        """A drafter with its starting weights, the same each time."""
        if kind == "draft":
            return self._start_draft()
        if self._options.head is not None:
            folder = head_folder(self._options.head, self._progress)
            self._configs[kind] = read_json(folder / "config.json")
            return load(folder, self._teacher.embedding)
        head, config = start_head(kind, self._teacher, self._data, seed=self._options.seed)
        self._configs[kind] = config
        return head

    def save(self, head: Any, folder: Path, training: dict[str, Any]) -> None:
        """Write a drafter's folder, in its published format."""
        if head.kind == "draft":
            save_draft(head, self._source, folder, training)
        else:
            save(head, self._configs[head.kind], folder, training)

    def measure(self, head: Any) -> Costs:
        """What drafting and verifying cost on this machine."""
        folder = self._work / f"unpriced-{head.kind}"
        self.save(head, folder, {})
        if head.kind == "draft":
            return measure_draft(self._bundle, folder, self._work, self._progress)
        return measure_head(self._bundle, folder, self._work)

    @functools.cached_property
    def _teacher(self) -> Teacher:
        return read_teacher(self._bundle)

    @functools.cached_property
    def _source(self) -> Plan:
        if self._options.source is None:
            raise AssertionError("the options were checked")
        main = Vocabulary.of_folder(self._bundle.tokenizer_path)
        return open_source(self._options.source, main, self._bundle.manifest.main.source.id, self._progress)

    def _start_draft(self) -> Any:
        path = self._work / "draft.json"
        if path.exists():
            with reading(str(path), "Delete it to choose layers again."):
                chosen = json.loads(path.read_text(encoding="utf-8"))
            return restore_draft(self._source, chosen["layers"], chosen["token_ids"])
        counts = self._data.counts(self._bundle.manifest.main.geometry.logits_width)
        epoch = self._data.batches(_LAYER_BATCH, self._options.seed)
        batches = [self._data.read(each) for each in epoch[: _LAYER_TOKENS // _LAYER_BATCH]]
        head, cut = start_draft(
            self._source,
            counts,
            batches,
            num_layers=self._options.num_layers or 0,
            num_tokens=None,
            progress=self._progress,
        )
        token_ids = None if head.token_ids is None else head.token_ids.tolist()
        write_whole(path, json.dumps({"layers": cut.kept, "token_ids": token_ids}).encode())
        return head
