"""Grammars for tests, with a real tokenizer of 403 tokens."""

import json
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
SCHEMAS: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))


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
