"""The state of an answer in its grammar: masks, forced tokens, and what becomes of rejected ones."""

import calendar
import json
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grammars import EOS, SCHEMAS, VOCAB_SIZE, new_grammars
from outrider.config import GenerationConfig
from outrider.errors import BundleError, NoTokenLeft, OptionError
from outrider.tokens.grammar import (
    JSON_STYLE,
    Grammars,
    GrammarSource,
    GrammarState,
    compiler,
    fill_masks,
    with_real_dates,
)
from outrider.types import Draft
from tiny import train_tokenizer

TOKENIZER = train_tokenizer()
LONG_KEYS = json.dumps(SCHEMAS["object"])
SOURCES = [
    *(GrammarSource("json_schema", json.dumps(schema)) for schema in SCHEMAS.values()),
    GrammarSource("regex", "(a|ab|abc)*d{2,3}"),
    GrammarSource("grammar", 'start: "the " noun ("," " " noun)*\nnoun: /fo[xg]/ | "dog" | %json {"type": "boolean"}'),
]


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    return new_grammars(tmp_path_factory.mktemp("tokenizer"))


def allowed(state: GrammarState, prefix: Sequence[int] = ()) -> list[int]:
    logits = np.zeros(VOCAB_SIZE, dtype=np.float32)
    state.apply(logits, prefix)
    return np.flatnonzero(logits == 0).tolist()


def walk(
    state: GrammarState, choose: Callable[[Sequence[int]], int], count: int, prefix: Sequence[int] = ()
) -> list[int]:
    """Up to `count` tokens that a grammar allows after `prefix`; none that ends the answer."""
    token_ids: list[int] = []
    while len(token_ids) < count:
        others = [token_id for token_id in allowed(state, [*prefix, *token_ids]) if token_id not in EOS]
        if not others:
            break
        token_ids.append(choose(others))
    return token_ids


def encode(text: str) -> list[int]:
    token_ids: list[int] = TOKENIZER.encode(text).ids
    return token_ids


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@settings(max_examples=60)
@given(st.data(), st.sampled_from(SOURCES))
def test_rejected_tokens_leave_no_trace(grammars: Grammars, data: Any, source: GrammarSource) -> None:
    """Masks, forced tokens and ends are those of a state that has only seen the committed tokens."""

    def choose(token_ids: Sequence[int]) -> int:
        return int(data.draw(st.sampled_from(token_ids)))

    state, committed = grammars.new_state(source), list[int]()
    for _ in range(4):
        draft = walk(state, choose, data.draw(st.integers(0, 5)))
        if data.draw(st.booleans()):
            draft.append(data.draw(st.integers(0, VOCAB_SIZE - 1)))  # as a bad drafter proposes
        if data.draw(st.booleans()):
            fill_masks([(state, Draft(draft))])
        if data.draw(st.booleans()):
            state.forced([], 8)
        draft = draft[: state.num_allowed(draft)]
        accepted = draft[: data.draw(st.integers(0, len(draft)))]
        if len(accepted) < len(draft):  # another branch
            walk(state, choose, data.draw(st.integers(0, 3)), accepted)
        if EOS[0] in accepted or EOS[1] in accepted:
            break
        state.commit(accepted)
        committed += accepted
        fresh = grammars.new_state(source)
        fresh.commit(committed)
        assert allowed(state) == allowed(fresh)
        assert state.forced([], 8) == fresh.forced([], 8)
        assert state.is_complete() == fresh.is_complete()


@settings(max_examples=40)
@given(st.data(), st.lists(st.sampled_from(SOURCES), min_size=1, max_size=3))
def test_masks_of_one_call_are_those_of_single_rows(
    grammars: Grammars, data: Any, sources: list[GrammarSource]
) -> None:
    states = [grammars.new_state(source) for source in sources]
    drafts = []
    for source in sources:
        begun = walk(
            grammars.new_state(source), lambda ids: data.draw(st.sampled_from(ids)), data.draw(st.integers(0, 6))
        )
        ends = data.draw(st.sampled_from([[], [EOS[1]], [5, 5]]))
        drafts.append(Draft([*begun, *ends]))
    fill_masks([*zip(states, drafts, strict=True)])
    for state, draft, source in zip(states, drafts, sources, strict=True):
        known = {**state._masks}
        assert known
        for prefix, mask in known.items():
            assert tuple(draft.token_ids[: len(prefix)]) == prefix
            assert mask.tolist() == grammars.new_state(source)._mask(prefix).tolist()
        assert state.missing(draft) is None


@settings(max_examples=30)
@given(st.data(), st.sampled_from(SOURCES))
def test_forced_tokens_are_the_only_ones_allowed(grammars: Grammars, data: Any, source: GrammarSource) -> None:
    state = grammars.new_state(source)
    for _ in range(12):
        for i, token_id in enumerate(forced := state.forced([], 20)):
            assert allowed(state, forced[:i]) == [token_id]
        assert forced or len(allowed(state)) > 1 or state.is_complete()
        token_ids = walk(state, lambda ids: data.draw(st.sampled_from(ids)), 1)
        assert state.forced(token_ids, 1) == grammar_after(grammars, source, state, token_ids).forced([], 1)
        state.commit(token_ids)


def grammar_after(grammars: Grammars, source: GrammarSource, state: GrammarState, token_ids: list[int]) -> GrammarState:
    fresh = grammars.new_state(source)
    fresh.commit([*state._committed, *token_ids])
    return fresh


def test_long_keys_are_forced(grammars: Grammars) -> None:
    state = grammars.new_state(GrammarSource("json_schema", LONG_KEYS))
    assert TOKENIZER.decode(state.forced([], 64)).startswith('{"description_of_the_place"')
    assert len(state.forced([], 3)) == 3


def test_an_answer_ends_where_nothing_may_follow(grammars: Grammars) -> None:
    state = grammars.new_state(GrammarSource("regex", "ab|abc?d"))
    token_ids = [*encode("a"), *encode("b"), *encode("d"), *encode("x")]
    assert not state.is_complete(token_ids[:2])  # it may go on
    assert state.is_complete(token_ids[:3])
    assert state.num_until_complete(token_ids) == 3
    assert state.num_until_complete(token_ids[:2]) == 2
    assert not state.is_complete(encode("x"))  # what is not allowed completes nothing
    assert {*EOS} < {*allowed(state, token_ids[:2])}
    state.commit(token_ids[:3])
    assert allowed(state) == [*EOS]


def test_ends_are_allowed_only_where_the_grammar_accepts(grammars: Grammars) -> None:
    state = grammars.new_state(GrammarSource("regex", "a+"))
    assert not {*EOS} & {*allowed(state)}
    state.commit(encode("a"))
    assert {*EOS} < {*allowed(state)}
    assert not allowed(state, [EOS[0], *encode("a")])


def test_rows_wider_and_narrower_than_the_vocabulary(grammars: Grammars) -> None:
    whole = allowed(state := grammars.new_state(GrammarSource("regex", "a+")))
    for width in (VOCAB_SIZE - 50, VOCAB_SIZE + 30):
        logits = np.zeros(width, dtype=np.float32)
        state.apply(logits, [])
        assert np.flatnonzero(logits == 0).tolist() == [token_id for token_id in whole if token_id < width]


def test_a_draft_that_breaks_the_matcher_does_not_break_the_answer(grammars: Grammars) -> None:
    """llguidance's matcher stays in an error for good; the answer goes on with another."""
    state = grammars.new_state(GrammarSource("regex", "a(b|c)d+"))
    state.commit(encode("a"))
    state.matcher.consume_token(encode("x")[0])
    assert state.matcher.is_error()
    assert state.num_allowed([*encode("b"), *encode("d")]) == 2
    assert sorted(allowed(state)) == sorted([*encode("b"), *encode("c")])


def test_a_grammar_that_is_too_complex_to_be_followed(grammars: Grammars) -> None:
    import llguidance

    tokenizer, executor = grammars._load("regex")
    limits = llguidance.LLParserLimits(step_lexer_fuel=2, step_max_items=2)
    pattern = llguidance.LLMatcher.grammar_from_regex("(a|b|[c-z]+)*foo.{1,100}bar")
    base = llguidance.LLMatcher(tokenizer, pattern, log_level=0, limits=limits)
    state = GrammarState(base, executor, VOCAB_SIZE, EOS, "regex")
    fill_masks([(state, Draft([5, 6])), (other := grammars.new_state(GrammarSource("regex", "a")), Draft([]))])
    with pytest.raises(NoTokenLeft, match=r"^regex is too complex to be followed here: \w[^\n]*\. Simplify it\.$"):
        allowed(state)
    assert allowed(other) == encode("a")
    # What the matcher refuses after a token that is committed is not taken for the end of the answer.
    schema = '{"type": "array", "items": {"type": "null"}, "minItems": 300}'
    limits = llguidance.LLParserLimits(step_max_items=100)
    pattern = llguidance.LLMatcher.grammar_from_json_schema(schema, defaults=JSON_STYLE)
    base = llguidance.LLMatcher(tokenizer, pattern, log_level=0, limits=limits)
    base.compute_bitmask()
    state = GrammarState(base, executor, VOCAB_SIZE, EOS, "json_schema")
    state.commit(encode("["))
    with pytest.raises(NoTokenLeft, match=r"^json_schema cannot be followed further: it is too complex \(parser error"):
        allowed(state)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        *(
            (GrammarSource("json_schema", text), "cannot be followed: recursion limit exceeded")
            for text in ('{"not":' * 200 + "{}" + "}" * 200, *(json.dumps(nested(depth)) for depth in (200, 500, 900)))
        ),
        (GrammarSource("regex", "("), r"regex=\( cannot be followed: .*unclosed group"),
        (GrammarSource("grammar", "start: foo"), 'grammar=start: foo cannot be followed: unknown name: "foo"'),
        (GrammarSource("grammar", "root ::= x"), "grammar=root ::= x cannot be followed: there is no rule 'x'. Give"),
        # Found with the first mask, which can take a second: not in the engine's thread, where all would wait for it.
        (
            GrammarSource("json_schema", '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}'),
            "NoExtensionBias",
        ),
        (
            GrammarSource("regex", "a" * 500_001),
            "cannot be followed: it has 500,001 characters, and 500,000 can be followed",
        ),
        (GrammarSource("json_schema", '{"not": {}}'), 'Unimplemented keys: \\["not"\\]'),
        (GrammarSource("json_schema", '{"type": "strin"}'), "Invalid type: strin"),
        (GrammarSource("json_schema", json.dumps({"enum": ["x" * 200], "not": {}})), "xxx…"),
    ],
)
def test_grammars_that_cannot_be_followed(grammars: Grammars, source: GrammarSource, says: str) -> None:
    with pytest.raises(OptionError, match=says) as raised:
        grammars.new_state(source)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize("depth", [1, 40])
def test_dates_that_do_not_exist(grammars: Grammars, depth: int) -> None:
    """At any depth that llguidance reads. Of years, those that leap are found by the calendar's own rule."""
    schema: dict[str, Any] = {"type": "string", "format": "date"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    for year in (0, 4, 100, 400, 1900, 1996, 2000, 2019, 2020, 2022, 2024, 2100, 9996):
        for day in (28, 29):
            state = grammars.new_state(GrammarSource("json_schema", json.dumps(schema)))
            token_ids = encode("[" * depth + f'"{year:04}-02-{day}"' + "]" * depth)
            exists = day == 28 or calendar.isleap(year)
            assert (state.num_allowed(token_ids) == len(token_ids)) == exists
    assert with_real_dates(nested(5000))  # is not walked to its end


def test_a_slow_grammar_keeps_no_other_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither one that was compiled before, nor a new one. The slow one is compiled once for all who ask for it."""
    grammars, known, slow = new_grammars(tmp_path), GrammarSource("regex", "a+"), GrammarSource("regex", "b+")
    grammars.new_state(known)
    begun, goes_on, calls = Event(), Event(), list[GrammarSource]()

    def compile_slowly(tokenizer: Any, source: GrammarSource) -> Any:
        calls.append(source)
        if source == slow:
            begun.set()
            assert goes_on.wait(600)
        return compiled(tokenizer, source)

    compiled = compiler._compile
    monkeypatch.setattr(compiler, "_compile", compile_slowly)
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(grammars.new_state, slow) for _ in range(2)]
        assert begun.wait(300)
        try:
            pool.submit(grammars.new_state, known).result(300)
            pool.submit(grammars.new_state, GrammarSource("regex", "c+")).result(300)
        finally:
            goes_on.set()
        for each in waiting:
            each.result(300)
    assert calls.count(slow) == 1
    assert known not in calls


def test_without_llguidance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(OptionError, match=r'regex needs the package llguidance .*pip install ".*\[structured\]"'):
        new_grammars(tmp_path).new_state(GrammarSource("regex", "a"))


def test_tokenizers_that_cannot_be_used(tmp_path: Path) -> None:
    grammars = Grammars(tmp_path, VOCAB_SIZE, EOS)
    with pytest.raises(
        BundleError, match=r"regex needs the tokenizer as .*tokenizer\.json, and the bundle has no such"
    ):
        grammars.new_state(GrammarSource("regex", "a"))
    (tmp_path / "tokenizer.json").write_text('{"a": 1}', encoding="utf-8")
    with pytest.raises(BundleError, match=r"cannot be used with the tokenizer .*tokenizer\.json"):
        grammars.new_state(GrammarSource("regex", "a"))
    train_tokenizer().save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(BundleError, match="vocab size too small"):
        Grammars(tmp_path, 50, EOS).new_state(GrammarSource("regex", "a"))


@pytest.mark.parametrize(("options", "says"), [
    ({"json_schema": False}, "json_schema=False is not a JSON schema"),
    ({"json_schema": 3}, "json_schema=3 is not a JSON schema"),
    ({"json_schema": "[]"}, r"json_schema=\[\] is not a JSON schema"),
    ({"json_schema": '{"type"'}, "is not JSON: Expecting ':'"),
    ({"json_schema": {"a": object()}}, "is not JSON"),
    ({"json_schema": nested(5000)}, "json_schema cannot be used: it is nested too deeply"),
    ({"json_schema": "[" * 100_000 + "]" * 100_000}, "json_schema cannot be used: it is nested too deeply"),
    ({"tools": [{"function": {"name": "f", "parameters": nested(901)}}]}, "cannot be used: it is nested too deeply"),
    ({"regex": ""}, "regex='' is not a text"),
    ({"grammar": 1}, "grammar=1 is not a text"),
    ({"regex": "a", "grammar": "b"}, "regex and grammar are both set"),
    ({"regex": "a", "ignore_eos": True}, "ignore_eos=True continues after the end"),
    ({"tools": [{}]}, "is not a list of functions"),
    ({"tools": [{"function": {"name": "f"}}] * 2}, "each with a name of its own"),
    ({"tools": [{"function": {"name": "auto"}}]}, "is not a list of functions"),
    ({"tools": [{"function": {"name": "f", "parameters": 3}}]}, "is not a list of functions"),
    ({"tools": [{"function": {"name": "f", "x": {1}}}]}, "is not a list of functions"),
    ({"tool_choice": "f"}, "tool_choice='f' is not one of auto, none, required"),
    ({"tool_choice": "required"}, "needs tools, and none are given"),
    ({"tools": [{"function": {"name": "f"}}], "regex": "a"}, "regex cannot be combined with tools"),
    ({"tools": [{"function": {"name": "f"}}], "tool_choice": "f", "ignore_eos": True},
     "ignore_eos=True continues after"),
])  # fmt: skip
def test_options_that_do_not_fit(options: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        GenerationConfig(**options)


def test_options_that_fit() -> None:
    assert GenerationConfig(json_schema='{"type": "object"}').json_schema == {"type": "object"}
    assert GrammarSource.of(GenerationConfig(json_schema=True)) == GrammarSource("json_schema", '{"type": "object"}')
    assert GrammarSource.of(GenerationConfig(json_schema={})) == GrammarSource("json_schema", "{}")
    assert GrammarSource.of(GenerationConfig()) is None
    choice = {"type": "function", "function": {"name": "f"}}
    config = GenerationConfig(tools=(choice,), tool_choice=choice)
    assert config.tool_choice == "f"
    assert config.offered_tools == (choice,)
    assert GenerationConfig(tools=(choice,), tool_choice="none", regex="a").offered_tools == ()
