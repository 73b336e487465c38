"""Counts what conversations with a model with states read again: from memory, and from files after a restart.

    python bench/scripts/hybrid_prefixes.py BUNDLE [--system 2000] [--conversations 10] [--turns 10]

Conversations begin with the same system prompt, this project's documentation. What a turn has to read is what its
prompt has after the last turn's answer, and of a conversation's first turn what it has after the system prompt. The
rest is read again if it is not in the cache. After the turns of each conversation, its last one is answered once more,
a fork goes back a turn and asks something else, an answer is cancelled in the middle, and the next turn follows it. In
"from files", an engine is loaded again for each conversation; its next turn is asked, answered once more, and asked in
a fork that went back a turn. Times are to the first token, on a machine that should be idle.
"""

import argparse
import statistics
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import outrider
from outrider.engine.chat import Chat

DOCS = Path(__file__).parents[2] / "docs"
ANSWER: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True}


@dataclass
class Row:
    """A row of the table. Each list has a number for each turn."""

    prompts: list[int] = field(default_factory=list)
    read_again: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def add(self, stats: Any, num_known: int) -> None:
        """Count a turn. num_known: tokens of its prompt that were read before."""
        self.prompts.append(stats.num_prompt_tokens)
        self.read_again.append(max(num_known - stats.num_cached_tokens, 0))
        self.seconds.append(stats.time_to_first_token)

    def cells(self) -> list[str]:
        """The number of turns, the tokens of their prompts, those read again, the most of a turn, and milliseconds."""
        total = f"{sum(self.read_again):,}"
        milliseconds = f"{1e3 * statistics.median(self.seconds):.0f}"
        return [str(len(self.prompts)), f"{sum(self.prompts):,}", total, f"{max(self.read_again):,}", milliseconds]


def question(conversation: int, turn: int) -> str:
    """A turn's message, another one each time."""
    return f"Question {turn} of conversation {conversation}: what does this text say about {conversation * 17 + turn}?"


def ask(row: Row, chat: Chat, text: str, num_known: int = 0) -> None:
    """Ask, and count. num_known: of a first turn."""
    known = len(chat.turns[-1].token_ids) if chat.turns else num_known
    row.add(chat.send(text, **ANSWER).stats, known)


def ask_again(row: Row, chat: Chat) -> None:
    """Have the last turn answered once more: all of its prompt was read."""
    stats = chat.retry(**ANSWER).stats
    row.add(stats, stats.num_prompt_tokens - 1)


def ask_back(row: Row, chat: Chat, text: str) -> None:
    """Ask something else in a fork in place of the last two turns."""
    fork = chat.fork()
    fork.rewind(2)
    ask(row, fork, text)


def cancel(chat: Chat, text: str) -> None:
    """Ask, and cancel in the middle of the answer."""
    for number, _ in enumerate(chat.stream(text, **ANSWER)):
        if number == ANSWER["max_new_tokens"] // 2:
            chat.cancel()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("--system", type=int, default=2000, help="tokens of the system prompt")
    parser.add_argument("--conversations", type=int, default=10)
    parser.add_argument("--turns", type=int, default=10)
    given = parser.parse_args()
    names = ("not cached", "first turns", "first turns of later conversations", "later turns", "answered again",
             "forks a turn back", "turns after a cancelled answer", "from files, next turns",
             "from files, answered again", "from files, forks a turn back")  # fmt: skip
    rows = {name: Row() for name in names}
    with tempfile.TemporaryDirectory() as folder:

        def load(**options: Any) -> outrider.Engine:
            engine = outrider.load(given.bundle, **options)
            engine.generate("Hello", max_new_tokens=2)  # kernels are compiled
            return engine

        with load(enable_prefix_caching=False) as engine:
            text = "\n".join(path.read_text("utf-8") for path in sorted(DOCS.glob("*.md")))
            system = engine.tokenizer.decode(engine.tokenizer.encode(text)[: given.system])
            for number in range(2):
                ask(rows["not cached"], engine.chat(system), question(number, 0), given.system)
            setting = engine.setting["main_device"]
        chats: list[Chat] = []
        with load(prefix_store=folder) as engine:
            for number in range(given.conversations):
                chat = engine.chat(system)
                for turn in range(given.turns):
                    first = "first turns of later conversations" if number else "first turns"
                    ask(
                        rows["later turns" if turn else first],
                        chat,
                        question(number, turn),
                        given.system * bool(number),
                    )
                ask_again(rows["answered again"], chat)
                ask_back(rows["forks a turn back"], chat, question(number, 77))
                cancel(chat, question(number, 88))
                ask(rows["turns after a cancelled answer"], chat, question(number, given.turns))
                chats.append(chat)
            use = engine.cache["main"]
        for number, chat in enumerate(chats):
            with load(prefix_store=folder) as engine:
                again = Chat(engine, system, turns=chat.turns)
                ask(rows["from files, next turns"], again, question(number, given.turns + 1))
                ask_again(rows["from files, answered again"], again)
                ask_back(rows["from files, forks a turn back"], again, question(number, 99))
    print(
        f"{given.bundle}: {setting}; {use.bytes_per_row:,} bytes a row of states, {use.bytes_per_token:,.0f} a token;"
    )
    print(f"{use.num_published_rows:,} rows in memory, of {use.num_rows:,}; {use.num_evicted_rows:,} evicted\n")
    print("| | turns | tokens of their prompts | read again | most in a turn | first token, ms |")
    print("|---|---|---|---|---|---|")
    for name, row in rows.items():
        print(f"| {name} | {' | '.join(row.cells())} |")


if __name__ == "__main__":
    main()
