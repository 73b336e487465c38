"""Speculative RAG (Wang et al. 2024, "Enhancing Retrieval Augmented Generation through Drafting").

The draft model answers from several subsets of the documents at once, each time with a rationale. The main model reads
none of the documents. It scores the drafts, and the best one is the answer. This is not lossless: the text is the draft
model's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import msgspec

from outrider.bundle.folder import read_bundle
from outrider.config.files import load_config
from outrider.decoding.results import Result
from outrider.engine.engine import Engine
from outrider.errors import OptionError, RequestError, nearest
from outrider.rag.retrieval import check_numbers, choose_subsets
from outrider.types import ChatTokenizer, Prompt

RATIONALE, ANSWER = "Rationale: ", "Answer: "
# The draft model's whole answer. Small models do not keep to a form that they are merely told.
FORM = rf"{RATIONALE}[^\n]{{1,280}}\n{ANSWER}[^\n]{{1,140}}"
REFLECTION = "Does the rationale support the answer? Say yes or no."
YES = "Yes"


def check_asked(question: str, documents: Sequence[str]) -> None:
    """Raise RequestError when the question or a document is empty, or there is no document."""
    if not question.strip():
        raise RequestError("The question is empty. Ask one.")
    if isinstance(documents, str) or not documents:
        raise RequestError(f"documents={documents!r} is not a list of texts with one at least. Retrieve some.")
    if empty := [i for i, each in enumerate(documents) if not each.strip()]:
        raise RequestError(f"Document {empty[0]} is empty. Leave it out.")


def from_documents(question: str, documents: Sequence[str]) -> str:
    """A question with numbered documents to answer it from. Raises as `check_asked`."""
    check_asked(question, documents)
    listed = "\n\n".join(f"[{i}] {each.strip()}" for i, each in enumerate(documents, 1))
    return f"Answer the question from these documents.\n\n{listed}\n\nQuestion: {question.strip()}"


def to_draft(question: str, documents: Sequence[str]) -> str:
    """The same, for an answer in the form of `FORM`."""
    return (
        f"{from_documents(question, documents)}\n\nFirst quote what supports your answer, as one line that begins with "
        f"'{RATIONALE.strip()}'. Then give a short answer, as a line that begins with '{ANSWER.strip()}'."
    )


def answer_from(engine: Engine, question: str, documents: Sequence[str], **options: Any) -> Result:
    """The main model's own answer, from all documents at once. Drafts are copied from them, so the text is lossless.

    options: of `GenerationConfig`. Raises as `Engine.generate`, and RequestError without documents.
    """
    return engine.generate(from_documents(question, documents), **({"references": tuple(documents)} | options))


_MARK = "OUTRIDER"  # stands for a draft in the chat template


@dataclass(frozen=True)
class RagDraft:
    """One of the draft model's answers.

    documents: the indices of those that it is from. Scores are natural logarithms: drafting and consistency the mean
    over the draft's tokens, by the draft model with the documents and by the main model without; reflection that of the
    main model's "Yes" to the question whether the rationale supports the answer.
    """

    documents: tuple[int, ...]
    rationale: str
    text: str
    drafting: float
    consistency: float
    reflection: float

    @property
    def score(self) -> float:
        """By which drafts are compared: the sum of the three, as the paper multiplies probabilities (equation 5).

        It multiplies those of all tokens. Means over tokens do not prefer short drafts.
        """
        return self.drafting + self.consistency + self.reflection


@dataclass(frozen=True)
class RagAnswer:
    """The best draft, with all of them in the order of their subsets, and the time that both models took."""

    best: RagDraft
    drafts: list[RagDraft]
    drafting_seconds: float
    scoring_seconds: float

    @property
    def text(self) -> str:
        """The answer."""
        return self.best.text


class SpeculativeRAG:
    """Answers questions from documents with two engines.

        rag = SpeculativeRAG(engine, draft_engine("my-pair"), num_drafts=4, documents_per_draft=2)
        rag.answer("Who built the bridge?", documents).text

    Raises:
        OptionError: for a number below 1.
    """

    def __init__(
        self,
        main: Engine,
        drafter: Engine,
        *,
        num_drafts: int = 4,
        documents_per_draft: int = 2,
        max_new_tokens: int = 160,
    ) -> None:
        check_numbers(num_drafts=num_drafts, documents_per_draft=documents_per_draft)
        self._main, self._drafter = main, drafter
        self._num_drafts, self._size = num_drafts, documents_per_draft
        self._max_new_tokens = max_new_tokens

    def answer(self, question: str, documents: Sequence[str], *, seed: int = 0) -> RagAnswer:
        """The best of the drafts from these documents. seed: of the subsets. Drafts are greedy.

        Raises:
            RequestError: when a question or document is empty, a draft does not fit the models' context, or none comes
                to its answer within max_new_tokens.
            OptionError: without the packages of `pip install "outrider[rag]"`, or a chat template.
        """
        check_asked(question, documents)
        subsets = choose_subsets(documents, self._size, self._num_drafts, seed=seed)
        prompts = [to_draft(question, [documents[i] for i in subset]) for subset in subsets]
        began = time.perf_counter()
        with ThreadPoolExecutor(len(subsets)) as pool:  # requests of one engine share its passes
            written = [*pool.map(self._write, prompts)]
            middle = time.perf_counter()
            scores = [*pool.map(self._score, [question] * len(subsets), prompts, written)]
        ended = time.perf_counter()
        drafts = []
        for subset, result, score in zip(subsets, written, scores, strict=True):
            rationale, _, text = result.text.removeprefix(RATIONALE).partition(f"\n{ANSWER}")
            drafts.append(RagDraft(subset, rationale.strip(), text.strip(), *score))
        whole = [each for each in drafts if each.text]  # max_new_tokens may have cut others
        if not whole:
            raise RequestError(
                f"No draft came to its answer within max_new_tokens={self._max_new_tokens}: rationales come first. "
                "Raise it."
            )
        return RagAnswer(max(whole, key=lambda each: each.score), drafts, middle - began, ended - middle)

    def _write(self, prompt: str) -> Result:
        return self._drafter.generate(prompt, regex=FORM, temperature=0.0, max_new_tokens=self._max_new_tokens)

    def _score(self, question: str, prompt: str, result: Result) -> tuple[float, float, float]:
        """drafting, consistency and reflection of a draft. The main model's two come from one pass."""
        drafting = self._drafter.score(prompt, result.text)
        tokenizer = cast("ChatTokenizer", self._main.tokenizer)
        asked = f"{question.strip()}\n\nGive a rationale, then a short answer."
        turns = (("user", asked), ("assistant", _MARK), ("user", REFLECTION))
        rendered = tokenizer.render([{"role": role, "content": content} for role, content in turns])
        before, _, after = rendered.partition(_MARK)
        parts = [tokenizer.encode(each) for each in (result.text, after, YES)]
        given = [token_id for part in parts for token_id in part]
        scores = self._main.score(Prompt(tokenizer.encode_rendered(before)), given)
        num_draft = len(parts[0])
        return sum(drafting) / len(drafting), sum(scores[:num_draft]) / num_draft, sum(scores[-len(parts[2]) :])


def draft_engine(bundle: str | Path, name: str = "draft", **options: Any) -> Engine:
    """An engine whose main model is the draft model `name` of a bundle. options: as those of `outrider.load`.

    Raises:
        OptionError: when there is no such draft model, or it cannot write: its output matrix is cut.
        BundleError, DeviceError: as `outrider.load`.
    """
    found = read_bundle(bundle)
    models = {each.name: each for each in found.manifest.drafters if each.traits.design == "model"}
    if name not in models:
        raise OptionError(f"The bundle has no draft model {name!r}. {nearest(name, models)}")
    entry = models[name]
    if entry.num_proposed_tokens is not None:
        raise OptionError(
            f"The draft model {name!r} proposes {entry.num_proposed_tokens:,} of {entry.model.vocab_size:,} tokens, so "
            "it cannot write everything. Export the bundle with --draft-vocab all."
        )
    tokenizer = entry.tokenizer or found.manifest.tokenizer
    manifest = msgspec.structs.replace(found.manifest, main=entry.model, drafters=(), tokenizer=tokenizer)
    return Engine(replace(found, manifest=manifest), load_config(None).replace(**options))
