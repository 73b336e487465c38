"""Measures what a prefix store saves: the first token after a long document, cold, from disk and from memory.

    python bench/scripts/prefix_store_speed.py BUNDLE [--tokens 4000] [--repeats 3]

The document is this project's documentation. Each time another question follows. "disk" is an engine that was loaded
again, with the files in the system's memory, and with the files read from the disk where the system can be told so.
"""

import argparse
import itertools
import os
import statistics
import tempfile
from pathlib import Path

import outrider
from outrider.models.kv.chunk_files import files_in

DOCS = Path(__file__).parents[2] / "docs"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("bundle")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    questions = (f"\n\nQuestion {i}: what is this text about?" for i in itertools.count())
    cold, disk, dropped, memory = ([0.0][:0] for _ in range(4))  # seconds
    with tempfile.TemporaryDirectory() as folder:

        def ask(engine: outrider.Engine) -> float:
            text = "\n".join(path.read_text("utf-8") for path in sorted(DOCS.glob("*.md")))
            document = engine.tokenizer.encode(text)[: given.tokens]
            result = engine.generate([*document, *engine.tokenizer.encode(next(questions))], max_new_tokens=8)
            engine.settle()
            return result.stats.time_to_first_token

        def load() -> outrider.Engine:
            engine = outrider.load(given.bundle, prefix_store=folder)
            engine.generate("Hello", max_new_tokens=8)  # kernels are compiled
            return engine

        for _ in range(given.repeats):
            with outrider.load(given.bundle) as engine:
                engine.generate("Hello", max_new_tokens=8)
                cold.append(ask(engine))
        with load() as engine:
            ask(engine)
            memory.extend(ask(engine) for _ in range(given.repeats))
            setting = engine.setting["main_device"]
        for where in (disk, dropped):
            for _ in range(given.repeats):
                if where is dropped:
                    drop(Path(folder))
                with load() as engine:
                    where.append(ask(engine))
        size = sum(file.size for file in files_in(Path(folder)))
    print(f"{given.bundle}: {setting}; {given.tokens} tokens, {size / 1e6:.0f} MB in files")
    print("| cold, s | from the disk, s | its files in memory, s | from memory, s |")
    print("|---|---|---|---|")
    print("|", " | ".join(f"{statistics.median(each):.2f}" for each in (cold, dropped, disk, memory)), "|")


def drop(folder: Path) -> None:
    """Let the system forget the files' content."""
    if not hasattr(os, "posix_fadvise"):
        return
    for file in files_in(folder):
        with file.path.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()
