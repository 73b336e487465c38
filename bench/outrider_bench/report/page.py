"""The results as Markdown, and that as an HTML page.

`results` is what `outrider_bench.benchmark.run` returns and results.json holds. The page is self-contained.
"""

from __future__ import annotations

import importlib.resources
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
Rows = list[list[str]]
_BAR = 20  # characters of the longest bar


def cells(row: Row) -> list[str]:
    """A row of the summary, without its mode and category, under `COLUMNS`."""
    return [cell(row) for _, cell in COLUMNS.values()]


def times(ratio: float | None) -> str:
    """A ratio; "-" for none."""
    return f"{ratio:.2f}×" if ratio else "-"


def span(interval: Sequence[float] | None) -> str:
    """An interval; "-" for none, "wide" if it is too wide to be useful, as of two repeats."""
    if not interval:
        return "-"
    return f"{interval[0]:.2f}–{interval[1]:.2f}" if interval[1] < 20 * interval[0] else "wide"


def _range(low: float, high: float) -> str:
    return f"{low:.1f}–{high:.1f}"


def _known(figure: str, form: str) -> Callable[[Row], str]:
    """The cell of a figure that modes of other runtimes may lack."""
    return lambda row: format(row[figure], form) if figure in row else "-"


# The columns of the summary: what each means, and its cell for a row.
COLUMNS: dict[str, tuple[str, Callable[[Row], str]]] = {
    "tokens/s": (
        "decoded tokens per second after the first token, median over prompts",
        lambda row: f"{row['tokens_per_second']:.1f}",
    ),
    "quartiles": (
        "the middle half of the prompts' tokens/s",
        lambda row: _range(*row["tokens_per_second_quartiles"]) if row["num_prompts"] > 1 else "-",
    ),
    "speed-up": (
        "tokens/s as a multiple of the reference's, run by run: median of repeats, geometric mean over prompts",
        lambda row: times(row["speed_up"]),
    ),
    "95%": (
        "95% interval of the speed-up over repeats; one repeat has none",
        lambda row: span(row["speed_up_interval"]),
    ),
    "slowest": ("the lowest speed-up of a prompt", lambda row: times(row["slowest"])),
    "first token": ("seconds to the first token, median", lambda row: f"{row['first_token_seconds']:.2f}"),
    "reading": ("speed of reading the prompt, as a multiple of the reference's", lambda row: times(row["reading"])),
    "seconds": ("seconds of a whole request, median", lambda row: f"{row['seconds']:.2f}"),
    "end to end": (
        "speed of whole requests, reading included, as a multiple of the reference's, with its interval",
        lambda row: times(row["end_to_end"]) + (f" ({span(given)})" if (given := row["end_to_end_interval"]) else ""),
    ),
    "identical": ("prompts whose tokens equal the reference's", lambda row: f"{row['identical']}/{row['num_prompts']}"),
    "accepted": ("share of draft tokens that were accepted", _known("acceptance_rate", ".0%")),
    "tokens/round": ("tokens per call of the main model", _known("tokens_per_round", ".2f")),
}
_OF_PROMPT: dict[str, Callable[[Row], str]] = {
    "prompt": lambda row: row["id"],
    "mode": lambda row: row["mode"],
    "prompt tokens": lambda row: f"{row['num_prompt_tokens']}",
    "new tokens": lambda row: f"{row['num_new_tokens']:g}",
    "tokens/s": lambda row: f"{row['tokens_per_second']:.1f}",
    "range": lambda row: _range(*row["tokens_per_second_range"]),
    "speed-up": lambda row: times(row["speed_up"]),
    "95% interval": lambda row: span(row["speed_up_interval"]),
    "end to end": lambda row: times(row["end_to_end"]),
    "identical": lambda row: "yes" if row["identical"] else "NO",
}


def verdict(results: Mapping[str, Any]) -> str:
    """The result in a sentence; empty if nothing was compared."""
    reference = results["reference"]
    rows = [row for row in results["summary"] if row["category"] == "all" and row["mode"] != reference]
    best = max((row for row in rows if row["speed_up"]), key=lambda row: row["speed_up"], default=None)
    if best is None:
        return ""
    same = f"{best['identical']} of {best['num_prompts']} prompts have the same text"
    if best["speed_up"] <= 1:
        return (
            f"Nothing decodes faster than {reference}; next is {best['mode']} at {times(best['speed_up'])}, and {same}."
        )
    return (
        f"{best['mode']} decodes fastest: {times(best['speed_up'])} the speed of {reference}, "
        f"{times(best['slowest'])} on the slowest prompt, and {same}."
    )


def notes(results: Mapping[str, Any]) -> dict[str, list[str]]:
    """What was cut, what failed, what was slower: each a list of sentences."""
    reference = results["reference"]
    said: dict[str, list[str]] = {}
    if results["cut"]:
        said["Cut"] = [results["cut"]]
    if results["failures"]:
        said["Failed"] = [
            f"{f['mode']}{', prompt ' + f['id'] if f['id'] else ''}: {f['error']}" for f in results["failures"]
        ]
    slower: dict[str, list[str]] = {}
    for row in results["summary"]:
        if row["speed_up"] and row["speed_up"] < 1:
            interval = row["speed_up_interval"]
            noise = " (within noise)" if interval and interval[1] >= 1 else ""
            slower.setdefault(row["mode"], []).append(f"{row['category']} {row['speed_up']:.2f}×{noise}")
    said[f"Slower than {reference}"] = [f"{mode}: {', '.join(rows)}." for mode, rows in slower.items()] or [
        "No mode, in any category."
    ]
    return said


def markdown(results: Mapping[str, Any]) -> str:
    """The report: what was found, tables, notes and the setting."""
    reference, profile, setting = results["reference"], results["profile"], results["setting"]
    modes = results["modes"]
    sections = {
        f"Over all prompts, against {reference}": [
            *_table(*_overall(results)),
            "",
            *(f"- {name}: {meaning}" for name, (meaning, _) in COLUMNS.items()),
        ],
        **{title: [f"- {sentence}" for sentence in sentences] for title, sentences in notes(results).items()},
        f"Decoding speed: to the right is faster than {reference}": _bars(results, "speed_up"),
        "The same for whole requests, reading the prompt included": _bars(results, "end_to_end"),
        "Accepted by position, of all drafts": _by_position(profile),
        "Milliseconds of decoding per token": _by_part(profile),
        "Modes": _table(["mode", "what it runs"], [[mode["name"], mode["description"]] for mode in modes], text=1),
        "Setting": _table(["", ""], [[name, _plain(value)] for name, value in setting.items()], text=1),
        "Every prompt": _table(
            [*_OF_PROMPT], [[cell(row) for cell in _OF_PROMPT.values()] for row in results["prompts"]]
        ),
    }
    lines = ["# outrider bench", ""]
    if "processor" in setting:
        lines += [f"{setting['main']} on {setting['device']}.", ""]
        lines += [f"Processor: {setting['processor']}; {setting['instructions']}.", ""]
    lines += [said, ""] if (said := verdict(results)) else []
    for title, content in sections.items():
        lines += [f"## {title}", "", *content, ""] if content else []
    return "\n".join(lines)


def html(results: Mapping[str, Any]) -> str:
    """The same as a page. Nothing in it is taken for HTML."""
    from markdown_it import MarkdownIt

    parser = MarkdownIt("zero").enable(["heading", "list", "table", "escape"])
    page = (importlib.resources.files("outrider_bench") / "report" / "page.html").read_text(encoding="utf-8")
    return page.replace("CONTENT", str(parser.render(markdown(results))))


def _overall(results: Mapping[str, Any]) -> tuple[list[str], Rows]:
    rows = [[row["mode"], *cells(row)] for row in results["summary"] if row["category"] == "all"]
    return ["mode", *COLUMNS], rows


def _by_part(profile: Mapping[str, Any]) -> list[str]:
    parts = {"draft": "drafting", "check": "target passes", "host": "all else on the host"}
    rows = [[mode, *(f"{one['milliseconds_per_token'][part]:.2f}" for part in parts)] for mode, one in profile.items()]
    return _table(["mode", *parts.values()], rows) if rows else []


def _by_position(profile: Mapping[str, Any]) -> list[str]:
    shares = {mode: one["accepted_by_position"] for mode, one in profile.items() if one["accepted_by_position"]}
    places = range(max(map(len, shares.values()), default=0))
    rows = [[mode, *(f"{each[i]:.0%}" if i < len(each) else "" for i in places)] for mode, each in shares.items()]
    return _table(["mode", *(f"{i + 1}" for i in places)], rows) if rows else []


def _bars(results: Mapping[str, Any], figure: str) -> list[str]:
    """A bar for each mode and category, on a logarithmic scale. figure: "speed_up" or "end_to_end"."""
    shown = [row for row in results["summary"] if row["mode"] != results["reference"] and row[figure]]
    widest = max((abs(math.log(row[figure])) for row in shown), default=0.0) or 1.0
    rows = []
    for row in shown:
        width = round(_BAR * math.log(row[figure]) / widest)
        slower, faster = "█" * max(-width, 0), "█" * max(width, 0)
        interval = span(row[f"{figure}_interval"])
        rows.append([row["mode"], row["category"], times(row[figure]), interval, slower, faster])
    return _table(["mode", "category", "", "95%", "slower", "faster"], rows, text=1) if rows else []


def _table(columns: Sequence[str], rows: Rows, text: int = 0) -> list[str]:
    """The first column and the last `text` ones are text, the others numbers."""
    numbers = len(columns) - 1 - text
    return [
        f"| {' | '.join(columns)} |",
        f"|---|{'---:|' * numbers}{'---|' * text}",
        *(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows),
    ]


def _plain(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={inner}" for name, inner in value.items())
    return str(value)
