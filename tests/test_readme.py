"""What the README shows is what there is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.cli import run
from outrider.config import GenerationConfig, find_presets

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_help_is_the_command_line_own(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert run(["--help"]) == 0
    shown = re.search(r"<!-- help -->\n```\n(.*?)```", README, re.DOTALL)
    assert shown
    assert shown[1] == capsys.readouterr().out


def test_the_options_it_names_exist() -> None:
    named = re.search(r"Options are keywords.*?\. A\s+name", README, re.DOTALL)
    assert named
    for name in re.findall(r"`(\w+)`", named[0]):
        assert name in (*GenerationConfig.__dataclass_fields__, "GenerationConfig", "None")


def test_the_presets_and_folders_it_names_exist() -> None:
    for name in find_presets():
        assert f"`{name}`" in README
    for folder in ("configs", "samples", "tests", "export/outrider_export", "runtime/outrider"):
        assert (ROOT / folder).is_dir()


def test_ci_runs_the_commands_of_the_readme() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert '.venv/bin/pip install -q -e ".[dev]"\n' in script
    assert '.venv/bin/pip install -q -e ".[dev]" && .venv/bin/pytest' in README
    assert script.rstrip().endswith(".venv/bin/pytest")
