"""Answers from documents: two ways to make them faster. Needs `pip install "outrider[rag]"`.

    from outrider.rag import Retriever, SpeculativeRAG, answer_from, draft_engine

    documents = Retriever(texts).find("Who built the bridge?", 8)
    answer_from(engine, "Who built the bridge?", documents).text                    # lossless
    SpeculativeRAG(engine, draft_engine("my-pair")).answer("Who built the bridge?", documents).text

`answer_from` is the main model's own answer to all documents, with drafts that are copied from them. `SpeculativeRAG`
(Wang et al. 2024) is another method with another text: the draft model answers from a few documents at a time, and the
main model only chooses.
"""

from __future__ import annotations

from outrider.rag.retrieval import MeaningRetriever, Retriever, choose_subsets
from outrider.rag.speculative import RagAnswer, RagDraft, SpeculativeRAG, answer_from, draft_engine

__all__ = [
    "MeaningRetriever", "RagAnswer", "RagDraft", "Retriever", "SpeculativeRAG", "answer_from", "choose_subsets",
    "draft_engine",
]  # fmt: skip
