"""Breaks the loop in one place after the other, and shows that a test fails for each.

    python tests/mutations.py [NAME …]

Works on a copy. Prints a table of what was broken and which test noticed; exits with 1 if one went unnoticed. Takes
some minutes, so it is run by hand when the loop, the verifiers, the sampling or the drafters change.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
RUNTIME = Path("runtime/outrider")


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


def check(tree: Path, mutation: Mutation) -> str | None:
    """The test that fails when `tree` is broken in this way; None if all pass."""
    path = tree / RUNTIME / mutation.path
    text = path.read_text(encoding="utf-8")
    if text.count(mutation.old) != 1:
        sys.exit(f"{mutation.name}: {mutation.path} has {text.count(mutation.old)} times {mutation.old!r}; update it.")
    path.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
    try:
        tests = [os.path.normpath(Path("tests/runtime") / test) for test in mutation.tests.split()]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(str(tree / half) for half in ("runtime", "export", "bench"))
        }
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", *tests]
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    finally:
        path.write_text(text, encoding="utf-8")
    if done.returncode == 0:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) tests/(?:runtime/)?(\S+)", done.stdout, re.MULTILINE)
    if done.returncode != 1 or failed is None:
        sys.exit(f"{mutation.name}: pytest could not run.\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return failed[1]


def main() -> None:
    """Check all mutations, or those whose names contain one of the arguments."""
    chosen = [m for m in MUTATIONS if not sys.argv[1:] or any(word in m.name for word in sys.argv[1:])]
    unnoticed = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        for part in ("runtime", "export", "bench", "tests", "configs", "samples"):
            shutil.copytree(
                ROOT / part, tree / part, ignore=shutil.ignore_patterns("__pycache__", ".hypothesis", ".cache")
            )
        shutil.copy(ROOT / "pyproject.toml", tree)
        for mutation in chosen:
            noticed = check(tree, mutation)
            unnoticed += noticed is None
            print(f"{'noticed' if noticed else 'UNNOTICED':10} {mutation.name:65} {noticed or ''}", flush=True)
    sys.exit(f"{unnoticed} of {len(chosen)} went unnoticed." if unnoticed else 0)


if __name__ == "__main__":
    main()
