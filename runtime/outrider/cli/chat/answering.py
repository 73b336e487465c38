"""Does what a line says, and shows what comes of it; without a terminal, for all lines of a file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import Console

from outrider.cli.chat.commands import remarks, reply_to
from outrider.cli.chat.keyboard import interruptible
from outrider.cli.chat.session import Session
from outrider.cli.chat.views import show, view_of


def do(session: Session, line: str, console: Console, notes: Console, *, ends_answers: bool) -> bool:
    """Do what a line says. Returns whether the program goes on.

    console: for answers and tables. notes: for sentences about what was done. ends_answers: whether Ctrl-C ends the
    answer instead of the program.

    Raises:
        OutriderError: when it fails. The conversation is as before.
    """
    is_retry, before = line.strip() == "/retry", session.last
    reply = reply_to(session, line)
    _note(notes, reply.note)
    if reply.shown is not None and reply.shown.row_count:
        console.print(reply.shown)
    if reply.chunks is not None:
        view = view_of(session, console)
        if ends_answers:
            with interruptible(reply.chunks, session.cancel) as chunks:
                show(chunks, view)
        else:
            show(reply.chunks, view)
        _note(notes, remarks(session, before if is_retry else None))
    return not reply.ends


def run_pipe(session: Session, lines: Iterable[str], console: Console, notes: Console) -> None:
    """Do what the lines say, until /quit or their end. A backslash at the end of a line joins the next one.

    Raises:
        OutriderError: when one fails. The others are not read, as they may depend on it.
    """
    for message in joined(lines):
        if message.strip() and not do(session, message, console, notes, ends_answers=False):
            return


def joined(lines: Iterable[str]) -> Iterator[str]:
    """Lines without their ends; those after a backslash belong to the one before."""
    parts: list[str] = []
    for line in lines:
        text = line.rstrip("\r\n")
        parts.append(text.removesuffix("\\"))
        if not text.endswith("\\"):
            yield "\n".join(parts)
            parts = []
    if parts:
        yield "\n".join(parts)


def _note(notes: Console, text: str) -> None:
    if text:
        notes.print(text, style="dim", soft_wrap=not notes.is_terminal)
