"""Runs modes against one another and condenses what they took."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as Seq

    from outrider.bench.modes import Mode, Run
    from outrider.bench.prompts import Prompt
    from outrider.config import GenerationConfig
    from outrider.engine import Engine


@dataclass(frozen=True, slots=True)
class Measurement:
    """All runs of one prompt: for each mode, one per repeat."""

    prompt: Prompt
    num_prompt_tokens: int
    runs: dict[str, list[Run]] = field(default_factory=dict)

    def median(self, mode: str, figure: Callable[[Run], float]) -> float:
        """A figure's median over the repeats."""
        return statistics.median(figure(run) for run in self.runs[mode])

    def identical(self, mode: str, reference: str) -> bool:
        """Whether every run of a mode gave the tokens of the reference's first run."""
        return all(run.token_ids == self.runs[reference][0].token_ids for run in self.runs[mode])


def measure(
    engine: Engine,
    modes: Seq[Mode],
    prompts: Seq[Prompt],
    config: GenerationConfig,
    repeats: int = 1,
    advance: Callable[[], None] = lambda: None,
) -> list[Measurement]:
    """Run every prompt in every mode, interleaved, so that a machine that slows down slows all of them.

    The first prompt is run once more in advance, uncounted: first calls of a shape compile kernels. `advance` is
    called after each run.
    """
    encoded = [engine.tokenizer.encode_prompt(prompt.text) for prompt in prompts]
    for mode in modes:
        mode.run(encoded[0], config)
    measurements = []
    for number, (prompt, token_ids) in enumerate(zip(prompts, encoded, strict=True)):
        measurement = Measurement(prompt, len(token_ids), {mode.name: [] for mode in modes})
        for repeat in range(repeats):
            # Another mode begins each time: what runs behind a long answer may meet a warmer machine.
            shift = (number + repeat) % len(modes)
            for mode in (*modes[shift:], *modes[:shift]):
                measurement.runs[mode.name].append(mode.run(token_ids, config))
                advance()
        measurements.append(measurement)
    return measurements


def summarize(measurements: Seq[Measurement], modes: Seq[str], reference: str) -> list[dict[str, Any]]:
    """For each mode and category, and for "all", speed against the reference mode.

    speed_up: geometric mean over prompts of decoded tokens per second against the reference's; end_to_end: the same
    for whole requests per token, reading the prompt included; slowest: the worst prompt's speed-up; identical: prompts
    with the reference's tokens. Rates are medians over prompts.
    """
    rows = []
    categories = list(dict.fromkeys(m.prompt.category for m in measurements))
    for mode in modes:
        for category in [*categories, "all"] if len(categories) > 1 else ["all"]:
            chosen = [m for m in measurements if category in ("all", m.prompt.category)]
            ratios = [_ratio(m, mode, reference, lambda run: run.tokens_per_second) for m in chosen]
            rates = [m.median(mode, lambda run: run.tokens_per_second) for m in chosen]
            whole = [_ratio(m, mode, reference, lambda run: len(run.token_ids) / run.total_seconds) for m in chosen]
            row: dict[str, Any] = {
                "mode": mode,
                "category": category,
                "num_prompts": len(chosen),
                "tokens_per_second": statistics.median(rates),
                "speed_up": statistics.geometric_mean(ratios),
                "slowest": min(ratios),
                "end_to_end": statistics.geometric_mean(whole),
                "identical": sum(m.identical(mode, reference) for m in chosen),
            }
            rows.append(row | _acceptance([run for m in chosen for run in m.runs[mode]]))
    return rows


def _ratio(measurement: Measurement, mode: str, reference: str, figure: Callable[[Run], float]) -> float:
    slow = measurement.median(reference, figure)
    fast = measurement.median(mode, figure)
    return fast / slow if slow > 0 and fast > 0 else 1.0  # a single token has no decoding speed


def _acceptance(runs: Seq[Run]) -> dict[str, float]:
    """Acceptance, and shares of decoding time, over all runs of a mode; nothing for modes that do not tell."""
    if not all(run.stats for run in runs):
        return {}
    total = {name: sum(run.stats[name] for run in runs) for name in _COUNTS}
    seconds = total["decode_seconds"] or 1.0
    tokens = total["num_generated_tokens"] - len(runs)
    return {
        "acceptance_rate": total["num_accepted_tokens"] / (total["num_draft_tokens"] or 1),
        "tokens_per_round": tokens / total["num_rounds"] if total["num_rounds"] else 1.0,
        "draft_share": total["draft_seconds"] / seconds,
        "check_share": total["check_seconds"] / seconds,
        "host_share": total["host_seconds"] / seconds,
    }


_COUNTS = (
    "num_generated_tokens",
    "num_rounds",
    "num_draft_tokens",
    "num_accepted_tokens",
    "decode_seconds",
    "draft_seconds",
    "check_seconds",
    "host_seconds",
)
