"""llama.cpp's /completion and /infill: the same answers in its words."""

import httpx

from outrider.server.options import AnswerLimit
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
    stop = next(character for character in made["content"] if character != "\ufffd")
    word = post(http, "/completion", prompt="The sky", n_predict=6, ignore_eos=True, stop=[stop])
    assert (word["stop_type"], word["stopping_word"]) == ("word", stop)


def test_a_completion_ends_with_its_time() -> None:
    timed = AnswerLimit(1e-6)
    assert not timed.is_set()
    timed.read("a")
    assert not timed.is_set()  # its first line is not complete
    timed.read("\n")
    assert timed.is_set()
