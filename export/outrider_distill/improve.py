"""Makes a bundle faster on this machine: trains what may pay, measures real answers, and keeps what is faster.

    improve(Path("my-bundle"), hours=8.0, tell=print)

A round is trained in `BUNDLE.improve`, beside the bundle. Each step leaves what it has made there, and is skipped where
that is there, so that a round goes on after a stop. The bundle changes by a rename at the end of a round.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from outrider.bundle.folder import Bundle, read_bundle
from outrider.config import Config
from outrider.engine.engine import load
from outrider.errors import ExportError
from outrider_bench import benchmark
from outrider_bench.modes.setup import Setup
from outrider_bench.prompts import BenchPrompt, read_prompts
from outrider_bench.setting import default_num_threads
from outrider_distill.draft.from_bundle import draft_model_of
from outrider_distill.improve_work import ImproveRound, ImproveWork
from outrider_distill.plan import Options
from outrider_distill.progress import Stopping
from outrider_distill.run import distill
from outrider_export.bundles.drafters import add_drafter
from outrider_export.progress import Progress, Silent

NAME, HEAD = "improved", "improved-head"  # of drafters in the bundle: one takes the place of its own kind alone
FASTER, SLOWER = 1.03, 0.97  # of all answers at least, and of none of the categories, both beyond chance
_TRAINING = 0.75  # of the hours; the rest is for measuring, which takes ten minutes at most
_OLD, _NEW = "auto", "auto@new"
_REPEATS, _ANSWER = 3, 64


def improve(
    path: Path,
    *,
    prompts: Path | None = None,
    hours: float = 8.0,
    progress: Progress | None = None,
    tell: Callable[[str], None] = lambda _: None,
    status: Callable[[str], None] | None = None,
    wait: Callable[[Stopping], float] = lambda _: 0.0,
) -> ImproveRound:
    """Do a round, or go on with the one that was begun; its hours and prompts stay.

    prompts: see `outrider_distill.prompts.read_prompts`. hours: of a round. The others: see `distill`.

    Raises:
        OptionError, BundleError, DeviceError: as `outrider.load`.
        ExportError: when nothing can be trained for the bundle, or as `distill`.
        Stopped: after Ctrl-C or SIGTERM. The bundle is as it was.
    """
    work, progress = ImproveWork(path), progress or Silent()
    with work.opened() as bundle:
        begun = work.begun(bundle, tell) or work.begin(bundle, NAME, hours, prompts, tell)
        drafter = work.drafter(begun.number)
        if not drafter.exists():
            asked = Options(
                str(path),
                drafter,
                prompts=work.prompts if work.prompts.stat().st_size else None,
                excluded=work.held_out,
                num_tokens=begun.num_tokens,
                hours=_TRAINING * begun.hours,
                tried=begun.candidates,
                shared_data=work.data(begun.key),
            )
            distill(asked, progress=progress, tell=tell, status=status, wait=wait)
        kind = json.loads((drafter / "training.json").read_text(encoding="utf-8"))["kind"]
        if not work.new.exists():
            build(bundle, drafter, kind, work.new, progress)
        wait(Stopping())
        tell("Measuring answers to prompts that were not trained on, with and without it: ten minutes at most")
        results = measure(bundle, work.new, read_prompts(work.held_out), work.folder / "measured")
        return work.end(ImproveRound(begun.number, kind, *judge(results), begun.key))


def build(bundle: Bundle, drafter: Path, kind: str, folder: Path, progress: Progress) -> None:
    """A bundle at `folder`, whole or not at all, with a new drafter in place of what it was made of."""
    own = draft_model_of(bundle, NAME) if kind == "draft" else None
    name = NAME if kind == "draft" else HEAD
    replaced = [each.name for each in bundle.manifest.drafters if each == own or each.name == name]
    add_drafter(bundle.folder, drafter, name=name, progress=progress, output=folder, replaced=replaced)


def measure(old: Bundle, new: Path, prompts: list[BenchPrompt], folder: Path) -> dict[str, Any]:
    """Answers with both bundles in turns, after unmeasured ones. folder: what was measured before a stop is there."""
    config = Config().replace(max_new_tokens=_ANSWER, measure="first", num_threads=default_num_threads())
    for bundle in () if folder.exists() else (old, read_bundle(new)):
        with load(bundle, config) as engine:  # it saves how often drafts are accepted, which later engines begin with
            for prompt in prompts:
                engine.generate([{"role": "user", "content": prompt.text}])
                engine.settle()
    setup = Setup(old, config, {"new": new})
    return benchmark.run(setup, prompts, [_OLD, _NEW], repeats=_REPEATS, folder=folder, quick=True)


def judge(results: dict[str, Any]) -> tuple[bool, str, list[tuple[str, float, float, float]]]:
    """Whether to keep the new bundle, and why; by category tokens per second before and after, and the ratio.

    The ratio is of whole answers, the reading of the prompt included.
    """
    if results["failures"]:
        failure = results["failures"][0]
        raise ExportError(f"It cannot be measured: {failure['mode']}: {failure['error']}. Run it again.")
    found = {(row["mode"], row["category"]): row for row in results["summary"]}
    rows = [
        (name, found[_OLD, name]["tokens_per_second"], row["tokens_per_second"], row["end_to_end"])
        for (mode, name), row in found.items()
        if mode == _NEW
    ]
    everything = found[_NEW, "all"]
    slower = [f"{name} ({ratio:.2f})" for name, _, _, ratio in rows if _is_slower(found[_NEW, name])]
    why = f"answers take {1 / everything['end_to_end']:.2f} of the time"
    if everything["identical"] < everything["num_prompts"]:
        return False, f"{everything['num_prompts'] - everything['identical']} texts differ", rows
    if everything["end_to_end"] < FASTER or (everything["end_to_end_interval"] or [0])[0] <= 1:
        return False, f"{why}, and {1 / FASTER:.2f} at most, beyond chance, is asked for", rows
    return not slower, f"{why}, but these are slower: {', '.join(slower)}" if slower else why, rows


def _is_slower(row: dict[str, Any]) -> bool:
    """Whether a category is, beyond chance: some have one prompt, which takes a few percent more or less each time."""
    return bool(row["end_to_end"] < SLOWER and (row["end_to_end_interval"] or [0, 0])[1] < 1)
