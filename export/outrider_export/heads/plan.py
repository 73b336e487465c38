"""A drafter that reads hidden states, as the draft of an export."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outrider.bundle.manifest import DrafterEntry, ModelEntry
from outrider_export.diet import choose_from
from outrider_export.heads.checks import check_draft_vocab, check_main
from outrider_export.heads.formats import Head, kind_of, read_head
from outrider_export.heads.write import check_head_weights, write_head
from outrider_export.plan import Plan
from outrider_export.progress import Progress
from outrider_export.sources import Located
from outrider_export.special_tokens import eos_of


def is_head(source: Located) -> bool:
    """Whether a source is a checkpoint folder of such a drafter."""
    return source.path is not None and source.path.is_dir() and kind_of(source.path) is not None


@dataclass
class HeadPlan:
    """The drafter's source and options, then what was read of it."""

    source: Located
    weights: str
    num_tokens: int | None
    corpus: list[str]
    head: Head | None = None
    main: Plan | None = None

    @classmethod
    def of(cls, source: Located, weights: str | None, num_tokens: int | None, corpus: list[str]) -> HeadPlan:
        """Check the options.

        Raises:
            OptionError: for a weight format that such drafters do not have.
        """
        check_head_weights("draft_weights", weights or "int8")
        return cls(source, weights or "int8", num_tokens, corpus)

    def read(self, main: Plan) -> None:
        """Read the drafter for this main model, before anything is converted.

        Raises:
            ExportError: when it is damaged or does not fit.
            OptionError: for a number of tokens, where it has an output matrix of its own.
        """
        if self.source.path is None:
            raise AssertionError("it was fetched")
        self.main, self.head = main, read_head(self.source.path, main.geometry)
        check_main(self.head, main.format)
        check_draft_vocab(self.head, self.num_tokens, self.corpus or None)

    def write(self, folder: Path, main: ModelEntry, progress: Progress) -> DrafterEntry:
        """Write it into the bundle's folder, behind the main model."""
        if self.head is None or self.main is None:
            raise AssertionError("it was read")
        tokens = None
        if self.head.uses_main_matrix:
            asked, eos = (self.num_tokens, self.corpus), eos_of(self.main)
            own = folder / "tokenizer"
            tokens = choose_from(self.main.vocabulary, eos, *asked, own, progress, self.head.proposed)
        return write_head(folder, main, self.head, self.head.kind, self.weights, tokens, self.source)
