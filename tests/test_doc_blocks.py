"""The Python blocks of each page, one behind the other: their names come from the page, and they run."""

import ast
import builtins
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from adapters import write_adapter
from heads import write_head
from serving import TEMPLATE, serving
from text_encoders import write_toy
from tiny import SHAPE
from tiny_vision import add_toy_encoder, picture

ROOT = Path(__file__).parents[1]
PAGES = {
    path.name: blocks
    for path in sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md"])
    if (blocks := re.findall(r"^```python\n(.*?)^```", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL))
}
ELSEWHERE = ("# openvino-genai", "# Transformers")  # blocks of other libraries
# Pages whose blocks do not run here, and why.
NOT_RUN = {
    "devices.md": "a processor with cores of two kinds",
    "distill.md": "a training of hours; tests/export/distill has shorter ones",
    "encoder-decoder.md": "a T5, a Whisper and speech; tests/runtime/test_encoder_decoder*.py have small ones",
}
# SmolLM2 has no format for functions.
BEFORE = {"structured-output.md": ("tools = [", f"engine.tokenizer.set_chat_template({TEMPLATE!r})\n")}
REAL = {"structured-output.md"}  # what a random model writes in JSON does not end
URL = "http://127.0.0.1:8000"


def names_of(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """Each name in a program, and whether it is given a value there."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id, not isinstance(node.ctx, ast.Load)
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).split(".")[0], True
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, True
        elif isinstance(node, ast.arg):
            yield node.arg, True


@pytest.mark.parametrize("page", PAGES)
def test_names_come_from_the_page(page: str) -> None:
    known = set(dir(builtins))
    for block in PAGES[page]:
        found = list(names_of(ast.parse(block)))
        known |= {name for name, is_given in found if is_given}
        assert {name for name, _ in found} <= known


@pytest.fixture(scope="module")
def folder(tiny: Path, tiny_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what pages call my-pair and my-model, and the checkpoints that these are made of."""
    from outrider_export import add_adapter, add_drafter

    made = tmp_path_factory.mktemp("pages")
    shutil.copytree(tiny_pair, made / "my-pair")
    shutil.copytree(tiny, made / "my-model")
    add_drafter(made / "my-model", write_head(made / "eagle3", "eagle3"))
    for seed, name in enumerate(("pirate", "legal")):
        add_adapter(made / "my-model", write_adapter(made / name, SHAPE, seed=seed, size=0.01))
    for name in ("model.gguf", "small.gguf"):
        shutil.copy(tiny.with_name("tiny.gguf"), made / name)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if page not in NOT_RUN])
def test_blocks_run_in_their_order(
    page: str, folder: Path, tiny: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On tiny models, in this process: test_samples.py runs programs as users do, on a real model."""
    program = "\n".join(block for block in PAGES[page] if not block.startswith(ELSEWHERE))
    place, first = BEFORE.get(page, ("", ""))
    program = program.replace(place, first + place, 1)
    if page in REAL:
        folder = request.getfixturevalue("smollm2").parent
        program = program.replace('("my-pair")', f'("{request.getfixturevalue("smollm2").name}", max_new_tokens=200)')
    if page == "embeddings.md":
        write_toy(folder / "bge-small", tiny, "embedding")
        write_toy(folder / "bge-reranker", tiny, "rerank")
    if page == "vision.md":
        add_toy_encoder(tiny, folder / "my-eyes")
        image = pytest.importorskip("PIL.Image", reason="the extra [vision]")
        image.fromarray(picture(0)).save(folder / "cat.png")
    sampled = re.compile(r"^(?!.*seed=)(.*temperature=0\.7)", re.MULTILINE)
    program = sampled.sub(r"\1, seed=7", program)  # the same at every run
    program = re.sub(r"max_new_tokens=\d{3,}", "max_new_tokens=48", program)
    for package in ("langchain_openai", "llama_index.llms.openai_like"):
        if package in program:
            pytest.importorskip(package.split(".")[0])
    monkeypatch.chdir(folder)
    monkeypatch.setitem(sys.modules, "openvino_telemetry", None)  # as a page does, but for this test alone
    if URL not in program:
        exec(compile(program, page, "exec"), {"__name__": "__main__"})  # noqa: S102 - the pages are ours
        return
    with serving({"my-pair": folder / "my-pair"}) as live:
        exec(compile(program.replace(URL, live.url), page, "exec"), {"__name__": "__main__"})  # noqa: S102 - as above


SAMPLES = sorted(path.name for path in (ROOT / "samples").glob("*.py"))
WITH_PACKAGES = {"desktop_chat.py": "PySide6", "ray_serve.py": "ray"}


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("sample", [name for name in SAMPLES if name not in WITH_PACKAGES])
def test_samples_without_arguments_print_usage(sample: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "samples" / sample)], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode
    assert "Traceback" not in done.stderr
    assert sample in done.stderr
    assert not any(tmp_path.iterdir())
