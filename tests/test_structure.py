"""The shape of the package: who may import whom, what is public, what stays light."""

import ast
import functools
import json
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import outrider
from outrider.bundle.kinds import KINDS
from outrider.models.backends.heads import Head, graph_of
from outrider_bench.modes.peers.known import PEERS

RUNTIME = Path(outrider.__file__).parent
ROOT = Path(__file__).parents[1]
EXPORT = ROOT / "export" / "outrider_export"
DISTILL = ROOT / "export" / "outrider_distill"
BENCH = ROOT / "bench" / "outrider_bench"
ALL = (RUNTIME, EXPORT, DISTILL, BENCH)

# From the top down: a module imports what stands below it, never what stands above or beside it.
LAYERS = [
    {"cli"}, {"server", "rag"}, {"engine", "testing", "tools"}, {"drafters"}, {"decoding"}, {"models"}, {"inputs"},
    {"tokens"}, {"config", "bundle", "types"}, {"system"}, {"errors", "version"},
]  # fmt: skip
EXPORT_LAYERS = [
    {"bundles"},
    {"heads", "weights_choice", "encoder_decoder", "text_encoders"},
    {"diet", "with_torch"},
    {"describe"},
    {"direct"},
    {"onnx", "tokenizers"},
    {"sources"},
    {"target", "child"},
    {"progress", "extras"},
]
both = pytest.mark.parametrize(
    ("package", "layers"), [(RUNTIME, LAYERS), (EXPORT, EXPORT_LAYERS)], ids=["runtime", "export"]
)


@functools.cache
def parsed(path: Path) -> ast.Module:
    """A file of ours; most tests read all."""
    return ast.parse(path.read_text(encoding="utf-8"))


def imports_of(path: Path) -> set[str]:
    """The full names that a file imports, at run time or for types."""
    names: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update({node.module, *(f"{node.module}.{alias.name}" for alias in node.names)})
    return names


def test_cores_are_made_in_one_place() -> None:
    """`new_core` keeps signals from ending the process."""
    made = [path for root in ALL for path in root.rglob("*.py") if ".Core(" in path.read_text("utf-8")]
    assert made == [RUNTIME / "system" / "core.py"]


@both
def test_imports_point_one_way(package: Path, layers: list[set[str]]) -> None:
    level = {name: number for number, names in enumerate(layers) for name in names}
    wrong = []
    for path in package.rglob("*.py"):
        part = path.relative_to(package).parts[0].removesuffix(".py")
        if part in ("__init__", "__main__"):
            continue
        for name in imports_of(path):
            parts = name.split(".")
            if parts[0] != package.name or len(parts) == 1 or parts[1] not in level or parts[1] == part:
                continue
            if level[parts[1]] <= level[part]:
                wrong.append(f"{path.relative_to(package)} imports {name}")
    assert not wrong


def running(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes below one but those that are there for types alone."""
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            yield child
            yield from running(child)


def import_graph(packages: Iterable[Path]) -> dict[str, set[str]]:
    """Which of the packages' modules each of them imports."""
    paths = {
        ".".join((package.name, *path.relative_to(package).with_suffix("").parts)): path
        for package in packages
        for path in package.rglob("*.py")
    }
    paths = {name.removesuffix(".__init__"): path for name, path in paths.items()}
    graph: dict[str, set[str]] = {}
    for name, path in paths.items():
        found = graph[name] = set()
        for node in running(parsed(path)):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names} & {*paths}
            elif isinstance(node, ast.ImportFrom) and node.module in paths:
                parts = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
                found |= {part if part in paths else node.module for part in parts.values()}
    return graph


@pytest.mark.parametrize("packages", [ALL], ids=["all"])
def test_no_imports_go_in_circles(packages: Iterable[Path]) -> None:
    """Inside a layer neither, nor from one half of the project to another and back.

    What counts is every import that runs: at the top of a module or in a function, as a late import hides a circle and
    does not end it. Imports for types alone do not count, and neither does that a package's parts load the package.
    """
    try:
        TopologicalSorter(import_graph(packages)).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_a_name_of_a_class_has_one_meaning() -> None:
    """In all packages; those with an underscore are their modules' own."""
    places: dict[str, list[str]] = {}
    for package in ALL:
        for path in package.rglob("*.py"):
            for node in parsed(path).body:
                if isinstance(node, ast.ClassDef) and node.name[0] != "_":
                    places.setdefault(node.name, []).append(path.relative_to(ROOT).as_posix())
    assert not {name: paths for name, paths in places.items() if len(paths) > 1}


def test_training_is_a_package_that_nothing_else_imports() -> None:
    """It comes through the entry points that other packages have."""
    for package in (RUNTIME, EXPORT, BENCH):
        for path in package.rglob("*.py"):
            assert not any(name.split(".")[0] == DISTILL.name for name in imports_of(path)), path


def test_circles_are_found(tmp_path: Path) -> None:
    package = tmp_path / "toy"
    (package / "part").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "one.py").write_text("from toy.part import two, three\n")
    (package / "part" / "__init__.py").write_text("three = 3\n")
    (package / "part" / "two.py").write_text("if TYPE_CHECKING:\n    from toy.one import One\n")
    test_no_imports_go_in_circles([package])
    parsed.cache_clear()
    (package / "part" / "two.py").write_text("def late():\n    from toy.one import One\n")
    with pytest.raises(pytest.fail.Exception, match=r"toy\.one imports toy\.part\.two|toy\.part\.two imports toy\.one"):
        test_no_imports_go_in_circles([package])


def ours() -> list[Path]:
    """What runs models: the runtime, and what measures it."""
    return [*RUNTIME.rglob("*.py"), *BENCH.rglob("*.py")]


@functools.cache
def drafter_classes() -> set[str]:
    """The names of all classes in the runtime that propose drafts, and of those that they inherit from."""
    bases: dict[str, set[str]] = {}
    found: set[str] = set()
    for path in ours():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = {ast.unparse(base).split(".")[-1] for base in node.bases}
                if any(isinstance(each, ast.FunctionDef) and each.name == "propose" for each in node.body):
                    found.add(node.name)
    while more := {name for name, its in bases.items() if its & found or any(name in bases[f] for f in found)} - found:
        found |= more
    return found


def type_switches(tree: ast.AST, names: set[str]) -> list[int]:
    """The lines that ask whether something is of one of these classes."""
    lines = []
    for node in ast.walk(tree):
        asked: list[ast.AST] = []
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
            asked = [*node.args[1:]]
        elif isinstance(node, ast.Compare) and "type(" in ast.unparse(node.left):
            asked = [*node.comparators]
        elif isinstance(node, ast.MatchClass):
            asked = [node.cls]
        named = {ast.unparse(part).split(".")[-1] for each in asked for part in ast.walk(each)}
        if named & names:
            lines.append(node.lineno if isinstance(node, ast.expr | ast.pattern) else 0)
    return lines


# Of kinds of drafters; not those that mean other things, too: an author of messages, an end of a text, an object.
KIND_NAMES = {*KINDS} - {"assistant", "suffix", "self"}


def test_a_kind_of_drafter_is_named_in_three_files_at_most() -> None:
    """Its row, its class or graph, the reader of its checkpoints: all else reads the row."""
    named: dict[str, set[str]] = {name: set() for name in KIND_NAMES}
    for path in [*RUNTIME.rglob("*.py"), *EXPORT.rglob("*.py")]:
        constants = {getattr(node, "value", None) for node in ast.walk(parsed(path))}
        for name in KIND_NAMES & {each for each in constants if isinstance(each, str)}:
            named[name].add(path.name)
    # A test's bundle and the draft model that a bundle is by itself have the kind that all others are compared with.
    assert {name: files for name, files in named.items() if len(files) > 3 and name != "draft_model"} == {}


def test_each_kind_of_drafter_that_is_no_decoder_has_a_graph() -> None:
    for kind in KINDS.values():
        assert bool(kind.graph) == kind.reads_states, kind
        if kind.graph:
            assert callable(graph_of(Head(kind, None)))


def test_nobody_asks_of_which_class_a_drafter_is() -> None:
    """What a drafter can do, it says itself: an app's own may do the same."""
    names = drafter_classes()
    assert {"Drafter", "DraftModel", "Copier", "Ngram", "Suffix", "Shuffled"} <= names
    assert not {"Controller", "Fixed", "Trial", "DraftState"} & names
    found = [f"{path}:{line}" for path in ours() for line in type_switches(parsed(path), names)]
    assert found == []


@pytest.mark.parametrize("line", [
    "isinstance(a, DraftModel)", "isinstance(a, int | drafters.Ngram)", "issubclass(a, (int, Suffix))",
    "type(a) is Ngram", "match a:\n    case Suffix(): pass",
])  # fmt: skip
def test_type_switches_are_found(line: str) -> None:
    assert type_switches(ast.parse(line), drafter_classes())
    assert not type_switches(ast.parse(line), {"Other"})


@both
def test_every_module_has_its_layer(package: Path, layers: list[set[str]]) -> None:
    found = {
        path.name.removesuffix(".py")
        for path in package.iterdir()
        if path.name[0] not in "_." and path.suffix != ".typed"
    }
    named: set[str] = set().union(*layers)
    assert found - {"configs"} == named
    assert len(named) <= 18


def test_the_runtime_reaches_what_measures_in_commands_only() -> None:
    """Inside of a command's functions, as the export half: no other command loads it."""
    for path in RUNTIME.rglob("*.py"):
        tree = parsed(path)
        if path.relative_to(RUNTIME).parts[0] != "cli":
            assert not any(name.startswith("outrider_bench") for name in imports_of(path)), path
        at_import = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        assert not any("outrider_bench" in ast.unparse(node) for node in at_import), path
    for path in EXPORT.rglob("*.py"):
        assert not any(name.startswith("outrider_bench") for name in imports_of(path)), path


def test_a_bundle_is_opened_without_the_export_half(loaded: dict[str, set[str]]) -> None:
    """And without the packages of the extra [cli]."""
    assert "outrider.engine.opening" in loaded["outrider.engine.engine"]
    named = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    others = {re.split("[<>=]", text)[0].replace("-", "_").removesuffix("_py") for text in named["cli"]}
    assert others >= {"click", "gguf", "huggingface_hub", "markdown_it"}
    assert not {name for name in loaded["outrider.engine.engine"] if name.split(".")[0] in {*others, "outrider_export"}}


def test_only_the_command_line_and_the_opening_of_models_reach_the_export_half() -> None:
    for path in ours():
        names = {name.split(".")[0] for name in imports_of(path)}
        # What the benchmark compares with is loaded by its adapter, in a process of its own.
        allowed = {"torch", "transformers"} if path.parts[-3:] == ("modes", "peers", "transformers.py") else set()
        assert not names & {"torch", "transformers", "optimum", "nncf", "gguf"} - allowed, path
        # A model that is named in place of a bundle is exported: one module of the runtime asks for that.
        may_export = path.parent == RUNTIME / "cli" or path == RUNTIME / "engine" / "opening.py"
        assert "outrider_export" not in names or may_export, path


def test_peers_are_imported_by_their_adapters_only(loaded: dict[str, set[str]]) -> None:
    packages = {peer.package: peer.module for peer in PEERS.values()} | {"torch": "transformers"}
    for path in ours():
        for name in {name.split(".")[0] for name in imports_of(path)} & set(packages) - {"openvino_genai"}:
            assert path.parts[-3:] == ("modes", "peers", f"{packages[name]}.py"), path
    assert not {*packages} & loaded["outrider_bench.benchmark"]


@pytest.fixture(scope="module")
def loaded() -> dict[str, set[str]]:
    """What a fresh interpreter has loaded after it has imported each of these, one after the other."""
    code = (
        "import importlib, json, sys\n"
        "def after(name): importlib.import_module(name); return [*sys.modules]\n"
        "print(json.dumps({name: after(name) for name in sys.argv[1:]}))"
    )
    names = ["outrider", "outrider.engine.engine", "outrider_bench.benchmark"]
    done = subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True, check=True)
    return {name: set(modules) for name, modules in json.loads(done.stdout).items()}


def test_importing_outrider_loads_nothing_heavy(loaded: dict[str, set[str]]) -> None:
    assert not {"numpy", "openvino", "torch", "rich", "click"} & loaded["outrider"]


def test_an_engine_loads_neither_torch_nor_transformers(loaded: dict[str, set[str]]) -> None:
    assert not {"torch", "transformers", "click"} & loaded["outrider.engine.engine"]


def test_public_names_are_there() -> None:
    for name in outrider.__all__:
        assert getattr(outrider, name).__doc__, name
    assert set(outrider.__all__) <= set(dir(outrider))


def test_an_unknown_public_name_fails_as_usual() -> None:
    assert not hasattr(outrider, "no_such_name")


def test_mutations_find_their_places() -> None:
    """They are run by hand: what they break has to be there still, once, and so have the tests that notice it."""
    mutations = runpy.run_path(str(Path(__file__).with_name("mutations.py")))["MUTATIONS"]
    places = [
        (mutation.name, (RUNTIME / mutation.path).read_text(encoding="utf-8"), mutation.old) for mutation in mutations
    ]
    assert [name for name, text, old in places if text.count(old) != 1] == []
    for test in {test for mutation in mutations for test in mutation.tests.split()}:
        path, _, name = test.partition("[")[0].partition("::")
        file = Path(__file__).parent / "runtime" / path
        assert file.is_dir() or f"def {name}" in file.read_text(encoding="utf-8"), test


def test_ablations_find_their_places() -> None:
    """The same for the controller's parts."""
    ablation = runpy.run_path(str(BENCH.parent / "scripts" / "ablation.py"))
    for part in ablation["PARTS"]:
        with ablation["without"](part):
            pass


# Lines of Python. A number is raised only in the commit that says why, and what was removed instead.
MOST_LINES = {"runtime": 48_737, "export": 22_759, "bench": 5_757, "tests": 45_964}
# What is longer than the rules for all others: 400 lines a file, 60 a function, 16 fields a class. Entries leave.
LONG_FILES: dict[str, int] = {}
LONG_FUNCTIONS: dict[str, int] = {}
MANY_FIELDS: dict[str, int] = {
    "GenerationConfig": 38,
    "GenerationOptions": 38,
    "Stats": 17,
}


def lengths() -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """Files, functions and classes of the product, with their lines and fields."""
    files: dict[str, int] = {}
    functions: dict[str, int] = {}
    classes: dict[str, int] = {}
    for path in (path for package in ALL for path in package.rglob("*.py")):
        files[path.name] = max(files.get(path.name, 0), len(path.read_text(encoding="utf-8").splitlines()))
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                functions[node.name] = max(functions.get(node.name, 0), length)
            elif isinstance(node, ast.ClassDef):
                classes[node.name] = sum(isinstance(each, ast.AnnAssign) for each in node.body)
    return files, functions, classes


def test_the_house_does_not_grow_unsaid() -> None:
    for folder, most in MOST_LINES.items():
        count = sum(
            len(path.read_text(encoding="utf-8").splitlines())
            for path in (ROOT / folder).rglob("*.py")
            if ".cache" not in path.parts
        )
        assert count <= most, f"{folder} has {count:,} lines, and {most:,} are allowed"


def test_files_functions_and_classes_are_short() -> None:
    for found, most, known in zip(lengths(), (400, 60, 16), (LONG_FILES, LONG_FUNCTIONS, MANY_FIELDS), strict=True):
        long = {name: count for name, count in found.items() if count > most}
        assert {name: count for name, count in long.items() if count > known.get(name, most)} == {}
        assert known.keys() <= long.keys(), "an entry that is short enough now leaves the list"
