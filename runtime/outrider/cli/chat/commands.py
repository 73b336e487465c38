"""What can be typed besides messages: /help and the like."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Generator
from dataclasses import dataclass, fields

from rich.table import Table

from outrider.cli.chat.session import Session
from outrider.cli.chat.sources import LOOKS, drafters_of
from outrider.cli.console import table
from outrider.config.files import user_path
from outrider.decoding.results import Result, TextChunk
from outrider.errors import OptionError, RequestError, nearest
from outrider.system.files import shown

SWITCH = {"on": True, "off": False}


@dataclass(frozen=True)
class Reply:
    """What a line leads to.

    note: a sentence about what was done. shown: a table that was asked for. chunks: an answer, to be shown. ends:
    whether the program ends.
    """

    note: str = ""
    shown: Table | None = None
    chunks: Generator[TextChunk, None, None] | None = None
    ends: bool = False


@dataclass(frozen=True)
class Command:
    """A command. argument: as in its help; in brackets if it can be left out, empty if it takes none."""

    argument: str
    help: str
    run: Callable[[Session, str], Reply]


def reply_to(session: Session, line: str) -> Reply:
    """What a line leads to: a command if it begins with a slash, otherwise a message.

    Raises:
        OutriderError: for an unknown command or a bad argument. The conversation is as before.
    """
    if not line.startswith("/"):
        return Reply(chunks=session.send(line))
    name, _, argument = line[1:].strip().partition(" ")
    command = COMMANDS.get(name)
    if command is None:
        options = {f"set {option.name}": option.name for option in fields(session.config)}
        alike = difflib.get_close_matches(name, [*COMMANDS, *options.values()], n=1)
        known = (
            nearest(f"set {alike[0]}", options) if alike and alike[0] in options.values() else nearest(name, COMMANDS)
        )
        raise OptionError(
            f"There is no command /{shown(name)}. {known} To send a line with a slash, put a space before it."
        )
    argument = argument.strip()
    if argument and not command.argument:
        raise OptionError(f"/{name} takes no argument, and got '{shown(argument)}'. Leave it out.")
    if not argument and command.argument and not command.argument.startswith("["):
        raise OptionError(f"/{name} needs an argument: /{name} {command.argument}.")
    return command.run(session, argument)


def _help(_session: Session, _argument: str) -> Reply:
    made = table("command", "", text=1)
    for name, command in COMMANDS.items():
        made.add_row(f"/{name} {command.argument}", command.help)
    made.add_row("Alt-Enter, or \\ at the end", "Begin a new line.")
    made.add_row("Ctrl-C", "End the answer.")
    return Reply(shown=made)


def _stats(session: Session, _argument: str) -> Reply:
    result = session.last
    if result is None:
        raise RequestError("There are no figures yet. Send a message first.")
    stats = result.stats
    accepted = f"{stats.num_accepted_tokens} of {stats.num_draft_tokens} draft tokens"
    drafters = drafters_of(result.tokens)
    rows = {
        "tokens": f"{stats.num_generated_tokens}, ended by {result.finish_reason}",
        "tokens per second": f"{stats.tokens_per_second:.1f}",
        "tokens per round": f"{stats.tokens_per_round:.2f}",
        "accepted": f"{accepted}, {stats.acceptance_rate:.0%}" if stats.num_draft_tokens else "nothing was drafted",
        "drafter": ", ".join(f"{name}, {count} accepted" for name, count in drafters.items()) or "none",
        "time to first token": f"{stats.time_to_first_token * 1e3:.0f} ms",
        "cached tokens": f"{stats.num_cached_tokens} of {stats.num_prompt_tokens} prompt tokens",
        "seed": "none, as decoding is greedy" if result.seed is None else str(result.seed),
        "text": _promise(result.lossless, result.exact),
    }
    made = table("last answer", "", text=1)
    for label, value in rows.items():
        made.add_row(label, value)
    return Reply(shown=made)


def _promise(lossless: bool, exact: bool) -> str:
    if not lossless:
        return "LOSSY: not the main model's distribution"
    return "the same with any drafter or none" if exact else "the main model's distribution"


def _drafts(session: Session, argument: str) -> Reply:
    session.drafts = _switched("drafts", argument, session.drafts)
    if not session.drafts:
        return Reply("Answers are shown as Markdown.")
    made = table("tokens", "", text=1)
    for source, look in LOOKS.items():
        made.add_row(f"{look.mark} {source}", look.meaning, style=look.style)
    return Reply("Answers are shown unformatted, with the source of each token.", made)


def _plain(session: Session, argument: str) -> Reply:
    session.plain = _switched("plain", argument, session.plain)
    if session.plain:
        return Reply("Drafting is off. /retry answers again without drafts, and /stats shows the speed.")
    return Reply(f"Drafting is on again, with drafter {session.config.drafter or 'none'}.")


def _switched(name: str, argument: str, now: bool) -> bool:
    if argument and argument not in SWITCH:
        raise OptionError(f"/{name} {shown(argument)} is neither on nor off. {nearest(argument, SWITCH)}")
    return SWITCH.get(argument, not now)


def _seed(session: Session, argument: str) -> Reply:
    session.set("seed", argument)
    if session.config.seed is None:
        return Reply("Each answer now has a new seed, which /stats shows.")
    if not session.config.temperature:
        return Reply("The seed has no effect at temperature 0. Set one above 0: /set temperature 0.7")
    return Reply(f"Seed {session.config.seed} now gives the same answers to the same messages, with any drafter.")


def _set(session: Session, argument: str) -> Reply:
    name, _, value = argument.partition(" ")
    if not argument:
        made = table("option", "", text=1)
        for key, each in session.options.items():
            made.add_row(key, repr(each))
        return Reply("" if session.options else "No option has been set. To set one: /set temperature 0.7", made)
    if value:
        session.set(name, value.strip())
    else:
        session.config.replace(**{name: getattr(session.config, name, None)})  # fails if there is none
    return Reply(f"{name}={getattr(session.config, name)!r}")


def _rewind(session: Session, argument: str) -> Reply:
    if argument and not argument.isdecimal():
        raise OptionError(f"/rewind {shown(argument)} is not a number of turns. Type one, as in /rewind 2")
    session.rewind(int(argument or 1))
    return Reply(f"{_turns(session)} left. /undo restores the conversation.")


def _undo(session: Session, _argument: str) -> Reply:
    session.undo()
    return Reply(f"As before: {_turns(session)}.")


def _new(session: Session, _argument: str) -> Reply:
    session.begin(session.system)
    return Reply("A new conversation. /undo restores the last one.")


def _system(session: Session, argument: str) -> Reply:
    if not argument:
        return Reply(f"The system message: {session.system}" if session.system else "There is no system message.")
    session.begin(None if argument == "off" else argument)
    how = "without a system message" if argument == "off" else "with this system message"
    return Reply(f"A new conversation, {how}. /undo restores the last one.")


def _save(session: Session, argument: str) -> Reply:
    path = user_path(argument)
    if path.exists():
        try:
            session.engine.load_chat(path, same_model=False)
        except OptionError as error:
            raise OptionError(
                f"{shown(path)} exists, and is not a conversation of this model. Name another file."
            ) from error
    session.chat.save(path)
    return Reply(f"Saved {_turns(session)} to {path}, unencrypted.")


def _load(session: Session, argument: str) -> Reply:
    session.load(argument)
    return Reply(f"Loaded {_turns(session)}. /undo restores the last conversation.")


def _turns(session: Session) -> str:
    count = len(session.chat.turns)
    return f"{count} turn" if count == 1 else f"{count} turns"


_SWITCH = "[on|off]"
COMMANDS: dict[str, Command] = {
    "help": Command("", "Show this.", _help),
    "stats": Command("", "Show the last answer's speed, drafts and cached tokens.", _stats),
    "drafts": Command(_SWITCH, "Show which tokens were accepted, recovered, bonus or plain.", _drafts),
    "plain": Command(_SWITCH, "Answer without drafts, to compare.", _plain),
    "continue": Command(
        "", "Go on with the last answer, which was cut or cancelled.", lambda session, _: Reply(chunks=session.go_on())
    ),
    "retry": Command("", "Answer the last message again.", lambda session, _: Reply(chunks=session.retry())),
    "rewind": Command("[N]", "Forget the last turn or N turns, and edit the message.", _rewind),
    "undo": Command("", "Undo the last change of the conversation.", _undo),
    "new": Command("", "Begin a new conversation.", _new),
    "system": Command(
        "[TEXT|off]", "Begin a new conversation with this system message; without TEXT, show it.", _system
    ),
    "seed": Command("N|off", "Sample with this seed: the same seed gives the same text.", _seed),
    "set": Command("[OPTION [VALUE]]", "Set a generation option, such as temperature 0.7; default resets it.", _set),
    "save": Command("FILE", "Save the conversation.", _save),
    "load": Command("FILE", "Continue a saved conversation.", _load),
    "quit": Command("", "Quit. Ctrl-D, or Ctrl-C twice, does the same.", lambda *_: Reply(ends=True)),
}


def remarks(session: Session, before: Result | None) -> str:
    """What there is to say about the last answer, which is not seen in its text. before: the answer it replaces."""
    result = session.last
    if result is None:
        return ""
    if result.finish_reason == "cancelled":
        return "Cancelled. The text so far stays in the conversation: /continue, /retry, or /undo."
    if before is not None and before.token_ids == result.token_ids:
        slow, fast = before.stats.tokens_per_second, result.stats.tokens_per_second
        return f"The same tokens, at {fast:.1f} per second; before, {slow:.1f}."
    if result.finish_reason == "length":
        count = len(result.token_ids)
        return f"Ended after {count} tokens: /continue goes on. For longer answers: /set max_new_tokens 2000"
    return ""
