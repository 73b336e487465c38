"""The draft diet: cuts a draft model's output matrix, so that it proposes only its most useful tokens.

    diet = plan_diet(plan, pairing, None, [], progress)    # by default, where that pays
    diet.choose(tokenizer, progress)                       # int32 [n], or None: all

The model still reads all tokens. A third of the weights that a small draft model reads per token can be its output
matrix, and most rows are hardly ever the answer. So the matrix is cut to the useful rows (Zhao et al. 2025,
"FR-Spec: accelerating large-vocabulary language models via frequency-ranked speculative sampling"). Nothing is
measured: the bytes of the rows tell the time, and the tokenizer which tokens are useful; see `usual_tokens`.

A drafter that was trained to propose some tokens only says so in a file draft_vocab.json beside its weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from outrider.errors import ExportError, OptionError
from outrider.inputs.text import Tokenizer
from outrider.models.tuning.machines import this_machine
from outrider_export.describe.pairing import Pairing
from outrider_export.describe.plan import Plan
from outrider_export.describe.special_tokens import eos_of
from outrider_export.diet.corpus import read_corpus
from outrider_export.diet.usual_tokens import count_tokens, read_texts, score_tokens
from outrider_export.progress import Progress
from outrider_export.sources.source import read_json
from outrider_export.tokenizers.vocabulary import Vocabulary

ALL = 0
TRAINED_NAME = "draft_vocab.json"  # {"token_ids": [...]}
_TRAINED_FOR = 32_768  # tokens that a draft model is trained for, of vocabularies that are twice as large and more
_LEAST_RATIO = 1.5  # a vocabulary is at least so many times as large
_LEAST_SAVED = 0.1  # of a draft token's time


@dataclass(frozen=True, eq=False)
class Diet:
    """A plan for the tokens that a draft model proposes."""

    vocabulary: Vocabulary
    candidates: NDArray[np.int32]  # [n], the ids to choose from, ascending
    required: NDArray[np.int32]  # [n], ids that are always proposed
    num_tokens: int
    corpus: list[str]  # texts that show which tokens are useful; without them, those of `usual_tokens`
    row_share: (
        float | None
    )  # of a draft token's time, that each row takes: the cut has to pay; None if it was asked for

    def choose(self, tokenizer: Path, progress: Progress) -> NDArray[np.int32] | None:
        """The proposed ids, int32 [num_tokens], ascending; None for all. tokenizer: the folder of the model's."""
        whole, why = len(self.vocabulary), ""
        if self.row_share is not None:
            saved = (whole - self.num_tokens) * self.row_share
            if 2 * len(self.required) >= self.num_tokens or len(self.candidates) < _LEAST_RATIO * self.num_tokens:
                return None
            if saved < _LEAST_SAVED:
                return None
            why = f"; a draft token takes {1 - saved:.2f} of its time, by the bytes that it reads"
            why += ". --draft-vocab all keeps all"
        encode = Tokenizer(tokenizer).encode
        texts = [self.corpus] if self.corpus else [[text] for text in read_texts().values()]
        if self.corpus:
            progress.phase("count")
        return self.choose_by([count_tokens(each, encode, whole) for each in texts], progress, why)

    def choose_by(self, counts: list[NDArray[np.int64]], progress: Progress, why: str = "") -> NDArray[np.int32]:
        """The same, by how often texts have each token, int64 [vocab] each."""
        scores = score_tokens(self.vocabulary, counts)
        scores[self.required] = np.inf
        best_first = np.lexsort((self.candidates, -scores[self.candidates]))
        chosen: NDArray[np.int32] = np.sort(self.candidates[best_first[: self.num_tokens]])
        if len(counts) == 1 and counts[0].any():
            why = f"; {counts[0][chosen].sum() / counts[0].sum():.1%} of the corpus's tokens are among them{why}"
        progress.note(f"draft vocabulary: {len(chosen):,} of {len(self.vocabulary):,} tokens{why}.")
        return chosen


def check_diet(
    has_draft: bool, draft_vocab: int | str | None, corpus: str | Path | None
) -> tuple[int | None, list[str]]:
    """Check the options draft_vocab and draft_vocab_corpus, and convert them for `plan_diet`.

    Raises:
        OptionError: if they are invalid, or the corpus cannot be read.
    """
    if not has_draft and (draft_vocab is not None or corpus is not None):
        raise OptionError("draft_vocab and draft_vocab_corpus are for a draft model, and none is named. Add --draft.")
    num_tokens = ALL if draft_vocab == "all" else draft_vocab
    if isinstance(num_tokens, str) and num_tokens.isdecimal():
        num_tokens = int(num_tokens)
    if isinstance(num_tokens, str) or (num_tokens is not None and num_tokens < ALL):
        raise OptionError(f"draft_vocab={draft_vocab!r} is not a number of tokens. Give one, or 'all'.")
    if num_tokens == ALL and corpus is not None:
        raise OptionError("draft_vocab='all' leaves nothing to choose by a corpus. Leave out one of them.")
    return num_tokens, read_corpus(corpus)


def plan_diet(plan: Plan, pairing: Pairing, num_tokens: int | None, corpus: list[str]) -> Diet | None:
    """Plan the tokens that a draft model proposes; None for all.

    num_tokens: the option, `ALL`, or None for the default: those that it was trained to propose, if it says so, or
    this machine's number, if that pays.

    Raises:
        ExportError: if its draft_vocab.json is damaged.
        OptionError: if it is less than the number of special tokens, or the model is converted by PyTorch.
    """
    vocabulary, trained = plan.vocabulary, read_trained(plan.path, len(plan.vocabulary))
    if num_tokens is None and trained is not None:
        num_tokens = len(trained)
    if not plan.direct and num_tokens != ALL:
        if num_tokens is not None or corpus:
            raise OptionError(
                f"draft_vocab and draft_vocab_corpus are for draft models that are converted without PyTorch, and "
                f"{plan.source.id} is none. Leave them out, or choose another draft model."
            )
        return None
    candidates = _real(vocabulary, trained)
    if pairing.vocabulary == "intersection":
        candidates = candidates[pairing.to_main[candidates] >= 0]  # the others are never proposed
    per_weight = {"fp16": 2.0, "fp32": 4.0}.get(plan.weights, 1.0)  # in int8 and int4 one byte
    row_share = per_weight * plan.geometry.hidden_size / max(plan.final_bytes, 1)
    return _diet(vocabulary, eos_of(plan), candidates, num_tokens, corpus, row_share)


def choose_from(
    vocabulary: Vocabulary,
    eos_token_ids: Iterable[int],
    num_tokens: int | None,
    corpus: list[str],
    tokenizer: Path,
    progress: Progress,
    trained: NDArray[np.int32] | None,
    row_share: float,
) -> NDArray[np.int32] | None:
    """The main model's tokens that a drafter with the main model's output matrix proposes, int32 [n]; None for all.

    num_tokens, corpus: the options, from `check_diet`. trained: see `read_trained`; without options it is these.
    row_share: as in `Diet`.

    Raises:
        OptionError: for fewer tokens than are always proposed.
    """
    if trained is not None and (num_tokens in (None, ALL) or num_tokens >= len(trained)):
        return trained
    diet = _diet(vocabulary, eos_token_ids, _real(vocabulary, trained), num_tokens, corpus, row_share)
    return None if diet is None else diet.choose(tokenizer, progress)


def choose_by_counts(
    vocabulary: Vocabulary,
    eos_token_ids: Iterable[int],
    num_tokens: int | None,
    counts: NDArray[np.int64],
    progress: Progress,
) -> NDArray[np.int32] | None:
    """The tokens to train a draft model for, int32 [n], ascending; None for all.

    num_tokens: as in `plan_diet`. counts: int64 [vocab], how often the main model says each token.

    Raises:
        OptionError: for fewer tokens than are always proposed.
    """
    size = len(vocabulary)
    asked = (_TRAINED_FOR if size >= 2 * _TRAINED_FOR else ALL) if num_tokens is None else num_tokens
    diet = _diet(vocabulary, eos_token_ids, _real(vocabulary, None), asked, [], 0.0)
    return None if diet is None else diet.choose_by([counts[:size]], progress)


def read_trained(folder: Path, size: int) -> NDArray[np.int32] | None:
    """The ids that a checkpoint was trained to propose, int32 [n], ascending; None if it does not say.

    size: of its vocabulary.

    Raises:
        ExportError: if they are no ids of its vocabulary.
    """
    path = folder / TRAINED_NAME
    if not path.is_file():
        return None
    token_ids = read_json(path).get("token_ids")
    if not isinstance(token_ids, list) or not all(isinstance(i, int) and 0 <= i < size for i in token_ids):
        raise ExportError(f"{path} has no 'token_ids' from 0 to {size - 1:,}. Delete it to propose all tokens.")
    return np.unique(np.array(token_ids, dtype=np.int32))


def _real(vocabulary: Vocabulary, trained: NDArray[np.int32] | None) -> NDArray[np.int32]:
    """The ids of tokens, int32 [n], ascending; only those of `trained`, if there are such."""
    real = np.flatnonzero([token is not None for token in vocabulary.tokens]).astype(np.int32)
    return real if trained is None else np.intersect1d(real, trained)


def _diet(
    vocabulary: Vocabulary,
    eos_token_ids: Iterable[int],
    candidates: NDArray[np.int32],
    num_tokens: int | None,
    corpus: list[str],
    row_share: float,
) -> Diet | None:
    """The plan for a number of the candidates; None for all tokens. Special tokens among these are always proposed.

    Raises:
        OptionError: for fewer tokens than are always proposed.
    """
    special = {*eos_token_ids, *vocabulary.special_token_ids, *vocabulary.added_token_ids}
    required = np.intersect1d(candidates, np.array(sorted(special), dtype=np.int32))
    if num_tokens is None:
        return Diet(vocabulary, candidates, required, this_machine().draft_vocab, corpus, row_share)
    if num_tokens == ALL or num_tokens >= len(vocabulary):
        return None
    if num_tokens <= len(required):
        raise OptionError(
            f"draft_vocab={num_tokens:,} leaves no room for text: {len(required):,} special tokens are always "
            "proposed. Ask for more, or for 'all'."
        )
    return Diet(vocabulary, candidates, required, num_tokens, corpus, None)
