"""The recipes of docs/recipes.md, with the real packages, against a live server."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

import outrider
from serving import serving

pytestmark = pytest.mark.slow
pytest.importorskip("llguidance", reason="the extra [structured]")
pydantic = pytest.importorskip("pydantic", reason="comes with both packages")

OPTIONS: dict[str, Any] = {"model": "tiny", "api_key": "none", "max_tokens": 300, "temperature": 0, "max_retries": 0}
QUESTION = "How is the weather in Oslo?"


class Weather(pydantic.BaseModel):  # type: ignore[misc, name-defined, unused-ignore]
    """The weather in a town."""

    kind: Literal["sunny", "rainy"]
    warm: bool


def is_warm(sunny: bool) -> str:
    """Whether it is warm in such weather."""
    return f"warm: {sunny}"


@pytest.fixture(scope="module")
def served(tiny: Path) -> Iterator[tuple[str, outrider.Engine]]:
    """A server whose model was told how to call functions, and its engine."""
    with serving({"tiny": tiny}, calls=True) as live:
        yield f"{live.url}/v1", live.engine()


def test_langchain(served: tuple[str, outrider.Engine]) -> None:
    langchain = pytest.importorskip("langchain_openai", reason="pip install langchain-openai")
    url, engine = served
    llm = langchain.ChatOpenAI(base_url=url, stream_usage=True, extra_body={"drafter": "suffix"}, **OPTIONS)
    text = engine.generate([{"role": "user", "content": QUESTION}], max_new_tokens=300).text
    answer = llm.invoke(QUESTION)
    assert answer.content == text
    chunks = list(llm.stream(QUESTION))
    assert "".join(chunk.content for chunk in chunks) == text
    counted = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
    assert [usage["output_tokens"] for usage in counted] == [answer.usage_metadata["output_tokens"]]
    for method in ("json_schema", "function_calling"):
        assert isinstance(llm.with_structured_output(Weather, method=method).invoke(QUESTION), Weather)
    for choice in ("any", "is_warm"):
        (call, *_) = llm.bind_tools([is_warm], tool_choice=choice).invoke(QUESTION).tool_calls
        assert is_warm(**call["args"]).startswith("warm: ")


def test_llama_index(served: tuple[str, outrider.Engine]) -> None:
    like = pytest.importorskip("llama_index.llms.openai_like", reason="pip install llama-index-llms-openai-like")
    core = pytest.importorskip("llama_index.core")
    url, engine = served
    common: dict[str, Any] = {"api_base": url, "context_window": 4096, "is_chat_model": True} | OPTIONS
    llm = like.OpenAILike(is_function_calling_model=True, **common)
    messages = [core.llms.ChatMessage(QUESTION)]
    text = engine.generate([{"role": "user", "content": QUESTION}], max_new_tokens=300).text
    assert llm.chat(messages).message.content == text
    assert "".join(chunk.delta or "" for chunk in llm.stream_chat(messages)) == text
    by_schema = like.OpenAILike(should_use_structured_outputs=True, **common)
    for one in (llm, by_schema):
        assert isinstance(one.as_structured_llm(Weather).complete(QUESTION).raw, Weather)
    tool = core.tools.FunctionTool.from_defaults(is_warm)
    assert llm.predict_and_call([tool], QUESTION, tool_required=True).response.startswith("warm: ")
    plain = like.OpenAILike(**common | {"is_chat_model": False})
    assert plain.complete("Hi").text == engine.generate("Hi", chat_template=False, max_new_tokens=300).text
