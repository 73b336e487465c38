"""Shows where the host's time of a round goes, with toy models whose calls take next to none.

    PYTHONPATH=runtime python bench/scripts/round_profile.py [DRAFTER]

Answers run one after the other, without drafts or with this drafter. Prints the host's milliseconds of a round; then,
of a second run, the functions that take most of it: how often a round calls each, its microseconds, and those without
the functions that it calls. There the profiler about doubles the time. For an idle machine, so it is run by hand.
"""

import cProfile
import pstats
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import outrider
from outrider.decoding.worker import Worker
from outrider.testing import ToyTokenizer, save_toy_bundle

NUM_TOKENS, NUM_ANSWERS, NUM_SHOWN = 200, 20, 40


def answer(engine: outrider.Engine, drafter: str | None) -> tuple[int, float]:
    """The rounds of the answers, and the host's seconds in them."""
    rounds, seconds = 0, 0.0
    for _ in range(NUM_ANSWERS):
        stats = engine.generate([1, 2, 3], max_new_tokens=NUM_TOKENS, ignore_eos=True, drafter=drafter).stats
        rounds, seconds = rounds + stats.num_rounds, seconds + stats.host_seconds
    return rounds, seconds


def main() -> None:
    """Measure."""
    drafter, profile, round_of = sys.argv[1] if len(sys.argv) > 1 else None, cProfile.Profile(), Worker._round

    def profiled(*args: Any) -> None:
        profile.runcall(round_of, *args)

    with tempfile.TemporaryDirectory() as folder:
        config = outrider.Config().replace(cache_size=0.005, num_threads=1)
        engine = outrider.Engine(save_toy_bundle(Path(folder)), config, tokenizer=ToyTokenizer())
        answer(engine, drafter)  # compiles kernels
        rounds, seconds = answer(engine, drafter)
        print(f"{1e3 * seconds / rounds:.3f} ms of the host in a round")
        with patch.object(Worker, "_round", profiled):
            rounds, _ = answer(engine, drafter)
        engine.close()
    found: dict[Any, Any] = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    for (file, _, name), (_, calls, own, whole, _) in sorted(found.items(), key=lambda each: -each[1][3])[:NUM_SHOWN]:
        place = f"{Path(file).stem}.{name}"
        print(f"{place:34.34} {calls / rounds:6.2f} calls {1e6 * whole / rounds:8.1f} µs, {1e6 * own / rounds:8.1f}")


if __name__ == "__main__":
    main()
