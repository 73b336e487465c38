"""Finds documents by their words (BM25) or their meaning, for apps without a search of their own, and splits them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from outrider.engine.text_encoders import Embedder, Reranker
from outrider.errors import OptionError, RequestError, needs


class Retriever:
    """Documents in memory, ranked by BM25 (Robertson and Zaragoza 2009) through the library bm25s.

    Raises:
        OptionError: when bm25s is not installed, or there is no document with words.
    """

    def __init__(self, documents: Sequence[str]) -> None:
        with needs("Searching documents needs bm25s", "rag", OptionError):
            import bm25s
        if not any(each.strip() for each in documents):
            raise OptionError(f"There are {len(documents)} documents, and none has words. Pass their texts.")
        self._documents = [*documents]
        self._tokenize = bm25s.tokenize
        self._index = bm25s.BM25()
        self._index.index(self._tokenize(self._documents, show_progress=False), show_progress=False)

    def find(self, question: str, count: int) -> list[str]:
        """The up to `count` documents that share words with a question, the best first.

        Raises:
            OptionError: for a count below 1.
            RequestError: when none shares a word.
        """
        if count < 1:
            raise OptionError(f"count={count} finds nothing. Ask for 1 document at least.")
        words = self._tokenize([question], show_progress=False)
        indices, scores = self._index.retrieve(words, k=min(count, len(self._documents)), show_progress=False)
        found = [self._documents[i] for i, score in zip(indices[0], scores[0], strict=True) if score > 0]
        if not found:
            raise RequestError(f"No document has a word of {question!r}. Ask in other words, or pass documents.")
        return found


class MeaningRetriever:
    """Documents in memory, ranked by the likeness of embeddings, and perhaps again by a reranker.

        documents = MeaningRetriever(texts, Embedder("bge-small")).find("Who built the bridge?", 8)

    query_prefix: stands before a question, for models that are trained with one. reranker: ranks the `candidates` best.

    Raises as `Embedder.embed`.
    """

    def __init__(
        self,
        documents: Sequence[str],
        embedder: Embedder,
        *,
        query_prefix: str = "",
        reranker: Reranker | None = None,
        candidates: int = 32,
    ) -> None:
        self._documents, self._embedder = [*documents], embedder
        self._prefix, self._reranker, self._candidates = query_prefix, reranker, candidates
        self._vectors = embedder.embed(self._documents).vectors

    def find(self, question: str, count: int) -> list[str]:
        """The up to `count` documents that are the most like a question, the best first.

        Raises as `Embedder.embed` and `Reranker.rerank`, and OptionError for a count below 1.
        """
        if count < 1:
            raise OptionError(f"count={count} finds nothing. Ask for 1 document at least.")
        (wanted,) = self._embedder.embed([self._prefix + question]).vectors
        order = np.argsort(-(self._vectors @ wanted), kind="stable")
        if self._reranker is None:
            return [self._documents[i] for i in order[:count]]
        near = [self._documents[i] for i in order[: max(count, self._candidates)]]
        return [near[each.index] for each in self._reranker.rerank(question, near, top_n=count).ranked]


def choose_subsets(documents: Sequence[str], size: int, count: int, *, seed: int = 0) -> list[tuple[int, ...]]:
    """Up to `count` different subsets of `size` documents, as ascending indices.

    The documents are put into `size` clusters by their words (k-means on TF-IDF), and each subset takes one of each, so
    that it has little twice. Documents that were taken least come first. Source: Wang et al. 2024, algorithm 1, which
    clusters embeddings and draws at random.

    Raises:
        OptionError: for a size or count below 1, or without scikit-learn.
    """
    check_numbers(size=size, count=count)
    if len(documents) <= size:
        return [tuple(range(len(documents)))]
    clusters = _clusters(documents, size, seed)
    generator = np.random.default_rng(seed)
    taken = np.zeros(len(documents))
    found: list[tuple[int, ...]] = []
    while len(found) < min(count, math.prod(map(len, clusters))):
        drawn = [min(cluster, key=lambda i: (taken[i], generator.random())) for cluster in clusters]
        subset = tuple(sorted(drawn))
        if subset in found:  # all documents were taken equally often: any other one
            subset = tuple(sorted(int(generator.choice(cluster)) for cluster in clusters))
        if subset not in found:
            found.append(subset)
            taken[list(subset)] += 1
    return found


def check_numbers(**numbers: int) -> None:
    """Raise OptionError for one below 1."""
    for name, value in numbers.items():
        if value < 1:
            raise OptionError(f"{name}={value} leaves nothing to draft from. Choose 1 at least.")


def _clusters(documents: Sequence[str], count: int, seed: int) -> list[list[int]]:
    """The indices of `count` clusters, none of them empty; fewer if documents are equal."""
    with needs("Splitting documents needs scikit-learn", "rag", OptionError):
        from sklearn.cluster import KMeans
        from sklearn.feature_extraction.text import TfidfVectorizer
    try:
        rows = TfidfVectorizer().fit_transform(documents)
    except ValueError:  # no document has a word
        return [[*range(i, len(documents), count)] for i in range(count)]
    num_different = len({row.tobytes() for row in rows.toarray()})
    labels = KMeans(min(count, num_different), n_init=4, random_state=seed).fit_predict(rows)
    return [np.flatnonzero(labels == label).tolist() for label in np.unique(labels)]
