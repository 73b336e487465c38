"""What a command can go on with."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

from outrider.cli.chat.commands import COMMANDS, SWITCH
from outrider.config import GenerationConfig
from outrider.config.files import user_path
from outrider.config.option import options_of
from outrider.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from outrider.cli.chat.session import Session


class Completion(NamedTuple):
    """A text that can take the place of the last `length` characters."""

    text: str
    length: int
    help: str = ""


def completions(session: Session, line: str) -> Iterator[Completion]:
    """What the last word of a command can be. Nothing for messages."""
    if not line.startswith("/") or "\n" in line:
        return
    name, space, argument = line[1:].partition(" ")
    if not space:
        known = {each: command.help for each, command in COMMANDS.items()}
        yield from _of(f"/{name}", {f"/{each}": meaning for each, meaning in known.items()})
    elif name in ("save", "load"):
        yield from _paths(argument)
    elif name == "set":
        option, space, value = argument.partition(" ")
        if not space:
            yield from _of(option, {each.name: str(each.type) for each in dataclasses.fields(GenerationConfig)})
        else:
            yield from _of(value, dict.fromkeys(_values(session, option), ""))
    elif name in ("drafts", "plain"):
        yield from _of(argument, dict.fromkeys(SWITCH, ""))
    elif name in ("seed", "system"):
        yield from _of(argument, {"off": ""})


def _of(word: str, known: dict[str, str]) -> Iterator[Completion]:
    return (Completion(each, len(word), meaning) for each, meaning in known.items() if each.startswith(word))


def _values(session: Session, option: str) -> Iterable[str]:
    """Values of an option that has few."""
    if option == "drafter":
        return ("auto", "none", *session.engine.drafters, "default")
    described = options_of(GenerationConfig).get(option)
    if described is None:
        return ()
    words = ("true", "false") if described.values.kind is bool else described.values.choices
    return (*words, *(("auto",) if described.default == "auto" else ()), "default")


def _paths(begun: str) -> Iterator[Completion]:
    """Files and folders whose names begin so, without the hidden ones."""
    folder, name = begun[: begun.rfind("/") + 1], begun[begun.rfind("/") + 1 :]
    try:
        found = sorted(user_path(folder or ".").iterdir())
    except (OSError, OptionError):
        return
    for path in found:
        if path.name.startswith(name) and (name or not path.name.startswith(".")):
            yield Completion(path.name + ("/" if path.is_dir() else ""), len(name))
