"""What the README shows is what there is."""

import re
import tomllib
from pathlib import Path

import pytest

import outrider
from outrider import cli
from outrider_export.heads.formats import KINDS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
START = (ROOT / "docs" / "getting-started.md").read_text(encoding="utf-8")


def table(heading: str, text: str = README) -> list[list[str]]:
    """The rows of the first table below a line that begins with `heading`, header and rule left out."""
    behind = text[text.index(f"\n{heading}") :]
    found = re.search(r"(?:^\|.*\n)+", behind, re.MULTILINE)
    assert found
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in found[0].splitlines()[2:]]


def test_the_drafters_it_names_exist(openvino_engine: outrider.Engine) -> None:
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


def test_what_never_slower_means_is_said_in_the_same_words() -> None:
    said = re.search(r"An answer loses at most .*?\.(?= |$)", README.replace("\n", " "))
    assert said
    for text in (cli.root.help or "", (ROOT / "docs" / "controller.md").read_text(encoding="utf-8")):
        assert said[0] in " ".join(text.split())


def test_it_is_a_front_page_and_read_in_a_minute() -> None:
    assert len(README.splitlines()) <= 125
    assert len(README.split()) <= 700
    assert len(re.findall(r"^\|---", README, re.MULTILINE)) <= 3
    pages = (path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md"))
    assert len(" ".join(pages).split()) <= 45_000


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
    assert re.findall(r"pytest(?: -m (\w+))?$", script, re.MULTILINE) == ["", "slow", "processor"]
