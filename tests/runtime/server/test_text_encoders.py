"""/v1/embeddings, /v1/rerank and Ollama's /api/embed, beside a model that writes."""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import outrider
from outrider.server import Settings
from serving import Live, serving
from text_encoders import LENGTH, write_toy

TEXTS = ["def quicksort(items):", "The quick brown fox", "jumps"]
LONG = "quick " * 100


@pytest.fixture(scope="module")
def toys(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("toys")
    made = {"bge": write_toy(folder / "bge", tiny, "embedding"), "reranker": write_toy(folder / "r", tiny, "rerank")}
    return {"tiny": tiny, **made}


@pytest.fixture(scope="module")
def encoding(toys: dict[str, Path]) -> Iterator[Live]:
    with serving(toys) as live:
        yield live


@pytest.fixture(scope="module")
def expected(toys: dict[str, Path]) -> Any:
    """float32 [texts, width]."""
    with outrider.Embedder(toys["bge"]) as embedder:
        return embedder.embed(TEXTS).vectors


def post(live: Live, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{live.url}{path}", json=body, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["bge", "text-embedding-3-small"])
def test_openai_s_client_gets_the_embeddings(encoding: Live, expected: Any, model: str) -> None:
    asked = encoding.client().embeddings.create  # asks for base64
    found = asked(model=model, input=TEXTS)
    assert [each.index for each in found.data] == [0, 1, 2]
    assert np.abs(np.array([each.embedding for each in found.data]) - expected).max() < 1e-6
    assert (found.model, found.usage.prompt_tokens) == ("bge", found.usage.total_tokens)
    alone = asked(model=model, input=TEXTS[0], encoding_format="float", dimensions=4)
    assert np.allclose(alone.data[0].embedding, expected[0, :4] / np.linalg.norm(expected[0, :4]), atol=1e-6)


def test_base64_is_float32(encoding: Live, expected: Any) -> None:
    found = post(encoding, "/v1/embeddings", model="bge", input=TEXTS, encoding_format="base64").json()
    rows = [np.frombuffer(base64.b64decode(each["embedding"]), "<f4") for each in found["data"]]
    assert np.abs(np.stack(rows) - expected).max() < 1e-6


@pytest.mark.slow
def test_token_ids_are_texts(encoding: Live, tiny: Path, expected: Any) -> None:
    ids = [outrider.Embedder(encoding.service.models.encoders.by_name["bge"].bundle)._tokenizer.encode(text)
           .input_ids.data[0].tolist() for text in TEXTS]  # fmt: skip
    for given, rows in ((ids[0], expected[:1]), (ids, expected)):
        found = post(encoding, "/v1/embeddings", model="bge", input=given, user="x").json()
        assert np.abs(np.array([each["embedding"] for each in found["data"]]) - rows).max() < 1e-6


def test_documents_are_ranked(encoding: Live, toys: dict[str, Path]) -> None:
    with outrider.Reranker(toys["reranker"]) as reranker:
        ranked = reranker.rerank("quick", TEXTS).ranked
    for path in ("/v1/rerank", "/v2/rerank", "/rerank", "/reranking", "/v1/reranking"):
        found = post(encoding, path, model="reranker", query="quick", documents=TEXTS).json()
        assert [each["index"] for each in found["results"]] == [each.index for each in ranked]
        scores = [each["relevance_score"] for each in found["results"]]
        assert scores == pytest.approx([each.score for each in ranked], abs=1e-6)
    documents = [{"text": text} for text in TEXTS]
    found = post(encoding, "/v1/rerank", query="quick", documents=documents, top_n=1, return_documents=True).json()
    assert found["results"][0]["document"] == {"text": TEXTS[ranked[0].index]}
    assert len(found["results"]) == 1


def test_ollama_s_clients_get_them(encoding: Live, expected: Any) -> None:
    found = post(encoding, "/api/embed", model="bge:latest", input=TEXTS).json()
    assert np.abs(np.array(found["embeddings"]) - expected).max() < 1e-6
    assert post(encoding, "/api/embed", model="bge", input=LONG).json()["prompt_eval_count"] == LENGTH
    assert post(encoding, "/api/embed", model="bge", input=LONG, truncate=False).status_code == 400
    assert post(encoding, "/api/embed", model="bge", input=[]).json()["embeddings"] == []
    one = post(encoding, "/api/embeddings", model="bge", prompt=TEXTS[0]).json()["embedding"]
    assert np.abs(np.array(one) - expected[0]).max() < 1e-6
    assert post(encoding, "/api/show", model="bge").json()["capabilities"] == ["embedding"]
    listed = httpx.get(f"{encoding.url}/api/tags").json()["models"]
    assert [each["name"] for each in listed] == ["tiny", "bge", "reranker"]


def test_models_say_what_they_are(encoding: Live) -> None:
    found = httpx.get(f"{encoding.url}/v1/models").json()["data"]
    assert {each["id"]: each["type"] for each in found} == {"tiny": "llm", "bge": "embeddings", "reranker": "rerank"}
    assert httpx.get(f"{encoding.url}/v1/models/bge").json()["max_model_len"] == LENGTH


@pytest.mark.parametrize(("path", "body", "status", "param", "says"), [
    ("/v1/embeddings", {"model": "bge"}, 400, None, "missing required field `input`"),
    ("/v1/embeddings", {"input": ""}, 400, "input", "input[0] is empty. Leave it out."),
    ("/v1/embeddings", {"input": []}, 400, None, "input is empty"),
    ("/v1/embeddings", {"input": ["a", LONG]}, 400, "input", "input[1] has"),
    ("/v1/embeddings", {"input": ["a", 1]}, 400, "input", "texts and token ids"),
    ("/v1/embeddings", {"input": ["a"] * 2049}, 400, "input", "Send at most 2,048"),
    ("/v1/embeddings", {"input": "a", "dimensions": 99}, 400, "dimensions", "dimensions=99"),
    ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, 400, "encoding_format", "'hex'"),
    ("/v1/rerank", {"query": "a", "documents": []}, 400, "documents", "length >= 1"),
    ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, 400, "top_n", ">= 1"),
    ("/v1/rerank", {"query": " ", "documents": ["b"]}, 400, "query", "is empty"),
    ("/v1/chat/completions", {"model": "bge", "messages": [{"role": "user", "content": "Hi"}]}, 404, "model",
     "There is no model 'bge' that writes."),
])  # fmt: skip
def test_bad_requests_are_refused_by_name(
    encoding: Live, path: str, body: dict[str, Any], status: int, param: str | None, says: str
) -> None:
    answer = post(encoding, path, **body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param)
    assert says in error["message"]


def test_text_is_still_written_under_any_name(encoding: Live) -> None:
    assert encoding.client().completions.create(model="gpt-4", prompt="Hi", max_tokens=1).model == "tiny"


def test_embeddings_alone_are_served(toys: dict[str, Path]) -> None:
    with serving({"bge": toys["bge"]}, Settings(strict_models=True)) as live:
        assert post(live, "/v1/embeddings", model="bge", input="a").status_code == 200
        assert post(live, "/v1/embeddings", model="other", input="a").status_code == 404
        refused = post(live, "/v1/rerank", query="a", documents=["b"]).json()["error"]
        assert "No reranker is served" in refused["message"]
        assert post(live, "/v1/completions", model="any", prompt="Hi").status_code == 404
