"""The prompts that a measurement runs on."""

from __future__ import annotations

import importlib.resources
import json
from dataclasses import dataclass
from pathlib import Path

from outrider.errors import OptionError


@dataclass(frozen=True, slots=True)
class Prompt:
    """A user's message, with a name and a category to report it under."""

    id: str
    category: str
    text: str


def read_prompts(path: str | Path | None = None, per_category: int | None = None) -> list[Prompt]:
    """Prompts from a JSON Lines file; None is the six that ship with Outrider.

    Each line is an object with `turns`, a list of messages of which the first is used, or `prompt`, a text; and
    `id` and `category` if there are any. `per_category` keeps the first few of each category.

    Raises:
        OptionError: when the file is missing, empty, or a line is not of this form.
    """
    source = (
        Path(path).expanduser() if path else Path(str(importlib.resources.files("outrider"))) / "bench/prompts.jsonl"
    )
    try:
        lines = source.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"Prompts {source} cannot be read: {error}.") from error
    prompts = []
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            text = record["prompt"] if "prompt" in record else record["turns"][0]
            if not isinstance(text, str):
                raise TypeError
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise OptionError(f"{source}, line {number}, has neither a 'prompt' nor 'turns' with text.") from error
        category = str(record.get("category", "all"))
        seen[category] = seen.get(category, 0) + 1
        if per_category is None or seen[category] <= per_category:
            prompts.append(Prompt(str(record.get("id", number)), category, text))
    if not prompts:
        raise OptionError(f"Prompts {source} holds no prompt.")
    return prompts
