"""The results as an HTML page and as Markdown.

`results` is what `outrider_bench.benchmark.run` returns and results.json holds. The page is self-contained.
"""

from __future__ import annotations

import importlib.resources
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any

from outrider_bench.report.plots import colour, plot_acceptance, plot_ratios

Row = Mapping[str, Any]
Rows = list[list[str]]


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
    """Tables and notes."""
    reference = results["reference"]
    lines = ["# outrider bench", "", *([said, ""] if (said := verdict(results)) else [])]
    lines += [f"Against `{reference}`, over all prompts:", ""]
    lines += _markdown_table(*_overall(results))
    lines += ["", *(f"- {name}: {meaning}" for name, (meaning, _) in COLUMNS.items())]
    lines += ["", "Speed-up by category:", "", *_markdown_table(*_by_category(results))]
    for title, sentences in notes(results).items():
        lines += ["", f"{title}:", "", *(f"- {sentence}" for sentence in sentences)]
    lines += ["", "Modes:", "", *(f"- `{mode['name']}`: {mode['description']}" for mode in results["modes"])]
    lines += ["", "Setting:", "", *(f"- {name}: {_plain(value)}" for name, value in results["setting"].items())]
    return "\n".join(lines) + "\n"


def html(results: Mapping[str, Any]) -> str:
    """A page with plots, tables and notes."""
    summary, reference, profile = results["summary"], results["reference"], results["profile"]
    modes = [mode["name"] for mode in results["modes"]]
    drafting = [mode for mode, one in profile.items() if one["accepted_by_position"]]
    setting = results["setting"]
    legend = _legend([(mode, colour(modes, mode)) for mode in modes if mode != reference])
    sections = [
        f"<p class=lead>{escape(str(setting.get('main', '')))} on {escape(str(setting.get('device', '')))}, against "
        f"<b>{escape(reference)}</b></p>",
        _processor(setting),
        f"<p class=lead>{escape(verdict(results))}</p>",
        f"<dl class=note>{''.join(f'<dt>{name}</dt><dd>{each[0]}</dd>' for name, each in COLUMNS.items())}</dl>",
        _table(*_overall(results)),
        *(_notes(title, sentences) for title, sentences in notes(results).items()),
        _plot(
            "Decoding speed",
            f"Against {reference}, logarithmic: to the right is faster. Lines are 95% intervals over repeats, drawn to "
            "half and double at most.",
            plot_ratios(summary, modes, reference, "speed_up"),
            legend,
        ),
        _plot(
            "End to end",
            "The same for whole requests, reading the prompt included, per token.",
            plot_ratios(summary, modes, reference, "end_to_end"),
            legend,
        ),
        _plot(
            "Acceptance by position",
            "Of all drafts, the share whose token at this position was accepted.",
            plot_acceptance(profile, modes),
            _legend([(mode, colour(modes, mode)) for mode in drafting]),
        ),
        "<h2>Milliseconds of decoding per token</h2>" + _table(*_by_part(profile)) if profile else "",
        "<h2>Speed-up by category</h2>" + _table(*_by_category(results)),
        "<h2>Modes</h2>" + _table(("mode", "what it runs"), [[m["name"], m["description"]] for m in results["modes"]]),
        "<h2>Setting</h2>" + _table(("", ""), [[name, _plain(value)] for name, value in setting.items()]),
        "<details><summary>Every prompt</summary>"
        + _table([*_OF_PROMPT], [[cell(row) for cell in _OF_PROMPT.values()] for row in results["prompts"]])
        + "</details>",
    ]
    page = (importlib.resources.files("outrider_bench") / "report" / "page.html").read_text(encoding="utf-8")
    return page.replace("SECTIONS", "\n".join(sections))


def _processor(setting: Mapping[str, Any]) -> str:
    if "processor" not in setting:
        return ""
    return f"<p class=note>Processor: {escape(setting['processor'])}; {escape(setting['instructions'])}.</p>"


def _overall(results: Mapping[str, Any]) -> tuple[list[str], Rows]:
    rows = [[row["mode"], *cells(row)] for row in results["summary"] if row["category"] == "all"]
    return ["mode", *COLUMNS], rows


def _by_category(results: Mapping[str, Any]) -> tuple[list[str], Rows]:
    categories = list(dict.fromkeys(row["category"] for row in results["summary"]))
    found = {(row["mode"], row["category"]): times(row["speed_up"]) for row in results["summary"]}
    rows = [[mode["name"], *(found.get((mode["name"], c), "-") for c in categories)] for mode in results["modes"]]
    return ["mode", *categories], rows


def _by_part(profile: Mapping[str, Any]) -> tuple[list[str], Rows]:
    parts = {"draft": "drafting", "check": "target passes", "host": "all else on the host"}
    rows = [[mode, *(f"{one['milliseconds_per_token'][part]:.2f}" for part in parts)] for mode, one in profile.items()]
    return ["mode", *parts.values()], rows


def _plot(title: str, says: str, drawing: str, legend: str = "") -> str:
    if not drawing:
        return ""
    return f"<section><h2>{title}</h2><p class=note>{escape(says)}</p>{legend}<figure>{drawing}</figure></section>"


def _legend(entries: Iterable[tuple[str, str]]) -> str:
    marks = "".join(
        f'<li><svg width="12" height="12"><rect width="12" height="12" class="fill {kind}"/></svg>{escape(label)}</li>'
        for label, kind in entries
    )
    return f"<ul class=legend>{marks}</ul>"


def _notes(title: str, sentences: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f"<h2>{escape(title)}</h2><ul>{items}</ul>"


def _table(columns: Sequence[str], rows: Rows) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div class=wide><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _markdown_table(columns: Sequence[str], rows: Rows) -> list[str]:
    return [
        f"| {' | '.join(columns)} |",
        f"|{'---|' * len(columns)}",
        *(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows),
    ]


def _plain(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={inner}" for name, inner in value.items())
    return str(value)
