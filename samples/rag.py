"""Answers questions from a folder of text files, and compares two ways: one lossless, one speculative.

    python samples/rag.py BUNDLE                    # asks the questions beside the documents, and prints a table
    python samples/rag.py BUNDLE --ask "How deep is Lake Morrow?"

BUNDLE has a main model and a draft model that proposes all tokens (`outrider export … --draft-vocab all`). Needs
`pip install ".[rag]"`.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

try:
    import bm25s  # noqa: F401
    import sklearn  # noqa: F401
except ImportError as error:
    sys.exit(f'{error}. Run: pip install ".[rag]"')

import outrider
from outrider.rag import RagAnswer, Retriever, SpeculativeRAG, answer_from, draft_engine

FOLDER = Path(__file__).with_name("rag_documents")
NUM_DOCUMENTS, MAX_NEW_TOKENS = 6, 96


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("--documents", type=Path, default=FOLDER, help="folder of .txt files")
    parser.add_argument("--ask", help="one question instead of those in questions.jsonl")
    parser.add_argument("--drafts", type=int, default=3)
    asked = parser.parse_args()
    documents = Retriever([path.read_text(encoding="utf-8") for path in sorted(asked.documents.glob("*.txt"))])
    # Without the prefix cache: otherwise a way would find prompts that another one has read.
    engine = outrider.load(asked.bundle, enable_prefix_caching=False)
    with engine, draft_engine(asked.bundle, enable_prefix_caching=False) as drafter:
        speculative = SpeculativeRAG(engine, drafter, num_drafts=asked.drafts)
        if asked.ask is None:
            compare(asked.documents / "questions.jsonl", documents, engine, speculative)
            return
        answer = speculative.answer(asked.ask, documents.find(asked.ask, NUM_DOCUMENTS))
        for draft in answer.drafts:
            print(f"{'→' if draft is answer.best else ' '} {draft.score:6.2f}  {draft.text}  ({draft.rationale})")


def compare(questions: Path, documents: Retriever, engine: outrider.Engine, speculative: SpeculativeRAG) -> None:
    """Ask all questions in each way, and print how often the answer is right, and how long it took."""

    def plainly(question: str, found: list[str]) -> str:
        return answer_from(engine, question, found, drafter=None, max_new_tokens=MAX_NEW_TOKENS).text

    def lossless(question: str, found: list[str]) -> str:
        return answer_from(engine, question, found, max_new_tokens=MAX_NEW_TOKENS).text

    answers: list[RagAnswer] = []

    def drafted(question: str, found: list[str]) -> str:
        answers.append(speculative.answer(question, found))
        return answers[-1].text

    ways = {"plain decoding": plainly, "lossless drafts": lossless, "speculative RAG": drafted}
    right, seconds = dict.fromkeys(ways, 0), {name: list[float]() for name in ways}
    asked = [json.loads(line) for line in questions.read_text(encoding="utf-8").splitlines()]
    for each in asked:
        found = documents.find(each["question"], NUM_DOCUMENTS)
        for name, way in ways.items():
            began = time.perf_counter()
            text = way(each["question"], found)
            seconds[name].append(time.perf_counter() - began)
            right[name] += any(answer.lower() in text.lower() for answer in each["answers"])
    print(f"{'':16}  right  seconds (median)")
    for name in ways:
        print(f"{name:16}  {right[name]:2}/{len(asked)}  {statistics.median(seconds[name]):.2f}")
    first = sum(answer.best is answer.drafts[0] for answer in answers)
    shares = [answer.scoring_seconds / (answer.drafting_seconds + answer.scoring_seconds) for answer in answers]
    print(f"The first draft was chosen {first} times of {len(answers)}.")
    print(f"Scoring took {statistics.median(shares):.0%} of the time of speculative RAG.")


if __name__ == "__main__":
    main()
