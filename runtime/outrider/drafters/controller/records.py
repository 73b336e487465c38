"""Records of the drafters' acceptance, saved for later answers and later starts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from outrider.drafters.controller.acceptance import Acceptance, Share
from outrider.system.saved import SavedValue
from outrider.types import Draft, Verifier

_SAVE_INTERVAL_SECONDS = 5.0  # between two writes of the file
_MAX_GREEDY_COUNT = 10.0  # most observations that greedy decoding's share counts for in sampling
_NUM_LENGTHS = 16  # answers whose lengths are kept
_FIRST_LENGTH_TOKENS = 64  # of an answer, as long as none has ended
_DEFAULT_CONFIDENCE = 0.5  # the confidence of a drafter that gives none


@dataclass(slots=True)
class ModelRecord:
    """One model's acceptance over all answers.

    by_confidence: of its tokens, by its confidence. share: the accepted share, whatever the confidence. branches: the
    accepted share of second candidates where the first was rejected. An unknown model counts as one of which seven of
    ten tokens were accepted, and three of ten second candidates.
    """

    by_confidence: Acceptance = field(default_factory=Acceptance)
    share: Share = field(default_factory=lambda: Share(0.7, weight=10.0, memory=0.999))
    branches: Share = field(default_factory=lambda: Share(0.3, weight=10.0, memory=0.998))

    def observe(self, draft: Draft, path: Sequence[int]) -> None:
        """Take in the outcome of a draft of the model: its first candidates up to a rejected one, and the second there.

        path: the indices of the accepted tokens.
        """
        num_accepted = draft.num_first(path)
        for accepted, confidence in judged(draft, num_accepted):
            self.by_confidence.observe(confidence, accepted=accepted)
            self.share.add(accepted)
        if len(draft.children(num_accepted - 1)) > 1:
            self.branches.add(len(path) > num_accepted)


def judged(draft: Draft, num_accepted: int) -> Iterator[tuple[bool, float]]:
    """For each first candidate that was verified, whether it was accepted, and its confidence."""
    confidences = confidences_of(draft.first_chain if draft.parents else draft)
    for i, confidence in enumerate(confidences[: num_accepted + 1]):
        yield i < num_accepted, confidence


@dataclass(slots=True)
class Record:
    """The drafters' acceptance over all answers.

    copies: acceptance by confidence. first_copies: the same for the first token of a copy after a token that was not
    copied, where most wrong copies go wrong. models: by the names of the drafters that call a model. lengths: tokens of
    the last answers.
    """

    copies: Acceptance = field(default_factory=Acceptance)
    first_copies: Acceptance = field(default_factory=Acceptance)
    models: dict[str, ModelRecord] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)

    def ended(self, num_tokens: int) -> None:
        """Note how many tokens an answer had."""
        self.lengths[:] = [*self.lengths[1 - _NUM_LENGTHS :], num_tokens]

    def left(self, num_tokens: int, most: int) -> list[int]:
        """Tokens that an answer of so many may still get, `most` at most: as the last answers did, or as many again."""
        lengths = self.lengths or [_FIRST_LENGTH_TOKENS]
        return [min(each - num_tokens, most) for each in lengths if each > num_tokens] or [min(num_tokens, most)]

    def of_model(self, name: str) -> ModelRecord:
        """The record of a model, which is empty at first."""
        return self.models.setdefault(name, ModelRecord())


def confidences_of(draft: Draft) -> Sequence[float]:
    """The confidences of a draft, or a default for each token."""
    return draft.confidences or [_DEFAULT_CONFIDENCE] * len(draft)


class Records:
    """A record for each kind of request, in a file if there is one.

        records = Records(SavedValue(folder, key, dict[str, Record]))
        records.of(request.verifier).copies.chance(0.8)
        records.save()

    Sampling accepts other tokens than greedy decoding, so each verifier has its own record. So has each adapter of the
    main model, which writes other texts. adapters: a hash of each, by name; one that changes begins anew.
    """

    def __init__(
        self, file: SavedValue[dict[str, Record]] | None = None, adapters: Mapping[str, str] | None = None
    ) -> None:
        self._file, self._adapters = file, dict(adapters or {})
        self.found = (file.read() if file else None) or {}
        self._saved_at = time.monotonic()

    def of(self, verifier: Verifier, adapter: str | None = None) -> Record:
        """The record of requests with this kind of verifier, and this adapter or none."""
        name = self._name(type(verifier).__name__, adapter)
        if name not in self.found:
            self.found[name] = Record()
        return self.found[name]

    def of_model(self, verifier: Verifier, model: str, adapter: str | None = None) -> ModelRecord:
        """The record of a model for these requests.

        It begins with the share of greedy decoding; with an adapter, with that of greedy decoding with it or without.
        """
        record = self.of(verifier, adapter)
        for name in () if model in record.models else (self._name("Greedy", adapter), "Greedy"):
            if (greedy := self.found.get(name)) and model in greedy.models:
                known = greedy.models[model].share
                record.models[model] = ModelRecord(share=replace(known, weight=min(known.weight, _MAX_GREEDY_COUNT)))
                break
        return record.of_model(model)

    def _name(self, verifier: str, adapter: str | None) -> str:
        return verifier if adapter is None else f"{verifier} {adapter} {self._adapters.get(adapter, '')[:16]}"

    def save(self, *, at_once: bool = False) -> None:
        """Write the file, at most once in a few seconds unless `at_once`."""
        now = time.monotonic()
        if self._file and self.found and (at_once or now - self._saved_at >= _SAVE_INTERVAL_SECONDS):
            self._saved_at = now
            self._file.write(self.found)
