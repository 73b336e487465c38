"""What the documentation says is what there is: pages made from the code, links, programs, messages, names."""

import ast
import pkgutil
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import openvino_genai
import pytest

import outrider
from layouts import LAYOUTS
from outrider import cli, errors
from outrider.bundle import Bundle
from outrider.config import Config
from outrider.drafters.controller.pricing import best_length
from outrider.testing import ToyTokenizer
from outrider_bench.prompts import read_prompts
from outrider_distill.prompts import general_prompts
from outrider_export.describe.architectures import ARCHITECTURES
from outrider_export.direct.archs import ARCHS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.glob("*.md"), *ROOT.glob("*.md")])
MOST_PAGES = [path for path in PAGES if path.name != "moving.md"]  # whose names are other libraries'
OPTIONS = {name for section in vars(Config()).values() for name in vars(section)}


def text_of(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def generated() -> dict[Path, str]:
    pages: dict[Path, str] = runpy.run_path(str(DOCS / "generate.py"))["pages"]()
    return pages


def test_generated_pages_are_what_the_code_says(generated: dict[Path, str]) -> None:
    assert len(generated) == 6
    for path, text in generated.items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run 'python docs/generate.py'"


CONTEXT = click.Context(cli.root)
COMMANDS = {name: found for name in cli.root.list_commands(CONTEXT) if (found := cli.root.get_command(CONTEXT, name))}
# Folders whose files architecture.md names by the end of their path.
TREES = ("runtime/outrider", "export/outrider_export", "bench/outrider_bench", "tests", "docs")
# What pages count, by the words after the number, and how many there are.
COUNTS = {
    r"architectures": len(ARCHITECTURES),
    r"entries": len(ARCHS),
    r"(?:layouts|published models)": len(LAYOUTS),
    r"commands": len(COMMANDS),
    r"(?:open|short) questions": len(read_prompts("open")),
    r"general ones": len(general_prompts()),
    r"questions in `samples": len((ROOT / "samples" / "rag_documents" / "questions.jsonl").read_text().splitlines()),
}
SOURCES = [
    path
    for half in ("runtime", "export", "bench", "samples", "tests", "docs")
    for path in (ROOT / half).rglob("*.*")
    if path.suffix in (".py", ".toml") or path.parent.name == "helpers"
    if path != Path(__file__)
]
WORDS = {path.stem for path in SOURCES}.union(*(re.findall(r"\w+", path.read_text("utf-8")) for path in SOURCES))
OTHERS_NAMES = {"get_num_tokens", "opt_in_out", "num_thread", "request_id", "timings_per_token", "outrider.commands"}
OTHERS_OPTIONS = {"--onefile", "--once", "--opt_out", "--target", "--build-arg"}  # of programs that are not ours


def options_of_command(command: click.Command) -> set[str]:
    """The options of a command and of those below it."""
    below = command.commands.values() if isinstance(command, click.Group) else ()
    own = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
    return own.union({"-h", "--help"}, *map(options_of_command, below))


def untrue_paths(text: str) -> Iterator[str]:
    """Files and folders in backticks, or at the beginning of a line of the tree, that are not there."""
    files = [path.as_posix() for tree in TREES for path in (ROOT / tree).rglob("*") if "__pycache__" not in path.parts]
    tree_block = re.search(r"^```\n(.*?)```", text, re.MULTILINE | re.DOTALL)
    words = re.findall(r"`([\w/.-]+(?:\.py|/))`", text)
    for line in tree_block[1].splitlines() if tree_block else ():
        words += re.findall(r"(\S+(?:/|\.py))(?= |$)", line.split("    ")[0])
    for word in words:
        name = word.rstrip("/")
        if not (ROOT / name).exists() and not any(path.endswith("/" + name) for path in files):
            yield word
    for tree in TREES[:3]:
        for folder in (ROOT / tree).glob("*/"):
            if folder.name != "__pycache__" and f"{folder.name}/" not in text:
                yield f"{tree}/{folder.name} is not named"


def untrue_names(text: str) -> Iterator[str]:
    """Files by their whole paths, modules, and names with an underscore that are not there."""
    for path in re.findall(r"(?<![\w/.-])((?:bench|configs|docs|export|runtime|samples|tests)/(?!\.)[\w/.-]*\w)", text):
        if not (ROOT / path).exists():
            yield path
    for span in re.findall(r"`([^`\n]+)`", re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S)):
        names = re.findall(r"(?<![\w/.<-])(?!lib)[a-z]+(?:_[a-z0-9]+)+\b(?![./])", span)
        yield from (name for name in names if name not in WORDS | OTHERS_NAMES)
        if re.fullmatch(r"outrider(?:_\w+)?(?:\.(?!json)\w+)+", span) and span not in OTHERS_NAMES:
            try:
                pkgutil.resolve_name(span)
            except (ImportError, AttributeError):
                yield span


def untrue_counts(text: str) -> Iterator[str]:
    """Numbers of things that are not how many there are."""
    for what, number in COUNTS.items():
        for found in re.finditer(rf"\b(\d[\d,]*) {what}", text):
            if int(found[1].replace(",", "")) != number:
                yield f"{found[0]}: there are {number}"


def untrue_commands(text: str) -> Iterator[str]:
    """Commands of ours that do not exist, and options that the command, or any command, does not have."""
    known = set().union(*map(options_of_command, COMMANDS.values()), ("--version",))
    blocks = re.findall(r"^```bash\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    lines = [line.strip() for block in blocks for line in re.sub(r"\\\n", " ", block).splitlines()]
    spans = [
        " ".join(span.split())
        for span in re.findall(r"`([^`]+)`", re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S))
    ]
    for line in [*lines, *spans]:
        said = re.match(r"(?:[A-Z_]+=\S* )*outrider ([a-z][a-z-]+)(.*)", line.split(" # ")[0].split(" | ")[0])
        if said and said[1] not in COMMANDS:
            yield line
        options = re.findall(r"(?<![\w-])--[a-z][\w-]+", said[2] if said else line if line.startswith("--") else "")
        has = options_of_command(COMMANDS[said[1]]) if said and said[1] in COMMANDS else known
        yield from (f"{option} of {line}" for option in options if option not in has | OTHERS_OPTIONS)


@pytest.mark.parametrize(
    ("untrue", "pages", "example"),
    [
        (untrue_paths, [DOCS / "architecture.md"], "`decoding/simulation.py`"),
        (untrue_names, MOST_PAGES, "bench/scripts/simulate.py"),
        (untrue_names, MOST_PAGES, "`draft_tokens_counted`"),
        (untrue_names, MOST_PAGES, "`outrider.simulation`"),
        (untrue_counts, PAGES, "3 architectures"),
        (untrue_commands, PAGES, "`outrider simulate`"),
        (untrue_commands, PAGES, "`outrider chat my-pair --colour`"),
        (untrue_commands, PAGES, "`--colour`"),
    ],
)
def test_names_and_counts_are_true(untrue: Callable[[str], Iterator[str]], pages: list[Path], example: str) -> None:
    assert next(iter(untrue(example))).startswith((example.strip("`"), "--colour of"))
    assert {path.name: found for path in pages if (found := list(untrue(path.read_text(encoding="utf-8"))))} == {}


def imports_of_apps() -> Iterator[tuple[str, str, str]]:
    """What the documentation's programs and the samples import of ours: where, module, name."""
    programs = [(path.name, path.read_text(encoding="utf-8")) for path in (ROOT / "samples").glob("*.py")]
    for page in PAGES:
        blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
        programs += [(page.name, block) for block in blocks]
    for where, program in programs:
        for node in ast.walk(ast.parse(program)):
            if isinstance(node, ast.Import):
                yield from ((where, each.name, "") for each in node.names if each.name.startswith("outrider"))
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("outrider"):
                yield from ((where, node.module or "", each.name) for each in node.names)
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "outrider":
                yield where, "outrider", node.attr


def test_programs_import_public_names_alone() -> None:
    """And packages that apps do not import say so."""
    public = {
        section.split("\n", 1)[0]: set(re.findall(r"^\| `(\w+)` ", section, re.MULTILINE))
        for section in text_of("api.md").split("\n## ")[1:]
    }
    public["outrider"] |= {name for name in outrider.__all__ if hasattr(errors, name)}  # troubleshooting.md has them
    found = list(imports_of_apps())
    assert {("rag.py", "outrider.rag", "Retriever"), ("own-drafter.md", "outrider", "Engine")} <= set(found)
    others = [each for each in found if each[1] not in public or (each[2] and each[2] not in public[each[1]])]
    assert others == []
    for path in Path(outrider.__file__).parent.glob("*/__init__.py"):
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        assert (f"outrider.{path.parent.name}" in public) != ("Internal: " in docstring), path


def anchors_of(path: Path) -> set[str]:
    """The anchors of a page's headings, as Python-Markdown's `toc` makes them."""
    prose = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    plain = [re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings]
    return {re.sub(r"[-\s]+", "-", heading) for heading in plain}


def links_of(path: Path) -> Iterator[tuple[str, str]]:
    """A page's relative links, as a path and an anchor."""
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if not re.match(r"[a-z]+:", target):
            file, _, anchor = target.partition("#")
            yield file, anchor


def test_links_lead_somewhere() -> None:
    found = [(path, *link) for path in PAGES for link in links_of(path)]
    assert (DOCS / "commands.md", "options.md", "device-deviceconfig") in found
    for path, file, anchor in found:
        target = (path.parent / file) if file else path
        assert target.exists(), f"{path.name}: {file}"
        if path.parent == DOCS:  # the site has nothing else
            assert target.resolve().is_relative_to(DOCS), f"{path.name}: {file}"
        assert not anchor or anchor in anchors_of(target), f"{path.name}: {file}#{anchor}"


@pytest.mark.parametrize(("page", "says"), [("own-drafter.md", "same tokens: True"), ("testing.md", "")])
def test_programs_run_as_they_stand(page: str, says: str, tmp_path: Path) -> None:
    program = re.search(r"```python\n(.*?)```", text_of(page), re.DOTALL)
    assert program
    file = tmp_path / "program.py"
    file.write_text(program[1], encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(file)], capture_output=True, text=True, check=False, encoding="utf-8", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert says in done.stdout


def names_of_program(page: str, pattern: str) -> dict[str, Any]:
    """What a part of a page's program defines."""
    program = re.search(pattern, text_of(page), re.DOTALL | re.MULTILINE)
    assert program
    names: dict[str, Any] = {}
    exec(program[1], names)  # noqa: S102 - the pages are ours
    return names


def test_the_drafter_of_the_documentation_drafts(openvino_bundle: Bundle) -> None:
    names = names_of_program("own-drafter.md", r"```python\n(.*?)^bundle = ")
    engine = outrider.Engine(openvino_bundle, tokenizer=ToyTokenizer())
    engine.add_drafter("documented", names["LastTime"]())
    result = engine.generate("abcabc", drafter="documented", max_new_tokens=30, ignore_eos=True)
    assert result.stats.num_draft_tokens > 0


def test_all_errors_are_in_the_table() -> None:
    known = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)}
    named = set(re.findall(r"^\| `(\w+)` \|", text_of("troubleshooting.md"), re.MULTILINE))
    assert named == known - {"OutriderError"}


def test_messages_are_the_code_s_own() -> None:
    """Each piece of a message between what varies is found in one text of the sources."""
    sources: list[str] = []
    for path in [path for half in ("runtime", "export", "bench") for path in (ROOT / half).rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
                sources.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                sources.append(node.value)
    everything = "\n".join(sources)
    pages = text_of("troubleshooting.md"), (ROOT / "README.md").read_text(encoding="utf-8")
    messages = [m for page in pages for m in re.findall(r"^\|? ?`([^`]* [^`]*)`(?: \||$)", page, re.MULTILINE)]
    assert len(messages) > 20
    varying = r"…|[,;.] |'[^']*'|\b\d[\d,.]*\b|my-pair|outrider\.json|Warning: |\b(?:main|GPU|CPU)\b|\w+="
    for message in messages:
        if message.startswith(("outrider ", ".", "--")):
            continue
        pieces = [piece.strip(" .;,") for piece in re.split(varying, message)]
        for piece in (piece for piece in pieces if len(piece) > 8):
            assert piece in everything, (message, piece)


def names_in(heading: str, column: int) -> set[str]:
    """The names, without values and arguments, in a column of the table below a heading of moving.md."""
    behind = text_of("moving.md").split(f"## {heading}")[1].split("\n## ")[0]
    cells = [row.split(" | ")[column] for row in behind.splitlines() if row.startswith("| ") and "`" in row]
    written = [code for cell in cells for code in re.findall(r"`([^`]*)`", cell)]
    return {re.split(r"[^\w.]", code)[0].split(".")[-1] for code in written}


def test_names_of_openvino_genai_exist() -> None:
    known = {"prompt_lookup"}  # a property of the pipeline
    kinds = ("GenerationConfig", "LLMPipeline", "SchedulerConfig", "StreamingStatus", "PerfMetrics", "DecodedResults")
    for owner in (openvino_genai, *(getattr(openvino_genai, kind) for kind in kinds)):
        known |= set(dir(owner))
    written = {name.removesuffix("[0") for name in names_in("From OpenVINO GenAI", 0)}
    assert len(written) > 30
    assert written <= known


@pytest.mark.parametrize("heading", ["From OpenVINO GenAI", "From Transformers' assisted generation"])
def test_our_names_in_the_tables_exist(heading: str) -> None:
    known = OPTIONS | {"chat_template", "cancel", "chat", "generate", "stream", "load", "outrider", "auto"}
    known |= {*outrider.Result.__dataclass_fields__, *dir(outrider.Stats)}
    assert names_in(heading, 1) - {"", "0"} <= known


def test_the_twelve_lines_of_the_controller_are_what_it_computes() -> None:
    names = names_of_program("controller.md", r"```python\n(def best_length.*?)```")
    for chances, costs in (
        ([0.9, 0.8, 0.1], [0, 0.2, 0.4, 0.9]),
        ([0.1], [0, 0.5]),
        ([], [0.0]),
        ([1.0] * 4, [0.1] * 5),
    ):
        assert names["best_length"](chances, costs) == best_length(chances, costs)
