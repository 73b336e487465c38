"""Starts and writes drafters of each kind: heads on the main model's hidden states, and cut draft models.

drafters = Drafters(bundle, data, seed, work, progress)
head = drafters.start(candidate)
drafters.save(candidate, head, folder, training)
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
from outrider_distill.plan import DistillCandidate, head_folder
from outrider_distill.prediction import measure_drafter
from outrider_distill.train.files import load, save
from outrider_distill.train.fit import start_head
from outrider_distill.train.layers import Teacher
from outrider_export.describe.plan import Plan
from outrider_export.progress import Progress
from outrider_export.sources.source import read_json
from outrider_export.tokenizers.vocabulary import Vocabulary

_CUT = "layers-"  # begins the names of files with the layers that a candidate keeps
_LAYER_TOKENS, _LAYER_BATCH = 2048, 1024  # of the training data, to choose layers by


class Drafters:
    """For one main model and its data. What was chosen for a cut draft model is kept in the work folder."""

    def __init__(self, bundle: Bundle, data: Data, seed: int, work: Path, progress: Progress) -> None:
        self._bundle, self._data, self._seed = bundle, data, seed
        self._work, self._progress = work, progress
        self._configs: dict[str, dict[str, Any]] = {}

    def start(self, candidate: DistillCandidate) -> Any:
        """A drafter with its starting weights, the same each time."""
        if candidate.kind == "draft":
            return self._start_draft(candidate)
        if candidate.source is not None:
            folder = head_folder(candidate.source, self._progress)
            self._configs[candidate.name] = read_json(folder / "config.json")
            return load(folder, self._teacher.embedding)
        head, config = start_head(self._teacher, self._data, seed=self._seed)
        self._configs[candidate.name] = config
        return head

    def save(self, candidate: DistillCandidate, head: Any, folder: Path, training: dict[str, Any]) -> None:
        """Write a drafter's folder, in its published format."""
        if head.kind == "draft":
            save_draft(head, self._source(candidate), folder, training)
        else:
            save(head, self._configs[candidate.name], folder, training)

    def measure(self, candidate: DistillCandidate, head: Any) -> Costs:
        """What drafting and verifying cost on this machine."""
        folder = self._work / f"unpriced-{candidate.name}"
        self.save(candidate, head, folder, {})
        return measure_drafter(self._bundle, folder, self._work)

    @functools.cached_property
    def _teacher(self) -> Teacher:
        return read_teacher(self._bundle)

    def _source(self, candidate: DistillCandidate) -> Plan:
        if candidate.source is None:
            raise AssertionError("the options were checked")
        main = Vocabulary.of_folder(self._bundle.tokenizer_path)
        return open_source(candidate.source, main, self._bundle.manifest.main.source.id, self._progress)

    def _start_draft(self, candidate: DistillCandidate) -> Any:
        source, wanted, cuts = self._source(candidate), candidate.num_layers, self._cuts
        if (found := cuts.get(candidate.name)) is not None:
            return restore_draft(source, found["layers"], found["token_ids"])
        same = [each["layers"] for each in cuts.values() if each.get("source") == candidate.source]
        counts = self._data.counts(self._bundle.manifest.main.geometry.logits_width)
        epoch = self._data.batches(_LAYER_BATCH, self._seed)
        batches = [self._data.read(each) for each in epoch[: _LAYER_TOKENS // _LAYER_BATCH]]
        head, cut = start_draft(
            source, counts, batches, num_layers=wanted, num_tokens=None, progress=self._progress,
            within=min((each for each in same if wanted and len(each) > wanted), key=len, default=None),
        )  # fmt: skip
        token_ids = None if head.token_ids is None else head.token_ids.tolist()
        chosen = {"source": candidate.source, "layers": cut.kept, "token_ids": token_ids}
        write_whole(self._work / f"{_CUT}{candidate.name}.json", json.dumps(chosen).encode())
        return head

    @property
    def _cuts(self) -> dict[str, Any]:
        """What was chosen before, by candidate."""
        found = {}
        for path in self._work.glob(f"{_CUT}*.json"):
            with reading(str(path), "Delete it to choose layers again."):
                found[path.stem.removeprefix(_CUT)] = json.loads(path.read_text(encoding="utf-8"))
        return found
