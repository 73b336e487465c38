"""Schemas as generators of schemas write them: what is followed, what is left out, and what the grammar then accepts.

helpers/schema_cases/generators.jsonl has a schema a line, with the places that are left out of it, and values that are
valid and not. Made with Pydantic 2.14, msgspec 0.22, zod 4.6, zod-to-json-schema 3.25, TypeBox 0.34, and the tools of
two MCP servers, Codex and opencode; the others are written as schemars, OpenAPI and others write them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llguidance", reason="the extra [structured]")

from llguidance import LLTokenizer

import schema_suite
from grammars import EOS, VOCAB_SIZE
from outrider.tokens.grammar import GrammarSource, widened
from outrider.tokens.grammar.matcher import new_matcher, new_tokenizer
from tiny import train_tokenizer

FILE = Path(schema_suite.__file__).with_name("schema_cases") / "generators.jsonl"
CASES = {case["name"]: case for case in map(json.loads, FILE.read_text(encoding="utf-8").splitlines())}
TOKENIZER = train_tokenizer()


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return new_tokenizer(TOKENIZER.to_str(), VOCAB_SIZE, EOS)


@pytest.mark.parametrize("name", CASES)
def test_schemas_are_followed_as_far_as_they_say(tokenizer: LLTokenizer, name: str) -> None:
    case = CASES[name]
    made, left_out = widened(case["schema"])
    assert left_out == case.get("left_out", [])
    matcher = new_matcher(tokenizer, GrammarSource("json_schema", json.dumps(made)))
    assert not matcher.get_error()

    def accepts(value: Any) -> bool:
        token_ids = [*TOKENIZER.encode(json.dumps(value, ensure_ascii=False)).ids, EOS[0]]
        return matcher.validate_tokens(token_ids) == len(token_ids)

    assert all(map(accepts, case["valid"]))
    assert not any(map(accepts, case["invalid"]))
    if left_out:
        with pytest.raises(ValueError, match="cannot be followed, and the schema is strict") as raised:
            widened(case["schema"], strict=True)
        assert str(raised.value).startswith(left_out[0])
    else:
        assert widened(case["schema"], strict=True) == (made, [])


@pytest.mark.parametrize("value", [5, "x", {}, ["x", 1], [[]]])
def test_values_of_a_wrong_type_stay(value: Any) -> None:
    """llguidance says what is wrong with them."""
    odd = {"properties": {"a": {"format": value}}, "required": value, "pattern": value, "nullable": value}
    several = {"oneOf": [{"type": "object", "required": value, "properties": {"k": {"const": i}}} for i in (1, 2)]}
    assert widened(odd)[0]["required"] == value
    made = widened(several)[0]
    assert made.get("anyOf", made.get("oneOf"))[0]["required"] == value


def test_all_generators_are_there() -> None:
    kinds = {name.partition(": ")[0] for name in CASES}
    assert len(CASES) >= 150
    assert {"pydantic", "msgspec", "zod 4", "zod-to-json-schema", "TypeBox", "schemars 0.8", "schemars 1"} <= kinds


@pytest.mark.parametrize(("option", "text", "right"), [
    ("regex", "<call>ab", "<call>ab"),
    ("grammar", 'start: "a" /<call>/ "b"', "a<call>b"),
    ("json_schema", '{"const": "<call>ab"}', '"<call>ab"'),
    ("json_schema", '{"const": "\\u003ccall>ab"}', '"<call>ab"'),
])  # fmt: skip
def test_the_text_of_a_special_token_can_be_forced(option: Any, text: str, right: str) -> None:
    """As other tokens: the special one was allowed alone, and not taken."""
    stored = json.loads(TOKENIZER.to_str())
    special = max(each["id"] for each in stored["added_tokens"]) + 1
    stored["added_tokens"].append({**stored["added_tokens"][-1], "id": special, "content": "<call>", "special": False})
    tokenizer = new_tokenizer(json.dumps(stored), VOCAB_SIZE + 1, EOS)
    matcher, written = new_matcher(tokenizer, GrammarSource(option, text)), b""
    while written.decode() != right:
        allowed = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        token_id = int(np.flatnonzero(allowed)[0])
        assert matcher.try_consume_tokens([token_id]) == 1
        written += tokenizer.decode_bytes([token_id])
        assert right.startswith(written.decode())
