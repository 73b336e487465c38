"""Breaks the product in one place after the other, and shows that a test of one of the suites fails for each.

    python tests/mutations.py [-n PROCESSES] [NAME …]

Works on copies. Prints a table of what was broken and which test noticed; exits with 1 if one went unnoticed. The test
that noticed a mutation is the first to run the next time. All of them take an hour or more, so this is run by hand when
the loop, the verifiers, the sampling or the drafters change.
"""

import argparse
import compileall
import contextlib
import importlib.util
import json
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from py_compile import PycInvalidationMode
from queue import SimpleQueue
from typing import TYPE_CHECKING

import hypothesis
import pytest
from hypothesis import Phase

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext, SpawnContext

ROOT = Path(__file__).parents[1]
RUNTIME = Path("runtime/outrider")
NOTICED = ROOT / "tests" / ".cache" / "mutations.json"  # {name of a mutation: the test that noticed it}
PARTS = ("runtime", "export", "bench", "tests", "configs", "samples")
# What takes seconds to import is imported once; processes that run tests are forks of it, where there are forks.
PACKAGES = ("openvino", "onnxruntime", "onnx", "gguf", "openai", "schemathesis", "xdist", "torch", "transformers")
TEST_SECONDS = 150  # a test that takes longer hangs, which is noticed, too


@dataclass(frozen=True)
class Mutation:
    """`old`, which stands in `path` once, becomes `new`; one of `tests` must fail."""

    name: str
    path: str
    old: str
    new: str
    tests: str


MUTATIONS = [
    Mutation(name, path, old, new, tests)
    for path, found in tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")).items()
    for name, (tests, old, new) in found.items()
]


class FirstNoticed:
    """A plugin of pytest: the tests that are likely to notice a mutation come first; says which one runs."""

    def __init__(self, name: str, noticed_by: str | None, running: Path) -> None:
        self._words = set(re.findall(r"\w{3,}", name.lower()))
        self._noticed_by, self._running = noticed_by, running

    def pytest_sessionstart(self) -> None:
        """One failing example is enough: to make it smaller takes Hypothesis a minute."""
        settings, phases = hypothesis.settings, (Phase.explicit, Phase.reuse, Phase.generate)
        settings.register_profile("first", settings(), phases=phases, report_multiple_bugs=False)
        settings.load_profile("first")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=self._rank)

    def _rank(self, item: pytest.Item) -> tuple[bool, bool, int]:
        words = set(re.findall(r"[a-z0-9]{3,}", item.name.lower()))
        is_slow = item.get_closest_marker("slow") is not None
        return item.nodeid != self._noticed_by, is_slow, -len(words & self._words)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._running.write_text(nodeid, encoding="utf-8")


def _run_tests(folder: Path, mutation: Mutation, noticed_by: str | None) -> None:
    """Runs in a process of its own, with one processor, in the copy of the product that is in `folder`."""
    tree = folder / "tree"
    os.chdir(tree)
    sys.dont_write_bytecode = False
    if hasattr(os, "sched_setaffinity"):  # see `pytest_configure` in conftest.py
        processors = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {processors[int(folder.name) % len(processors)]})
    halves = [str(tree / half) for half in ("runtime", "export", "bench")]
    sys.path[:0] = halves
    os.environ["PYTHONPATH"] = os.pathsep.join(halves)
    output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    tests = [os.path.normpath(Path("tests/runtime") / test) for test in mutation.tests.split()]
    options = ["-x", "-q", "-n", "0", "-m", "", "-p", "no:cacheprovider", f"--basetemp={folder / 'temporary'}"]
    options += ["-o", f"faulthandler_timeout={TEST_SECONDS}"]
    code = pytest.main([*options, *tests], [FirstNoticed(mutation.name, noticed_by, folder / "running")])
    sys.stdout.flush()
    os._exit(code)  # threads of what was broken may never end


def copy_product(tree: Path) -> None:
    """Copy what tests need. Modules are compiled once, and again only where their text is another one."""
    ignored = shutil.ignore_patterns("__pycache__", ".hypothesis", ".cache")
    for part in PARTS:
        shutil.copytree(ROOT / part, tree / part, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tree)
    compileall.compile_dir(tree, maxlevels=20, quiet=2, invalidation_mode=PycInvalidationMode.CHECKED_HASH)


def check(folder: Path, mutation: Mutation, noticed_by: str | None) -> str | None:
    """The test that fails when the copy in `folder` is broken in this way; None if all pass."""
    path = folder / "tree" / RUNTIME / mutation.path
    text = path.read_text(encoding="utf-8")
    if text.count(mutation.old) != 1:
        sys.exit(f"{mutation.name}: {mutation.path} has {text.count(mutation.old)} times {mutation.old!r}; update it.")
    (folder / "running").unlink(missing_ok=True)
    path.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
    try:
        process = _context().Process(target=_run_tests, args=(folder, mutation, noticed_by))
        process.start()
        process.join()
    finally:
        path.write_text(text, encoding="utf-8")
        shutil.rmtree(folder / "temporary", ignore_errors=True)
    if process.exitcode == 0:
        return None
    if not (folder / "running").exists():
        output = (folder / "output").read_text(encoding="utf-8", errors="replace")
        sys.exit(f"{mutation.name}: pytest could not run.\n{output[-4000:]}")
    return (folder / "running").read_text(encoding="utf-8")


def _context() -> "SpawnContext | ForkServerContext":
    """Processes are forks of one that has imported `PACKAGES`; on Windows they import what they need."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([each for each in PACKAGES if importlib.util.find_spec(each)])
    return context


def main() -> None:
    """Check all mutations, or those whose names contain one of the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", dest="processes", type=int, default=1)
    parser.add_argument("names", nargs="*", metavar="NAME")
    asked = parser.parse_args()
    chosen = [m for m in MUTATIONS if not asked.names or any(word in m.name for word in asked.names)]
    noticed_by: dict[str, str] = {}
    with contextlib.suppress(OSError, ValueError):
        noticed_by = json.loads(NOTICED.read_text(encoding="utf-8"))
    unnoticed = 0
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(asked.processes) as pool:
        folders: SimpleQueue[Path] = SimpleQueue()
        for i in range(asked.processes):
            copy_product(Path(scratch) / str(i) / "tree")
            folders.put(Path(scratch) / str(i))

        def run(mutation: Mutation) -> str | None:
            folder = folders.get()
            try:
                return check(folder, mutation, noticed_by.get(mutation.name))
            finally:
                folders.put(folder)

        for mutation, noticed in zip(chosen, pool.map(run, chosen), strict=True):
            unnoticed += noticed is None
            print(f"{'noticed' if noticed else 'UNNOTICED':10} {mutation.name:65} {noticed or ''}", flush=True)
            if noticed:
                noticed_by[mutation.name] = noticed
                NOTICED.parent.mkdir(exist_ok=True)
                NOTICED.write_text(json.dumps(noticed_by, indent=1), encoding="utf-8")
    sys.exit(f"{unnoticed} of {len(chosen)} went unnoticed." if unnoticed else 0)


if __name__ == "__main__":
    main()
