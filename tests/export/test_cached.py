"""Models that are named in place of bundles: made into one once, and found again."""

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

import outrider
from exports import Recorder
from outrider.bundle import Bundle, read_bundle
from outrider.cli import run
from outrider.cli.serve import name_bundles
from outrider.engine.joining import Joining
from outrider.engine.opening import open_bundle
from outrider.errors import BundleError, ExportError, OptionError
from outrider.system import saved
from outrider_export.bundles import bundle_cache, cached
from outrider_export.bundles.bundle_cache import BundleCache, CachedSource
from outrider_export.bundles.cached import _identity
from outrider_export.child import begin_beside
from outrider_export.describe.plan import DEFAULT_WEIGHTS
from outrider_export.sources import content
from outrider_export.sources.source import Located
from tiny import write_checkpoint, write_gguf


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, of child processes too."""
    folder = tmp_path / "cache"
    monkeypatch.setattr(saved, "FOLDER", folder)
    monkeypatch.setenv("OUTRIDER_CACHE", str(folder))
    return folder


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of the same sizes with other weights, last changed long ago."""
    root = tmp_path_factory.mktemp("models")
    for seed in range(2):
        write_checkpoint(root / f"checkpoint-{seed}", seed)
        write_gguf(root / f"model-{seed}.gguf", root / f"checkpoint-{seed}", "Q4_1", "qwen2", {})
    return [root / f"model-{seed}.gguf" for seed in range(2)]


@pytest.fixture
def file(files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of one's own. Files count as old as soon as they are there, so that tests need not wait."""
    monkeypatch.setattr(content, "_SETTLED_NS", -(10**15))
    return Path(shutil.copyfile(files[0], tmp_path / "Model.gguf"))


class Told(Recorder):
    """A progress that remembers."""

    @property
    def exported(self) -> bool:
        return any(phase.startswith("convert") for phase in self.phases)


def opened(model: str | Path, draft: str | Path | None = None) -> tuple[Bundle, Told]:
    told = Told()
    return open_bundle(model, draft, progress=told), told


def shown_files(folder: Path) -> list[str]:
    """What is in the cache's folder of bundles, but for the empty files that processes lock."""
    return sorted(path.name for path in (folder / "bundles").iterdir() if path.suffix != ".lock")


def is_whole(bundle: Bundle) -> bool:
    bundle.check_hashes()
    return bundle.manifest.main.source.kind == "gguf"


# ── found again


def test_a_file_is_exported_once(file: Path, folder: Path) -> None:
    first, told = opened(file)
    assert is_whole(first)
    assert told.exported
    assert told.notes == [f"Making a bundle of {file}, once, in {folder / 'bundles'}."]
    again, told = opened(file)
    assert again == first
    assert told.phases == []  # the file is not even read while it does not change
    assert shown_files(folder) == [first.folder.name, f"{first.folder.name}.json"]


def test_an_engine_is_loaded_from_a_file(file: Path, files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached, "_INTERVAL", 0.0)
    said: list[str] = []
    with outrider.load(str(file), draft=files[0], max_new_tokens=8, ignore_eos=True, progress=said.append) as engine:
        assert said[0] == "Exporting: hash main."
        assert any(line.startswith("Making a bundle of") for line in said)
        assert {"Exporting: convert main, 100%.", "Exporting: convert draft, 100%."} <= {*said}
        assert engine.bundled_drafters == ("draft",)
        text = engine.generate("Hello").text
        assert engine.generate("Hello", drafter=None).text == text
    with outrider.load(engine.bundle, draft_bundle=str(file)) as same:  # draft models may come from a model, too
        assert same.bundle.folder == engine.bundle.folder


def test_another_name_of_the_same_content_leads_to_the_same_bundle(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = opened(file)
    (tmp_path / "elsewhere").mkdir()
    moved = file.rename(tmp_path / "elsewhere" / "Renamed.gguf")
    found, told = opened(moved)
    assert found == first
    assert not told.exported
    monkeypatch.chdir(moved.parent)
    assert opened(moved.name)[0] == opened(f"./{moved.name}")[0] == first


def test_parts_of_a_model_are_one_source_whichever_is_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoint", 0)
    write_gguf(tmp_path / "Model.gguf", tmp_path / "checkpoint", "Q4_1", "qwen2", {}, per_file=12)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert len(parts) > 1
    first, told = opened(parts[1])
    assert told.notes[0].startswith(f"Making a bundle of {parts[0]}, once")
    assert is_whole(first)
    assert first.folder.name.startswith("model-")
    for name in (parts[0], parts[-1]):
        again, told = opened(name)
        assert again == first
        assert not told.exported
    parts[-1].rename(tmp_path / "away")
    with pytest.raises(ExportError, match=f"one of {len(parts)} parts, and {parts[-1].name} is missing"):
        opened(parts[0])


def inodes(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_ino for path in folder.rglob("*") if path.is_file()}


def test_files_of_several_bundles_are_stored_once(
    file: Path, files: list[Path], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle_cache, "_LARGE", 100_000)
    cache, (alone, _) = BundleCache(folder), opened(file)
    first = cache.size
    pair, _ = opened(file, files[1])
    assert [len(bundle.manifest.drafters) for bundle in (alone, pair)] == [0, 1]
    weights = "main/openvino_model.bin"
    assert inodes(alone.folder)[weights] == inodes(pair.folder)[weights]
    assert len({*inodes(alone.folder).values()} & {*inodes(pair.folder).values()}) < len(inodes(alone.folder))
    assert cache.size < first + sum(entry.size for entry in pair.manifest.files)
    cache.remove(cache.find(alone.folder.name))
    pair.check_hashes()
    # Damaged weights are no others' weights.
    damaged = pair.folder / weights
    damaged.write_bytes(bytes([damaged.read_bytes()[0] ^ 1]) + damaged.read_bytes()[1:])
    opened(file)[0].check_hashes()
    assert opened(file, files[0])[0].folder not in (alone.folder, pair.folder)


def test_without_links_files_are_stored_again(file: Path, files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(bundle_cache, "_LARGE", 1)
    monkeypatch.setattr(os, "link", refused)
    bundles = [opened(file)[0], opened(file, files[1])[0]]
    assert not {*inodes(bundles[0].folder).values()} & {*inodes(bundles[1].folder).values()}
    assert not list(bundles[1].folder.rglob("*.linked"))
    for bundle in bundles:
        bundle.check_hashes()


def test_options_and_version_are_in_the_key(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [opened(file)[0].folder]
    monkeypatch.setattr("outrider_export.bundles.cached.__version__", "9.9.9")
    found.append(opened(file)[0].folder)
    monkeypatch.setitem(DEFAULT_WEIGHTS, "main", "fp16")
    found.append(opened(file)[0].folder)
    assert len({*found}) == 3
    tagged = [CachedSource("main", "hub", f"org/m{tag}", "commit") for tag in ("", ":Q4_K_M", ":Q8_0")]
    assert len({*map(_identity, tagged)}) == 3


def test_a_name_from_the_list_is_a_bundle_s_name(file: Path) -> None:
    first, _ = opened(file)
    file.unlink()
    assert opened(first.folder.name)[0] == first
    for name in (first.folder.name, first.folder):
        with pytest.raises(OptionError, match=r"draft='small\.gguf' is .* is a bundle already. Add .* outrider add"):
            opened(name, "small.gguf")


# ── changed


def test_a_changed_file_is_exported_anew(file: Path, files: list[Path]) -> None:
    first, _ = opened(file)
    opened(file)
    shutil.copyfile(files[1], file)
    second, told = opened(file)
    assert told.exported
    assert second.files_of("main") != first.files_of("main")
    shutil.copyfile(files[0], file)
    assert opened(file)[0] == first  # it is still there


def test_the_main_model_answers_before_the_draft_model_is_converted(
    file: Path, files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are the pair's, whose bundle is found at once from then on; both starts write the same text."""
    may_go, convert = threading.Event(), Joining._converted
    monkeypatch.setattr(Joining, "_converted", lambda *given: may_go.wait() and convert(*given))
    options: dict[str, Any] = {"draft": files[1], "measure": "idle", "cache_size": 0.01}
    asked: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True}
    with outrider.load(file, **options) as engine:
        first = engine.bundle
        assert not first.manifest.drafters
        assert engine.bundled_drafters == ("draft",)
        before = engine.generate("Hello", **asked)
        assert not engine._registry.models
        may_go.set()
        assert [*engine.draft_models] == ["draft"]
        drafted = engine.generate("Hello", **asked, drafter="draft", num_assistant_tokens=3)
        assert drafted.stats.num_draft_tokens
    with outrider.load(file, **options) as engine:
        pair = engine.bundle
        again = engine.generate("Hello", **asked)
    assert before.token_ids == drafted.token_ids == again.token_ids
    assert is_whole(pair)
    assert [drafter.name for drafter in pair.manifest.drafters] == ["draft"]
    for part in ("main", "tokenizer"):
        assert pair.files_of(part) == first.files_of(part)
    weights = [each.model_path(each.manifest.main).with_suffix(".bin") for each in (first, pair)]
    assert weights[0].samefile(weights[1])
    assert opened(file, files[1])[0] == pair


@pytest.mark.parametrize("last", ["engine.close()", ""], ids=["closed", "not closed"])
def test_a_draft_model_is_converted_to_the_end_though_the_program_ends(
    file: Path, files: list[Path], folder: Path, last: str
) -> None:
    """It does not wait for that: what says whether a conversion has ended never does here."""
    program = f"""
import outrider
from outrider_export.bundles import cached
begin = cached.begin_beside
cached.begin_beside = lambda *given: [begin(*given), bool][1]
engine = outrider.load({str(file)!r}, draft={str(files[1])!r}, measure="idle", cache_size=0.01)
engine.generate("Hello", max_new_tokens=1)
{last}
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    while not any((folder / "bundles").glob("model-pair-*.json")):
        time.sleep(0.1)
    with outrider.load(file, draft=files[1], measure="idle", cache_size=0.01) as engine:
        assert engine.bundle.manifest.drafters


def test_a_program_that_would_start_itself_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    with pytest.raises(ExportError, match="no Python interpreter to convert models with"):
        begin_beside(cached.__name__, [])


@pytest.mark.parametrize("options", [
    {}, {"measure": "first"}, {"measure": "idle", "drafter": "draft"}, {"measure": "idle", "overlap": True},
], ids=str)  # fmt: skip
def test_a_draft_model_that_cannot_come_later_is_converted_at_once(
    file: Path, files: list[Path], options: dict[str, Any]
) -> None:
    with outrider.load(file, draft=files[1], cache_size=0.01, **options) as engine:
        assert [*engine._registry.models] == [each.name for each in engine.bundle.manifest.drafters] == ["draft"]


def test_a_draft_model_that_fits_no_main_model_is_refused_before_the_first_answer(file: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ExportError, match=r"broken\.gguf"):
        outrider.load(file, draft=broken, measure="idle")


def test_large_files_are_known_by_samples(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And by their time of change. What lies between samples is not read."""
    for name, value in {"_WHOLE": 1 << 16, "_BEGINNING": 1 << 12, "_SAMPLE": 1 << 4}.items():
        monkeypatch.setattr(content, name, value)

    def content_of(path: Path) -> str:
        return content.content_of(Located(path.name, "gguf", path), path.parent / "known", Told())

    whole, before = content_of(file), file.stat()
    moved = file.rename(file.with_name("moved.gguf"))
    assert content_of(moved) == whole
    os.utime(moved, ns=(before.st_atime_ns, before.st_mtime_ns + 10**10))
    assert content_of(moved) != whole
    data = bytearray(moved.read_bytes())
    data[1 << 11] ^= 1
    moved.write_bytes(data)
    os.utime(moved, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert content_of(moved) != whole


@pytest.mark.needs("POSIX")
def test_a_file_of_the_same_size_and_time_is_another_one(file: Path, files: list[Path]) -> None:
    first, _ = opened(file)
    opened(file)
    before = file.stat()
    file.write_bytes(files[1].read_bytes())
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert opened(file)[0] != first


def test_what_was_changed_a_moment_ago_is_read_again(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be changed once more within the same tick of the disk's clock."""
    monkeypatch.undo()
    monkeypatch.setattr(saved, "FOLDER", file.parent / "cache")
    located = Located(file.name, "gguf", file)
    for _ in range(2):
        told = Told()
        content.content_of(located, saved.FOLDER, told)
        assert told.phases == ["hash"]
    monkeypatch.setattr("time.time_ns", lambda: file.stat().st_ctime_ns + 10**10)
    content.content_of(located, saved.FOLDER, Told())
    content.content_of(located, saved.FOLDER, told := Told())
    assert told.phases == []


def test_a_file_that_changes_while_it_is_exported_makes_no_bundle(file: Path, files: list[Path], folder: Path) -> None:
    class Downloading(Told):
        def phase(self, name: str, total: int | None = None) -> None:
            super().phase(name, total)
            if name == "tokenizer main":
                shutil.copyfile(files[1], file)

    with pytest.raises(ExportError, match=r"Model\.gguf has changed while it was read\. Try again when it is complete"):
        open_bundle(file, progress=Downloading())
    assert shown_files(folder) == []
    assert is_whole(opened(file)[0])


def test_any_file_that_an_export_reads_changes_a_checkpoint(tmp_path: Path, folder: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    write_checkpoint(checkpoint)
    located = Located("checkpoint", "folder", checkpoint)

    def now() -> str:
        return content.content_of(located, folder, Told())

    found = [now()]
    (checkpoint / "chat_template.jinja").write_text("{{ messages }}")
    found.append(now())
    (checkpoint / "chat_template.jinja").rename(checkpoint / "other_template.jinja")
    found.append(now())
    (checkpoint / "other_template.jinja").unlink()
    config = checkpoint / "config.json"
    config.write_text(config.read_text().replace("1e-06", "1e-05"))
    found.append(now())
    config.write_text(config.read_text().replace("1e-05", "1e-06"))
    assert len({*found}) == 4
    for name in ("README.md", "pytorch_model.bin"):  # what no export reads
        (checkpoint / name).write_text("text")
    assert now() == found[0]


# ── deleted


def test_what_was_exported_of_a_deleted_file_is_used(file: Path, files: list[Path]) -> None:
    pair, _ = opened(file, files[1])
    file.unlink()
    found, told = opened(file, files[1])
    assert found == pair
    assert told.notes == [f"{file} is gone; the bundle made from it is used."]
    with pytest.raises(ExportError, match=r"There is no .*Model\.gguf any more, and the bundle made from it is"):
        opened(file)  # it was exported as a pair only
    (pair.folder / "outrider.json").unlink()
    with pytest.raises(ExportError, match=r"There is no .*Model\.gguf any more"):
        opened(file, files[1])
    assert run(["models", "remove", "--all"]) == 0
    with pytest.raises(ExportError, match=r"There is no .*Model\.gguf\. Name a"):
        opened(file, files[1])


@pytest.mark.parametrize("name", ["nowhere", "a/b/nowhere", "./nowhere", "~/nowhere/at/all"])
def test_a_name_of_nothing_asks_nothing_of_the_network(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("the hub is asked"))
    with pytest.raises(BundleError, match=r"There is no folder .*nowhere.*Make a bundle with .* or name a model: "):
        opened(name)


# ── whole or not at all


def test_a_full_disk_is_told_before_the_work(file: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=10**5))
    with pytest.raises(ExportError, match="has 0.00 GB free. .* another folder with OUTRIDER_CACHE") as caught:
        opened(file)
    assert " -o." not in str(caught.value)  # what `outrider export` takes, and this does not
    assert shown_files(folder) == []


CTRL_C, FULL = KeyboardInterrupt(), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(("phase", "error", "says"), [
    *((phase, CTRL_C, "^$") for phase in ("hash main", "convert main", "hash")),
    *((phase, FULL, "cannot be written: .*No space left.*OUTRIDER_CACHE") for phase in ("convert main", "hash")),
])  # fmt: skip
def test_ctrl_c_and_a_disk_that_fills_up_leave_nothing(
    file: Path, folder: Path, phase: str, error: BaseException, says: str
) -> None:
    with pytest.raises(KeyboardInterrupt if error is CTRL_C else ExportError, match=says):
        open_bundle(file, progress=Told(raises=(phase, error)))
    assert not (folder / "bundles").exists() or shown_files(folder) == []
    assert is_whole(opened(file)[0])


def test_a_folder_that_cannot_be_made_is_named(file: Path, folder: Path) -> None:
    folder.write_text("no folder")
    with pytest.raises(ExportError, match=r"bundles cannot be written: .* another folder with OUTRIDER_CACHE"):
        opened(file)


def test_a_damaged_bundle_is_made_again(file: Path, folder: Path) -> None:
    first, _ = opened(file)
    (first.folder / "main" / "openvino_model.bin").write_bytes(b"half")
    with pytest.raises(BundleError):
        read_bundle(first.folder)
    second, told = opened(file)
    assert told.exported
    assert is_whole(second)
    assert shown_files(folder) == [first.folder.name, f"{first.folder.name}.json"]


def test_damaged_notes_cost_no_bundle(file: Path, folder: Path) -> None:
    first, _ = opened(file)
    for path in (*(folder / "sources").iterdir(), folder / "bundles" / f"{first.folder.name}.json"):
        path.write_bytes(b"\xff{")
    found, told = opened(file)
    assert found == first
    assert not told.exported
    assert [source.name for source in BundleCache(folder).entries()[0].sources] == [str(file)]


# ── several processes

CHILD = """
import sys
from outrider.engine.opening import open_bundle
class Progress:
    def phase(self, name, total=None):
        print(name, flush=True)
        if name == "convert main" and "wait" in sys.argv:
            sys.stdin.readline()
    def advance(self, count): pass
    def note(self, text): print(text.split(" ")[0], flush=True)
print(open_bundle(sys.argv[1], progress=Progress()).folder, flush=True)
"""


@pytest.fixture
def start(file: Path) -> Any:
    """`start("wait")`: a process that opens the file, and stops in the middle of an export."""
    children: list[subprocess.Popen[str]] = []

    def make(*arguments: str) -> subprocess.Popen[str]:
        command, pipe = [sys.executable, "-c", CHILD, str(file), *arguments], subprocess.PIPE
        child = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        children.append(child)
        return child

    yield make
    for child in children:
        child.kill()
        child.communicate()


def lines_until(child: subprocess.Popen[str], last: str) -> list[str]:
    assert child.stdout is not None
    lines: list[str] = []
    while not lines or lines[-1] != last:
        line = child.stdout.readline()
        assert line, lines
        lines.append(line.strip())
    return lines


@pytest.mark.slow
def test_of_two_processes_one_exports_and_the_other_waits(start: Callable[..., Any], folder: Path) -> None:
    first = start("wait")
    lines_until(first, "convert main")
    second = start()
    assert lines_until(second, "Another")[-2:] != ["Making", "Another"]
    told, _ = first.communicate("\n", timeout=300)
    others, _ = second.communicate(timeout=300)
    assert told.splitlines()[-1] == others.splitlines()[-1]
    assert "convert main" not in others
    assert len(shown_files(folder)) == 2


@pytest.mark.slow
def test_what_a_killed_process_left_is_cleared_away(start: Callable[..., Any], file: Path, folder: Path) -> None:
    first = start("wait")
    lines_until(first, "convert main")
    waiting = start()
    lines_until(waiting, "Another")
    first.kill()
    first.wait()
    others, _ = waiting.communicate(timeout=300)  # it takes over
    assert others.splitlines()[0] == "Making"
    name = Path(others.splitlines()[-1]).name
    assert shown_files(folder) == [name, f"{name}.json"]
    assert not opened(file)[1].exported


@pytest.mark.slow
def test_leftovers_of_other_models_are_cleared_away_unless_they_are_being_made(
    start: Callable[..., Any], files: list[Path], folder: Path
) -> None:
    (folder / "bundles").mkdir(parents=True)
    for name in (".0123456789ab.partial", ".model-0123456789ab.deleted"):
        (folder / "bundles" / name / "main").mkdir(parents=True)
    first = start("wait")
    lines_until(first, "convert main")
    (partial,) = (folder / "bundles").glob(".*.partial")
    other, _ = opened(files[1])
    assert shown_files(folder) == [partial.name, other.folder.name, f"{other.folder.name}.json"]
    told, _ = first.communicate("\n", timeout=300)
    assert is_whole(read_bundle(told.splitlines()[-1]))


@pytest.mark.slow
@pytest.mark.needs("Linux")
def test_a_cache_that_cannot_be_written_is_read(file: Path, folder: Path) -> None:
    first, _ = opened(file)
    paths = [folder, *folder.rglob("*")]
    for path in paths:
        path.chmod(0o555 if path.is_dir() else 0o444)
    # Root may write anywhere: that is given up, by the system call.
    mere = "import ctypes; ctypes.CDLL(None).capset((ctypes.c_uint32 * 2)(0x20080522), (ctypes.c_uint32 * 6)())"
    other = file.with_name("other.gguf")
    other.write_bytes(file.read_bytes() + b"more")
    done, refused = (
        subprocess.run([sys.executable, "-c", mere + CHILD, path], capture_output=True, text=True, check=False)
        for path in (file, other)
    )
    for path in paths:
        path.chmod(0o755 if path.is_dir() else 0o644)
    assert done.stdout.splitlines()[-1:] == [str(first.folder)], done.stderr
    assert "convert main" not in done.stdout
    assert "bundles cannot be written: Permission denied. Make room there, name another folder" in refused.stderr


# ── hub ids


def test_a_hub_id_means_the_commit_that_was_exported(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest, asked = ["0" * 40], list[str | None]()
    (tmp_path / "small").mkdir()  # of the small files that are looked at first, a repository of GGUF files has none

    def download(located: Located, trust: bool = False, progress: Any = None, only: Any = None, **_: Any) -> Located:
        if only:
            return Located(located.id, "folder", tmp_path / "small", located.revision or newest[-1])
        asked.append(located.revision)
        return Located(located.id, "gguf", file, located.revision or newest[-1])

    for module in ("bundles.cached", "bundles.export", "describe.plan", "text_encoders.checkpoint"):
        monkeypatch.setattr(f"outrider_export.{module}.fetch", download)
    first, _ = opened("org/Tiny")
    assert first.folder.name.startswith("tiny-")
    assert first.manifest.main.source.revision == newest[0]
    assert asked == [None, newest[0]]  # what is exported is what the key says
    newest.append("1" * 40)
    assert opened("org/Tiny")[0] == first
    assert len(asked) == 2  # nothing was asked of the network
    assert run(["models", "remove", first.folder.name]) == 0
    assert opened("org/Tiny")[0].manifest.main.source.revision == newest[1]


# ── commands


def listed(capsys: pytest.CaptureFixture[str]) -> Any:
    capsys.readouterr()
    assert run(["models", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_commands_take_a_file(file: Path, files: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--max-new-tokens", "4", "--ignore-eos"]
    assert run(["generate", str(file), "Hello", "--draft", str(files[1]), *options]) == 0
    printed = capsys.readouterr()
    assert printed.err.startswith(f"Making a bundle of {file}, once, in ")  # the main model comes first
    assert run(["generate", str(file), "Hello", "--draft", str(files[1]), *options]) == 0
    again = capsys.readouterr()
    assert again.out == printed.out
    assert "Making a bundle" not in again.err
    for command in (["inspect"], ["devices"], ["tune-layers", "--dry-run"]):
        assert run([command[0], str(file), *command[1:], "--json"]) == 0
        assert json.loads(capsys.readouterr().out)


def test_models_are_listed_and_removed(
    file: Path, files: list[Path], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert listed(capsys) == {"folder": str(folder / "bundles"), "bytes": 0, "models": []}
    pair, _ = opened(file, files[1])
    alone, _ = opened(files[0])
    os.utime(folder / "bundles" / f"{pair.folder.name}.json", (0, 0))
    file.unlink()
    found = listed(capsys)
    assert [model["name"] for model in found["models"]] == [alone.folder.name, pair.folder.name]
    assert found["bytes"] == sum(model["bytes"] for model in found["models"]) > 500_000
    old = found["models"][1]
    assert old["bytes"] == sum(path.stat().st_size for path in pair.folder.rglob("*") if path.is_file())
    assert [(source["name"], source["state"]) for source in old["sources"]] == [
        (str(file), "gone"),
        (str(files[1]), "there"),
    ]
    assert old["last_used"].startswith(("1970", "1969"))
    opened(pair.folder.name)
    assert listed(capsys)["models"][0]["name"] == pair.folder.name  # used last now
    assert run(["models"]) == 0
    text = capsys.readouterr().out
    assert f"{file}(gone)" in "".join(text.split())  # a long path is folded
    assert str(folder / "bundles") in text

    assert run(["models", "remove", "model-pair"]) == 0  # a beginning will do
    assert shown_files(folder) == [alone.folder.name, f"{alone.folder.name}.json"]
    assert run(["models", "remove", "--all", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["removed"] == [alone.folder.name]
    assert shown_files(folder) == []
    assert run(["models"]) == 0
    assert "has no bundles" in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "message"), [
    ([], "or --all, and not both"),
    (["x", "--all"], "or --all, and not both"),
    (["x"], "There is no 'x' in the cache. Known: model-1, model-2"),
    (["model-"], "'model-' begins several names: model-1, model-2"),
])  # fmt: skip
def test_what_is_to_be_removed_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    for name in ("model-1", "model-2"):  # damaged ones are listed, too
        (folder / "bundles" / name).mkdir(parents=True)
    assert run(["models", "remove", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert len(listed(capsys)["models"]) == 2


def test_a_model_is_served_under_its_bundle_s_name(file: Path, tmp_path: Path) -> None:
    found = name_bundles((str(file), "org/Some-Model", f"small={file}"))
    assert found == {"model": str(file), "some-model": "org/Some-Model", "small": str(file)}
    assert name_bundles((str(file),), "small.gguf") == {"model": str(file)}
    with pytest.raises(OptionError, match="--draft small.gguf is for one model, and 2 are named"):
        name_bundles((str(file), f"b={file}"), "small.gguf")


def test_without_the_export_half_bundles_are_opened_and_models_say_what_is_missing(
    file: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("outrider_export", "outrider_export.bundles.cached", "outrider_export.bundles.bundle_cache"):
        monkeypatch.setitem(sys.modules, name, None)
    assert open_bundle(tiny).folder == tiny
    with pytest.raises(ExportError, match=r"Model\.gguf is no bundle, and .*pip install \".*\[export\]\""):
        open_bundle(file)
    assert run(["models"]) == 1
    assert '[export]"' in capsys.readouterr().err
