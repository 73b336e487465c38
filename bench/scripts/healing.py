"""Measures what a first load on a busy machine costs later answers.

    python bench/scripts/healing.py BUNDLE [--prompts NAME|FILE] [--max-new-tokens 64] [--answers 24] [--busy 6]

Three processes load the bundle, each with an empty cache folder of its own. "clean" loads it while nothing else runs,
"busy" while as many other processes compute as --busy says, and "plain" does not draft. Then all answer the same
prompts in turns, greedily, on the idle machine. The table shows how fast `auto` decoded with the costs of the busy load
and with clean ones, where plain decoding is 1: in the first 500 tokens and after them, when costs should have healed.
Exits with 1 if a text differs from plain decoding's. For an idle machine, so it is run by hand.
"""

import argparse
import contextlib
import multiprocessing
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

FIRST_TOKENS = 500
IDLE: dict[str, str | None] = {"plain": None, "clean": "auto"}  # drafters of those that load while nothing else runs
Answer = tuple[list[int], float]  # tokens, and the seconds from the first to the last


def serve(bundle: str, cache: str, pipe: Connection, drafter: str | None) -> None:
    """Load the bundle with this cache folder, and answer prompts until there are no more."""
    os.environ["XDG_CACHE_HOME"] = cache
    import outrider  # which reads the environment

    with outrider.load(bundle) as engine:
        pipe.send(engine.setting["main_device"])
        while (task := pipe.recv()) is not None:
            prompt, num = task
            result = engine.generate(prompt, max_new_tokens=num, drafter=drafter, earlier_answers=False)
            pipe.send((result.token_ids, result.stats.decode_seconds))


def burn() -> None:
    """Compute for ever."""
    while True:
        sum(range(1_000_000))


@contextlib.contextmanager
def busy(num: int) -> Iterator[None]:
    """So many processes that compute."""
    processes = [multiprocessing.get_context("spawn").Process(target=burn, daemon=True) for _ in range(num)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


class Server:
    """An engine in a process of its own. setting: the main model's, which each first load chooses by its own times."""

    def __init__(self, bundle: str, cache: Path, drafter: str | None = "auto") -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        context.Process(target=serve, args=(bundle, str(cache), theirs, drafter), daemon=True).start()
        self.setting: str = self._pipe.recv()

    def answer(self, prompt: str, num: int) -> Answer:
        """Decode one answer."""
        self._pipe.send((prompt, num))
        answer: Answer = self._pipe.recv()
        return answer


def main() -> None:
    """Measure."""
    from outrider_bench.prompts import read_prompts

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle")
    parser.add_argument("--prompts", default="open")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--answers", type=int, default=24)
    parser.add_argument("--busy", type=int, default=6)
    given: Any = parser.parse_args()
    prompts = read_prompts(given.prompts)
    chosen = [prompts[i * len(prompts) // given.answers].text for i in range(given.answers)]
    with tempfile.TemporaryDirectory() as folder:
        servers = {name: Server(given.bundle, Path(folder, name), drafter) for name, drafter in IDLE.items()}
        with busy(given.busy):
            servers["busy"] = Server(given.bundle, Path(folder, "busy"))
        answers: dict[str, list[Answer]] = {name: [] for name in servers}
        for prompt in chosen:
            for name, server in servers.items():
                answers[name].append(server.answer(prompt, given.max_new_tokens))
    show(answers)
    plain = servers["plain"].setting
    for name, server in servers.items():
        if server.setting != plain:
            print(f"{name} has another setting, whose texts may differ: {server.setting} in place of {plain}")
        elif [ids for ids, _ in answers[name]] != [ids for ids, _ in answers["plain"]]:
            sys.exit(f"{name} has another text than plain decoding")


def show(answers: dict[str, list[Answer]]) -> None:
    """Print the table."""
    lengths = [len(ids) for ids, _ in answers["plain"]]
    border = next((i for i in range(len(lengths)) if sum(lengths[:i]) >= FIRST_TOKENS), len(lengths))
    print(f"| answers | tokens | clean costs | costs of a busy load | busy / clean |\n|{'---|' * 5}")
    for name, part in (("the first", slice(0, border)), ("later", slice(border, None))):
        plain, clean, loaded = ([seconds for _, seconds in answers[each][part]] for each in ("plain", "clean", "busy"))
        if plain:
            speeds = [
                statistics.geometric_mean(own / other for own, other in zip(plain, each, strict=True))
                for each in (clean, loaded)
            ]
            print(f"| {name} {len(plain)} | {sum(lengths[part])} | {speeds[0]:.2f} | {speeds[1]:.2f} | "
                  f"{speeds[1] / speeds[0]:.3f} |")  # fmt: skip


if __name__ == "__main__":
    main()
