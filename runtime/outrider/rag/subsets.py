"""Splits documents into diverse subsets: each has one document of every cluster."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from outrider.errors import OptionError, needs

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq


def choose_subsets(documents: Seq[str], size: int, count: int, *, seed: int = 0) -> list[tuple[int, ...]]:
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


def _clusters(documents: Seq[str], count: int, seed: int) -> list[list[int]]:
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
