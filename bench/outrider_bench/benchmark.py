"""A whole comparison: engines in processes of their own, a folder that can be continued, and the results."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from outrider.config import GenerationConfig
from outrider.errors import OptionError, OutriderError
from outrider.inputs.text import Tokenizer
from outrider_bench.modes.mode import Mode
from outrider_bench.modes.name import ModeName
from outrider_bench.modes.peers.check import check_peer
from outrider_bench.modes.peers.known import PEERS
from outrider_bench.modes.setup import Setup
from outrider_bench.prompts import BenchPrompt, Task, encode_prompts
from outrider_bench.report import page
from outrider_bench.report.summary import collect, profile, summarize, summarize_prompts
from outrider_bench.runs.measure import QUICK_SECONDS, RunRecord, TimeBudget, layers, measure, warm_up
from outrider_bench.runs.run_folder import RunFolder
from outrider_bench.runs.workers import RemoteMode, start_workers
from outrider_bench.setting import describe_machine, describe_models, describe_versions


def run(
    setup: Setup,
    prompts: list[BenchPrompt],
    names: list[str],
    *,
    repeats: int = 1,
    folder: str | Path | None = None,
    quick: bool = False,
    progress: Callable[[int], AbstractContextManager[Callable[[], None]]] = lambda _: nullcontext(lambda: None),
) -> dict[str, Any]:
    """Run these modes on these prompts, interleaved. The others are compared with the first mode.

    folder: runs are written there as they end, and the same measurement continues from them. quick: end in ten minutes.
    progress: called with the number of runs once all is loaded; returns a function to call after each.

    Raises:
        OptionError: for an invalid mode, or a folder with other content.
        OutriderError: when no mode can be loaded.
    """
    check_setup(setup, names)
    budget = TimeBudget(QUICK_SECONDS) if quick else None
    config = setup.config.generation
    setting = describe_run(setup, prompts, names, repeats, quick=quick)
    failures: list[dict[str, str | None]] = []
    with ExitStack() as stack:
        path = folder or stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        saved = RunFolder(path, setting)
        tokenizer = setup.tokenizer or Tokenizer(setup.bundle.tokenizer_path)
        tasks = encode_prompts(prompts, tokenizer)
        modes = stack.enter_context(
            start_workers(names, setup, saved.path, lambda mode, error: failures.append(_failure(mode, None, error)))
        )
        if not modes:
            raise OutriderError(f"No mode can be loaded; {failures[0]['mode']}: {failures[0]['error']}.")
        if budget and "max_new_tokens" not in saved.chosen:
            _choose_tokens(saved, budget, modes, tasks, config)
        else:
            warm_up(modes, tasks, _as_chosen(config, saved))
        config = _as_chosen(config, saved)
        num_done = sum(record.run is not None for record in saved.records)
        advance = stack.enter_context(progress(len(tasks) * len(modes) * repeats - num_done))

        def record(made: RunRecord) -> None:
            saved.append(made)
            advance()

        records = measure(modes, tasks, config, repeats, done=saved.records, record=record, budget=budget)
        described = describe_modes(modes)
    results = condense(records, tasks, described, names[0])
    results["failures"] = failures + results["failures"]
    setting["max_new_tokens"] = config.max_new_tokens
    cut = describe_cut(records, tasks, repeats, setup.config.generation.max_new_tokens, config.max_new_tokens)
    return {"setting": setting, **results, "cut": cut}


def check_setup(setup: Setup, names: list[str]) -> None:
    """Check, without loading anything, that these modes can be compared.

    Raises:
        OptionError: for an invalid mode, or if a run would gain from the one before it.
    """
    for name in map(ModeName.parse, names):
        if name.kind in PEERS:
            check_peer(name, setup)
        setup.on(name)
    if setup.config.scheduler.answer_store:
        raise OptionError("answer_store would let a run copy from the run before it. Leave it out of a comparison.")


def describe_modes(modes: Sequence[RemoteMode]) -> list[dict[str, Any]]:
    """A description of each mode."""
    return [{"name": mode.name, "runtime": mode.runtime, "description": mode.description} for mode in modes]


def _as_chosen(config: GenerationConfig, saved: RunFolder) -> GenerationConfig:
    """The config with the answer length that the first start of a quick measurement chose."""
    length = saved.chosen.get("max_new_tokens")
    return config if length is None else config.replace(max_new_tokens=length)


def _choose_tokens(
    saved: RunFolder, budget: TimeBudget, modes: Sequence[Mode], tasks: list[Task], config: GenerationConfig
) -> None:
    """Choose the answer length of a quick measurement, from the time of a first prompt."""
    wanted = config.max_new_tokens or 1
    seconds = warm_up(modes, tasks, config)
    saved.choose(max_new_tokens=budget.choose_tokens(wanted, seconds, len(layers(tasks, 1)[0])))


def condense(
    records: list[RunRecord], tasks: list[Task], modes: Sequence[dict[str, Any]], reference: str
) -> dict[str, Any]:
    """Figures and runs, for JSON."""
    runs, names = collect(records), [mode["name"] for mode in modes]
    return {
        "reference": reference,
        "modes": modes,
        "summary": summarize(runs, tasks, names, reference),
        "prompts": summarize_prompts(runs, tasks, names, reference),
        "profile": profile(runs, names),
        "failures": [
            _failure(record.mode, tasks[record.number].prompt.id, record.error)
            for record in records
            if record.error and record.repeat not in runs.get((record.number, record.mode), {})
        ],
        "runs": [
            {
                "id": tasks[record.number].prompt.id,
                "category": tasks[record.number].prompt.category,
                "num_prompt_tokens": len(tasks[record.number].token_ids),
                "mode": record.mode,
                "repeat": record.repeat,
                **asdict(record.run),
            }
            for record in records
            if record.run
        ],
    }


def save(results: dict[str, Any], folder: Path) -> list[Path]:
    """Write results.json, results.md and report.html, and return their paths."""
    made = {
        "results.json": json.dumps(results, ensure_ascii=False) + "\n",
        "results.md": page.markdown(results),
        "report.html": page.html(results),
    }
    for name, text in made.items():
        (folder / name).write_text(text, encoding="utf-8", newline="\n")
    return [folder / name for name in made]


def describe_run(
    setup: Setup, prompts: list[BenchPrompt], names: list[str], repeats: int, *, quick: bool
) -> dict[str, Any]:
    """Everything that the figures of a measurement depend on."""
    device, generation = setup.config.device, setup.config.generation
    texts = json.dumps([asdict(prompt) for prompt in prompts]).encode()
    files = [setup.bundle.manifest.files]
    if device.draft_bundle:
        files.append(setup.draft_bundle.manifest.files)
    files += [setup.on(name).bundle.manifest.files for name in map(ModeName.parse, names) if name.bundle]
    options = {
        option.name: getattr(generation, option.name)
        for option in fields(generation)
        if getattr(generation, option.name) != getattr(GenerationConfig(), option.name)
    }
    return {
        **describe_models(setup.models),
        "bundle": hashlib.sha256("".join(map(repr, files)).encode()).hexdigest()[:16],
        **describe_machine(device.main_device),
        "draft_device": device.draft_device or device.main_device,
        "num_threads": device.num_threads,
        "precision": device.precision,
        "cache_precision": device.cache_precision,
        "cache_size": setup.config.scheduler.cache_size,
        "max_num_batched_tokens": setup.config.scheduler.max_num_batched_tokens,
        "properties": dict(device.properties),
        **{
            name: getattr(device, name)
            for name in ("draft_num_threads", "main_properties", "draft_properties")
            if getattr(device, name)
        },
        "prompts": ", ".join(f"{count} {name}" for name, count in Counter(p.category for p in prompts).items()),
        "prompts_sha256": hashlib.sha256(texts).hexdigest()[:16],
        "modes": names,
        "peer_models": {name: str(path) for name, path in setup.peer_models.items()},
        "repeats": repeats,
        "quick": quick,
        "max_new_tokens": generation.max_new_tokens,
        **options,
        **describe_versions(setup.models.values()),
    }


def describe_cut(
    records: list[RunRecord], tasks: list[Task], repeats: int, wanted_tokens: int | None, tokens: int | None
) -> str | None:
    """What was left out to end in time, in a sentence; None if nothing was."""
    cuts = []
    if tokens != wanted_tokens:
        cuts.append(f"{tokens} new tokens instead of {wanted_tokens}")
    planned = Counter(task.prompt.category for task in tasks)
    measured = Counter(tasks[number].prompt.category for number in {record.number for record in records})
    if measured != planned:
        cuts.append("prompts " + ", ".join(f"{name} {measured[name]} of {all_}" for name, all_ in planned.items()))
    missing = {(number, repeat) for layer in layers(tasks, repeats) for number, repeat in layer}
    missing -= {(record.number, record.repeat) for record in records}
    fewest = min(repeat for _, repeat in missing) if missing else repeats
    if fewest < repeats and (measured == planned or repeats > 1):
        cuts.append(f"{max(fewest, 1)} of {repeats} repeats" + (" of some prompts" if fewest else ""))
    return f"To end in time: {'; '.join(cuts)}." if cuts else None


def _failure(mode: str, prompt: str | None, error: str | None) -> dict[str, str | None]:
    return {"mode": mode, "id": prompt, "error": error}
