"""The chat in a terminal: editing, history and completion, by prompt_toolkit."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.filters import Condition
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from rich.console import Console

from outrider.bundle.folder import Bundle
from outrider.cli.chat.answering import do
from outrider.cli.chat.commands import COMMANDS, SWITCH
from outrider.cli.chat.keyboard import on_interrupt
from outrider.cli.chat.session import Session
from outrider.config import GenerationConfig
from outrider.config.option import options_of
from outrider.errors import OutriderError

_CACHED = re.compile(r"-[0-9a-f]{12}$")  # the end of a cached bundle's name


def run_terminal(session: Session, console: Console, history: Path | None = None) -> None:
    """Read lines and do what they say, until /quit, Ctrl-D, or Ctrl-C twice at an empty prompt.

    history: a file for what is typed; see `open_history`.
    """
    prompts: PromptSession[str] = PromptSession(
        history=open_history(history),
        completer=Commands(session),
        complete_while_typing=Condition(lambda: get_app().current_buffer.text.startswith("/")),
        key_bindings=_bindings(),
        multiline=True,
        prompt_continuation="  ",
        bottom_toolbar=lambda: status(session),
    )
    console.print(title_of(session.engine.bundle), style="bold")
    console.print("/help lists the commands. Ctrl-D quits.", style="dim")
    with on_interrupt(lambda *_: None):  # one that comes between an answer and the prompt
        while (line := _read(prompts, session, console)) is not None:
            try:
                if line.strip() and not do(session, line, console, console, ends_answers=True):
                    return
            except OutriderError as error:
                console.print(" ".join(str(error).split()), style="red")
            console.print()


def _read(prompts: PromptSession[str], session: Session, console: Console) -> str | None:
    """What is typed next. None: nothing any more."""
    is_second = False  # whether Ctrl-C now quits
    while True:
        unsent, session.unsent = session.unsent, ""
        try:
            return prompts.prompt("› ", default=unsent)
        except EOFError:
            return None
        except KeyboardInterrupt:
            is_empty = not prompts.default_buffer.text
            if is_empty and is_second:
                return None
            if is_empty:
                console.print("Press Ctrl-C again to quit.", style="dim")
            is_second = is_empty


def status(session: Session) -> str:
    """One line: what is drafted, how tokens are chosen, what the conversation has, and the last answer's speed."""
    config, tokens = session.config, len(session.chat.token_ids)
    parts = [
        f"drafter {config.drafter or 'none'}",
        f"temperature {config.temperature:g}" if config.temperature else "greedy",
        f"{tokens:,} of {session.engine.max_tokens:,} tokens",
    ]
    if config.temperature and config.seed is not None:
        parts.append(f"seed {config.seed}")
    if session.last is not None:
        parts.append(f"{session.last.stats.tokens_per_second:.1f} tokens/s")
    return " | ".join(parts)


class Commands(Completer):
    """What the last word of a command can be. Nothing for messages."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
        """What the text before the cursor can go on with."""
        line = document.text_before_cursor
        if not line.startswith("/") or "\n" in line:
            return
        name, space, argument = line[1:].partition(" ")
        if not space:
            yield from _of(line, {f"/{each}": command.help for each, command in COMMANDS.items()})
        elif name in ("save", "load"):
            yield from PathCompleter(expanduser=True).get_completions(Document(argument), complete_event)
        elif name == "set":
            option, space, value = argument.partition(" ")
            if not space:
                yield from _of(option, {each.name: str(each.type) for each in dataclasses.fields(GenerationConfig)})
            else:
                yield from _of(value, dict.fromkeys(_values(self._session, option), ""))
        elif name in ("drafts", "plain"):
            yield from _of(argument, dict.fromkeys(SWITCH, ""))
        elif name in ("seed", "system"):
            yield from _of(argument, {"off": ""})


def _of(word: str, known: dict[str, str]) -> Iterator[Completion]:
    return (Completion(each, -len(word), display_meta=says) for each, says in known.items() if each.startswith(word))


def _values(session: Session, option: str) -> Iterable[str]:
    """Values of an option that has few."""
    if option == "drafter":
        return ("auto", "none", *session.engine.drafters, "default")
    described = options_of(GenerationConfig).get(option)
    if described is None:
        return ()
    words = ("true", "false") if described.values.kind is bool else described.values.choices
    return (*words, *(("auto",) if described.default == "auto" else ()), "default")


def _bindings() -> KeyBindings:
    bindings = KeyBindings()

    @bindings.add("enter")
    def _enter(event: KeyPressEvent) -> None:
        """Take the completion that was chosen, go on in a new line after a backslash, or send."""
        buffer = event.current_buffer
        if buffer.complete_state is not None and buffer.complete_state.current_completion is not None:
            buffer.complete_state = None
        elif buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    return bindings


class _History(FileHistory):
    """A file that takes what is typed as long as it can be written."""

    def store_string(self, string: str) -> None:
        with suppress(OSError):  # as on a full disk; it is in memory, too
            super().store_string(string)


def open_history(path: Path | None) -> History:
    """What was typed, in a file that only the user can read. None, or one that cannot be written: in memory."""
    if path is not None:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            path.open("ab").close()
            return _History(str(path))
    return InMemoryHistory()


def title_of(bundle: Bundle) -> str:
    """What a conversation's model is called: its bundle's name, or that of what a cached bundle was made of."""
    name = bundle.folder.resolve().name
    return bundle.manifest.main.source.id if _CACHED.search(name) else name
