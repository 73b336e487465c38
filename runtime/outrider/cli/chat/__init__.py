"""`outrider chat`: a conversation in the terminal.

`session` has the conversation and its settings, `commands` what /name does, `sources` and `views` show answers,
`answering` and `terminal` read lines. Only `terminal` needs prompt_toolkit.
"""

from __future__ import annotations

import sys
from typing import Any

import click
import platformdirs
from rich.console import Console

from outrider.cli.opening import load_model, model_argument, open_model
from outrider.cli.options import generation_options, load_options, read_options


@click.command()
@model_argument
@click.option("--system", metavar="TEXT", help="System message before the conversation.")
@click.option("--resume", metavar="FILE", help="Continue a conversation that /save wrote.")
@click.option("--no-history", is_flag=True, help="Do not save your input for later sessions.")
@load_options
@generation_options
def chat(
    bundle: str, draft: str | None, system: str | None, resume: str | None, no_history: bool, **options: Any
) -> None:
    """Chat with MODEL in the terminal.

    MODEL is a bundle, a .gguf file, a checkpoint folder or a hub id.

    Lines that begin with a slash are commands: /help shows them. Without a terminal, each line of standard input is a
    message or a command, and the answers are printed without formatting.
    """
    from outrider.cli.chat.session import Session

    if system is not None and resume is not None:
        raise click.UsageError("--resume has the conversation's own system message: leave out --system.")
    config = read_options(options)
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    with load_model(open_model(bundle, draft, quiet=False, config=config, main_first=True), config) as engine:
        session = Session(engine, system)
        if resume is not None:
            session.load(resume)
        console = Console(markup=False, emoji=False, highlight=False)
        if is_terminal:
            from outrider.cli.chat.terminal import run_terminal

            folder = platformdirs.user_state_path("outrider", appauthor=False)
            run_terminal(session, console, None if no_history else folder / "chat-history")
        else:
            from outrider.cli.chat.answering import run_pipe

            run_pipe(session, sys.stdin, console, Console(stderr=True, markup=False, emoji=False, highlight=False))
