"""Measures what calls of models with states cost: by rows, with the states after each of them stored, and without.

    python bench/scripts/hybrid_costs.py FOLDER TOKENIZER [MODEL …]

The models are those of `family_sizes.py`, with random weights: their calls cost what those of the real ones do. Each is
exported in int8 into FOLDER, where it stays. Rows with stores and without are called in turns, after 200 tokens; each
figure is the least of many. The memory that calls add is compared with what the cache counts of it. For an idle
machine, so it is run by hand.
"""

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from family_sizes import OUTRIDER, SHAPES, write_checkpoint  # type: ignore[import-not-found]

import outrider
from outrider.models.kv import LAST, SequenceRows
from outrider.types import Chunk

ROWS = (1, 2, 3, 4, 8, 16)
PAST, REPEATS = 200, 15
# As loading chooses for trained models. Those with random weights may be too far from f32 in any groups.
PROPERTIES = {"DYNAMIC_QUANTIZATION_GROUP_SIZE": 128}
NUM_SLOTS = 3  # whose memory is measured, after a first one
CACHE_SIZE = 4  # GB, of which most are never written
MODELS = ("LFM2.5 1.2B", "Qwen3.5 0.8B", "Qwen3.5 2B", "Granite 4.0-H 1B")


def export(folder: Path, tokenizer: Path, name: str) -> Path:
    """The bundle of a model, which is made if it is not there."""
    made = folder / name
    if not made.exists():
        checkpoint = folder / f"{name}-checkpoint"
        shutil.rmtree(checkpoint, ignore_errors=True)
        write_checkpoint(checkpoint, tokenizer, SHAPES[name])
        subprocess.run([*OUTRIDER, "export", str(checkpoint), "-o", str(made)], check=True, stdout=subprocess.DEVNULL)
        shutil.rmtree(checkpoint)
    return made


@contextmanager
def without_stores() -> Iterator[None]:
    """Calls store the last state alone."""
    with patch.object(SequenceRows, "interval_of", lambda *_, **__: (LAST, 0)):
        yield


def measure(engine: outrider.Engine) -> dict[bool, dict[int, float]]:
    """Seconds of calls: whether states are stored, by rows."""
    backend: Any = engine.main
    slot = backend.open(PAST + max(ROWS) + 1)
    backend.submit([Chunk(slot, [3] * PAST, 1)]).wait()
    found: dict[bool, dict[int, float]] = {stores: dict.fromkeys(ROWS, 1e9) for stores in (True, False)}

    def call(rows: int) -> float:
        began = time.perf_counter()
        backend.submit([Chunk(slot, [5] * rows, rows, generated=True)]).wait()
        seconds = time.perf_counter() - began
        slot.trim(PAST)
        return seconds

    for rows in ROWS:
        for _ in range(REPEATS):
            found[True][rows] = min(found[True][rows], call(rows))
            with without_stores():
                found[False][rows] = min(found[False][rows], call(rows))
    slot.close()
    return found


def memory(engine: outrider.Engine) -> tuple[float, float]:
    """Bytes that sequences add to the process, with eight stored rows each, and those that the cache counts of them."""
    backend: Any = engine.main
    backend.allocate(backend.max_tokens)  # none of it was written
    slots, added = [], list[tuple[int, float]]()
    for _ in range(NUM_SLOTS + 1):
        slots.append(backend.open(PAST + 8))
        backend.submit([Chunk(slots[-1], [3] * PAST, 1)]).wait()
        backend.submit([Chunk(slots[-1], [5] * 8, 8, generated=True)]).wait()
        use = backend.cache
        counted = use.num_used_tokens * use.bytes_per_token + use.num_used_rows * use.bytes_per_row
        fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text("utf-8").splitlines())
        added.append((1024 * int(fields["RssAnon"].split()[0]), counted))
    for slot in slots:
        slot.close()
    return added[-1][0] - added[0][0], added[-1][1] - added[0][1]


def main(folder: str, tokenizer: str, *names: str) -> None:
    """Print the table."""
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    print(
        f"| int8, rows | a call of 1 row | {' | '.join(map(str, ROWS[1:]))} "
        "| bytes of a row of states | of a token's keys and values | memory: measured / counted |"
    )
    print("|---" * (len(ROWS) + 4) + "|")
    for name in names or MODELS:
        bundle = export(place, Path(tokenizer), name)
        with outrider.load(bundle, drafter=None, cache_size=CACHE_SIZE, properties=PROPERTIES) as engine:
            use, (measured, counted) = engine.cache["main"], memory(engine)
            found, setting = measure(engine), engine.setting["main_device"]
            one = found[False][1]
            cells = [name, f"{1e3 * one:.1f} ms ({found[True][1] / one:.2f})"]
            cells += [f"{found[True][n] / one:.2f} ({found[True][n] / found[False][n]:.2f})" for n in ROWS[1:]]
            cells += [f"{use.bytes_per_row:,}", f"{use.bytes_per_token:,.0f}"]
            cells += [f"{measured / 1e6:.0f} / {counted / 1e6:.0f} MB"]
            print(f"| {' | '.join(cells)} |", flush=True)
            print(f"{name}: {setting}", file=sys.stderr)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
