"""Measures what pages of 2 MB change: the time of a token in plain decoding, with weights in them and in pages of 4 KB.

    python bench/scripts/large_pages.py BUNDLE [REPEATS]

The bundle is loaded twice, and only the first engine's weights are moved; both answer in turns. Prints the medians and
the median of the paired ratios. On Linux, and an idle machine, so it is run by hand.
"""

import statistics
import sys

import outrider
from outrider.decoding import large_pages

NUM_TOKENS = 24
PROMPT = "Write a function that sorts a list of numbers."


def seconds_per_token(engine: outrider.Engine) -> float:
    """Of decoding, after the first token."""
    result = engine.generate(PROMPT, max_new_tokens=NUM_TOKENS, ignore_eos=True)
    return result.stats.decode_seconds / (NUM_TOKENS - 1)


def main() -> None:
    """Measure."""
    bundle, repeats = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 12
    config = outrider.Config().replace(drafter=None)
    large = outrider.load(bundle, config=config)
    large.settle()
    setattr(large_pages, "_LEAST_WEIGHTS", sys.maxsize)  # noqa: B010
    small = outrider.load(bundle, config=config)
    seconds: dict[str, list[float]] = {"2 MB": [], "4 KB": []}
    for turn in range(repeats + 1):
        for name, engine in (("2 MB", large), ("4 KB", small))[:: 1 if turn % 2 else -1]:
            taken = seconds_per_token(engine)
            if turn:  # the first one compiles kernels
                seconds[name].append(taken)
    ratios = [few / many for few, many in zip(seconds["4 KB"], seconds["2 MB"], strict=True)]
    print(f"{bundle}: {repeats} answers each; {large.setting['main_device']}")
    for name, each in seconds.items():
        print(f"{name}: {1000 * statistics.median(each):.2f} ms a token")
    print(f"2 MB is {statistics.median(ratios):.3f} times as fast ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
