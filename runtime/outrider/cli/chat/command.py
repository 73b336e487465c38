"""The command's options."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Any

import click
import platformdirs
from rich.console import Console

from outrider.cli.options import generation_options, load_options, read_options
from outrider.errors import OutriderError


@click.command()
@click.argument("bundle")
@click.option("--system", metavar="TEXT", help="System message before the conversation.")
@click.option("--resume", metavar="FILE", help="Go on with a conversation that /save wrote.")
@click.option("--no-history", is_flag=True, help="Do not save what is typed for later sessions.")
@load_options
@generation_options
def chat(bundle: str, system: str | None, resume: str | None, no_history: bool, **options: Any) -> None:
    """Talk with the main model of BUNDLE.

    Lines that begin with a slash are commands: /help shows them. Without a terminal, each line of standard input is a
    message or a command, and the answers are printed as they are.
    """
    from outrider.cli.chat.session import Session
    from outrider.engine import load

    if system is not None and resume is not None:
        raise click.UsageError("--resume has the conversation's own system message: leave out --system.")
    config = read_options(options)
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if is_terminal:
        check_packages()
    with load(bundle, config) as engine:
        session = Session(engine, system)
        if resume is not None:
            session.load(resume)
        console = Console(markup=False, emoji=False, highlight=False)
        if is_terminal:
            from outrider.cli.chat.terminal import run_terminal

            folder = platformdirs.user_state_path("outrider", appauthor=False)
            run_terminal(session, console, None if no_history else folder / "chat-history")
        else:
            from outrider.cli.chat.pipe import run_pipe

            run_pipe(session, sys.stdin, console, Console(stderr=True, markup=False, emoji=False, highlight=False))


def check_packages() -> None:
    """Check that what a terminal needs is installed.

    Raises:
        OutriderError: when it is not.
    """
    if find_spec("prompt_toolkit") is None:
        raise OutriderError(
            "In a terminal, outrider chat needs prompt_toolkit, which is not installed. Run: pip install "
            '"outrider[chat]"'
        )
