"""Acceptance and speed of each drafter with an adapter of the main model and without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from outrider.bundle.folder import Bundle
from outrider.bundle.kinds import COPYING
from outrider.config import Config
from outrider.decoding.metrics import Stats
from outrider.engine.engine import Engine
from outrider_bench.prompts import BenchPrompt


def compare_adapter(
    bundle: Bundle,
    config: Config,
    prompts: Sequence[BenchPrompt],
    adapter: str,
    progress: Callable[[int], AbstractContextManager[Callable[[], None]]] = lambda _: nullcontext(lambda: None),
) -> dict[str, Any]:
    """Answer these prompts by plain decoding and with each drafter, with the adapter and without.

    Draft models stay as they are, and draft for another text with the adapter: that costs acceptance, never text.
    Runs with and without take turns, so that both see the machine in the same state.

    Raises:
        OptionError: when the bundle has no such adapter.
    """
    with Engine(bundle, config.replace(enable_prefix_caching=False)) as engine:
        drafters: list[str | None] = [None, "auto", *engine.draft_models, *COPYING]
        engine.generate(prompts[0].text, adapter=adapter, max_new_tokens=4)  # kernels are compiled at the first call
        modes: list[dict[str, Any]] = []
        with progress(2 * len(drafters) * len(prompts)) as advance:
            for drafter in drafters:
                stats: dict[str, list[Stats]] = {"without": [], "with": []}
                for prompt in prompts:
                    for which, name in (("without", None), ("with", adapter)):
                        result = engine.generate(prompt.text, adapter=name, drafter=drafter)
                        stats[which].append(result.stats)
                        advance()
                modes.append({"drafter": drafter or "plain", **{which: _sum(each) for which, each in stats.items()}})
        return {"adapter": adapter, "num_prompts": len(prompts), "setting": engine.setting, "modes": modes}


def _sum(runs: Sequence[Stats]) -> dict[str, Any]:
    """Figures of several answers together."""
    drafts, drafted, accepted = (
        sum(getattr(each, name) for each in runs) for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    )
    decoded = sum(max(each.num_generated_tokens - 1, 0) for each in runs)  # the first comes with the prompt
    seconds = sum(each.decode_seconds for each in runs)
    return {
        "num_draft_tokens": drafted,
        "num_accepted_tokens": accepted,
        "acceptance_rate": accepted / drafted if drafted else None,
        "mean_acceptance_length": 1 + accepted / drafts if drafts else None,
        "tokens_per_second": decoded / seconds if seconds else None,
    }
