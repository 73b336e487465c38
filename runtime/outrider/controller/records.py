"""What drafters have earned, kept for later answers and later starts."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from outrider.controller.acceptance import Acceptance, Share

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from outrider.saved import SavedValue
    from outrider.types import Draft, Verifier

_SECONDS = 5.0  # between two writes of the file
_HEARSAY = 10.0  # observations that what is known of greedy decoding counts for where it is sampled
_UNSAID = 0.5  # stands for the confidence of a drafter that does not say any


@dataclass(slots=True)
class Record:
    """What is known of the drafters, whichever answer it was learned from.

    copies, model: how often tokens of theirs are kept. first_copies: the same of a copy's first token where the one
    before was not copied: most copies that go wrong do so there. model_share: of the draft model's tokens, whatever it
    says of them. length: tokens of an answer.
    """

    copies: Acceptance = field(default_factory=Acceptance)
    first_copies: Acceptance = field(default_factory=Acceptance)
    model: Acceptance = field(default_factory=Acceptance)
    model_share: Share = field(default_factory=lambda: Share(0.7, weight=10.0, memory=0.999))
    length: Share = field(default_factory=lambda: Share(64.0, weight=1.0, memory=0.9))

    def judge(self, draft: Draft, num_accepted: int) -> None:
        """Take in what became of a draft of the model's: of the tokens up to the first rejected one."""
        for i, confidence in enumerate(confidences_of(draft)[: num_accepted + 1]):
            self.model.observe(confidence, kept=i < num_accepted)
            self.model_share.add(i < num_accepted)


def confidences_of(draft: Draft) -> Seq[float]:
    """What a drafter says of its tokens, or what stands for it."""
    return draft.confidences or [_UNSAID] * len(draft)


class Records:
    """A record for each kind of request, in a file if there is one.

        records = Records(SavedValue(folder, key, dict[str, Record]))
        records.of(request.verifier).copies.chance(0.8)
        records.save()

    Sampling keeps other tokens than greedy decoding, so each way to judge has its own.
    """

    def __init__(self, file: SavedValue[dict[str, Record]] | None = None) -> None:
        self._file = file
        self.found = (file.read() if file else None) or {}
        self.is_new = not self.found
        self._saved_at = time.monotonic()

    def of(self, verifier: Verifier) -> Record:
        """The record of requests that are judged in this way."""
        name = type(verifier).__name__
        if name not in self.found:
            made = self.found[name] = Record()
            if greedy := self.found.get("Greedy"):
                known = greedy.model_share
                made.model_share = replace(known, weight=min(known.weight, _HEARSAY))
        return self.found[name]

    def save(self, *, at_once: bool = False) -> None:
        """Write the file, unless that was done a moment ago."""
        now = time.monotonic()
        if self._file and self.found and (at_once or now - self._saved_at >= _SECONDS):
            self._saved_at = now
            self._file.write(self.found)
