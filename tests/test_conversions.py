"""What the tests keep of conversions is never what another exporter, package or input would give."""

from collections.abc import Callable
from pathlib import Path

import pytest

from conversions import Conversions


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., int]:
    """`run({"a": 1})`: how often the recipe was made, in a run of its own; the package is `tmp_path / "package"`."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "export.py").write_text("one")
    num_runs = 0

    def start(recipe: dict[str, object]) -> int:
        nonlocal num_runs
        num_runs += 1
        made: list[Path] = []

        def make(folder: Path) -> None:
            made.append(folder)
            (folder / "file").write_text("made")

        kept = Conversions(tmp_path / "cache", tmp_path / f"copies-{num_runs}", [tmp_path / "package"])
        found = kept.find(recipe, make)
        assert kept.find(recipe, make) == found
        assert (found / "file").read_text() == "made"
        (found / "file").write_text("spoilt")  # by a test: the next run has its own
        return len(made)

    return start


def test_a_recipe_is_made_once(run: Callable[..., int]) -> None:
    assert [run({"a": 1}), run({"a": 1}), run({"a": 2}), run({"a": 1})] == [1, 0, 1, 0]


def test_compiled_sources_that_are_being_written_change_nothing(run: Callable[..., int], tmp_path: Path) -> None:
    made = [run({"a": 1})]
    compiled = tmp_path / "package" / "__pycache__"
    compiled.mkdir()
    (compiled / "export.cpython-311.pyc.139842").write_bytes(b"half")  # as Python names it until it is whole
    assert [*made, run({"a": 1})] == [1, 0]


def test_it_is_made_again_when_a_source_has_changed(run: Callable[..., int], tmp_path: Path) -> None:
    assert run({"a": 1}) == 1
    (tmp_path / "package" / "export.py").write_text("two")
    assert [run({"a": 1}), run({"a": 1})] == [1, 0]
    (tmp_path / "package" / "new").mkdir()
    (tmp_path / "package" / "new" / "data.json").write_text("{}")
    assert run({"a": 1}) == 1
    assert len(list((tmp_path / "cache").iterdir())) == 1  # what was made on other ground is gone
