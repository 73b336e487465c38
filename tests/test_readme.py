"""What the README shows is what there is."""

import re
import tomllib
from pathlib import Path

import pytest

import outrider
from outrider.config import Config
from outrider_export.heads.formats import KINDS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
START = (ROOT / "docs" / "getting-started.md").read_text(encoding="utf-8")
BENCHMARKS = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")


def table(heading: str, text: str = README) -> list[list[str]]:
    """The rows of the first table below a line that begins with `heading`, header and rule left out."""
    behind = text[text.index(f"\n{heading}") :]
    found = re.search(r"(?:^\|.*\n)+", behind, re.MULTILINE)
    assert found
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in found[0].splitlines()[2:]]


def test_it_is_a_front_page() -> None:
    assert len(README.splitlines()) <= 125


def test_the_options_it_names_exist(openvino_engine: outrider.Engine) -> None:
    config = Config()
    known = {name for section in vars(config).values() for name in vars(section)}
    named = [name for row in table("## Options that matter", START) for name in re.findall(r"`(\w+)`", row[0])]
    assert len(named) >= 10
    assert set(named) <= known
    drafters = {name for row in table("## Which drafter", START) for name in re.findall(r'`"?(\w+)"?`', row[0])}
    assert drafters == {*openvino_engine.drafters, "auto", "None", "eagle3", "dflash", "self"}
    assert {"eagle3", "dflash"} <= {*KINDS.values()}


def test_the_table_of_extras_is_whole() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = {row[0].strip("| `") for row in table("## Install", START)}
    assert named == {"none", *(f".[{name}]" for name in project["optional-dependencies"])}


def test_its_program_runs(
    openvino_engine: outrider.Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = re.search(r"```python\n(import outrider\n.*?)```", README, re.DOTALL)
    assert program
    monkeypatch.setattr(outrider, "load", {"my-pair": openvino_engine}.__getitem__)
    exec(program[1].replace("Why is the sky blue?", "why is the sky blue"), {})  # noqa: S102 - what the toy can spell
    assert re.search(r"\d+ tokens, [\d.]+ a second", capsys.readouterr().out)


def test_its_figures_are_those_of_the_benchmarks() -> None:
    names = {
        "**Outrider, `auto`**": "**auto**",
        "openvino-genai, prompt lookup, 5 tokens": "openvino-genai, prompt lookup, 5, f32",
        "llama.cpp, plain, in the file's 4 bits": "llama.cpp, plain, 4 bits",
    }
    full = {row[0].strip("| "): [cell.strip("| ") for cell in row] for row in table("## A Xeon with AMX", BENCHMARKS)}
    columns = (8, 1, 2, 4, 6, 9, 11)  # all, general, instruction, code, summarization, slowest, same text
    plain = float(next(name for name in full if name.startswith("plain, "))[7:].split()[0])
    shown = table("## Proof")
    assert [row[0].strip("| ") for row in shown] == [*names]
    for row in shown:
        there = full[names[row[0].strip("| ")]]
        assert [cell.strip("| ") for cell in row[2:]] == [there[i] for i in columns]
        assert abs(float(row[1]) - plain * float(there[8].strip("*"))) < 0.1  # tokens per second


def test_it_is_read_in_a_minute() -> None:
    assert len(README.split()) <= 720
    assert len(re.findall(r"^\|---", README, re.MULTILINE)) <= 3


def test_its_picture_moves_and_is_small() -> None:
    name = re.search(r"!\[.*\]\((.*\.svg)\)", README)
    assert name
    picture = (ROOT / name[1]).read_text(encoding="utf-8")
    assert len(picture) < 300_000
    assert picture.count("infinite") > 20
    assert not re.search(r"<script|href=", picture)


def test_ci_runs_the_commands_of_the_readme() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert '.venv/bin/pip install -q -e ".[dev]"\n' in script
    assert '.venv/bin/pip install -q -e ".[dev]" && .venv/bin/pytest\n' in README
    assert ".venv/bin/pytest -m slow " in README
    assert ".venv/bin/mkdocs build --strict" in script
    tests = [line for line in script.splitlines() if ".ci/.venv/bin/pytest" in line]
    assert tests == [
        ".ci/avx2 .ci/.venv/bin/pytest",
        *(f".ci/.venv/bin/pytest -m {kind}" for kind in ("slow", "processor")),
    ]
    assert script.rstrip().endswith(tests[-1])
