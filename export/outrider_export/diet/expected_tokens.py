"""Runs a converted model over short texts, to know which tokens it expects.

usage = expected_tokens(entry, folder, vocabulary, tokenizer, progress)
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from outrider.bundle.folder import Bundle
from outrider.bundle.manifest import SCHEMA_VERSION, FileEntry, Manifest, ModelEntry, TokenizerEntry
from outrider.inputs.text import Tokenizer
from outrider.models.tuning.measure.slots import open_slot
from outrider.models.tuning.measured import compile_for_trials
from outrider.models.tuning.model_spec import ModelSpec
from outrider.models.tuning.setting import settings_for
from outrider.types import Chunk, CompiledModel, Exactness
from outrider_export.diet.usual_tokens import TOKENS_PER_TEXT, TokenUsage, read_texts
from outrider_export.progress import Progress
from outrider_export.tokenizers.vocabulary import Vocabulary

_ROOM = 2 * TOKENS_PER_TEXT  # of the cache, with padding


def part_alone(folder: Path, role: str, entry: ModelEntry) -> ModelSpec:
    """A model that was written to the folder, as the only one of a bundle that has no tokenizer."""
    paths = [path for path in (folder / entry.folder).rglob("*") if path.is_file()]
    listed = tuple(FileEntry(path.relative_to(folder).as_posix(), path.stat().st_size, "0" * 64) for path in paths)
    tokenizer = TokenizerEntry("tokenizer", ())
    return ModelSpec(role, Bundle(folder, Manifest(SCHEMA_VERSION, "0", "slices", entry, (), tokenizer, listed)), entry)


def expected_tokens(
    entry: ModelEntry, folder: Path, vocabulary: Vocabulary, tokenizer: Path, progress: Progress
) -> TokenUsage:
    """What a draft model expects after the first tokens of each text, in seconds.

    folder: of the bundle, whose folder `entry.folder` has the model. tokenizer: the folder of the model's.

    Raises:
        DeviceError: when the model cannot be run on the CPU.
    """
    texts = read_texts()
    progress.phase("count", sum(len(text.encode()) for text in texts.values()))
    encode = Tokenizer(tokenizer).encode
    part = part_alone(folder, "draft", entry)
    backend = compile_for_trials(part, next(iter(settings_for(part))), max_tokens=_ROOM)
    backend.use(Exactness())
    expected, agreed = {}, {}
    for language, text in texts.items():
        token_ids = [i for i in encode(text) if i < len(vocabulary)][:TOKENS_PER_TEXT]
        if len(token_ids) > 1:
            expected[language], agreed[language] = _read(backend, token_ids, len(vocabulary))
        progress.advance(len(text.encode()))
    del backend
    gc.collect()  # a file that is mapped cannot be moved on Windows
    return TokenUsage(vocabulary, expected, agreed)


def _read(
    backend: CompiledModel, token_ids: Sequence[int], num_tokens: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The sums of the next token's probabilities and of their squares, float64 [2, num_tokens], in each half."""
    sums, squares = np.zeros((2, 2, num_tokens))
    with closing(open_slot(backend, len(token_ids))) as slot:
        chunk = Chunk(slot, token_ids, num_rows=len(token_ids))
        for i, row in enumerate(backend.submit([chunk]).wait().rows(chunk)):
            logits = row.full()[:num_tokens]
            probabilities = np.exp(logits - logits.max())
            probabilities /= probabilities.sum(dtype=np.float64)
            half = int(2 * i >= len(token_ids))
            sums[half] += probabilities
            squares[half] += np.square(probabilities)
    return sums, squares
