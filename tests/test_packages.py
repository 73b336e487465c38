"""What is installed: the wheel, the sdist, and the commands that messages give."""

import shutil
import subprocess
import sys
import tomllib
import zipfile
from email import message_from_bytes
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

import outrider.__main__
from outrider.errors import ExportError, install
from outrider_export import export_bundle

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel and the sdist, by kind."""
    pytest.importorskip("hatchling", reason="builds packages")
    folder = tmp_path_factory.mktemp("dist")
    hooks = "from hatchling import build; import sys; build.build_wheel(sys.argv[1]); build.build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", hooks, str(folder)], check=True, cwd=ROOT, capture_output=True)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return {"wheel": wheel, "sdist": sdist}


def tracked(*folders: str) -> set[str]:
    """The repository's files in these folders."""
    done = subprocess.run(["git", "ls-files", *folders], capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        pytest.skip("this is no clone")
    return set(done.stdout.split())


@pytest.mark.needs("git")
def test_the_wheel_has_both_halves_and_what_they_read(built: dict[str, Path]) -> None:
    with zipfile.ZipFile(built["wheel"]) as wheel:
        names = set(wheel.namelist())
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        said = message_from_bytes(wheel.read(metadata))
        scripts = wheel.read(metadata.replace("METADATA", "entry_points.txt")).decode()
    expected = {name.split("/", 1)[1] for name in tracked("runtime", "export", "bench/outrider_bench")}
    expected |= {f"outrider/{name}" for name in tracked("configs")}
    assert expected <= names
    assert {name for name in names if ".dist-info/" not in name} <= expected
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert said["Name"] == "outrider"
    assert set(said.get_all("Provides-Extra", [])) == set(PROJECT["optional-dependencies"])
    assert "outrider = outrider.__main__:main" in scripts


@pytest.mark.slow
@pytest.mark.needs("git")
def test_the_sdist_builds_the_same_wheel(built: dict[str, Path], tmp_path: Path) -> None:
    shutil.unpack_archive(built["sdist"], tmp_path)
    (folder,) = tmp_path.iterdir()
    for name in tracked("runtime", "export", "bench", "configs") | {"pyproject.toml", "README.md", "LICENSE"}:
        assert (folder / name).is_file(), name
    hook = "from hatchling import build; build.build_wheel('dist')"
    subprocess.run([sys.executable, "-c", hook], check=True, cwd=folder, capture_output=True)
    (wheel,) = (folder / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as ours, zipfile.ZipFile(built["wheel"]) as theirs:
        assert set(ours.namelist()) == set(theirs.namelist())


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_the_wheel_runs_in_a_clean_environment(version: str, built: dict[str, Path], tmp_path: Path) -> None:
    python = shutil.which(f"python{version}")
    if python is None or subprocess.run([python, "--version"], capture_output=True, check=False).returncode:
        pytest.skip(f"there is no Python {version}")
    subprocess.run([python, "-m", "venv", tmp_path], check=True)
    programs = tmp_path / ("Scripts" if sys.platform == "win32" else "bin")
    pip = [str(programs / "python"), "-m", "pip", "install", "-q", f"{built['wheel']}[cli]"]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    if "Could not find a version" in done.stderr or "Connection" in done.stderr:
        pytest.skip("no package index is reached")
    assert done.returncode == 0, done.stderr
    for arguments in (["--help"], ["devices", "--json"], ["inspect", "--help"]):
        done = subprocess.run([programs / "outrider", *arguments], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), arguments


def test_pages_install_from_a_clone_or_name_the_extra() -> None:
    """`pip install "outrider[…]"` finds nothing before there is a release."""
    for path in [*(ROOT / "docs").glob("*.md"), *(ROOT / "samples").glob("*.py"), *ROOT.glob("*.md")]:
        assert 'pip install "outrider' not in path.read_text(encoding="utf-8"), path.name


@pytest.mark.parametrize(("origin", "command"), [
    ('{"url": "file:///home/me/outrider", "dir_info": {}}', 'pip install "/home/me/outrider[server]"'),
    ('{"url": "https://example.com/outrider.whl"}', 'pip install "outrider[server]"'),
    ("{", 'pip install "outrider[server]"'),
    (None, 'pip install "outrider[server]"'),
    ("no package", 'pip install "outrider[server]"'),
])  # fmt: skip
@pytest.mark.needs("POSIX")
def test_messages_install_from_where_outrider_came(
    origin: str | None, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Installed(Distribution):
        def read_text(self, filename: str) -> str | None:
            return origin

        def locate_file(self, path: Any) -> Any:
            raise AssertionError

    def found(name: str) -> Distribution:
        if origin == "no package":
            raise PackageNotFoundError(name)
        return Installed()

    monkeypatch.setattr("importlib.metadata.distribution", found)
    assert install("server") == command


def test_without_the_extra_cli_the_command_and_conversions_name_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for module in ("outrider.__main__", "outrider_export.sources.source"):
        monkeypatch.setattr(f"{module}.is_installed", lambda name: name not in ("click", "gguf"))
    with pytest.raises(SystemExit, match=r"^outrider: The command line needs click\. Run: pip install .*\[cli\]"):
        outrider.__main__.main()
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    for call in (lambda: outrider.load(model), lambda: export_bundle(model, output=tmp_path / "made")):
        with pytest.raises(ExportError, match=r"Making a bundle of a model needs gguf\. Run: pip install .*\[cli\]"):
            call()
