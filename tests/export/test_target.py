"""What an export does to the disk: nothing, until the bundle is complete."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.bundle import MANIFEST_NAME
from outrider.errors import ExportError
from outrider_export import default_output, export_bundle
from outrider_export.target import Target
from toys import wait_until

pytestmark = pytest.mark.children


def fill(target: Target, text: str = "new") -> None:
    (target.new / MANIFEST_NAME).write_text(text, encoding="utf-8")


def write(output: Path, *, overwrite: bool) -> None:
    with Target(output, overwrite) as target:
        fill(target)
        target.commit()


def write_and_fail(output: Path, error: type[BaseException], *, overwrite: bool) -> None:
    with Target(output, overwrite) as target:
        fill(target)
        raise error


def old_bundle(folder: Path) -> Path:
    folder.mkdir()
    (folder / MANIFEST_NAME).write_text("old", encoding="utf-8")
    return folder


def test_the_name_appears_when_it_is_complete(tmp_path: Path) -> None:
    output = tmp_path / "some" / "where" / "bundle"
    with Target(output, overwrite=False) as target:
        fill(target)
        assert not output.exists()
        target.commit()
    assert (output / MANIFEST_NAME).read_text(encoding="utf-8") == "new"
    assert [path.name for path in output.parent.iterdir()] == ["bundle"]


@pytest.mark.parametrize("error", [ExportError, KeyboardInterrupt, SystemExit, OSError])
def test_failure_leaves_nothing_new(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error):
        write_and_fail(tmp_path / "some" / "where" / "bundle", error, overwrite=False)
    assert list(tmp_path.iterdir()) == []
    output = old_bundle(tmp_path / "bundle")
    with pytest.raises(error):
        write_and_fail(output, error, overwrite=True)
    assert (output / MANIFEST_NAME).read_text(encoding="utf-8") == "old"
    assert list(tmp_path.iterdir()) == [output]
    with pytest.raises(ExportError, match=r"exists\. Choose another name with -o, or replace it with --overwrite"):
        Target(output, overwrite=False).__enter__()


def test_overwrite_replaces_bundles_and_empty_folders(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for output in (old_bundle(tmp_path / "bundle"), empty):
        write(output, overwrite=True)
        assert (output / MANIFEST_NAME).read_text(encoding="utf-8") == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle", "empty"]


def test_overwrite_spares_everything_else(tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    (photos / "cat.jpg").write_bytes(b"cat")
    (tmp_path / "file").write_bytes(b"text")
    with pytest.raises(ExportError, match=r"photos is not a bundle: it has no outrider\.json"):
        Target(photos, overwrite=True).__enter__()
    with pytest.raises(ExportError, match="file is not a folder"):
        Target(tmp_path / "file", overwrite=True).__enter__()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "photos"]
    assert (photos / "cat.jpg").read_bytes() == b"cat"


def test_the_old_bundle_returns_if_the_new_one_cannot_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = old_bundle(tmp_path / "bundle")
    rename = Path.rename

    def fail_for_new(self: Path, to: Path) -> Path:
        if self.name == "bundle" and to == output:  # the new one; the old one comes from "old"
            raise PermissionError(13, "it is open in another program")
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", fail_for_new)
    with pytest.raises(ExportError, match="cannot be replaced: it is open in another program"):
        write(output, overwrite=True)
    assert (output / MANIFEST_NAME).read_text(encoding="utf-8") == "old"
    assert list(tmp_path.iterdir()) == [output]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ExportError, match="file cannot be written: Not a directory"):
        Target(tmp_path / "file" / "bundle", overwrite=False).__enter__()

    def refuse(**_: object) -> str:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tempfile.mkdtemp", refuse)
    with pytest.raises(ExportError, match=r"cannot be written: Read-only file system\. Choose another folder with -o"):
        Target(tmp_path / "new" / "bundle", overwrite=False).__enter__()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_full_disk_is_told_before_the_work(gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=10**7))
    monkeypatch.setattr("outrider_export.bundles.convert_model.run_child", lambda *_: pytest.fail("it began"))
    with pytest.raises(ExportError, match=r"needs 0\.0\d GB and .* has 0\.01 GB free"):
        export_bundle(gguf_file, output=tmp_path / "bundle")
    assert list(tmp_path.iterdir()) == []


def test_a_failing_conversion_leaves_nothing_and_says_why(make_checkpoint: Any, make_gguf: Any, tmp_path: Path) -> None:
    """A file that promises three layers and has two fails in openvino-genai."""
    path = make_gguf("deep", make_checkpoint("plain"), metadata={"qwen2.block_count": 3})
    with pytest.raises(ExportError, match=r"The main model deep\.gguf cannot be converted") as caught:
        export_bundle(path, output=tmp_path / "bundle", weights="int4")
    assert "\n" not in str(caught.value)
    assert str(caught.value.__cause__)  # all of it, for those who debug
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.needs("POSIX")
@pytest.mark.parametrize("wait", ["convert main", "write main"])
def test_ctrl_c_leaves_nothing_and_no_process(make_checkpoint: Any, tmp_path: Path, wait: str) -> None:
    program = (
        "import sys; from outrider_export import export_bundle\n"
        "class P:\n"
        "    def phase(self, name, total=None): print(name, flush=True)\n"
        "    def advance(self, count): pass\n"
        "    def note(self, text): pass\n"
        "export_bundle(sys.argv[1], output=sys.argv[2], progress=P())\n"
    )
    folder = str(make_checkpoint("plain"))
    running = subprocess.Popen(
        [sys.executable, "-c", program, folder, str(tmp_path / "bundle")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert running.stdout is not None
    for line in running.stdout:
        if line.strip() == wait:
            break
    children = _children_of(running.pid)
    assert children
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=300)
    assert running.returncode != 0
    assert "KeyboardInterrupt" in errors
    assert list(tmp_path.iterdir()) == []
    assert not any(_is_running(pid) for pid in children)


@pytest.mark.slow
@pytest.mark.needs("Linux")
def test_a_child_does_not_outlive_its_parent(make_checkpoint: Any, tmp_path: Path) -> None:
    program = "import sys; from outrider_export import export_bundle; export_bundle(sys.argv[1], output=sys.argv[2])"
    arguments = [sys.executable, "-c", program, str(make_checkpoint("plain")), str(tmp_path / "bundle")]
    running = subprocess.Popen(arguments)
    wait_until(lambda: _children_of(running.pid))
    children = _children_of(running.pid)
    running.kill()
    running.wait()
    wait_until(lambda: not any(_is_running(pid) for pid in children))
    assert not (tmp_path / "bundle").exists()


def _children_of(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_the_default_name_is_never_the_checkpoint_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    assert default_output("model") == Path("model-bundle")
    assert default_output(".") == Path(tmp_path.name.lower())
