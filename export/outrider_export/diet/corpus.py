"""A file of texts that show which tokens are useful: the option draft_vocab_corpus."""

from __future__ import annotations

import json
from pathlib import Path

from outrider.config.files import user_path
from outrider.errors import OptionError
from outrider.system.files import reading

_PIECE = 100_000  # characters per tokeniser call


def read_corpus(path: str | Path | None) -> list[str]:
    """The texts of a file: one of plain text, or JSON Lines whose objects have `text`, `prompt` or `turns`.

    Raises:
        OptionError: when the file is missing, holds no text, or a line is not of this form.
    """
    if path is None:
        return []
    path = user_path(path)
    with reading(f"The corpus {path}"):
        content = path.read_text(encoding="utf-8-sig")
    if path.suffix.lower() == ".jsonl":
        lines = enumerate(content.split("\n"), 1)
        texts = [text for number, line in lines if line.strip() for text in _texts(path, number, line)]
    else:
        texts = _pieces(content)
    if not any(text.strip() for text in texts):
        raise OptionError(f"The corpus {path} holds no text.")
    return texts


def _texts(path: Path, number: int, line: str) -> list[str]:
    try:
        record = json.loads(line)
        texts = [record[name] for name in ("prompt", "text") if name in record] + list(record.get("turns", []))
        if not texts or not all(isinstance(text, str) for text in texts):
            raise TypeError
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise OptionError(f"{path}, line {number}, has neither 'text' nor 'prompt' nor 'turns' with text.") from error
    return texts


def _pieces(text: str) -> list[str]:
    """A text in pieces, cut at line ends if it is long."""
    pieces = [""]
    for line in text.splitlines(keepends=True):
        if len(pieces[-1]) + len(line) > _PIECE:
            pieces.append("")
        pieces[-1] += line
    return pieces
