"""Measures the server's time to the first byte, and the host's time a round, with a model that takes next to none.

    python bench/scripts/first_byte.py [--bundle BUNDLE] [--repeats 50] [--turns 5] [--against TREE]

A warm server answers streams of one connection, one after the other: chats with a prompt that is in the prefix cache,
of 1 and 64 tokens. Of each stream the time from the request to the first byte of the answer, to its end, and
between two tokens, which is a round without drafts: with a random model of two layers nearly all of it is the host's.
All answer with one letter again and again, so that each token is sent at once. `engine.stream` is measured the same
way, without the server.

--bundle: a random model is made if none is given. --against: another checkout of this repository. Both are then
measured by turns, each in a process of its own, and the differences are those of each turn. Prints medians in
milliseconds, with the least and the most, and one line of JSON. For an idle machine, so it is run by hand.
"""

import argparse
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NUM_TOKENS = 64
ANSWERS = {
    "chat": ("/v1/chat/completions", {}),
    "responses": ("/v1/responses", {"input": "Why is the sky blue?"}),
    "messages": ("/v1/messages", {}),
}


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bundle", type=Path)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(given.bundle, given.repeats)))
        return
    trees = {"this": ROOT} | ({"against": given.against.resolve()} if given.against else {})
    found: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
    with tempfile.TemporaryDirectory() as folder:
        bundle = given.bundle or make_bundle(Path(folder))
        for _ in range(given.turns):
            for name, tree in trees.items():
                found[name].append(run(tree, bundle, given.repeats))
    medians = {name: show(name, turns) for name, turns in found.items()}
    if given.against:
        pairs = zip(found["this"], found["against"], strict=True)
        show("difference", [{what: own[what] - other[what] for what in own} for own, other in pairs])
    print(json.dumps({"bundle": given.bundle and given.bundle.name, "repeats": given.repeats, **medians}))


def show(name: str, turns: list[dict[str, float]]) -> dict[str, float]:
    """Print the median of the turns, and the least and the most."""
    medians = {}
    for what in turns[0]:
        values = sorted(turn[what] for turn in turns)
        medians[what] = round(statistics.median(values), 3)
        print(f"{name:10} {what:32} {medians[what]:9.3f} ms  {values[0]:9.3f} to {values[-1]:9.3f}")
    return medians


def run(tree: Path, bundle: Path, repeats: int) -> dict[str, float]:
    """One measurement with the code of a checkout, in a process of its own."""
    parts = [str(tree / part) for part in ("runtime", "export", "bench", "tests/helpers")]
    command = [
        sys.executable,
        str(Path(__file__).resolve()),
        "--one",
        "--bundle",
        str(bundle),
        "--repeats",
        str(repeats),
    ]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": os.pathsep.join(parts)}, stdout=subprocess.PIPE, text=True, check=True
    )
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


def make_bundle(folder: Path) -> Path:
    """A random model of two layers, with a tokenizer and a chat template."""
    sys.path[:0] = [str(ROOT / part) for part in ("runtime", "export", "tests/helpers")]
    from outrider_export import export_bundle
    from tiny import write_checkpoint, write_gguf

    write_checkpoint(folder / "checkpoint")
    write_gguf(folder / "tiny.gguf", folder / "checkpoint", "Q4_1", "qwen2", {})
    return export_bundle(folder / "tiny.gguf", output=folder / "bundle", weights="keep").folder


def measure(bundle: Path, repeats: int) -> dict[str, float]:
    """Medians in milliseconds, by what was measured."""
    import outrider
    from serving import CONFIG, MESSAGES, Live

    letter = json.loads((bundle / "tokenizer" / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]["a"]
    live = Live.of({"model": bundle}, config=CONFIG.replace(drafter=None, ignore_eos=True, logit_bias={letter: 100.0}))
    live.start()
    connection = http.client.HTTPConnection("127.0.0.1", live.port)
    found = dict[str, float]()
    for name, (path, fields) in ANSWERS.items():
        asked: dict[str, Any] = {"model": "model", "stream": True, "temperature": 0, **fields}
        asked |= {} if fields else {"messages": MESSAGES}
        limit = "max_output_tokens" if fields else "max_tokens"
        streams = [streamed(connection, path, {**asked, limit: NUM_TOKENS}) for _ in range(repeats + 2)][2:]
        found |= {f"{name}, first byte": median(first for first, _ in streams)}
        found |= {f"{name}, all of {NUM_TOKENS} tokens": median(last for _, last in streams)}
    engine: outrider.Engine = live.engine("model")
    rounds, firsts = list[float](), list[float]()
    for _ in range(repeats):
        times = [time.perf_counter()]
        times += [time.perf_counter() for _ in engine.stream(MESSAGES, max_new_tokens=NUM_TOKENS, ignore_eos=True)]
        firsts.append(times[1] - times[0])
        rounds.append((times[-1] - times[1]) / (NUM_TOKENS - 1))
    connection.close()
    live.stop()
    return found | {"engine.stream, first piece": median(firsts), "engine.stream, a round": median(rounds)}


def streamed(connection: http.client.HTTPConnection, path: str, body: dict[str, Any]) -> tuple[float, float]:
    """Seconds to the first byte of a stream, and to its end."""
    began = time.perf_counter()
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    first = response.read(1)
    to_first = time.perf_counter() - began
    rest = response.read()
    if response.status != 200 or not first:
        raise SystemExit(f"{path} answered with status {response.status}: {(first + rest)[:300]!r}")
    return to_first, time.perf_counter() - began


def median(seconds: Iterable[float]) -> float:
    """In milliseconds."""
    return 1e3 * statistics.median(seconds)


if __name__ == "__main__":
    main()
