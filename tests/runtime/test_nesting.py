"""Limits of what is nested, for apps that use a part by itself: each case ended the process, or took minutes."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import outrider
from outrider.errors import OptionError, RequestError, TooLong
from outrider.inputs.text import Tokenizer
from outrider.system.nesting import MOST_LEVELS, TooDeep, check_json, check_levels, levels_of, levels_of_json
from outrider.tokens.grammar import Grammars, GrammarSource

DEEP = "[" * 100_000 + "]" * 100_000
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.sampled_from('[]{}"\\é,')),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(st.sampled_from('{["\\')), inner, max_size=3),
    max_leaves=20,
)


def nested(levels: int) -> Any:
    value: Any = 1
    for i in range(levels):
        value = [value] if i % 2 else {"a": value}
    return value


def calling(arguments: Any) -> list[dict[str, Any]]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [call]}]


@given(VALUES)
def test_levels_of_json_are_those_of_the_value(value: Any) -> None:
    assert (
        levels_of_json(json.dumps(value)) == levels_of_json(json.dumps(value, ensure_ascii=False)) == levels_of(value)
    )


def test_the_limit_is_a_number_of_levels() -> None:
    check_levels(nested(MOST_LEVELS))
    check_json(json.dumps(nested(MOST_LEVELS)))
    with pytest.raises(TooDeep, match="nested too deeply, in more than 100 levels"):
        check_levels(nested(MOST_LEVELS + 1))
    with pytest.raises(TooDeep):
        check_json("]" * 500 + "[" * (MOST_LEVELS + 1))
    within: list[Any] = []
    within.append(within)
    with pytest.raises(TooDeep):
        check_levels(within)


@pytest.mark.parametrize("arguments", [DEEP, DEEP[:100_000], DEEP[:5_000] + "]" * 5_000, nested(901)])
def test_a_template_is_given_nothing_that_is_nested_deeply(tiny: Path, arguments: Any) -> None:
    tokenizer = Tokenizer(tiny / "tokenizer")
    with pytest.raises(RequestError, match="cannot be laid out: it is nested too deeply"):
        tokenizer.encode_prompt(calling(arguments))
    with pytest.raises(RequestError, match="cannot be laid out"):
        tokenizer.encode_prompt("Hi", tools=[{"type": "function", "function": {"parameters": nested(901)}}])
    assert tokenizer.encode_prompt(calling(json.dumps(nested(50))))
    assert tokenizer.encode_prompt([{"role": "user", "content": DEEP}])  # plain text


class Counting:
    """Counts the characters that a tokenizer encodes, and the most at a time."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.all = self.most = 0

    def encode(self, text: str, **options: Any) -> Any:
        self.all, self.most = self.all + len(text), max(self.most, len(text))
        return self._tokenizer.encode(text, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def test_a_text_that_cannot_fit_is_not_tokenized_to_its_end(tiny: Path) -> None:
    """The library's tokenizer lets no other thread run meanwhile: 7 seconds for 3 million blanks."""
    tokenizer = Tokenizer(tiny / "tokenizer", max_tokens=20_000)
    counting = tokenizer._tokenizer = Counting(tokenizer._tokenizer)
    long = "quite " * 500_000
    for prompt in (long, [{"role": "user", "content": long}]):
        counting.all = 0
        with pytest.raises(TooLong, match=r"characters, .*exceed the model's context of 20,000 tokens\. Shorten it"):
            tokenizer.encode_prompt(prompt, chat_template=not isinstance(prompt, str))
        assert 0 < counting.all < 100_000
    assert counting.most <= 20_000
    whole = Tokenizer(tiny / "tokenizer")
    for count in (6_667, 6_660):  # as many tokens and fewer: what may fit is tokenized as ever
        text = "quite " * count
        expected = whole.encode_prompt(text, chat_template=False)
        assert 19_900 < len(expected) <= 20_002
        assert tokenizer.encode_prompt(text, chat_template=False) == expected


def test_references_are_tokenized_in_pieces(tiny: Path) -> None:
    with outrider.load(tiny, cache_size=0.02, keep_records=False, drafter="suffix") as engine:
        tokenizer: Any = engine.tokenizer
        counting = tokenizer._tokenizer = Counting(tokenizer._tokenizer)
        engine.generate("Hi", references=["quite " * 20_000], max_new_tokens=1)
        assert counting.all > 120_000
        assert counting.most <= 20_000


@pytest.mark.parametrize("option", ["json_schema", "grammar"])
def test_what_references_lead_to_too_deep_is_refused(tiny: Path, option: str) -> None:
    """A Lark grammar can hold a schema."""
    pytest.importorskip("llguidance", reason="the extra [structured]")
    grammars = Grammars(tiny / "tokenizer", 404, (402,))

    def source(count: int) -> GrammarSource:
        definitions: dict[str, Any] = {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(count)}
        text = json.dumps({"$ref": "#/$defs/d0", "$defs": definitions | {f"d{count}": {}}})
        return GrammarSource(option, text if option == "json_schema" else f"start: %json {text}")

    assert grammars.new_state(source(300))
    with pytest.raises(OptionError, match="cannot be followed: "):
        grammars.new_state(source(8_000))
    grammars.close()
