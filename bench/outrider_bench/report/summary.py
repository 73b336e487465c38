"""Condenses runs into figures: for each prompt, each category, each mode.

Speed is decoded tokens per second after the first token. Ratios to the reference mode are paired: repeat by repeat, as
the two ran one after the other. Repeats give the median, prompts the geometric mean.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from outrider_bench.modes.mode import Run
from outrider_bench.prompts import Task
from outrider_bench.runs.measure import RunRecord

# For each prompt's number and mode, its runs by repeat.
Runs = dict[tuple[int, str], dict[int, "Run"]]


def collect(records: Iterable[RunRecord]) -> Runs:
    """The runs that did not fail."""
    runs: Runs = {}
    for record in records:
        if record.run:
            runs.setdefault((record.number, record.mode), {})[record.repeat] = record.run
    return runs


def summarize_prompts(runs: Runs, tasks: Sequence[Task], modes: Sequence[str], reference: str) -> list[dict[str, Any]]:
    """For each prompt and mode, medians over its repeats, their smallest and largest, and ratios to the reference.

    speed_up: of decoded tokens per second; end_to_end: of the seconds per token of whole requests, reading the prompt
    included; each with its 95% interval over the repeats, None for one repeat. reading: of the speed at which the
    prompt is read, up to the first token. identical: whether all runs gave the tokens of the reference's first.
    """
    rows = []
    for number, task in enumerate(tasks):
        others = runs.get((number, reference), {})
        for mode in modes:
            own = runs.get((number, mode))
            if not own:
                continue
            first = others[min(others)].token_ids if others else None
            rows.append(
                {
                    "id": task.prompt.id,
                    "category": task.prompt.category,
                    "mode": mode,
                    "num_prompt_tokens": len(task.token_ids),
                    "num_new_tokens": statistics.median(len(run.token_ids) for run in own.values()),
                    **compare(own, others),
                    "first_token_seconds": statistics.median(run.first_token_seconds for run in own.values()),
                    "reading": median_ratio(_ratios(own, others, _reading)),
                    "identical": all(run.token_ids == first for run in own.values()),
                }
            )
    return rows


def compare(own: Mapping[int, Any], others: Mapping[int, Any]) -> dict[str, Any]:
    """A mode's figures over its repeats, and their ratios to the reference's. Of a `Run` or a `MeasuredLoad` each."""
    rate, rates = median_and_range([each.tokens_per_second for each in own.values()])
    seconds, spread = median_and_range([each.total_seconds for each in own.values()])
    decode, whole = _ratios(own, others, _decoding), _ratios(own, others, _whole)
    return {
        "num_repeats": len(own),
        "tokens_per_second": rate,
        "tokens_per_second_range": rates,
        "seconds": seconds,
        "seconds_range": spread,
        "speed_up": median_ratio(decode),
        "speed_up_interval": ratio_interval(decode),
        "end_to_end": median_ratio(whole),
        "end_to_end_interval": ratio_interval(whole),
    }


def summarize(runs: Runs, tasks: Sequence[Task], modes: Sequence[str], reference: str) -> list[dict[str, Any]]:
    """For each mode and category, and for "all": medians over prompts with quartiles, and geometric means of ratios.

    slowest: the worst prompt's speed_up; identical: of num_prompts, how many had the reference's tokens. Intervals are
    over repeats of the whole set: what the ratio would be if these prompts ran again, not others.
    """
    prompts = summarize_prompts(runs, tasks, modes, reference)
    categories = list(dict.fromkeys(task.prompt.category for task in tasks))
    rows = []
    for mode in modes:
        for category in [*categories, "all"] if len(categories) > 1 else ["all"]:
            mine = [row for row in prompts if row["mode"] == mode and category in ("all", row["category"])]
            if not mine:
                continue
            rates = [row["tokens_per_second"] for row in mine]
            ratios = [row["speed_up"] for row in mine if row["speed_up"]]
            numbers = [n for n, task in enumerate(tasks) if category in ("all", task.prompt.category)]
            row: dict[str, Any] = {
                "mode": mode,
                "category": category,
                "num_prompts": len(mine),
                "tokens_per_second": statistics.median(rates),
                "tokens_per_second_quartiles": quartiles(rates),
                "seconds": statistics.median(row["seconds"] for row in mine),
                "seconds_quartiles": quartiles([row["seconds"] for row in mine]),
                "first_token_seconds": statistics.median(row["first_token_seconds"] for row in mine),
                "reading": geometric_mean([row["reading"] for row in mine if row["reading"]]),
                "speed_up": geometric_mean(ratios),
                "speed_up_interval": _repeat_interval(runs, numbers, mode, reference, _decoding),
                "slowest": min(ratios, default=None),
                "end_to_end": geometric_mean([row["end_to_end"] for row in mine if row["end_to_end"]]),
                "end_to_end_interval": _repeat_interval(runs, numbers, mode, reference, _whole),
                "identical": sum(row["identical"] for row in mine),
            }
            own = [run for number in numbers for run in runs.get((number, mode), {}).values()]
            rows.append(row | _shares(own))
    return rows


def profile(runs: Runs, modes: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Statistics of our own modes' rounds.

    accepted_by_position: the share of drafts whose token at this position was accepted. milliseconds_per_token: of
    decoding, in the draft model's calls, in target passes, and in neither; medians over runs.
    """
    made = {}
    for mode in modes:
        stats = [run.stats for key, repeats in runs.items() if key[1] == mode for run in repeats.values()]
        if not stats or not all(stats):
            continue
        num_drafts = sum(one["num_drafts"] for one in stats)
        positions = _columns([one["num_accepted_tokens_per_position"] for one in stats])
        made[mode] = {
            "accepted_by_position": [sum(column) / num_drafts for column in positions],
            "milliseconds_per_token": {
                part: statistics.median(
                    1e3 * one[f"{part}_seconds"] / max(one["num_generated_tokens"] - 1, 1) for one in stats
                )
                for part in ("draft", "check", "host")
            },
        }
    return made


def _decoding(run: Any) -> float:
    return float(run.tokens_per_second)


def _reading(run: Run) -> float:
    return 1 / run.first_token_seconds if run.first_token_seconds > 0 else 0.0


def _whole(run: Any) -> float:
    return float(run.end_to_end)


def _ratios(own: Mapping[int, Any], others: Mapping[int, Any], figure: Callable[[Any], float]) -> list[float]:
    """A mode's figure by the reference's, for each repeat that both have. A single token has no decoding speed."""
    pairs = [(figure(own[repeat]), figure(others[repeat])) for repeat in sorted(own) if repeat in others]
    return [mine / other for mine, other in pairs if mine > 0 and other > 0]


def _repeat_interval(
    runs: Runs, numbers: list[int], mode: str, reference: str, figure: Callable[[Run], float]
) -> tuple[float, float] | None:
    """The interval of a ratio's geometric mean over prompts, from the repeats in which all of these prompts ran."""
    both = [(runs.get((n, mode), {}), runs.get((n, reference), {})) for n in numbers]
    both = [(own, others) for own, others in both if own and others]
    repeats = set.intersection(*({*own} & {*others} for own, others in both)) if both else set()
    means = []
    for repeat in sorted(repeats):
        ratios = [r for own, others in both for r in _ratios({repeat: own[repeat]}, others, figure)]
        means += [mean] if (mean := geometric_mean(ratios)) else []
    return ratio_interval(means)


def _columns(lists: Sequence[Sequence[float]]) -> list[list[float]]:
    """The first numbers of all lists, then the second ones of all lists that are long enough, and so on."""
    longest = max(map(len, lists))
    return [[values[i] for values in lists if i < len(values)] for i in range(longest)]


def _shares(runs: Sequence[Run]) -> dict[str, float]:
    """Acceptance, and shares of decoding time, over all runs of a mode; empty for modes without statistics."""
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


# Student's t, two-sided 95%, for 1, 2, … degrees of freedom; the last one is used beyond.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120)


def median_and_range(values: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """The median, with the smallest and the largest."""
    return statistics.median(values), (min(values), max(values))


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The first and third, by linear interpolation as NumPy's; of one value, itself twice."""
    if len(values) == 1:
        return values[0], values[0]
    first, _, third = statistics.quantiles(values, method="inclusive")
    return first, third


def geometric_mean(ratios: Sequence[float]) -> float | None:
    """The geometric mean; None without ratios."""
    return statistics.geometric_mean(ratios) if ratios else None


def median_ratio(ratios: Sequence[float]) -> float | None:
    """The median on a logarithmic scale, which is robust against single slow runs; None without ratios."""
    return math.exp(statistics.median(map(math.log, ratios))) if ratios else None


def ratio_interval(ratios: Sequence[float]) -> tuple[float, float] | None:
    """A 95% confidence interval of the geometric mean, from repeats: Student's t of the logarithms.

    None for fewer than two repeats.
    """
    if len(ratios) < 2:
        return None
    logs = [math.log(ratio) for ratio in ratios]
    mean, degrees = statistics.mean(logs), len(logs) - 1
    margin = _T[min(degrees, len(_T)) - 1] * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean - margin), math.exp(mean + margin)
