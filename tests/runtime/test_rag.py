"""Answers from documents: which are found, how they are divided, and which draft is taken."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import outrider
from outrider.errors import OptionError, RequestError
from outrider.rag import Retriever, SpeculativeRAG, answer_from, choose_subsets, speculative
from outrider.rag.speculative import ANSWER, RATIONALE, to_draft
from outrider.types import Prompt

pytest.importorskip("bm25s")
TOPICS = ("bread oven flour baker", "lake water fish swim", "train rail steam tunnel")
DOCUMENTS = [f"{topic} story number {i}" for i, topic in enumerate(TOPICS * 3)]
QUESTION = "Who bakes the bread?"


def test_documents_are_found_by_their_words() -> None:
    retriever = Retriever(DOCUMENTS)
    found = retriever.find("Which fish swim in the water?", 3)
    assert sorted(found) == [each for each in DOCUMENTS if "lake" in each]
    assert len(retriever.find("bread", 2)) == 2
    with pytest.raises(RequestError, match="No document has a word of 'xylophone'"):
        retriever.find("xylophone", 2)
    with pytest.raises(OptionError, match="count=0"):
        retriever.find("bread", 0)
    with pytest.raises(OptionError, match="There are 2 documents, and none has words"):
        Retriever(["", " "])


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.sampled_from([*DOCUMENTS, "the same", "!"]), min_size=1, max_size=8),
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(0, 3),
)
def test_subsets_are_different_and_not_too_many(documents: list[str], size: int, count: int, seed: int) -> None:
    subsets = choose_subsets(documents, size, count, seed=seed)
    assert 1 <= len(subsets) <= count
    assert len(set(subsets)) == len(subsets)
    for subset in subsets:
        assert list(subset) == sorted(set(subset))
        assert 1 <= len(subset) <= max(size, 1)
        assert all(0 <= i < len(documents) for i in subset)
    assert subsets == choose_subsets(documents, size, count, seed=seed)


@pytest.fixture(autouse=True)
def short_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random models write what they can."""
    monkeypatch.setattr(speculative, "FORM", rf"{RATIONALE}[a-z]{{1,9}}\n{ANSWER}[a-z]{{1,9}}")


@pytest.fixture(scope="module")
def engine(tiny: Path) -> Iterator[outrider.Engine]:
    with outrider.load(tiny, drafter="suffix", cache_size=0.05) as made:
        yield made


def test_the_draft_with_the_best_score_is_the_answer(engine: outrider.Engine) -> None:
    rag = SpeculativeRAG(engine, engine, num_drafts=3, documents_per_draft=2, max_new_tokens=60)
    found = rag.answer(QUESTION, DOCUMENTS[:5])
    assert len(found.drafts) == 3
    assert found.best is max(found.drafts, key=lambda each: each.score)
    assert found.text == found.best.text
    again = rag.answer(QUESTION, DOCUMENTS[:5])
    assert (again.text, again.best.score) == (found.text, found.best.score)


def test_the_scores_are_those_of_the_models(engine: outrider.Engine) -> None:
    """Each part read by itself: the drafts with their documents, the rest without."""
    rag = SpeculativeRAG(engine, engine, num_drafts=2, documents_per_draft=2, max_new_tokens=60)
    for draft in rag.answer(QUESTION, DOCUMENTS[:4]).drafts:
        text = f"{RATIONALE}{draft.rationale}\n{ANSWER}{draft.text}"
        with_documents = engine.score(to_draft(QUESTION, [DOCUMENTS[i] for i in draft.documents]), text)
        assert draft.drafting == pytest.approx(sum(with_documents) / len(with_documents), abs=1e-3)
        assert draft.score == draft.drafting + draft.consistency + draft.reflection
        assert max(draft.drafting, draft.consistency, draft.reflection) < 0


class Recording:
    """An engine that remembers what it was asked to score."""

    def __init__(self, engine: outrider.Engine) -> None:
        self._engine = engine
        self.tokenizer = engine.tokenizer
        self.scored: list[tuple[Prompt, list[int]]] = []
        self.found: list[list[float]] = []

    def score(self, prompt: Prompt, token_ids: Sequence[int]) -> list[float]:
        self.scored.append((prompt, [*token_ids]))
        self.found.append(self._engine.score(prompt, token_ids))
        return self.found[-1]


def test_the_main_model_reads_question_draft_and_reflection_once_and_no_document(engine: outrider.Engine) -> None:
    main: Any = Recording(engine)
    rag = SpeculativeRAG(main, engine, num_drafts=2, documents_per_draft=1, max_new_tokens=60)
    found = rag.answer(QUESTION, DOCUMENTS[:3])
    assert len(main.scored) == len(found.drafts)
    for prompt, token_ids in main.scored:
        whole = engine.tokenizer.decode([*prompt.token_ids, *token_ids])
        assert QUESTION in whole
        assert not any(document in whole for document in DOCUMENTS)
        assert whole.endswith("Yes")
    count = len(engine.tokenizer.encode("Yes"))
    expected = sorted(sum(scores[-count:]) for scores in main.found)
    assert sorted(each.reflection for each in found.drafts) == expected


def test_the_main_models_own_answer_is_lossless(engine: outrider.Engine) -> None:
    options: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True}
    drafted = answer_from(engine, QUESTION, DOCUMENTS, **options)
    plain = answer_from(engine, QUESTION, DOCUMENTS, drafter=None, **options)
    assert drafted.token_ids == plain.token_ids


@pytest.mark.parametrize(("question", "documents", "said"), [
    (" ", DOCUMENTS, "The question is empty"),
    (QUESTION, [], "is not a list of texts with one at least"),
    (QUESTION, "one text", "is not a list of texts"),
    (QUESTION, ["a text", " "], "Document 1 is empty"),
])  # fmt: skip
def test_empty_input_is_refused(engine: outrider.Engine, question: str, documents: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        SpeculativeRAG(engine, engine).answer(question, documents)
    with pytest.raises(RequestError, match=said):
        answer_from(engine, question, documents)


def test_drafts_without_an_answer_are_said(engine: outrider.Engine) -> None:
    with pytest.raises(RequestError, match="No draft came to its answer within max_new_tokens=3"):
        SpeculativeRAG(engine, engine, max_new_tokens=3).answer(QUESTION, DOCUMENTS)
