"""The prompts of a measurement."""

from __future__ import annotations

import importlib.resources
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.config.files import user_path
from outrider.errors import OptionError
from outrider.system.files import reading
from outrider.types import TextTokenizer

BUILT_IN = {"default": "prompts.jsonl", "grounded": "grounded.jsonl", "long": "grounded.jsonl", "open": "open.jsonl"}
LONG_DOCUMENTS = (1, 4, 8, 16)  # in front of a question of the long prompts
_FOLDER = Path(str(importlib.resources.files("outrider_bench"))) / "prompts"


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """A user's message, with a name and a category for reports.

    references: texts that the answer may quote from, for drafters that read them.
    """

    id: str
    category: str
    text: str
    references: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt with its token ids."""

    prompt: BenchPrompt
    token_ids: list[int]


def encode_prompts(prompts: list[BenchPrompt], tokenizer: TextTokenizer) -> list[Task]:
    """Encode prompts. All modes get the same token ids."""
    return [Task(prompt, tokenizer.encode_prompt(prompt.text)) for prompt in prompts]


def read_prompts(path: str | Path | None = None, per_category: int | None = None) -> list[BenchPrompt]:
    """Prompts from a JSON Lines file, or those that come with Outrider: "default" (None), "grounded", "long", "open".

    Each line is an object with `turns`, a list of messages of which the first is used, or `prompt`, a text; and
    `id`, `category` and `references`, a list of texts, if there are any. `per_category`: use the first few of
    each category.

    Raises:
        OptionError: when the file is missing, empty, or a line is not of this form.
    """
    built_in = BUILT_IN.get(str(path or "default"))
    source = _FOLDER / built_in if built_in else user_path(str(path))
    with reading(f"Prompts {source}"):
        lines = source.read_text(encoding="utf-8-sig").split("\n")
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    prompts = [_read_prompt(line, f"{source}, line {number},", str(number)) for number, line in numbered]
    if path == "long":
        prompts = _after_documents(prompts)
    if not prompts:
        raise OptionError(f"{source} has no prompts.")
    seen: Counter[str] = Counter()
    chosen = []
    for prompt in prompts:
        seen[prompt.category] += 1
        if per_category is None or seen[prompt.category] <= per_category:
            chosen.append(prompt)
    return chosen


def _after_documents(grounded: list[BenchPrompt]) -> list[BenchPrompt]:
    """The same questions, with more and more other documents in the prompt before their own."""
    documents = [document for prompt in grounded for document in prompt.references]
    prompts = []
    for count in LONG_DOCUMENTS:
        for i, prompt in enumerate(grounded):
            others = [documents[(i + k) % len(documents)] for k in range(count - 1, 0, -1)]
            text = "\n\n".join([*others, prompt.text])
            prompts.append(BenchPrompt(f"{prompt.id}-{count}", f"{count} documents", text))
    return prompts


def _read_prompt(line: str, source: str, number: str) -> BenchPrompt:
    with reading(source):
        record: dict[str, Any] = json.loads(line)
        try:
            text = record["prompt"] if "prompt" in record else record["turns"][0]
            if not isinstance(text, str):
                raise TypeError
        except (KeyError, IndexError, TypeError) as error:
            raise OptionError(f"{source} has neither a 'prompt' nor 'turns' with text.") from error
        references = record.get("references", [])
        if not isinstance(references, list) or not all(isinstance(reference, str) for reference in references):
            raise OptionError(f"{source} has 'references' that are not a list of texts.")
        category = str(record.get("category", "all"))
        return BenchPrompt(str(record.get("id", number)), category, text, tuple(references))
