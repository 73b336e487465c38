"""Embedding models and rerankers, with toys whose numbers are known."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import outrider
from outrider.errors import BundleError, OptionError, OutriderError, RequestError, TooLong
from text_encoders import LENGTH, WIDTH, table_of, write_toy

TEXTS = ["def quicksort(items):", "The quick brown fox", "jumps"]


@pytest.fixture(scope="module")
def embedder(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    with outrider.Embedder(write_toy(tmp_path_factory.mktemp("toy") / "bge", tiny, "embedding")) as embedder:
        yield embedder


@pytest.fixture(scope="module")
def reranker(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    with outrider.Reranker(write_toy(tmp_path_factory.mktemp("toy") / "reranker", tiny, "rerank")) as reranker:
        yield reranker


def ids_of(encoder: Any, text: str) -> list[int]:
    return [int(each) for each in encoder._tokenizer.encode(text).input_ids.data[0]]


def expected_of(encoder: Any, text: str) -> Any:
    mean = table_of(encoder.bundle.manifest.main.vocab_size)[ids_of(encoder, text)].mean(0)
    return mean / np.linalg.norm(mean)


def test_texts_are_pooled_whatever_is_beside_them(embedder: Any) -> None:
    many = TEXTS * 20  # more than a call has
    found = embedder.embed(many)
    assert (found.vectors.dtype, found.vectors.shape) == (np.float32, (60, WIDTH))
    assert found.num_tokens == 20 * sum(len(ids_of(embedder, text)) for text in TEXTS)
    expected = np.stack([expected_of(embedder, text) for text in many])
    assert np.abs(found.vectors - expected).max() < 1e-5
    assert np.array_equal(embedder.embed([ids_of(embedder, TEXTS[1])]).vectors, embedder.embed(TEXTS[1:2]).vectors)


@pytest.mark.parametrize(("fields", "read"), [
    ({"lowercase": True}, "the quick brown fox"), ({"prompt": "quick "}, "quick The quick brown fox"),
    ({"lowercase": True, "prompt": "The "}, "the the quick brown fox"),
])  # fmt: skip
def test_texts_are_read_as_sentence_transformers_reads_them(embedder: Any, fields: Any, read: str) -> None:
    bundle = embedder.bundle
    entry = msgspec.structs.replace(bundle.manifest.main.text_encoder, **fields)
    main = msgspec.structs.replace(bundle.manifest.main, text_encoder=entry)
    changed = replace(bundle, manifest=msgspec.structs.replace(bundle.manifest, main=main))
    with outrider.Embedder(changed) as own:
        found = own.embed(TEXTS[1:2])
        assert np.array_equal(found.vectors, embedder.embed([read]).vectors)
        assert found.num_tokens == len(ids_of(embedder, read))
        with pytest.raises(RequestError, match="is empty"):
            own.embed([" "])


def test_dimensions_are_the_first_numbers(embedder: Any) -> None:
    (whole,), (found,) = embedder.embed(TEXTS[:1]).vectors, embedder.embed(TEXTS[:1], dimensions=4).vectors
    assert np.allclose(found, whole[:4] / np.linalg.norm(whole[:4]))


def test_a_long_text_is_cut_where_that_is_asked_for(embedder: Any) -> None:
    text = "quick " * 100
    found = embedder.embed([text], truncate=True)
    assert found.num_tokens == LENGTH
    with pytest.raises(TooLong, match=r"^input\[1\] has \d+ tokens, and this model reads 64\. Split it\.$"):
        embedder.embed(["quick", text])


@pytest.mark.parametrize(("texts", "options", "kind", "says"), [
    ([], {}, RequestError, "input is empty"),
    (["a", " \n"], {}, RequestError, "input[1] is empty"),
    ([[1, 10**9]], {}, RequestError, "input[0] is a list of token ids that no text has"),
    ([[-1]], {}, RequestError, "input[0] is a list"),
    (["a"], {"dimensions": WIDTH + 1}, OptionError, "dimensions=17 is not from 1 to 16"),
    (["a"], {"dimensions": 0}, OptionError, "dimensions=0"),
])  # fmt: skip
def test_what_cannot_be_embedded_is_said(
    embedder: Any, texts: Any, options: Any, kind: type[OutriderError], says: str
) -> None:
    with pytest.raises(kind) as caught:
        embedder.embed(texts, **options)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_documents_are_ranked(reranker: Any) -> None:
    found = reranker.rerank("quick", TEXTS * 20)
    scores = [each.score for each in found.ranked]
    assert sorted(each.index for each in found.ranked) == [*range(60)]
    assert scores == sorted(scores, reverse=True)
    of_one = {text: reranker.rerank("quick", [text]).ranked[0].score for text in TEXTS}
    assert all(abs(each.score - of_one[TEXTS[each.index % 3]]) < 1e-5 for each in found.ranked)
    assert found.ranked[:2] == reranker.rerank("quick", TEXTS * 20, top_n=2).ranked
    equal = [each.index for each in reranker.rerank("quick", [TEXTS[0]] * 5).ranked]
    assert equal == sorted(equal)


@pytest.mark.parametrize(("query", "documents", "top_n", "says"), [
    ("", ["a"], None, "query='' is empty"),
    ("a", [], None, "documents is empty"),
    ("a", ["a", ""], None, "documents[1] is empty"),
    ("a", ["quick " * 100], None, "documents[0] has"),
    ("a", ["a"], 0, "top_n=0"),
])  # fmt: skip
def test_what_cannot_be_ranked_is_said(reranker: Any, query: str, documents: Any, top_n: Any, says: str) -> None:
    with pytest.raises(OutriderError) as caught:
        reranker.rerank(query, documents, top_n=top_n)
    assert str(caught.value).startswith(says)


def test_documents_are_found_by_their_meaning(embedder: Any, reranker: Any) -> None:
    from outrider.rag import MeaningRetriever

    assert MeaningRetriever(TEXTS, embedder).find(TEXTS[1], 1) == [TEXTS[1]]
    assert len(MeaningRetriever(TEXTS, embedder, query_prefix="quick ").find("fox", 9)) == len(TEXTS)
    best = [TEXTS[each.index] for each in reranker.rerank("quick", TEXTS, top_n=2).ranked]
    assert MeaningRetriever(TEXTS, embedder, reranker=reranker).find("quick", 2) == best


def test_a_model_of_another_kind_is_refused(tiny: Path, embedder: Any, reranker: Any) -> None:
    with pytest.raises(BundleError, match="has an embedding model, which writes no text"):
        outrider.load(embedder.bundle)
    with pytest.raises(BundleError, match="has a reranker, which writes no text"):
        outrider.load(reranker.bundle)
    with pytest.raises(OptionError, match="has a model that writes, and an embedding model is needed"):
        outrider.Embedder(tiny)
    with pytest.raises(OptionError, match="has an embedding model, and a reranker is needed"):
        outrider.Reranker(embedder.bundle)


def test_a_closed_model_says_so(embedder: Any) -> None:
    with outrider.Embedder(embedder.bundle) as own:
        pass
    with pytest.raises(RequestError, match="closed"):
        own.embed(["a"])
