"""The architectures that are converted without PyTorch, by their differences from Llama: `archs.toml` is the table.

ARCHS["gemma2"].norms.offset        # 1.0
BY_GGUF["command-r"].name           # "cohere"
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any, TypeAlias

from outrider_export.direct import adjustments
from outrider_export.direct.arch import Arch, ArchAttention, ArchExperts, ArchMatrices, Norms

Table: TypeAlias = dict[str, Any]

TEXT = Path(__file__).with_name("archs.toml").read_text(encoding="utf-8")
_NOT_ALIKE = ("gguf", "tried")  # what an entry has not from those that it is like
_PARTS = {"matrices": ArchMatrices, "norms": Norms, "attention": ArchAttention, "experts": ArchExperts}
_BRACES = re.compile(r"\{(\w+(?:,\w+)+)\}")


def read(text: str) -> dict[str, Table]:
    """The entries of a table, each with the content of those that it is like."""
    tables = tomllib.loads(text)

    def whole(name: str) -> Table:
        own = dict(tables[name])
        like = own.pop("like", [])
        found: Table = {}
        for other in [like] if isinstance(like, str) else like:
            found = _merged(found, {key: value for key, value in whole(other).items() if key not in _NOT_ALIKE})
        return _merged(found, own | {"names": _expanded(own["names"])} if "names" in own else own)

    return {name: whole(name) for name in tables if not name.startswith("_")}


def arch_of(name: str, table: Table) -> Arch:
    """The entry of an architecture, as `read` gives its content."""
    made = {key: value for key, value in table.items() if key != "tried"}
    made |= {key: part(**_frozen(made[key])) for key, part in _PARTS.items() if key in made}
    made |= {key: getattr(adjustments, made[key]) for key in ("adjust", "adjust_gguf") if made.get(key)}
    return Arch(name, **_frozen(made))


def _merged(table: Table, other: Table) -> Table:
    """Two tables in one, key by key; the second counts."""
    both = {key: _merged(table[key], value) for key, value in other.items() if isinstance(table.get(key), dict)}
    return table | other | both


def _expanded(names: dict[str, str]) -> dict[str, str]:
    found = {}
    for ours, theirs in names.items():
        braces = _BRACES.search(ours)
        for word in braces[1].split(",") if braces else [""]:
            found[_BRACES.sub(word, ours)] = _BRACES.sub(word, theirs)
    return found


def _frozen(table: Table) -> Table:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}


TABLES = read(TEXT)
ARCHS: dict[str, Arch] = {name: arch_of(name, table) for name, table in TABLES.items() if table.keys() != {"tried"}}
BY_GGUF: dict[str, Arch] = {arch.gguf: arch for arch in reversed(ARCHS.values()) if arch.gguf}  # the first of each
