"""The demo's checkpoint: only the official file is used, wherever it lies."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from outrider.errors import ExportError
from outrider_export import demo_model
from outrider_export.progress import Silent

if TYPE_CHECKING:
    from pathlib import Path


def test_a_file_of_the_same_size_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> Path:
        raise ExportError("asked for again")

    monkeypatch.setattr(demo_model, "_download", refuse)
    path = tmp_path / demo_model.FILE
    with path.open("wb") as file:
        file.truncate(demo_model.SIZE)
    with pytest.raises(ExportError, match="asked for again"):
        demo_model.fetch_demo_model(tmp_path, Silent())


def test_the_official_file_is_used_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = b"official"
    monkeypatch.setattr(demo_model, "SIZE", len(content))
    monkeypatch.setattr(demo_model, "SHA256", "6896191a14f6c66534bac457f50996b9330cd702cb6dbaae4c08d1d213e93d98")
    path = tmp_path / demo_model.FILE
    path.write_bytes(content)
    assert demo_model.fetch_demo_model(tmp_path, Silent()) == path
