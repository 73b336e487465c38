"""Tables and lines in terminals of any width."""

import io
import itertools
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from outrider.cli import bench, console
from outrider.cli.console import table


def printed(made: object, width: int) -> list[str]:
    stream = io.StringIO()
    Console(file=stream, width=width, markup=False, highlight=False).print(made)
    return stream.getvalue().splitlines()


@pytest.mark.parametrize(("num_columns", "num_rows", "width"), [*itertools.product((2, 9), (1, 3, 9), (40, 80, 200))])
def test_tables_fit_and_keep_columns_and_words(num_columns: int, num_rows: int, width: int) -> None:
    headings = [f"heading {i}" for i in range(num_columns)]
    rows = [[f"value-{row}-{i}" for i in range(num_columns)] for row in range(num_rows)]
    made = table(*headings, title="A title")
    for row in rows:
        made.add_row(*row)
    lines = printed(made, width)
    assert max(map(cell_len, lines)) <= width
    text = "\n".join(lines)
    assert "A title" in text
    assert all(text.count(value) >= 1 for value in itertools.chain(headings, *rows))


def test_a_table_is_turned_where_only_its_rows_fit_beside_each_other() -> None:
    made = table("device", *(f"a long heading {i}" for i in range(6)))
    made.add_row("CPU", *"abcdef")
    lines = [line.split("  ") for line in printed(made, 60)]
    assert lines[0][0] == "device"
    assert lines[0][-1].strip() == "CPU"
    assert lines[1][0] == "a long heading 0"
    assert lines[1][-1].strip() == "a"


def test_long_text_is_wrapped_between_words() -> None:
    made = table("check", "detail")
    made.columns[-1].no_wrap = False
    made.add_row("greedy identity", "54 of 54 runs identical to plain decoding, 739 tokens drafted")
    assert all(set(line.split()) <= set(" ".join(printed(made, 200)).split()) for line in printed(made, 40))


def test_a_path_that_is_longer_than_a_line_stays_whole() -> None:
    path = "/folder" * 30
    made = table("name", "made of")
    made.columns[-1].no_wrap = False
    made.add_row("model", path)
    assert path in "".join("".join(printed(made, 80)).split())


def test_descriptions_that_do_not_fit_beside_each_other_stand_one_below_the_other() -> None:
    keys = [f"key {i}" for i in range(6)]
    made = table("", *keys, text=6)
    for name in ("main model", "draft"):
        made.add_row(name, *(f"{name}, {key}, twenty" for key in keys))
    beside, below = printed(made, 60), printed(made, 35)
    assert [line[:7].strip() for line in beside] == ["", *keys]
    assert beside[1].split("  ")[1:3] == ["main model, key 0, twenty", "draft, key 0, twenty"]
    assert [line[:7].strip() for line in below] == ["", *keys, "", "", *keys]
    assert [below[0].strip(), below[8].strip()] == ["main model", "draft"]


def row_of(mode: str, category: str) -> dict[str, Any]:
    """A row of a benchmark's summary."""
    ratios = dict.fromkeys(("speed_up", "slowest", "reading", "end_to_end"), 1.25)
    times = dict.fromkeys(("tokens_per_second", "first_token_seconds", "seconds", "tokens_per_round"), 12.5)
    ranges = dict.fromkeys(("tokens_per_second_quartiles", "speed_up_interval", "end_to_end_interval"), (1.0, 1.5))
    counts = {"num_prompts": 6, "identical": 6, "acceptance_rate": 0.5}
    return {"mode": mode, "category": category, **ratios, **times, **ranges, **counts}


@pytest.mark.parametrize(("width", "is_whole"), [(80, False), (160, True)])
def test_a_benchmark_keeps_a_line_for_each_row(width: int, is_whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    for module in (bench, console):
        monkeypatch.setattr(module, "out", Console(file=stream, width=width, markup=False, highlight=False))
    modes = ("plain", "genai-draft:3/bf16")
    bench._print(
        {
            "reference": "plain", "setting": {"main": "tiny", "quick": False}, "failures": [], "cut": None,
            "modes": [{"name": mode, "description": "as it is"} for mode in modes],
            "summary": [row_of(mode, category) for mode in modes for category in ("summarization", "all")],
        }
    )  # fmt: skip
    lines = stream.getvalue().splitlines()
    assert max(map(cell_len, lines)) <= width
    assert "quick" not in stream.getvalue()
    assert sum(line.startswith("  summarization") and "1.25×" in line for line in lines) == 2
    assert ("quartiles" in stream.getvalue().split("Left out")[0]) == is_whole
    assert ("Left out, as the terminal is narrow: quartiles" in stream.getvalue()) != is_whole


def test_without_a_terminal_progress_is_a_line_from_time_to_time(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, now = io.StringIO(), iter([0.0, 10.0, 20.0, 30.0, 160.0])
    monkeypatch.setattr(console, "err", Console(file=stream, markup=False, highlight=False))
    monkeypatch.setattr("time.monotonic", lambda: next(now))
    with console.progress_bar("answers measured", 10) as advance:
        for _ in range(4):
            advance()
    assert stream.getvalue().splitlines() == [
        "answers measured: 2 of 10, about 80 s left",
        "answers measured: 4 of 10, about 4 min left",
    ]
