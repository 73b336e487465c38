"""What GGUF files call tensors and metadata, and checkpoints do: the tables of `gguf_names.toml`.

to_gguf("layer")["self_attn.q_proj"]    # "attn_q"
from_gguf("layer")["attn_q"]            # "self_attn.q_proj"
"""

from __future__ import annotations

import tomllib
from pathlib import Path

_TABLES: dict[str, dict[str, str]] = tomllib.loads(
    Path(__file__).with_name("gguf_names.toml").read_text(encoding="utf-8")
)


def to_gguf(*tables: str) -> dict[str, str]:
    """A file's names by a checkpoint's, of all these tables. A kind of drafter may have no table of its own."""
    return {ours: theirs for table in tables for ours, theirs in _TABLES.get(table, {}).items()}


def from_gguf(*tables: str) -> dict[str, str]:
    """The opposite."""
    return {theirs: ours for ours, theirs in to_gguf(*tables).items()}
