"""llama.cpp's /completion and /infill, and LM Studio's addresses: the same answers in their words."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import httpx
import pytest

import outrider
from outrider.decoding.metrics import Stats
from outrider.decoding.results import TextChunk
from outrider.server.conversations import Conversations
from outrider.server.errors import ApiError
from outrider.server.infill import Infill
from outrider.server.llamacpp import Limit, LlamaInfill
from outrider.server.lmstudio import LmStudioChat
from serving import events_of, head_of, post, result_of

HELLO = [{"role": "user", "content": "Say hi."}]


def test_a_completion_in_llama_cpp_s_words(http: httpx.Client) -> None:
    plain = post(http, "/v1/completions", prompt="The sky", max_tokens=6, ignore_eos=True, return_tokens=True)
    made = post(
        http,
        "/completion",
        prompt="The sky",
        n_predict=6,
        ignore_eos=True,
        return_tokens=True,
        cache_prompt=True,
        id_slot=-1,
    )
    assert made["content"] == plain["choices"][0]["text"]
    assert made["tokens"] == [token["id"] for token in plain["choices"][0]["tokens"]]
    assert (made["stop"], made["stop_type"], made["tokens_predicted"], made["prompt"]) == (True, "limit", 6, "The sky")
    assert made["timings"]["predicted_n"] == 6
    events = events_of(
        http.post("/completion", json={"prompt": "The sky", "n_predict": 6, "ignore_eos": True, "stream": True})
    )
    assert "".join(event["content"] for event in events) == made["content"]
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
    assert [i for event in events for i in event["tokens"]] == made["tokens"]
    several = post(http, "/completion", prompt=["The sky", "A"], n_predict=6, ignore_eos=True)
    assert [each["index"] for each in several] == [0, 1]
    assert several[0]["content"] == made["content"]
    assert (
        post(http, "/completion", prompt={"prompt_string": "The sky"}, n_predict=6, ignore_eos=True)["content"]
        == made["content"]
    )
    empty = post(http, "/completion", prompt="The sky", n_predict=0)
    assert (empty["content"], empty["tokens_predicted"]) == ("", 0)
    stop = next(character for character in made["content"] if character != "\ufffd")
    word = post(http, "/completion", prompt="The sky", n_predict=6, ignore_eos=True, stop=[stop])
    assert (word["stop_type"], word["stopping_word"]) == ("word", stop)


def test_llama_cpp_s_probabilities(http: httpx.Client) -> None:
    fields = {"prompt": "The sky", "n_predict": 3, "n_probs": 2, "temperature": 0.8, "seed": 5}
    made = post(http, "/completion", **fields)["completion_probabilities"]
    assert [len(each["top_logprobs"]) for each in made] == [2, 2, 2]
    assert all(each["logprob"] <= 0 and bytes(each["bytes"]).decode(errors="replace") for each in made)
    after = post(http, "/completion", **fields, post_sampling_probs=True)["completion_probabilities"]
    assert [each["id"] for each in after] == [each["id"] for each in made]
    assert all(0 <= each["prob"] <= 1 and math.isfinite(each["top_probs"][0]["prob"]) for each in after)


def test_the_fields_that_are_asked_for(http: httpx.Client) -> None:
    names = ["content", "timings/prompt_n", "tokens_cached", "unheard/of"]
    made = post(http, "/completion", prompt="The sky", n_predict=2, response_fields=names)
    assert made.keys() == {"content", "timings/prompt_n", "tokens_cached"}


@pytest.mark.parametrize(("path", "fields", "says"), [
    ("/completion", {"prompt": [1, "x"]}, "A prompt of texts and token ids in one"),
    ("/completion", {"prompt": {"prompt_string": "x", "multimodal_data": ["y"]}}, "Send them to /v1/chat"),
    ("/completion", {"prompt": "x", "samplers": ["top_k", "mirostat"]}, "'samplers' is not supported"),
    ("/completion", {"prompt": "x", "samplers": ["top_k"], "temperature": 1}, "'samplers' is not supported"),
    ("/completion", {"prompt": "x", "n_indent": 4, "stream": True}, "n_indent is not supported in a stream"),
    ("/completion", {"prompt": "x", "n_indent": "4"}, "'n_indent' is not a number"),
    ("/completion", {"prompt": "x", "n_predictt": 4}, "There is no field 'n_predictt'"),
    ("/completion", {"n_predict": 4}, "'prompt'"),
    ("/infill", {"input_prefix": 5}, "'input_prefix' is not a text"),
    ("/infill", {"input_extra": [{"text": 5}]}, r"'input_extra\[0\].text' is not a text"),
    ("/infill", {"input_prefix": "a", "input_suffix": "b"}, "input_suffix needs a model with tokens"),
    ("/api/v1/chat", {"input": "a", "integrations": ["mcp/x"]}, "'integrations' is not supported"),
    ("/api/v1/chat", {"input": "a", "tools": []}, "There is no field 'tools' in LM Studio's API"),
    ("/api/v1/chat", {"input": [{"type": "audio"}]}, r"'input\[0\]' is no item"),
    ("/api/v1/chat", {"input": "a", "previous_response_id": "resp_x"}, "There is no response 'resp_x'"),
    ("/api/v1/models/load", {"model": "tiny", "gpu": 1}, "There is no field 'gpu'"),
])  # fmt: skip
def test_what_cannot_be_done_is_refused(http: httpx.Client, path: str, fields: dict[str, Any], says: str) -> None:
    answer = http.post(path, json=fields)
    assert answer.status_code == 400
    assert re.search(says, answer.json()["error"]["message"])


def test_an_editor_s_request_to_fill_in() -> None:
    """As llama.vim sends it."""
    body = {
        "id_slot": 0, "input_prefix": "def f():\n", "input_suffix": "\nf()", "prompt": "    ret", "n_predict": 128,
        "input_extra": [{"filename": "a.py", "text": "x = 1\n"}], "stop": [], "n_indent": 4, "top_k": 40, "top_p": 0.9,
        "samplers": ["top_k", "top_p", "infill"], "stream": False, "cache_prompt": True, "t_max_prompt_ms": 500,
        "t_max_predict_ms": 1000, "response_fields": ["content"],
    }  # fmt: skip
    asked = LlamaInfill.read(json.dumps(body).encode())
    (choice,) = LlamaInfill.choices(asked, Conversations(0))
    assert choice.prompt == Infill("def f():\n", "\nf()", "    ret", [("a.py", "x = 1\n")], "input_suffix")
    assert (choice.options["max_new_tokens"], choice.options["top_k"]) == (128, 40)
    assert choice.limit is not None


def test_a_completion_ends_with_its_indentation_or_its_time() -> None:
    limit = Limit(0, 4)
    for piece, is_set in (("return 1\n", False), ("    x\n", False), ("  ", False), ("  y\n", False), ("def", True)):
        limit.read(piece)
        assert limit.is_set() == is_set
    assert limit.cut("return 1\n    x\n  y\n") == "return 1\n    x\n  "
    timed = Limit(1e-6, 0)
    assert not timed.is_set()
    timed.read("a")
    assert not timed.is_set()  # its first line is not complete
    timed.read("\n")
    assert timed.is_set()


def test_lm_studio_s_chats_say_how_fast_they_are(http: httpx.Client) -> None:
    fields = {"model": "tiny", "messages": HELLO, "max_tokens": 5}
    plain, made = (post(http, f"/{name}/chat/completions", **fields) for name in ("v1", "api/v0"))
    assert made["choices"][0]["message"] == plain["choices"][0]["message"]
    assert made["stats"]["stop_reason"] == "maxPredictedTokensReached"
    assert made["stats"]["tokens_per_second"] > 0
    assert made["model_info"]["context_length"] == 8192
    last = events_of(http.post("/api/v0/chat/completions", json=fields | {"stream": True}))[-1]
    assert (last["choices"][0]["finish_reason"], last["runtime"]["name"]) == ("length", "outrider")
    text = post(http, "/api/v0/completions", prompt="A", max_tokens=3, stop="\n")
    assert text["choices"][0]["text"] == post(http, "/v1/completions", prompt="A", max_tokens=3)["choices"][0]["text"]


def test_lm_studio_s_clients_see_the_models(http: httpx.Client) -> None:
    (model,) = http.get("/api/v0/models").json()["data"]
    assert (model["id"], model["type"], model["state"], model["max_context_length"]) == ("tiny", "llm", "loaded", 8192)
    assert http.get("/api/v0/models/tiny").json() == model
    (model,) = http.get("/api/v1/models").json()["models"]
    assert (model["key"], model["type"], model["loaded_instances"][0]["id"]) == ("tiny", "llm", "tiny")
    assert model["size_bytes"] > 0
    loaded = post(http, "/api/v1/models/load", model="tiny", context_length=4096, echo_load_config=True)
    assert (loaded["status"], loaded["load_config"]) == ("loaded", {"context_length": 8192})


def test_lm_studio_s_conversation(http: httpx.Client, engine: outrider.Engine) -> None:
    first = post(http, "/api/v1/chat", model="tiny", input="My name is Bob.", system_prompt="Be brief.",
                 max_output_tokens=6)  # fmt: skip
    said = first["output"][0]["content"]
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "My name is Bob."}]
    assert said == engine.generate(turns, max_new_tokens=6).text
    turns += [{"role": "assistant", "content": said}, {"role": "user", "content": "And mine?"}]
    expected = engine.generate(turns, max_new_tokens=6).text
    body = {"input": [{"type": "message", "content": "And mine?"}], "max_output_tokens": 6, "stream": True,
            "previous_response_id": first["response_id"], "reasoning": "off", "context_length": 8000}  # fmt: skip
    answer = http.post("/api/v1/chat", json=body)
    events = events_of(answer)
    kinds = [event["type"] for event in events]
    assert kinds[:4] == ["chat.start", "prompt_processing.start", "prompt_processing.end", "message.start"]
    assert kinds[-2:] == ["message.end", "chat.end"]
    assert "event: message.delta" in answer.text
    assert "".join(event["content"] for event in events if event["type"] == "message.delta") == expected
    result = events[-1]["result"]
    assert result["output"] == [{"type": "message", "content": expected}]
    assert result["response_id"].startswith("resp_")
    assert "response_id" not in post(http, "/api/v1/chat", input="a", max_output_tokens=2, store=False)


def test_lm_studio_has_reasoning_apart() -> None:
    asked = LmStudioChat.read(b'{"model": "m", "input": "a", "reasoning": "on", "stream": true}')
    assert asked.own.enable_thinking is True
    conversations = Conversations(10_000)
    head = head_of("<think>", conversations)
    answer = LmStudioChat(asked, head, LmStudioChat.choices(asked, conversations))
    result = result_of("<think>Hm.</think>Yes.")
    events = [
        *answer.events(0, TextChunk("<think>Hm.</think>Y", Stats())),
        *answer.events(0, TextChunk("es.", Stats(), result)),
    ]
    assert [event["type"] for event in events] == [
        "reasoning.start", "reasoning.delta", "reasoning.end", "message.start", "message.delta", "message.delta",
        "message.end", "chat.end",
    ]  # fmt: skip
    assert events[-1]["result"]["output"] == [
        {"type": "reasoning", "content": "Hm."}, {"type": "message", "content": "Yes."},
    ]  # fmt: skip
    assert conversations.turns("resp_1")[-1]["reasoning_content"] == "Hm."
    assert answer.failure(ApiError(500, "No."))["error"]["message"] == "No."
