"""Reasoning in answers: apart from the content, whole and streamed, with any draft, and before a grammar."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from outrider.inputs.reasoning import ReasoningFormat, formats
from serving import Live, serving

# It ends within the reasoning, as those of Qwen3.5 and R1 do. This model never ends it itself: the budget does.
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.reasoning_content %}<think>\n"
    "{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ '<think></think>' if enable_thinking is false else "
    "'<think>' }}\n{% endif %}"
)
HELLO = [{"role": "user", "content": "Why is the sky blue?"}]
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
THINKING = {"model": "tiny", "messages": HELLO, "max_tokens": 24, "reasoning_budget": 6, "ignore_eos": True}


@pytest.fixture(scope="module")
def thinker(tiny: Path) -> Iterator[Live]:
    with serving({"tiny": tiny}) as live:
        live.service.models.find("tiny").load()
        tokenizer: Any = live.engine().tokenizer
        tokenizer.set_chat_template(TEMPLATE)
        yield live


def post(live: Live, path: str, body: dict[str, Any]) -> Any:
    answer = httpx.post(live.url + path, json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_budget_gives_the_same_tokens_with_any_draft(thinker: Live) -> None:
    engine = thinker.engine()
    for options in ({}, {"temperature": 1, "seed": 3}):
        asked: dict[str, Any] = {"max_new_tokens": 24, "reasoning_budget": 6, "ignore_eos": True, **options}
        plain = engine.generate(HELLO, drafter=None, **asked)
        assert plain.text.count("</think>") == 1
        assert plain.thinks
        for drafter in ("ngram", "suffix", "auto"):
            assert engine.generate(HELLO, drafter=drafter, **asked).token_ids == plain.token_ids
        copied = engine.generate(HELLO, drafter="suffix", references=[plain.text], num_assistant_tokens=8, **asked)
        assert copied.token_ids == plain.token_ids
        assert copied.stats.num_accepted_tokens > 0


def test_stop_strings_are_looked_for_in_the_content(thinker: Live) -> None:
    engine = thinker.engine()
    asked: dict[str, Any] = {
        "max_new_tokens": 24, "reasoning_budget": 6, "ignore_eos": True, "temperature": 1, "seed": 3,
    }  # fmt: skip
    plain = engine.generate(HELLO, **asked)
    thoughts, _, content = plain.text.partition("</think>")
    stop = next(letter for letter in thoughts if letter not in content)
    for drafter in (None, "suffix"):
        found = engine.generate(HELLO, stop=[stop, "think>"], drafter=drafter, references=[plain.text], **asked)
        assert found.token_ids == plain.token_ids
        first = next(token for token in plain.token_ids[:6] if token not in plain.token_ids[6:])
        assert engine.generate(HELLO, stop_token_ids=[first], drafter=drafter, **asked).token_ids == plain.token_ids
    within = engine.generate(HELLO, stop=stop, stop_in_reasoning=True, **asked)
    assert (within.text, within.stop_string) == (thoughts[: thoughts.index(stop)], stop)
    left = post(thinker, CHAT, THINKING | {"stop": stop, "reasoning_format": "none", "temperature": 1, "seed": 3})
    assert left["choices"][0]["message"]["content"] == within.text


@pytest.mark.parametrize("turn", [{"content": "", "reasoning_content": "Hm. It"}, {"content": "<think>\nHm. It"}])
def test_an_answer_goes_on_within_the_reasoning(thinker: Live, turn: dict[str, Any]) -> None:
    """This model never ends it: all that comes is reasoning."""
    asked = {"model": "tiny", "messages": [*HELLO, {"role": "assistant", **turn}], "max_tokens": 6}
    message = post(thinker, CHAT, asked)["choices"][0]["message"]
    assert message["reasoning_content"]
    assert not message["content"]


def test_a_grammar_begins_after_the_reasoning(thinker: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the end is a token of its own; here <tool_call> is."""
    form = ReasoningFormat("toy", "<think>", "<tool_call>")
    monkeypatch.setattr(formats, "_of_template", lambda template: form if "<think>" in template else None)
    schema = {
        "type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False,
    }  # fmt: skip
    engine = thinker.engine()
    asked: dict[str, Any] = {"max_new_tokens": 60, "reasoning_budget": 5, "json_schema": schema}
    texts = set()
    for drafter in (None, "ngram"):
        result = engine.generate(HELLO, drafter=drafter, **asked)
        reasoning, content = form.parse(result.text, opened=result.thinks)
        assert reasoning
        assert set(json.loads(content)) == {"a"}
        texts.add(result.text)
    assert len(texts) == 1
    for options in (
        {"regex": "[0-9]{3}", "json_schema": None},
        {"grammar": 'start: "yes" | "no"', "json_schema": None},
    ):
        result = engine.generate(HELLO, **asked | options)
        _, content = form.parse(result.text, opened=result.thinks)
        assert content in ("yes", "no") or content.isdecimal()
    closed = engine.generate(HELLO, **asked, chat_template_kwargs={"enable_thinking": False})
    assert closed.text


def test_a_conversation_has_the_template_s_variables(thinker: Live) -> None:
    engine = thinker.engine()
    asked: dict[str, Any] = {"max_new_tokens": 8, "ignore_eos": True}
    chat = engine.chat(chat_template_kwargs={"enable_thinking": False}, **asked)
    assert not chat.send("Hi").thinks
    assert not chat.send("Hi").thinks
    assert chat.send("Hi", chat_template_kwargs={}).thinks
    chat = engine.chat(**asked)
    assert chat.send("Hi").thinks
    for budget, thinks in ((None, True), (2, True), (None, False)):  # the budget ends the reasoning
        *_, last = chat.go_on(reasoning_budget=budget, max_new_tokens=24)
        assert last.thinks == thinks
