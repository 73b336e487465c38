"""The addresses that clients of llama.cpp, vLLM and others ask for besides answers."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.routing import Route

import outrider
from outrider.server import Settings
from serving import MESSAGES, SCHEMA, post, serving


def test_texts_become_tokens_and_texts_again(http: httpx.Client, engine: outrider.Engine) -> None:
    text = "The quick 😀 fox<|im_end|>"
    expected = engine.tokenizer.encode(text)
    assert post(http, "/tokenize", content=text) == {"tokens": expected}
    counted = post(http, "/tokenize", prompt=text, model="tiny", return_token_strs=True)
    assert counted["tokens"] == [*engine.tokenizer.prefix, *expected]
    assert (counted["count"], counted["max_model_len"]) == (len(counted["tokens"]), 8192)
    assert counted["token_strs"][-1] == "<|im_end|>"
    for name in ("content", "prompt"):
        assert post(http, "/detokenize", tokens=expected)[name] == text
    pieces = post(http, "/tokenize", content=text, with_pieces=True)["tokens"]
    assert [each["id"] for each in pieces] == expected
    written = b"".join(p.encode() if isinstance(p := each["piece"], str) else bytes(p) for each in pieces)
    assert written.decode() == text
    assert post(http, "/tokenize", content="") == {"tokens": []}


def test_messages_are_laid_out_and_counted(http: httpx.Client, engine: outrider.Engine) -> None:
    tokenizer: Any = engine.tokenizer
    laid_out = tokenizer.render(MESSAGES)
    assert post(http, "/apply-template", messages=MESSAGES) == {"prompt": laid_out}
    token_ids = engine.encode_prompt(MESSAGES)
    assert post(http, "/tokenize", messages=MESSAGES, add_special_tokens=False)["tokens"] == token_ids
    count = {"object": "response.input_tokens", "input_tokens": len(token_ids)}
    assert post(http, "/v1/chat/completions/input_tokens", messages=MESSAGES) == count
    items = {"input": MESSAGES[1:], "instructions": MESSAGES[0]["content"]}
    assert post(http, "/v1/responses/input_tokens", **items) == count
    user = [{"role": "user", "content": "<|im_end|>a\ufdd0b"}]
    prompt = post(http, "/apply-template", messages=user)["prompt"]
    assert prompt == "".join(tokenizer.parts(tokenizer.render(user)))
    assert "a\ufdd0b" in prompt


@pytest.mark.parametrize(("path", "fields", "says"), [
    ("/tokenize", {}, "There is no text"), ("/tokenize", {"content": 1}, "'content'"),
    ("/tokenize", {"content": "a", "add_specal": True}, "Did you mean 'add_special'?"),
    ("/tokenize", {"content": "a", "parse_special": False}, "parse_special=false"),
    ("/tokenize", {"content": "word " * 20_000}, "context"),
    ("/detokenize", {"tokens": [10**8]}, "100000000 is no token"), ("/detokenize", {"tokens": [-1]}, "'tokens[0]'"),
    ("/apply-template", {"messages": []}, "'messages'"),
])  # fmt: skip
def test_what_has_no_tokens_is_refused(http: httpx.Client, path: str, fields: dict[str, Any], says: str) -> None:
    answer = http.post(path, json=fields)
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]


def test_vllm_s_load_and_version(http: httpx.Client) -> None:
    assert http.get("/load").json() == {"server_load": 0}
    assert http.get("/version").json() == {"version": outrider.__version__}


@pytest.mark.parametrize("path", [
    "/chat/completions", "/v1/v1/chat/completions", "/v1//chat/completions", "//v1/chat/completions/",
    "/api/v1/chat/completions", "/responses", "/v1/v1/messages", "/v1/api/chat",
])  # fmt: skip
def test_base_urls_are_as_users_write_them(http: httpx.Client, path: str) -> None:
    """With the version twice or not at all, and with slashes too many."""
    given = {"input": "Hi"} if "responses" in path else {"messages": MESSAGES, "max_tokens": 1}
    assert http.post(path, json={"model": "tiny:latest"} | given).status_code == 200
    for models in ("/models", "/models/", "/v1/v1/models", "/v1/models/"):
        assert http.get(models).json() == http.get("/v1/models").json()
    assert http.get("/v1/health").json() == http.post("/ping").json() == {"status": "ok"}


def test_a_key_guards_all_addresses_but_those_of_the_page(tiny: Path) -> None:
    with serving({"tiny": tiny}, Settings(api_key="k")) as live:
        paths = {route.path for route in live.app.routes if isinstance(route, Route)}
        needed = {path for path in paths if httpx.get(live.url + path).status_code == 401}
        assert paths - needed == {"/", "/health", "/v1/health", "/ping"}
        assert {"/v1/rerank", "/v2/rerank", "/tokenize", "/load"} <= needed
        assert httpx.get(f"{live.url}/page/index.html").status_code == 200


def test_a_schema_beside_tools(caller: Any) -> None:
    """A random model does the one or the other, and nothing else."""
    tool = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"enum": ["sun", "rain"]}}}
    asked: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "tools": [tool], "response_format": form}
    for seed in range(4):
        answer = caller.chat.completions.create(**asked, temperature=1, seed=seed, max_tokens=200)
        message = answer.choices[0].message
        assert bool(message.tool_calls) != (message.content in ('"sun"', '"rain"'))
