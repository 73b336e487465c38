"""Embeddings of texts and their relevance for a query, by openvino-genai's pipelines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from outrider.bundle.folder import Bundle
from outrider.bundle.manifest import TextEncoderEntry, TextEncoderKind
from outrider.engine.opening import open_bundle
from outrider.errors import DeviceError, OptionError, RequestError, TooLong, one_line
from outrider.models.backends.processor import this_processor

_BATCH_TOKENS, _BATCH_TEXTS = 8192, 32  # of one call, with padding
_WHAT: dict[TextEncoderKind, str] = {"embedding": "an embedding model", "rerank": "a reranker"}


@dataclass(frozen=True)
class Embeddings:
    """Texts as vectors: float32 [texts, width], each of length 1. num_tokens: all that were read."""

    vectors: NDArray[np.float32]
    num_tokens: int


@dataclass(frozen=True)
class Ranked:
    """A document's place in the list that was given, and its relevance from 0 to 1."""

    index: int
    score: float


@dataclass(frozen=True)
class Ranking:
    """Documents by their relevance, the most relevant first. num_tokens: that were read."""

    ranked: list[Ranked]
    num_tokens: int


class _TextEncoder:
    """What both have: a bundle of their kind, a tokenizer, and calls one after the other."""

    kind: TextEncoderKind
    has_failed = False  # what a device has failed to do is tried again

    def __init__(self, model: str | Path | Bundle, device: str = "CPU") -> None:
        bundle = open_bundle(model)
        entry = bundle.manifest.main.text_encoder
        if entry is None or entry.kind != self.kind:
            found = "a model that writes" if entry is None else _WHAT[entry.kind]
            raise OptionError(f"{bundle.folder} has {found}, and {_WHAT[self.kind]} is needed. Name another model.")
        self.bundle = bundle
        self.context_length = bundle.manifest.main.geometry.context_length
        self._lock = Lock()
        folder = bundle.folder / bundle.manifest.main.folder
        try:
            self._load(folder, device, entry)
        except RuntimeError as error:
            raise DeviceError(f"{bundle.folder} cannot be loaded on {device}: {one_line(error)}.") from error

    def _load(self, folder: Path, device: str, entry: TextEncoderEntry) -> None:
        raise NotImplementedError

    @property
    def is_working(self) -> bool:
        """Whether it is open."""
        return self._pipeline is not None

    def close(self) -> None:
        """Free the model."""
        with self._lock:
            self._pipeline: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_lengths(self, name: str, lengths: Sequence[int], also: str = "") -> None:
        """Raise TooLong for the first text that the model does not read whole."""
        for i, length in enumerate(lengths):
            if length > self.context_length:
                raise TooLong(
                    f"{name}[{i}] has {length:,} tokens{also}, and this model reads {self.context_length:,}. Split it."
                )

    def _batches(self, lengths: Sequence[int], cancel: Event | None) -> Iterator[list[int]]:
        """The indices of texts for each call: texts of like length together, as the others are padded."""
        batch: list[int] = []
        for i in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
            if batch and (len(batch) == _BATCH_TEXTS or (len(batch) + 1) * lengths[batch[0]] > _BATCH_TOKENS):
                yield batch
                batch = []
            if cancel is not None and cancel.is_set():
                raise RequestError("The request was cancelled.")
            batch.append(i)
        if batch:
            yield batch

    def _run(self, call: Any, *arguments: Any) -> Any:
        with self._lock:
            if self._pipeline is None:
                raise RequestError("This model is closed. Load it again.")
            try:
                return getattr(self._pipeline, call)(*arguments)
            except RuntimeError as error:
                raise DeviceError(f"The device has failed: {one_line(error)}.") from error


def _properties_on(device: str) -> dict[str, Any]:
    """OpenVINO's: on a CPU f32, where its default depends on the processor, and with it the vectors."""
    if not device.startswith("CPU"):
        return {}
    quota = this_processor().quota
    return {"INFERENCE_PRECISION_HINT": "f32"} | ({"INFERENCE_NUM_THREADS": quota} if quota else {})


class Embedder(_TextEncoder):
    """An embedding model: texts to vectors whose products are their likeness. Thread-safe.

        with outrider.Embedder("BAAI/bge-small-en-v1.5") as embedder:
            vectors = embedder.embed(["Sledges glide on snow.", "Outriders go ahead."]).vectors

    model: a bundle of `outrider export`, or a checkpoint folder or hub id, of which one is made once. device: as
    OpenVINO names it.

    Raises:
        OptionError: for a model of another kind.
        BundleError, ExportError: as `outrider.load`.
        DeviceError: when the device does not run it.
    """

    kind = "embedding"

    def _load(self, folder: Path, device: str, entry: TextEncoderEntry) -> None:
        import openvino_genai

        pipeline = openvino_genai.TextEmbeddingPipeline
        config = pipeline.Config()
        config.pooling_type = getattr(pipeline.PoolingType, (entry.pooling or "cls").upper())
        config.normalize = True
        self._tokenizer = openvino_genai.Tokenizer(folder)
        if not self._tokenizer.encode(["a", "a a a a"]).attention_mask.data[0, 0]:
            config.padding_side = "left"  # as the tokenizer pads: else the pipeline looks for last tokens elsewhere
        config.max_length = self.context_length
        self._entry = entry
        self._pipeline = pipeline(folder, device, config, **_properties_on(device))

    @property
    def width(self) -> int:
        """Numbers of an embedding."""
        return self.bundle.manifest.main.geometry.hidden_size

    def embed(
        self,
        texts: Sequence[str | Sequence[int]],
        *,
        dimensions: int | None = None,
        truncate: bool = False,
        cancel: Event | None = None,
    ) -> Embeddings:
        """The embeddings of texts, or of the model's own token ids.

        dimensions: the first numbers alone, brought to length 1 again; for models that are trained for it
        (Matryoshka). truncate: the beginning of a text that is too long, which is refused otherwise.

        Raises:
            OptionError: for more dimensions than there are.
            RequestError: without texts, for an empty one, one that is too long (TooLong), or ids that are no text.
            DeviceError: when the device fails.
        """
        if dimensions is not None and not 1 <= dimensions <= self.width:
            raise OptionError(f"dimensions={dimensions} is not from 1 to {self.width}, this model's width.")
        given = _check_texts("input", [self._text_of(i, each) for i, each in enumerate(texts)])
        lengths = [self._tokenizer.encode(text).input_ids.shape[1] for text in given]
        if not truncate:
            self._check_lengths("input", lengths)
        lengths = [min(length, self.context_length) for length in lengths]
        vectors = np.empty((len(given), self.width), np.float32)
        for batch in self._batches(lengths, cancel):
            vectors[batch] = self._run("embed_documents", [given[i] for i in batch])
        if dimensions is not None:
            vectors = vectors[:, :dimensions]
            vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        return Embeddings(vectors, sum(lengths))

    def _text_of(self, index: int, given: str | Sequence[int]) -> str:
        """A text as the model reads it; for token ids the one that has them, as the pipeline reads texts alone."""
        if isinstance(given, str):
            whole = f"{self._entry.prompt}{given}" if given.strip() else given
            return whole.lower() if self._entry.lowercase else whole
        ids = [*given]
        most = self.bundle.manifest.main.vocab_size
        text = self._tokenizer.decode(ids, skip_special_tokens=True) if all(0 <= i < most for i in ids) else None
        for special in (True, False) if text else ():
            if self._tokenizer.encode(text, add_special_tokens=special).input_ids.data[0].tolist() == ids:
                return str(text)
        raise RequestError(
            f"input[{index}] is a list of token ids that no text has with this model's tokenizer. Send the text (in "
            "LangChain: check_embedding_ctx_length=False)."
        )


class Reranker(_TextEncoder):
    """A reranker: how relevant documents are for a query. Thread-safe.

        with outrider.Reranker("BAAI/bge-reranker-base") as reranker:
            best = reranker.rerank("Who goes ahead?", documents, top_n=3).ranked[0].index

    Arguments and errors as `Embedder`'s.
    """

    kind = "rerank"

    def _load(self, folder: Path, device: str, _: TextEncoderEntry) -> None:
        import openvino_genai

        config = openvino_genai.TextRerankPipeline.Config()
        config.top_n, config.max_length = _BATCH_TEXTS, self.context_length
        self._pipeline = openvino_genai.TextRerankPipeline(folder, device, config, **_properties_on(device))
        self._tokenizer = openvino_genai.Tokenizer(folder, add_second_input=True)
        self._reads_pairs: bool = self._tokenizer.supports_paired_input()

    def rerank(
        self, query: str, documents: Sequence[str], *, top_n: int | None = None, cancel: Event | None = None
    ) -> Ranking:
        """The documents by their relevance for a query, the best first; of equal ones the first.

        Raises:
            OptionError: for a top_n below 1.
            RequestError: without documents, for an empty query or document, or one that is too long (TooLong).
            DeviceError: when the device fails.
        """
        if top_n is not None and top_n < 1:
            raise OptionError(f"top_n={top_n} asks for nothing. Ask for 1 document at least.")
        if not query.strip():
            raise RequestError(f"query={query!r} is empty. Ask something.")
        given = _check_texts("documents", documents)
        lengths = [self._length(query, document) for document in given]
        self._check_lengths("documents", lengths, " with the query")
        scores = [0.0] * len(given)
        for batch in self._batches(lengths, cancel):
            for place, score in self._run("rerank", query, [given[i] for i in batch]):
                scores[batch[place]] = score
        order = sorted(range(len(given)), key=lambda i: (-scores[i], i))[:top_n]
        return Ranking([Ranked(i, scores[i]) for i in order], sum(lengths))

    def _length(self, query: str, document: str) -> int:
        """The tokens of both, as the pipeline reads them."""
        if self._reads_pairs:
            return int(self._tokenizer.encode([query], [document]).input_ids.shape[1])
        return int(self._tokenizer.encode(query + document).input_ids.shape[1])


def _check_texts(name: Literal["input", "documents"], texts: Sequence[str]) -> list[str]:
    """Raise RequestError unless there are texts and none is empty."""
    if not texts:
        raise RequestError(f"{name} is empty. Pass one text at least.")
    if empty := [i for i, text in enumerate(texts) if not text.strip()]:
        raise RequestError(f"{name}[{empty[0]}] is empty. Leave it out.")
    return [*texts]
