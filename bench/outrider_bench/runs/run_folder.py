"""A measurement on disk, which can be interrupted and continued.

::

    DIR/
      setting.json      the setting; written before the first run
      runs.jsonl        a line for each run, appended as it ends
      *.log             the engines' output
      results.json, results.md, report.html      written at the end
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from outrider.config.files import user_path
from outrider.errors import OptionError
from outrider.system.files import FAULTS, shown, why
from outrider_bench.modes.mode import Run
from outrider_bench.runs.measure import RunRecord


class RunFolder:
    """A folder with one measurement, finished or not. The same setting continues it.

    records: earlier ones.

    Raises:
        OptionError: when the folder holds another measurement, or cannot be used.
    """

    def __init__(self, path: str | Path, setting: dict[str, Any]) -> None:
        self.path = user_path(path)
        self.setting: dict[str, Any] = json.loads(json.dumps(setting))
        self.records: list[RunRecord] = []
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if self._setting_path.exists():
                self._compare(json.loads(self._setting_path.read_text(encoding="utf-8")))
                self.records = self._read()
            elif any(self.path.iterdir()):
                raise OptionError(f"{self.path} is no measurement, and not empty. Choose another folder.")
            else:
                self._write_setting()
        except OptionError:
            raise
        except (*FAULTS, TypeError, KeyError, AttributeError) as error:  # the last ones: JSON with other content
            raise OptionError(f"{shown(self.path)} cannot be used: {why(error)}. Choose another folder.") from error

    @property
    def chosen(self) -> dict[str, Any]:
        """Choices of the first start of this measurement, which later starts use again."""
        chosen: dict[str, Any] = self.setting.get("chosen", {})
        return chosen

    def choose(self, **options: Any) -> None:
        """Save a choice for all starts of this measurement."""
        self.setting["chosen"] = self.chosen | options
        self._write_setting()

    def append(self, record: RunRecord) -> None:
        """Append one run to the file."""
        with self._runs_path.open("a", encoding="utf-8", newline="\n") as file:
            file.write(json.dumps(asdict(record)) + "\n")

    @property
    def _setting_path(self) -> Path:
        return self.path / "setting.json"

    @property
    def _runs_path(self) -> Path:
        return self.path / "runs.jsonl"

    def _write_setting(self) -> None:
        self._setting_path.write_text(json.dumps(self.setting, indent=2) + "\n", encoding="utf-8")

    def _compare(self, old: dict[str, Any]) -> None:
        """Take over earlier choices. Raise if the folder has another measurement."""
        self.setting |= {"chosen": old.pop("chosen")} if "chosen" in old else {}
        for name, value in self.setting.items():
            if name != "chosen" and old.get(name) != value:
                raise OptionError(
                    f"{self.path} holds another measurement, with {name}={_shown(old.get(name))} instead of "
                    f"{_shown(value)}. Choose another folder, or delete it."
                )

    def _read(self) -> list[RunRecord]:
        """The runs so far. A line that a crash cut off is removed."""
        if not self._runs_path.exists():
            return []
        text = self._runs_path.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]
        if len(whole) < len(text):
            self._runs_path.write_bytes(whole)
        records = []
        for line in whole.decode().splitlines():
            fields = json.loads(line)
            fields["run"] = Run(**fields["run"]) if fields["run"] else None
            records.append(RunRecord(**fields))
        return records


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
