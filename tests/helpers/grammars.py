"""Grammars for tests, with a real tokenizer of 403 tokens."""

from pathlib import Path
from typing import Any

import msgspec

from hybrids import save_hybrid
from in_the_loop import new_request
from outrider.bundle import Bundle, Format
from outrider.bundle.folder import read_bundle
from outrider.bundle.manifest import write_manifest
from outrider.config import GenerationConfig
from outrider.decoding.answer import Answer
from outrider.testing import save_toy_bundle
from outrider.tokens.grammar import Grammars, GrammarSource
from outrider.tokens.sampling import LogitsSampler
from outrider.tokens.verifiers import Coupled
from tiny import train_tokenizer

VOCAB_SIZE = 404
EOS = (400, 402)  # <|endoftext|>, <|im_end|>

# What a schema may say, each with a bound, as a random model ends no text of its own accord.
SCHEMAS: dict[str, Any] = {
    "object": {
        "type": "object",
        "properties": {
            "description_of_the_place": {"type": "string", "maxLength": 6},
            "is_open_today": {"type": "boolean"},
        },
        "required": ["description_of_the_place", "is_open_today"],
        "additionalProperties": False,
    },
    "optional": {
        "type": "object",
        "properties": {"first": {"type": "null"}, "second": {"type": "boolean"}, "third": {"const": 3}},
        "required": ["second"],
        "additionalProperties": False,
    },
    "enum": {"enum": ["red", "green", "blue", 3, None, {"a": [1]}]},
    "const": {"const": {"version": "2.0", "flags": [True, False]}},
    "array": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "boolean"}, {"enum": ["x", "y"]}],
        "items": False,
        "minItems": 2,
    },
    "numbers": {
        "type": "array",
        "items": False,
        "prefixItems": [
            {"type": "integer", "minimum": -20, "maximum": 300},
            {"type": "integer", "exclusiveMinimum": 4, "multipleOf": 3, "maximum": 99},
            {"type": "number", "minimum": 0, "exclusiveMaximum": 9, "multipleOf": 0.5},
        ],
        "minItems": 3,
        "maxItems": 3,
    },
    "nested": {
        "type": "object",
        "properties": {
            "outer": {
                "type": "object",
                "properties": {"inner": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2}},
                "required": ["inner"],
                "additionalProperties": False,
            }
        },
        "required": ["outer"],
        "additionalProperties": False,
    },
    "anyOf": {"anyOf": [{"type": "boolean"}, {"type": "string", "maxLength": 3}, {"type": "null"}]},
    "oneOf": {"x-guidance": {"coerce_one_of": True}, "oneOf": [{"const": "a"}, {"const": "b"}]},
    "allOf": {"allOf": [{"type": "integer", "minimum": 10}, {"maximum": 30}]},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    "lengths": {"type": "string", "minLength": 2, "maxLength": 5},
    "format": {"type": "string", "format": "date"},
    "ref": {
        "$defs": {"point": {"type": "object", "properties": {"x": {"enum": [0, 1]}, "next": {"$ref": "#/$defs/end"}},
                            "required": ["x", "next"], "additionalProperties": False},
                  "end": {"type": "null"}},
        "$ref": "#/$defs/point",
    },
    "map": {
        "type": "object",
        "patternProperties": {"^[ab]$": {"type": "boolean"}},
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 2,
    },
    "types": {"type": ["boolean", "null"]},
    "blanks": {
        "x-guidance": {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"},
        "type": "object",
        "properties": {"a": {"const": 1}, "b": {"const": 2}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
}  # fmt: skip


def save_pair(
    folder: Path,
    tokenizer: Path,
    *,
    seed: int = 0,
    format: Format = "openvino",  # noqa: A002
    states: str = "",
) -> Bundle:
    """A toy main and draft model with the tokenizer of another bundle. states: the kind of those that layers keep."""
    options: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "tokenizer": tokenizer}
    if states:
        bundle = save_hybrid(folder, states, **options)
    else:
        bundle = save_toy_bundle(folder, seed=seed, formats=(format, format), **options)
    entry = msgspec.structs.replace(bundle.manifest.tokenizer, eos_token_ids=EOS)
    write_manifest(folder, msgspec.structs.replace(bundle.manifest, tokenizer=entry))
    return read_bundle(folder)


def new_grammars(folder: Path) -> Grammars:
    """Compiles grammars with a tokenizer that is saved to this folder."""
    train_tokenizer().save(str(folder / "tokenizer.json"))
    return Grammars(folder, VOCAB_SIZE, EOS)


def make_request(grammars: Grammars, source: GrammarSource, drafter: Any = None, **fields: Any) -> Answer:
    """A sampled answer that follows a grammar. drafter, fields: see `new_request`."""
    state = grammars.new_state(source)
    sampler = LogitsSampler(GenerationConfig(temperature=1.0), [7, 8], grammar=state)
    given: dict[str, Any] = {"verifier": Coupled(), "max_new_tokens": 200, "eos_token_ids": frozenset(EOS)}
    return new_request([7, 8], drafter, sampler=sampler, grammar=state, reuse=False, **given | fields)
