"""The card of a drafter: README.md beside its weights, for people; training.json has the same for programs."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

from outrider.bundle import Bundle
from outrider.config.files import user_path
from outrider.version import __version__
from outrider_distill.data import find_shards
from outrider_distill.plan import DistillPlan, Options


def describe(
    options: Options, plan: DistillPlan, bundle: Bundle, report: dict[str, Any], hours: dict[str, float], **more: Any
) -> dict[str, Any]:
    """What training.json says. report: of `fit`. hours: by stage. more: the prediction, and trials of kinds."""
    source = bundle.manifest.main.source
    asked = Counter(
        json.loads(line)["source"]
        for shard in find_shards(options.data)
        for line in (shard / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    )
    prompts = {
        "file": None if options.prompts is None else options.prompts.name,
        "sha256": plan.prompts,
        "conversations": dict(asked),
    }
    return {
        "created_by": f"outrider {__version__}",
        "recipe": command(options),
        "main_model": {
            "id": source.id,
            "revision": source.revision,
            "sha256": source.sha256,
            "weights": bundle.manifest.main.weights,
        },
        "prompts": prompts,
        "started_from": None if options.source is None else _name(options.source),
        "hours_by_stage": {name: round(each, 3) for name, each in hours.items()},
        **report,
        **more,
    }


def card(training: dict[str, Any]) -> str:
    """README.md, from training.json."""
    main, prompts, expected = training["main_model"], training["prompts"], training["prediction"]
    acceptance = training["held_out_acceptance_by_place"]
    places = " | ".join(str(i) for i in range(1, len(acceptance) + 1))
    shares = " | ".join(f"{each:.0%}" for each in acceptance)
    written = ", ".join(f"{count:,} from the {who}" for who, count in sorted(prompts["conversations"].items()))
    stages = ", ".join(f"{name} {each:.2f} h" for name, each in training["hours_by_stage"].items())
    head = [f"base_model: {json.dumps(main['id'])}", "library_name: outrider", "tags: [speculative-decoding]"]
    return "\n".join(
        [
            "---", *head, "---", "",
            f"# A drafter of kind {training['kind']} for {main['id']}",
            "",
            "It proposes tokens, and the main model verifies them: the text is the main model's own.",
            "",
            f"- **Main model**: {main['id']} ({main['weights']}), revision {main['revision'] or 'none'}.",
            *([f"- **Started from**: {training['started_from']}."] if training.get("started_from") else []),
            f"- **Data**: {training['data_answer_tokens']:,} tokens of the main model's answers to {written} prompts.",
            f"- **Prompts**: {prompts['file'] or 'general ones, and those that the main model made'}.",
            f"- **Training**: {training['steps']:,} steps, {training['trained_answer_tokens']:,} tokens, "
            f"{training['hours']:.2f} hours. All stages: {stages}.",
            f"- **Expected on the machine that trained it**: {expected['speed_up']:.2f} × plain decoding, with "
            f"{expected['num_draft_tokens']} draft tokens per round.",
            "",
            "Acceptance on held-out text, greedy, at each position, given that all before it are accepted:",
            "",
            f"| position | {places} |", f"|---|{'---|' * len(acceptance)}", f"| accepted | {shares} |",
            "",
            f"Tokens per round, if {len(acceptance)} are drafted: {training['held_out_tokens_per_round']:.2f}.",
            "",
            "Made with:",
            "", "```bash", training["recipe"], "```", "",
        ]
    )  # fmt: skip


def command(options: Options) -> str:
    """The command that makes this drafter, with names of files instead of paths."""
    words = ["outrider", "distill", _name(options.main), "-o", options.output.name, "--kind", options.kind]
    words += ["--tokens", str(options.num_tokens), "--hours", f"{options.hours:g}", "--seed", str(options.seed)]
    if options.source is not None:
        words += ["--from", _name(options.source)]
    if options.num_layers is not None:
        words += ["--layers", str(options.num_layers)]
    if options.prompts is not None:
        words += ["--prompts", options.prompts.name]
    if options.excluded is not None:
        words += ["--exclude", options.excluded.name]
    return shlex.join(words)


def _name(text: str) -> str:
    """The last part of a path that exists; a hub id as it is."""
    path = Path(user_path(text))
    return path.resolve().name if path.exists() else text
