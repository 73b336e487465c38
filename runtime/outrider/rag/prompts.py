"""What the models are asked, and the main model's own answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outrider.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from outrider.decoding.results import Result
    from outrider.engine.engine import Engine

RATIONALE, ANSWER = "Rationale: ", "Answer: "
# The draft model's whole answer. Small models do not keep to a form that they are merely told.
FORM = rf"{RATIONALE}[^\n]{{1,280}}\n{ANSWER}[^\n]{{1,140}}"
REFLECTION = "Does the rationale support the answer? Say yes or no."
YES = "Yes"


def check_asked(question: str, documents: Seq[str]) -> None:
    """Raise RequestError when the question or a document is empty, or there is no document."""
    if not question.strip():
        raise RequestError("The question is empty. Ask one.")
    if isinstance(documents, str) or not documents:
        raise RequestError(f"documents={documents!r} is not a list of texts with one at least. Retrieve some.")
    if empty := [i for i, each in enumerate(documents) if not each.strip()]:
        raise RequestError(f"Document {empty[0]} is empty. Leave it out.")


def from_documents(question: str, documents: Seq[str]) -> str:
    """A question with numbered documents to answer it from. Raises as `check_asked`."""
    check_asked(question, documents)
    listed = "\n\n".join(f"[{i}] {each.strip()}" for i, each in enumerate(documents, 1))
    return f"Answer the question from these documents.\n\n{listed}\n\nQuestion: {question.strip()}"


def to_draft(question: str, documents: Seq[str]) -> str:
    """The same, for an answer in the form of `FORM`."""
    return (
        f"{from_documents(question, documents)}\n\nFirst quote what supports your answer, as one line that begins with "
        f"'{RATIONALE.strip()}'. Then give a short answer, as a line that begins with '{ANSWER.strip()}'."
    )


def answer_from(engine: Engine, question: str, documents: Seq[str], **options: Any) -> Result:
    """The main model's own answer, from all documents at once. Drafts are copied from them, so the text is lossless.

    options: of `GenerationConfig`. Raises as `Engine.generate`, and RequestError without documents.
    """
    return engine.generate(from_documents(question, documents), **({"references": tuple(documents)} | options))
