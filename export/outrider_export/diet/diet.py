"""The draft diet: cuts a draft model's output matrix, so that it proposes only its most useful tokens.

The model still reads all tokens. A third of the weights that a small draft model reads per token can be its output
matrix, and most rows are hardly ever the answer. So the matrix is cut to the useful rows (Zhao et al. 2025,
"FR-Spec: accelerating large-vocabulary language models via frequency-ranked speculative sampling").

A drafter that was trained to propose some tokens only says so in a file draft_vocab.json beside its weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from outrider.config.files import user_path
from outrider.errors import ExportError, OptionError
from outrider.inputs.text import Tokenizer
from outrider.models.tuning.machines import this_machine
from outrider.system.files import reading
from outrider_export.describe.pairing import Pairing
from outrider_export.describe.plan import Plan
from outrider_export.describe.special_tokens import eos_of
from outrider_export.diet.draft_cut import AutomaticCut
from outrider_export.progress import Progress
from outrider_export.sources.source import read_json
from outrider_export.tokenizers.vocabulary import Vocabulary

ALL = 0
# The number of proposed tokens that a corpus chooses by default. Without one, see `draft_cut`.
DEFAULT_WITH_CORPUS = 32_768
# With a corpus, vocabularies that are less than this many times as large are not cut: the gain would be small.
LEAST_RATIO = 2
TRAINED_NAME = "draft_vocab.json"  # {"token_ids": [...]}
_PIECE = 100_000  # characters per tokeniser call


@dataclass(frozen=True, eq=False)
class Diet:
    """A plan for the tokens that a draft model proposes.

    num_tokens: how many. candidates: int32 [n], the draft ids to choose from. required: ids that are always proposed.
    corpus: texts that show which tokens are useful. size: of the draft model's vocabulary.
    """

    num_tokens: int
    candidates: NDArray[np.int32]
    required: NDArray[np.int32]
    corpus: list[str]
    size: int

    def choose(self, tokenizer: Path, progress: Progress) -> NDArray[np.int32]:
        """Choose the proposed draft ids, int32 [num_tokens], ascending. tokenizer: the draft model's folder."""
        return self.choose_by(_count(self.corpus, tokenizer, self.size, progress), progress)

    def choose_by(self, counts: NDArray[np.int64], progress: Progress) -> NDArray[np.int32]:
        """The same, by how often each token occurs, int64 [size]."""
        useful = _usefulness(counts)
        useful[self.required] = np.inf
        best_first = np.lexsort((self.candidates, -useful[self.candidates]))
        chosen: NDArray[np.int32] = np.sort(self.candidates[best_first[: self.num_tokens]])
        note = f"draft vocabulary: {len(chosen):,} of {self.size:,} tokens"
        if counts.any():
            note += f"; {counts[chosen].sum() / counts.sum():.1%} of the corpus's tokens are among them"
        progress.note(f"{note}.")
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


def plan_diet(
    plan: Plan, pairing: Pairing, num_tokens: int | None, corpus: list[str], progress: Progress
) -> Diet | AutomaticCut | None:
    """Plan the tokens that a draft model proposes; None for all.

    num_tokens: the option, `ALL`, or None for the default: those that it was trained to propose, if it says so, or
    those of `AutomaticCut`.

    Raises:
        ExportError: if its draft_vocab.json is damaged.
        OptionError: if it is less than the number of special tokens, or the model is converted by PyTorch.
    """
    vocabulary, trained = plan.vocabulary, read_trained(plan.path, len(plan.vocabulary))
    if num_tokens is None and trained is not None:
        num_tokens = len(trained)
    is_automatic = num_tokens is None and not corpus
    if not plan.direct and num_tokens != ALL:
        if not is_automatic:
            raise OptionError(
                f"draft_vocab and draft_vocab_corpus are for draft models that are converted without PyTorch, and "
                f"{plan.source.id} is none. Leave them out, or choose another draft model."
            )
        return None
    asked = DEFAULT_WITH_CORPUS if num_tokens is None else num_tokens
    if asked == ALL:
        return None
    is_small = num_tokens is None and LEAST_RATIO * asked > len(vocabulary)
    if not is_automatic and (asked >= len(vocabulary) or is_small):
        progress.note(f"draft vocabulary: all {len(vocabulary):,} tokens.")
        return None
    real = np.array([token is not None for token in vocabulary.tokens])
    if trained is not None:
        real &= np.isin(np.arange(len(real)), trained)
    if pairing.vocabulary == "intersection":
        real &= pairing.to_main >= 0  # the others are never proposed
    candidates = np.flatnonzero(real).astype(np.int32)
    if is_automatic:
        always = _always(vocabulary, eos_of(plan), candidates)
        return AutomaticCut(vocabulary, candidates, always, this_machine().draft_vocab, _row_share(plan))
    return _diet(vocabulary, eos_of(plan), candidates, asked, corpus)


def _row_share(plan: Plan) -> float:
    """The part of a draft model's bytes that each row of its output matrix has."""
    per_weight = {"fp16": 2.0, "fp32": 4.0}.get(plan.weights, 1.0)  # in int8 and int4 one byte
    return per_weight * plan.geometry.hidden_size / max(plan.final_bytes, 1)


def choose_from(
    vocabulary: Vocabulary,
    eos_token_ids: Iterable[int],
    num_tokens: int | None,
    texts: list[str],
    tokenizer: Path,
    progress: Progress,
    trained: NDArray[np.int32] | None,
    row_share: float,
) -> NDArray[np.int32] | None:
    """The main model's tokens that a drafter with the main model's output matrix proposes, int32 [n]; None for all.

    num_tokens, texts: the options, from `check_diet`. trained: see `read_trained`; without options it is these.
    row_share: as in `AutomaticCut`, by which it proposes some tokens by default.

    Raises:
        OptionError: for fewer tokens than are always proposed.
    """
    if trained is not None and (num_tokens in (None, ALL) or num_tokens >= len(trained)):
        return trained
    real = np.flatnonzero([token is not None for token in vocabulary.tokens]).astype(np.int32)
    if num_tokens is None and not texts:
        always = _always(vocabulary, eos_token_ids, real)
        return AutomaticCut(vocabulary, real, always, this_machine().draft_vocab, row_share).choose(tokenizer, progress)
    asked = DEFAULT_WITH_CORPUS if num_tokens is None else num_tokens
    if asked == ALL or asked >= len(vocabulary):
        return None
    real = real if trained is None else np.intersect1d(real, trained)
    return _diet(vocabulary, eos_token_ids, real, asked, texts).choose(tokenizer, progress)


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
    asked = DEFAULT_WITH_CORPUS if num_tokens is None else num_tokens
    if asked == ALL or asked >= size or (num_tokens is None and LEAST_RATIO * asked > size):
        return None
    real = np.flatnonzero([token is not None for token in vocabulary.tokens]).astype(np.int32)
    return _diet(vocabulary, eos_token_ids, real, asked, []).choose_by(counts[:size], progress)


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


def _diet(
    vocabulary: Vocabulary, eos_token_ids: Iterable[int], candidates: NDArray[np.int32], asked: int, texts: list[str]
) -> Diet:
    """The plan for `asked` of the candidates, int32 [n], which ascend. Special tokens among these are always proposed.

    Raises:
        OptionError: for fewer tokens than are always proposed.
    """
    required = _always(vocabulary, eos_token_ids, candidates)
    if asked <= len(required):
        raise OptionError(
            f"draft_vocab={asked:,} leaves no room for text: {len(required):,} special tokens are always proposed. "
            "Ask for more, or for 'all'."
        )
    return Diet(asked, candidates, required, texts, len(vocabulary))


def _always(vocabulary: Vocabulary, eos_token_ids: Iterable[int], candidates: NDArray[np.int32]) -> NDArray[np.int32]:
    """Those of the candidates that are always proposed, int32 [n]."""
    special = {*eos_token_ids, *vocabulary.special_token_ids, *vocabulary.added_token_ids}
    return np.intersect1d(candidates, np.array(sorted(special), dtype=np.int32))


def read_corpus(path: str | Path | None) -> list[str]:
    """The texts of a file: one of plain text, or JSON Lines whose objects have `text`, `prompt` or `turns`.

    Raises:
        OptionError: when the file is missing, holds no text, or a line is not of this form.
    """
    if path is None:
        return []
    path = user_path(path)
    with reading(f"The corpus {path}"):
        content = path.read_text(encoding="utf-8-sig")
    if path.suffix.lower() == ".jsonl":
        lines = enumerate(content.split("\n"), 1)
        texts = [text for number, line in lines if line.strip() for text in _texts(path, number, line)]
    else:
        texts = _pieces(content)
    if not any(text.strip() for text in texts):
        raise OptionError(f"The corpus {path} holds no text.")
    return texts


def _texts(path: Path, number: int, line: str) -> list[str]:
    try:
        record = json.loads(line)
        texts = [record[name] for name in ("prompt", "text") if name in record] + list(record.get("turns", []))
        if not texts or not all(isinstance(text, str) for text in texts):
            raise TypeError
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise OptionError(f"{path}, line {number}, has neither 'text' nor 'prompt' nor 'turns' with text.") from error
    return texts


def _pieces(text: str) -> list[str]:
    """A text in pieces, cut at line ends if it is long."""
    pieces = [""]
    for line in text.splitlines(keepends=True):
        if len(pieces[-1]) + len(line) > _PIECE:
            pieces.append("")
        pieces[-1] += line
    return pieces


def _count(corpus: list[str], tokenizer: Path, size: int, progress: Progress) -> NDArray[np.int64]:
    """How often each token occurs in the corpus, int64 [size]."""
    counts = np.zeros(size, dtype=np.int64)
    if not corpus:
        return counts
    progress.phase("count", sum(len(text.encode("utf-8", "replace")) for text in corpus))
    encode = Tokenizer(tokenizer).encode
    for text in corpus:
        counts += np.bincount(np.array(encode(text), dtype=np.int64), minlength=size)
        progress.advance(len(text.encode("utf-8", "replace")))
    return counts


def _usefulness(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Each token's estimated probability, up to a factor: half from its share of the corpus, half from its id.

    The tokenizer's training made the tokens from frequent to rare, so Zipf's law gives a probability by id, also for
    tokens that are not in the corpus. Compared with counts first and ids for the rest, the mean of both covers more of
    other topics (16,384 tokens, math questions and Python sources: 87.7 % of a model's answers instead of 85.4 %) and
    as much of the corpus's own topics.
    """
    by_id: NDArray[np.float64] = 1 / (np.arange(len(counts)) + 2.7)  # Mandelbrot's constant for words
    by_id /= by_id.sum()
    by_id += counts / max(counts.sum(), 1)
    return by_id
