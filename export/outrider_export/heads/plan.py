"""A drafter that reads hidden states, as the draft of an export, or for a bundle."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.bundle.manifest import DrafterEntry, Geometry, ModelEntry
from outrider.errors import OptionError
from outrider_export.diet.diet import choose_from
from outrider_export.heads.formats import EMBEDDING, HeadCheckpoint, kind_of_head
from outrider_export.heads.write import write_head
from outrider_export.progress import Progress
from outrider_export.sources.source import Located
from outrider_export.target import Target
from outrider_export.tokenizers.vocabulary import Vocabulary

DEFAULT_WEIGHTS = "int8"


def is_head(source: Located) -> bool:
    """Whether what was fetched is a checkpoint folder, or a GGUF file, of such a drafter."""
    return kind_of_head(source.fetched) is not None


@dataclass(frozen=True)
class HeadPlan:
    """A drafter's checkpoint that was read, before anything is converted.

    Raises:
        OptionError: for a number of tokens, where it has an output matrix of its own.
    """

    head: HeadCheckpoint
    source: Located  # of its files
    eos_token_ids: tuple[int, ...]  # the main model's
    weights: str
    num_tokens: int | None  # this and the corpus: of `check_diet`
    corpus: list[str]
    progress: Progress

    def __post_init__(self) -> None:
        if not self.head.uses_main_matrix and (self.num_tokens is not None or self.corpus):
            raise OptionError(
                f"draft_vocab is for drafters with a part of the main model's output matrix, and this {self.head.kind} "
                "drafter has none. Leave it out."
            )

    @property
    def kind(self) -> str:
        """The drafter's."""
        return self.head.kind

    def write(self, target: Target, main: ModelEntry, name: str) -> DrafterEntry:
        """Write it into the new bundle under this name, after the main model and its tokenizer."""
        tokens = None
        if self.head.uses_main_matrix:
            tokenizer = target.new / "tokenizer"
            tokens = choose_from(
                Vocabulary.of_folder(tokenizer),
                self.eos_token_ids,
                self.num_tokens,
                self.corpus,
                tokenizer,
                self.progress,
                self.head.proposed,
                self._row_share(main.geometry),
            )
        return write_head(target.new, main, self.head, name, self.weights, tokens, self.source)

    def _row_share(self, geometry: Geometry) -> float:
        """The part of the head's bytes that each row of the output matrix has, all weights in 8 bits."""
        own_bytes = sum(tensor.size for name, tensor in self.head.tensors.items() if EMBEDDING not in name)
        return geometry.hidden_size / (own_bytes + geometry.logits_width * geometry.hidden_size)
