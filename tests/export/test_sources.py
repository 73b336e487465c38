"""What a name means, and what is fetched from the hub for it."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors
from huggingface_hub.utils._paths import filter_repo_objects

from exports import Recorder
from outrider.engine.opening import open_bundle
from outrider.errors import ExportError, OptionError
from outrider_export import export_bundle
from outrider_export.sources.hub import ALLOWED, ALLOWED_WITH_CODE, ELSEWHERE, choose_gguf
from outrider_export.sources.source import default_name, fetch, locate

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_an_existing_path_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "model.GGUF").write_bytes(b"GGUF")
    assert locate("org/name").kind == "folder"
    assert locate("model.GGUF").kind == "gguf"
    assert locate("org/other").kind == "hub"
    assert locate("gpt2").kind == "hub"
    assert locate("org/name").id == "name"


@pytest.mark.parametrize(
    "name", ["./model", "../x", "~/x", "a/b/c", "model.gguf", "org/model.gguf", "C:\\models\\x", "/x"]
)
def test_a_path_with_nothing_there_is_never_downloaded(name: str) -> None:
    with pytest.raises(ExportError, match=r"There is no .*Name a \.gguf file, a checkpoint folder or a hub id"):
        locate(name)
    with pytest.raises(ExportError, match="There is no"):
        locate(Path("org/name"))  # a Path is never a hub id


@pytest.mark.parametrize("name", ["model.guf", "model.gguff", "modl.gguf", "models/../model.ggfu"])
def test_a_misspelt_file_is_not_taken_for_a_new_bundle(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for open_it in (locate, open_bundle):
        with pytest.raises(ExportError, match=r"^There is no \S+\. Did you mean \S*model\.gguf\?$"):
            open_it(name)
    assert locate("org/model.v2").kind == "hub"


@pytest.mark.parametrize("name", ["", " ", "a b", "org/", "org/na me", "-x"])
def test_neither_path_nor_hub_id(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ExportError, OptionError)):
        locate(name)


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ExportError, match=r"neither a checkpoint folder nor a \.gguf file"):
        locate(tmp_path / "model.safetensors")


def test_a_folder_of_gguf_files_is_the_only_one_or_names_them(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    for name in ("x-00001-of-00002.gguf", "x-00002-of-00002.gguf", "mmproj-x.gguf"):
        (tmp_path / "models" / name).write_bytes(b"GGUF")
    assert locate(tmp_path / "models").fetched.name == "x-00001-of-00002.gguf"
    assert locate(tmp_path / "models").id == "x.gguf"
    assert default_name(tmp_path / "models" / "x-00002-of-00002.gguf") == "x"
    (tmp_path / "models" / "y.gguf").write_bytes(b"GGUF")
    with pytest.raises(ExportError, match=r"no config\.json\. Name one of its files: x-00001-of-00002\.gguf, y\.gguf"):
        export_bundle(tmp_path / "models", output=tmp_path / "b")


_PUBLISHED = ["README.md", "m-Q4_K_M.gguf", "m-Q5_K.gguf", "m-Q5_K_M.gguf", "mmproj-m.gguf"]
_PUBLISHED += [f"Q8_0/m-Q8_0-0000{i}-of-00002.gguf" for i in (1, 2)]


def test_a_quantization_chooses_among_the_hubs_gguf_files() -> None:
    assert choose_gguf("org/m", _PUBLISHED, "q8_0") == "Q8_0/m-Q8_0-00001-of-00002.gguf"
    assert choose_gguf("org/m", _PUBLISHED, "Q5_K") == "m-Q5_K.gguf"
    assert choose_gguf("org/m", _PUBLISHED, "") == "m-Q4_K_M.gguf"
    assert choose_gguf("org/m", ["a.gguf"], "") == "a.gguf"
    assert choose_gguf("org/m", ["model.safetensors"], "") is None
    assert locate("org/m:Q8_0").kind == "hub"
    with pytest.raises(ExportError, match=r"org/m: no model has Q6_K in the name\. Name one by .* m-Q8_0\.gguf"):
        choose_gguf("org/m", _PUBLISHED, "Q6_K")
    with pytest.raises(ExportError, match=r"no model has Q4_K_M in the name"):
        choose_gguf("org/m", ["a-Q8_0.gguf", "a-F16.gguf"], "")


def test_the_hubs_gguf_file_is_fetched_with_all_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Api:
        def list_repo_files(self, repo_id: str, revision: str) -> list[str]:
            assert (repo_id, revision) == ("org/m", "commit")
            return _PUBLISHED

    def download(repo_id: str, *, allow_patterns: list[str], dry_run: bool = False, **_: Any) -> Any:
        assert repo_id == "org/m"
        if dry_run:
            return []
        asked.append(allow_patterns)
        (tmp_path / "commit").mkdir(exist_ok=True)
        return str(tmp_path / "commit")

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    found = fetch(locate("org/m:Q8_0"), trust_remote_code=False, progress=Recorder())
    assert (found.kind, found.revision, found.id) == ("gguf", "commit", "org/m:Q8_0")
    assert found.fetched == tmp_path / "commit" / "Q8_0" / "m-Q8_0-00001-of-00002.gguf"
    assert asked == [["config.json"], [f"Q8_0/m-Q8_0-0000{i}-of-00002.gguf" for i in (1, 2)]]


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_json_that_is_nested_too_deeply_is_named(name: str, make_checkpoint: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(make_checkpoint("plain"), tmp_path / "copy")
    (folder / name).write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(ExportError, match=f"{name} (cannot be read: it is nested|is not a tokenizer that can be read)"):
        export_bundle(folder, output=tmp_path / "b")


def test_only_safe_files_are_allowed() -> None:
    repository = [
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", "source.spm",
        "chat_template.jinja", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "modeling_x.py",
        "README.md", "pytorch_model.bin", "model.pt", "model.pth", "model.ckpt", "weights.pkl", "tf_model.h5",
        "flax_model.msgpack", "onnx/model.onnx", "original/consolidated.00.pth", "original/params.json", "x.gguf",
    ]  # fmt: skip

    def chosen(allowed: tuple[str, ...]) -> list[str]:
        options = {"allow_patterns": list(allowed), "ignore_patterns": list(ELSEWHERE)}
        return list(filter_repo_objects(repository, **options))  # type: ignore[arg-type]

    assert chosen(ALLOWED) == repository[:8]
    assert chosen(ALLOWED_WITH_CODE) == repository[:9]


@pytest.fixture
def hub(make_checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A hub with one model, org/tiny; returns the calls that it got."""
    calls: list[dict[str, Any]] = []
    snapshot = tmp_path / "hub" / COMMIT
    snapshot.parent.mkdir()
    snapshot.symlink_to(make_checkpoint("plain"))

    class File:
        commit_hash = COMMIT
        file_size = 1000
        will_download = True

    def download(repo_id: str, **options: Any) -> Any:
        calls.append({"repo_id": repo_id, **options})
        if options.get("dry_run"):
            return [File(), File()]
        bar = options["tqdm_class"](total=2000, unit="B")
        for _ in range(2):
            bar.update(1000)
        with options["tqdm_class"](iter([1, 2]), total=2, desc="Fetching 2 files") as files:
            assert list(files) == [1, 2]
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return calls


@pytest.mark.slow
def test_the_resolved_commit_is_recorded(hub: list[dict[str, Any]], tmp_path: Path) -> None:
    told = Recorder()
    bundle = export_bundle("org/tiny", output=tmp_path / "b", revision="v1", weights="fp16", progress=told)
    source = bundle.manifest.main.source
    assert (source.id, source.kind, source.revision) == ("org/tiny", "hub", COMMIT)
    assert told.phases[0] == "download main"
    assert told.num_bytes >= 2000
    assert [call["revision"] for call in hub] == ["v1", COMMIT] * 3  # first small files, twice
    assert hub[5]["allow_patterns"] == list(ALLOWED)


@pytest.mark.parametrize(("error", "message"), [
    (lambda r: errors.RepositoryNotFoundError("404 Client Error\nmany lines", response=r), "There is no org/tiny"),
    (lambda r: errors.GatedRepoError("403", response=r), "org/tiny is gated. Accept its terms"),
    (lambda r: errors.RevisionNotFoundError("404", response=r), "org/tiny has no revision 'v1'"),
    (lambda _: errors.LocalEntryNotFoundError("no connection\nsecond line"), "the hub cannot be reached"),
    (lambda _: ConnectionError("refused"), "the hub cannot be reached"),
    (lambda _: RuntimeError("some\nsurprise"), "org/tiny cannot be downloaded: RuntimeError: some surprise"),
])  # fmt: skip
def test_hub_errors_take_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Callable[[Any], Exception], message: str
) -> None:
    import httpx

    raised = error(httpx.Response(404, request=httpx.Request("GET", "https://huggingface.co")))

    def fail(*_: object, **__: object) -> None:
        raise raised

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ExportError, match=message) as caught:
        export_bundle("org/tiny", output=tmp_path / "b", revision="v1")
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is raised
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_does_not_wait_for_the_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    ended = threading.Event()

    def download(_: str, **options: Any) -> Any:
        if options.get("dry_run"):
            raise errors.DryRunError("not reached")
        bar = options["tqdm_class"](total=1 << 60, unit="B")
        try:
            while True:
                bar.update(1)
        finally:
            ended.set()

    class Interrupts(Recorder):
        def advance(self, count: int) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(KeyboardInterrupt):
        export_bundle("org/tiny", output=tmp_path / "b", progress=Interrupts())
    assert ended.wait(300)
    assert list(tmp_path.iterdir()) == []
