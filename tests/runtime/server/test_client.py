"""The official client: what it gets is what the engine gives for the same options."""

import math
from typing import Any

import openai
import pytest

import outrider
from serving import MESSAGES, Live, wait_until

SAMPLED: dict[str, Any] = {"temperature": 1, "seed": 2}


def test_a_chat_is_answered_as_by_the_engine(client: Any, engine: outrider.Engine) -> None:
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=30)
    result = engine.generate(MESSAGES, max_new_tokens=30)
    assert answer.choices[0].message.content == result.text
    assert answer.choices[0].finish_reason == result.finish_reason
    assert answer.usage
    assert answer.usage.prompt_tokens == result.stats.num_prompt_tokens
    assert answer.usage.completion_tokens == len(result.token_ids)
    assert answer.usage.total_tokens == result.stats.num_prompt_tokens + len(result.token_ids)


def test_a_stream_adds_up_to_the_answer(client: Any, engine: outrider.Engine) -> None:
    stream = client.chat.completions.create(
        model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **SAMPLED
    )
    chunks = list(stream)
    result = engine.generate(MESSAGES, **SAMPLED)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == result.text
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 2) + [result.finish_reason]
    assert all(c.usage is None for c in chunks[:-1])
    assert len({c.id for c in chunks}) == 1
    assert len(chunks) > 4
    usage = chunks[-1].usage
    assert usage
    assert not chunks[-1].choices
    assert usage.completion_tokens == len(result.token_ids)
    timings: dict[str, Any] = chunks[-1].timings
    assert timings["predicted_n"] == usage.completion_tokens


def test_n_answers_have_seeds_in_a_row(client: Any, engine: outrider.Engine) -> None:
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, n=3, temperature=1, seed=7)
    expected = [engine.generate(MESSAGES, temperature=1, seed=7 + i) for i in range(3)]
    assert [choice.message.content for choice in answer.choices] == [result.text for result in expected]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.seed for choice in answer.choices] == [7, 8, 9]
    assert answer.usage
    assert answer.usage.prompt_tokens == expected[0].stats.num_prompt_tokens
    assert answer.usage.completion_tokens == sum(len(result.token_ids) for result in expected)
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(
        model="tiny", messages=MESSAGES, n=3, temperature=1, seed=7, stream=True
    ):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [result.text for result in expected]


def test_an_answer_without_a_seed_says_which_one_it_had(client: Any, engine: outrider.Engine) -> None:
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=1)
    seed: int = answer.choices[0].seed
    assert answer.choices[0].message.content == engine.generate(MESSAGES, temperature=1, seed=seed).text
    greedy = client.chat.completions.create(model="tiny", messages=MESSAGES)
    assert greedy.choices[0].seed is None


def test_logprobs_are_the_engine_s(client: Any, engine: outrider.Engine) -> None:
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=3, **SAMPLED)
    result = engine.generate(MESSAGES, logprobs=3, **SAMPLED)
    assert result.logprobs
    given = answer.choices[0].logprobs
    assert given
    assert given.content
    assert [token.logprob for token in given.content] == [token.logprob for token in result.logprobs]
    for token, expected in zip(given.content, result.logprobs, strict=True):
        text = engine.tokenizer.decode([expected.token_id])
        assert token.token == text
        assert bytes(token.bytes or []).decode(errors="replace") in (text, "")
        assert [top.logprob for top in token.top_logprobs] == [logprob for _, logprob in expected.top]
    stream = client.chat.completions.create(
        model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=3, **SAMPLED, stream=True
    )
    pieces = [chunk.choices[0].logprobs for chunk in stream]
    streamed = [token for piece in pieces if piece for token in piece.content or ()]
    assert streamed == given.content
    assert sum(bool(piece) for piece in pieces) > 1


def test_completions_take_texts_and_token_ids(client: Any, engine: outrider.Engine) -> None:
    result = engine.generate("The quick", chat_template=False)
    token_ids = engine.tokenizer.encode_prompt("The quick", chat_template=False)
    for prompt in ("The quick", ["The quick"], token_ids, [token_ids]):
        answer = client.completions.create(model="tiny", prompt=prompt)
        assert [choice.text for choice in answer.choices] == [result.text]
    other = engine.generate("It's 2024", chat_template=False, temperature=1, seed=4)
    again = engine.generate("The quick", chat_template=False, temperature=1, seed=4)
    answer = client.completions.create(model="tiny", prompt=["The quick", "It's 2024"], temperature=1, seed=4, n=2)
    assert [answer.choices[i].text for i in (0, 2)] == [again.text, other.text]
    assert answer.usage
    assert answer.usage.prompt_tokens == other.stats.num_prompt_tokens + again.stats.num_prompt_tokens
    pieces = client.completions.create(model="tiny", prompt="The quick", stream=True, logprobs=2)
    chunks = list(pieces)
    assert "".join(chunk.choices[0].text for chunk in chunks) == result.text
    assert chunks[-1].choices[0].finish_reason == result.finish_reason


@pytest.mark.parametrize("drafter", ["none", "suffix", "ngram", "auto"])
def test_drafters_are_chosen_by_request(client: Any, engine: outrider.Engine, drafter: str) -> None:
    repeated: list[Any] = [{"role": "user", "content": "abc abc abc abc abc abc abc abc"}]
    expected = engine.generate(repeated, drafter=None, max_new_tokens=60, ignore_eos=True)
    for body in ({"draft_model": drafter}, {"drafter": drafter}):
        answer = client.chat.completions.create(
            model="tiny", messages=repeated, max_tokens=60, extra_body={**body, "ignore_eos": True}
        )
        assert answer.choices[0].message.content == expected.text
    timings: dict[str, Any] = answer.timings
    assert timings["predicted_n"] == 60
    assert timings["rounds_n"] == 59 if drafter == "none" else 0 < timings["rounds_n"] < 59
    assert timings["cache_n"] + timings["prompt_n"] == expected.stats.num_prompt_tokens
    assert 0 <= timings["draft_n_accepted"] <= timings["draft_n"]
    if drafter == "none":
        assert timings["draft_n"] == 0


def test_a_prediction_is_a_reference(client: Any, engine: outrider.Engine) -> None:
    text = engine.generate(MESSAGES, drafter=None, **SAMPLED).text
    prediction = {"type": "content", "content": [{"type": "text", "text": text}]}
    asked: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "prediction": prediction, **SAMPLED}
    answer = client.chat.completions.create(**asked, extra_body={"drafter": "suffix", "num_assistant_tokens": 4})
    assert answer.choices[0].message.content == text
    assert answer.timings["draft_n_accepted"] > 0
    with pytest.raises(openai.BadRequestError, match="references"):
        client.chat.completions.create(**asked, extra_body={"drafter": "ngram"})


def test_models_are_listed(client: Any, engine: outrider.Engine) -> None:
    (listed,) = client.models.list()
    assert client.models.retrieve("tiny") == listed
    assert listed.id == "tiny"
    assert listed.drafters == list(engine.drafters)
    assert listed.loaded is True


WRONG: list[tuple[dict[str, Any], int, str | None, str, str]] = [
    ({"max_tokens": 0}, 400, "max_tokens", "invalid_type", ">= 1"),
    ({"temperature": -1}, 400, "temperature", "invalid_type", ">= 0"),
    ({"seed": "x"}, 400, "seed", "invalid_type", "'seed': expected `int | null`"),
    ({"extra_body": {"temprature": 1}}, 400, "temprature", "unknown_field", "Did you mean 'temperature'?"),
    ({"extra_body": {f"q{i}": 1 for i in range(101)}}, 400, None, "unknown_field", "101 of the fields are none"),
    ({"extra_body": {"drafter": "nobody"}}, 400, None, "invalid_value", "There is no drafter 'nobody'"),
    ({"extra_body": {"web_search_options": {}}}, 400, "web_search_options", "unsupported_field", "not supported"),
    ({"logit_bias": {"999": 1}}, 400, None, "invalid_value", "vocabulary ends at"),
    ({"top_logprobs": 3}, 400, "top_logprobs", "invalid_value", "set it to true"),
    ({"n": 33}, 400, "n", "invalid_value", "Lower n"),
    ({"messages": []}, 400, "messages", "invalid_type", "length >= 1"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages[0].content[0]",
     "invalid_type", "image_url"),
    ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, 400, "messages[0].content[0].type",
     "invalid_type", "input_audio"),
    ({"extra_body": {"chat_template_kwargs": {"tools": []}}}, 400, "chat_template_kwargs", "invalid_value",
     "none of them messages"),
    ({"extra_body": {"continue_final_message": True}}, 400, "continue_final_message", "invalid_value", "End with one"),
    ({"tool_choice": "required"}, 400, "tool_choice", "invalid_value", "needs tools, and none are given"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, 400, "tool_choice", "invalid_value",
     "'f' is not one of auto, none, required"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, 400, "max_completion_tokens", "invalid_value", "two names"),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "status", "param", "code", "says"), WRONG, ids=lambda given: str(given)[:40])
def test_errors_name_the_field(
    client: Any, asked: dict[str, Any], status: int, param: str | None, code: str, says: str
) -> None:
    with pytest.raises(openai.APIStatusError) as raised:
        client.chat.completions.create(**{"model": "tiny", "messages": MESSAGES} | asked)
    error = raised.value
    assert error.status_code == status
    assert isinstance(error.body, dict)
    assert {**error.body, "message": ""} == {
        "message": "", "type": "invalid_request_error", "param": param, "code": code,
    }  # fmt: skip
    assert says in error.body["message"]


def test_a_request_may_not_have_very_many_prompts(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="200 prompts are more than"):
        client.completions.create(model="tiny", prompt=["Hi"] * 200)


def test_an_option_that_leaves_no_token_fails_alone(client: Any, live: Live) -> None:
    everything = {"extra_body": {"banned_token_ids": list(range(404))}}
    with pytest.raises(openai.BadRequestError, match="ban all tokens"):
        client.completions.create(model="tiny", prompt="Hi", **everything)
    assert client.completions.create(model="tiny", prompt="Hi").choices[0].text
    wait_until(lambda: live.service.queue.running == 0)


def test_timings_are_finite(client: Any) -> None:
    answer = client.completions.create(model="tiny", prompt="Hi", max_tokens=1)
    timings: dict[str, float] = answer.timings
    assert set(timings) >= {"prompt_n", "prompt_ms", "prompt_per_second", "predicted_n", "predicted_ms"}
    assert all(math.isfinite(value) and value >= 0 for value in timings.values())
