"""llama.cpp's /completion and /infill: the same answers in its words."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest

from outrider.server.conversations import Conversations
from outrider.server.infill import Infill
from outrider.server.llamacpp import Limit, LlamaInfill
from serving import events_of, post


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
    ("/completion", {"prompt": "x", "n_probs": 3}, "Send logprobs to /v1/completions"),
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
