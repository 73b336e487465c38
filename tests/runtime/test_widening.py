"""Schemas as Pydantic, zod, schemars and others write them: followed, or widened where that is allowed."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("llguidance", reason="the extra [structured]")

import jsonschema
from llguidance import LLMatcher

from outrider.tokens.grammar.widening import widened

CAT = {"type": "object", "properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}}, "required": ["kind"]}
DOG = {"type": "object", "properties": {"kind": {"enum": ["dog"]}}, "required": ["kind"]}
DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
# A schema, what is left out of it, and values that are valid and not, also for what is followed.
CASES: dict[str, tuple[dict[str, Any], list[str], list[Any], list[Any]]] = {
    "what is not set": (
        {"type": "object", "properties": {"a": {"type": "integer", "minimum": None, "enum": None}, "b": {"type": None}},
         "required": None, "additionalProperties": None}, [], [{"a": 1, "b": "x"}], [{"a": "x"}],
    ),
    "format of others": ({"type": "string", "format": "password"}, [], ["a"], [1]),
    "schemars' integer": ({"type": "integer", "format": "uint8", "minimum": 0, "maximum": 255}, [], [3], [256]),
    "known format": ({"type": "string", "format": "date"}, [], ["2024-02-29"], [1]),
    "pydantic's union": (
        {"discriminator": {"propertyName": "kind", "mapping": {"cat": "#/$defs/Cat"}},
         "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}], "$defs": {"Cat": CAT, "Dog": DOG}},
        [], [{"kind": "cat", "lives": 9}, {"kind": "dog"}], [{"kind": "cow"}, {}],
    ),
    "zod's union": ({"oneOf": [CAT, DOG]}, [], [{"kind": "dog"}], [{"kind": "cow"}]),
    "schemars' enum": ({"oneOf": [{"type": "string", "enum": ["A"]}, {"const": "B"}]}, [], ["A", "B"], ["C"]),
    "overlapping": (
        {"oneOf": [{"type": "object", "properties": {"a": {}}}, {"type": "object", "properties": {"b": {}}}]},
        ["/oneOf (followed as anyOf)"], [{"a": 1}], [1],
    ),
    "a set": ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, ["/uniqueItems"], [["a"]], [[1]]),
    "a list": ({"type": "array", "uniqueItems": False}, [], [[1, 1]], [{}]),
    "zod's record": (
        {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}},
        [], [{"a": 1}], [{"a": "b"}],
    ),
    "pydantic's keys": (
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "integer"}},
        [], [{"a": 1}], [{"c": 1}, {"a": "b"}],
    ),
    "keys by a pattern": ({"type": "object", "propertyNames": {"pattern": "^x_"}}, [], [{"x_1": 1}], [{"y": 1}]),
    "long keys": ({"type": "object", "propertyNames": {"maxLength": 3}}, [], [{"a": 1}], [{"abcd": 1}]),
    "decimal": (
        {"anyOf": [{"type": "number"}, {"type": "string", "pattern": DECIMAL}]}, [], [1.5, "1.5", ".5", "00", "-7."],
        ["", ".", "+", "1.5.2", "x"],
    ),
    "look-ahead": ({"type": "string", "pattern": "^(?=.*[0-9]).+$"}, ["/pattern"], ["a1"], [1]),
    "signs in a class": ({"type": "string", "pattern": r"^[-*+/]$"}, [], ["+"], ["a"]),
    "letters of all languages": ({"type": "string", "pattern": r"^\p{L}+\++$"}, [], [], []),
    "word boundary": ({"type": "string", "pattern": r"\bfoo\b"}, ["/pattern"], ["a"], [1]),
    "JavaScript's any character": ({"type": "string", "pattern": "^[^]$"}, ["/pattern"], ["a"], [1]),
    "overlapping patterns of keys": (
        {"type": "object", "patternProperties": {"^a": {"type": "integer"}, "b": {"type": "string"}}},
        ["/patternProperties"], [{"a": 1}], [1],
    ),
    "keys of an enum that is referred to": (
        {"type": "object", "propertyNames": {"$ref": "#/$defs/K"}, "$defs": {"K": {"type": "string", "enum": ["a"]}},
         "additionalProperties": {"type": "array", "uniqueItems": True}},
        ["/additionalProperties/uniqueItems"], [{"a": []}], [{"b": []}, {"a": 1}],
    ),
    "OpenAPI's null of a reference": (
        {"$ref": "#/$defs/A", "nullable": True, "$defs": {"A": {"type": "string"}}}, [], ["a", None], [1],
    ),
    "OpenAPI's null of values": ({"type": "string", "enum": ["a"], "nullable": True}, [], ["a", None], ["b"]),
    "definitions by another name": (
        {"$ref": "#/components/schemas/A", "components": {"schemas": {"A": {"type": "array", "uniqueItems": True}}}},
        ["/components/schemas/A/uniqueItems"], [[]], [1],
    ),
    "never": ({"type": "array", "items": {"not": {}}}, [], [[]], [[1]]),
    "another reference": ({"properties": {"a": {"$dynamicRef": "#a"}}}, ["/properties/a/$dynamicRef"], [{}], []),
    "one-of by several values": (
        {"oneOf": [CAT, {"type": "object", "properties": {"kind": {"enum": ["cow", "pig"]}}, "required": ["kind"]}]},
        [], [{"kind": "pig"}], [{"kind": "dog"}],
    ),
    "one-of by a name": (
        {"oneOf": [
            {"type": "object", "properties": {"a": {}}, "required": ["a"], "additionalProperties": False},
            {"type": "object", "properties": {"b": {}}, "required": ["b"]},
        ]},
        [], [{"a": 1}, {"b": 1}], [{}],
    ),
    "one-of that is open": (
        {"oneOf": [
            {"type": "object", "properties": {"a": {}}, "required": ["a"]},
            {"type": "object", "properties": {"b": {}}, "required": ["b"], "additionalProperties": {"type": "null"}},
        ]},
        ["/oneOf (followed as anyOf)"], [{"a": 1}], [{}],
    ),
    "float32": ({"type": "number", "maximum": 3.4028234663852886e38}, ["/maximum"], [1e10], ["a"]),
    "int64": ({"type": "integer", "minimum": -(2**63), "exclusiveMaximum": 9}, ["/minimum"], [1], [9, 1.5]),
    "a type of JavaScript": ({"type": "RegExp"}, ["/type"], [1], []),
    "count as a float": ({"type": "array", "minItems": 1.0, "items": {}}, [], [[1]], [[]]),
    "few properties": (
        {"type": "object", "properties": {"a": {}}, "minProperties": 1}, ["/minProperties"], [{"a": 1}], [1],
    ),
    "negation": (
        {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}, ["/properties/a/not"], [{"a": 1}], [1],
    ),
    "condition": (
        {"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}}, ["/if", "/then"], [{}], [1],
    ),
    "OpenAPI's null": ({"type": "string", "nullable": True}, [], ["a"], [1]),
    "notes": ({"type": "string", "examples": ["a"], "x-note": 1, "deprecated": True}, [], ["a"], [1]),
    "definitions anywhere": (
        {"type": "object", "properties": {
            "a": {"$ref": "#/properties/b/$defs/A"}, "b": {"$defs": {"A": {"type": "integer"}}},
        }},
        [], [{"a": 1}], [{"a": "x"}],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_schemas_of_generators_are_followed(case: str) -> None:
    schema, left_out, valid, wrong = CASES[case]
    made, found = widened(schema)
    assert found == left_out
    assert not LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(made))
    follows = jsonschema.Draft202012Validator(made).is_valid
    assert all(map(follows, valid))
    assert not any(map(follows, wrong))
    if left_out:
        with pytest.raises(ValueError, match="the schema is strict"):
            widened(schema, strict=True)
    else:
        assert widened(schema, strict=True) == (made, [])


def test_what_is_followed_is_left_as_it_is() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"enum": [1, None]}, "minItems": 1}}}
    assert widened(schema) == (schema, [])
    assert widened(True) == (True, [])


@pytest.mark.parametrize("value", [5, "x", {}, ["x", 1], [[]]])
def test_values_of_a_wrong_type_stay(value: Any) -> None:
    """llguidance says what is wrong with them."""
    odd = {"properties": {"a": {"format": value}}, "required": value, "pattern": value, "nullable": value}
    several = {"oneOf": [{"type": "object", "required": value, "properties": {"k": {"const": i}}} for i in (1, 2)]}
    assert widened(odd)[0]["required"] == value
    made = widened(several)[0]
    assert made.get("anyOf", made.get("oneOf"))[0]["required"] == value
