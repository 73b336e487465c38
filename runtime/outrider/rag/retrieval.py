"""Finds documents by their words: BM25, for apps without a search of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.errors import OptionError, RequestError, needs

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq


class Retriever:
    """Documents in memory, ranked by BM25 (Robertson and Zaragoza 2009) through the library bm25s.

    Raises:
        OptionError: when bm25s is not installed, or there is no document with words.
    """

    def __init__(self, documents: Seq[str]) -> None:
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
