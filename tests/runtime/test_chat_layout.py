"""How templates lay turns out, and what is kept of them."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from outrider.engine.chat.turn import ChatTurn, TurnLayout
from outrider.testing import ToyTokenizer
from outrider.types import Prompt


class Trimming(ToyTokenizer):
    """Writes messages without the spaces around them, as Llama 3's template."""

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        return super().render([{**each, "content": each["content"].strip()} for each in messages], **options)


class Forgetting(ToyTokenizer):
    """Leaves out what earlier answers have thought, up to a "z", as Qwen 3's template."""

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        kept = [
            {**each, "content": re.sub("^.*z", "", each["content"])} if each["role"] == "assistant" else each
            for each in messages
        ]
        return super().render(kept, **options)


class Numbering(ToyTokenizer):
    """Changes what stands before the answers: it begins with the number of messages."""

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        return f"{len(messages)}. " + super().render(messages, **options)


def talk(
    tokenizer: ToyTokenizer, answers: Sequence[tuple[str, list[int]]], **options: Any
) -> tuple[Prompt, list[ChatTurn]]:
    """A conversation with these answers, as text and tokens, and the prompt for the next."""
    layout = TurnLayout(tokenizer, options.get("opening", ()), options.get("tools", ()), frozenset({39}))
    turns: list[ChatTurn] = []
    for i, (text, token_ids) in enumerate(answers):
        messages = ({"role": "user", "content": f"n{i}"},)
        prompt = layout.prompt(turns, messages)
        turns.append(layout.turn(messages, prompt, text, token_ids, finish_reason="stop"))
    return layout.prompt(turns, ({"role": "user", "content": "end"},)), turns


def text_of(made: Prompt | ChatTurn) -> str:
    """With "|" for the end of a message."""
    return "".join("|" if token_id == 39 else ToyTokenizer().decode([token_id]) for token_id in made.token_ids)


def said(text: str) -> tuple[str, list[int]]:
    """An answer that ended by itself."""
    return text, [*ToyTokenizer().encode(text), 39]


def test_a_turn_is_put_after_the_ones_before() -> None:
    prompt, turns = talk(ToyTokenizer(chat=True), [said("one"), said("two")])
    assert text_of(prompt) == "u n0|a one|u n1|a two|u end|a "
    assert prompt.token_ids[: len(turns[-1].token_ids)] == list(turns[-1].token_ids)
    assert [text_of(prompt)[begin:end] for begin, end in prompt.answers] == ["one", "two"]


def test_answers_that_did_not_end_by_themselves_are_ended() -> None:
    prompt, _ = talk(ToyTokenizer(chat=True), [("on", ToyTokenizer().encode("on")), ("", []), said("two")])
    assert text_of(prompt) == "u n0|a on|u n1|a |u n2|a two|u end|a "
    assert [text_of(prompt)[begin:end] for begin, end in prompt.answers] == ["on", "two"]


def test_the_first_prompt_says_that_its_answer_is_marked_later() -> None:
    prompt, _ = talk(ToyTokenizer(chat=True), [])
    assert prompt.answers == ((len(prompt.token_ids), len(prompt.token_ids)),)


def test_a_stop_string_within_a_token_cuts_the_text_and_not_the_tokens() -> None:
    prompt, turns = talk(ToyTokenizer(chat=True), [("onex", ToyTokenizer().encode("one"))])
    assert text_of(prompt) == "u n0|a onex|u end|a "
    assert [text_of(prompt)[begin:end] for begin, end in prompt.answers] == ["one"]
    assert turns[0].text == "onex"


@pytest.mark.parametrize("spaces", [(" ", ""), ("", "  "), (" ", " "), ("", "")])
def test_spaces_that_a_template_trims_stay_among_the_tokens(spaces: tuple[str, str]) -> None:
    answer = "one".join(spaces)
    prompt, _ = talk(Trimming(chat=True), [said(answer)])
    assert text_of(prompt) == f"u n0|a {answer}|u end|a "
    prompt, _ = talk(ToyTokenizer(chat=True), [said(answer)])
    assert text_of(prompt) == f"u n0|a {answer}|u end|a "


def test_what_a_template_leaves_out_is_left_out_and_other_answers_are_kept() -> None:
    odd = [14, 39, 13, 4, 39]  # "o\0ne": reads as "one", with other tokens
    prompt, turns = talk(Forgetting(chat=True), [("one", odd), said("mmzthree"), ("one", odd)])
    assert text_of(prompt) == "u n0|a o|ne|u n1|a three|u n2|a o|ne|u end|a "
    assert [text_of(prompt)[begin:end] for begin, end in prompt.answers] == ["o|ne", "o|ne"]
    assert text_of(turns[1]) == "u n0|a o|ne|u n1|a mmzthree"  # as long as it was the last


def test_answers_are_kept_where_the_text_before_them_changes() -> None:
    odd = [14, 39, 13, 4, 39]
    prompt, _ = talk(Numbering(chat=True), [("one", odd), said("two")])
    assert text_of(prompt) == "5. u n0|a o|ne|u n1|a two|u end|a "
    assert [text_of(prompt)[begin:end] for begin, end in prompt.answers] == ["o|ne", "two"]


def test_tools_and_examples_stand_at_the_beginning() -> None:
    opening = ({"role": "system", "content": "kind"}, {"role": "assistant", "content": "hi"})
    prompt, _ = talk(ToyTokenizer(chat=True), [said("one")], opening=opening, tools=({"name": "look"},))
    assert text_of(prompt) == "t look|s kind|a hi|u n0|a one|u end|a "
    assert [text_of(prompt)[begin:end] for begin, end in prompt.answers] == ["one"]
