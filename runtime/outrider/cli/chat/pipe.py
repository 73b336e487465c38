"""The chat without a terminal: messages and commands are lines, answers are text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.cli.chat.answering import do

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rich.console import Console

    from outrider.cli.chat.session import Session


def run_pipe(session: Session, lines: Iterable[str], console: Console, notes: Console) -> None:
    """Do what the lines say, until /quit or their end. A backslash at the end of a line joins the next one.

    Raises:
        OutriderError: when one fails. The others are not read, as they may depend on it.
    """
    for message in joined(lines):
        if message.strip() and not do(session, message, console, notes, ends_answers=False):
            return


def joined(lines: Iterable[str]) -> Iterator[str]:
    """Lines without their ends; those behind a backslash belong to the one before."""
    parts: list[str] = []
    for line in lines:
        text = line.rstrip("\r\n")
        parts.append(text.removesuffix("\\"))
        if not text.endswith("\\"):
            yield "\n".join(parts)
            parts = []
    if parts:
        yield "\n".join(parts)
