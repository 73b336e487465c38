"""What a new drafter costs on this machine, and what it needs to pay: the end of `outrider add`.

show(measure_drafter(bundle, "eagle3", acceptance_in(folder)))
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outrider.bundle.folder import Bundle
from outrider.cli.console import out, table
from outrider.cli.opening import load_model
from outrider.config import Config
from outrider.drafters.prediction import Costs, best_draft, needed, predict, predictions
from outrider.errors import ExportError, OutriderError
from outrider.models.tuning.loading import is_settled
from outrider.models.tuning.model_spec import specs_of
from outrider.models.tuning.placement import choose_devices
from outrider.system.files import reading

_QUICK = 500_000_000  # bytes of models that are loaded for the first time: a few seconds
_LENGTHS = (1, 2, 3, 4, 5, 7, 15)


@dataclass(frozen=True)
class DrafterCosts:
    """A drafter's costs, and its acceptance on held-out text, by place, if its folder says that."""

    costs: Costs
    acceptance: list[float]


def acceptance_in(folder: Path) -> list[float]:
    """The acceptance on held-out text that a drafter's training.json says, by place; empty if there is none.

    Raises:
        ExportError: when the file is damaged.
    """
    path = folder / "training.json"
    if not path.is_file():
        return []
    with reading(str(path), "Delete it, or fetch it again.", ExportError):
        found = json.loads(path.read_text(encoding="utf-8")).get("held_out_acceptance_by_place", [])
        if not all(0 <= each <= 1 for each in found):
            raise ValueError("an acceptance is from 0 to 1")
        return [float(each) for each in found]


def measure_drafter(bundle: Bundle, name: str, acceptance: list[float]) -> DrafterCosts | str:
    """The costs of a bundle's drafter, where measuring takes seconds; otherwise a sentence that says why not, and how.

    Measured settings and costs are saved, as at any load.
    """
    tune = f"Measure it: outrider tune {bundle.folder} --drafter {name}"
    config = Config().replace(drafter=name, adapters=(), overlap=False, measure="first")
    main, drafts = specs_of(bundle, bundle, [each for each in bundle.manifest.drafters if each.name == name], ())
    try:
        placement = choose_devices(main, drafts, config.device)
        places = (main, placement.main), (drafts[0], placement.draft or placement.main)
        size = sum(spec.size for spec, device in places if not is_settled(spec.on(device, config.device)))
        if size > _QUICK:
            return f"What it costs here is measured at the first load, which takes longer than this. {tune}"
        config = config.replace(enable_prefix_caching=False, keep_records=False)
        with load_model(bundle, config) as engine:
            return DrafterCosts(Costs.of(engine.costs["main"], engine.draft_models[name]), acceptance)
    except OutriderError as error:
        return f"What it costs here cannot be measured: {error}"


def as_dict(found: DrafterCosts | str) -> dict[str, Any]:
    """For --json."""
    if isinstance(found, str):
        return {"not_measured": found}
    made = {"costs": asdict(found.costs), "needed_acceptance": needed(1.0, found.costs)}
    return made | ({"prediction": asdict(predict(found.acceptance, found.costs))} if found.acceptance else {})


def show(found: DrafterCosts | str) -> None:
    """Print what drafts cost, what makes up for that, and what is predicted."""
    if isinstance(found, str):
        out.print(found, soft_wrap=True)
        return
    costs = found.costs
    plain = costs.check[0]
    title = f"On this machine, in target passes of one token ({1000 * plain:.1f} ms)"
    headings = ["draft tokens", "draft", "target pass", "tokens/round to pay", "acceptance to pay"]
    made = table(*headings, *(["predicted"] if found.acceptance else []), title=title)
    expected = predictions(found.acceptance, costs)
    for k in _LENGTHS[: sum(each <= len(costs.draft) for each in _LENGTHS)]:
        cells = [costs.draft[k - 1] / plain, costs.check[k] / plain, costs.break_even(k)]
        share = needed(1.0, costs, k)
        row = [str(k), *(f"{each:.2f}" for each in cells), "-" if share is None else f"{share:.0%}"]
        if found.acceptance:
            row.append(f"{expected[k - 1].speed_up:.2f}×" if k <= len(expected) else "-")
        made.add_row(*row)
    out.print(made)
    out.print(_verdict(costs))
    if not found.acceptance:
        return
    best, shares = predict(found.acceptance, costs), ", ".join(f"{each:.0%}" for each in found.acceptance)
    gain = (
        f"{best.speed_up:.2f}× plain decoding with drafts of {_tokens(best.num_draft_tokens)}"
        if best.num_draft_tokens
        else "slower than plain decoding"
    )
    out.print(f"Predicted, not measured: {gain}, at the acceptance on held-out text in its training.json ({shares}).")


def _verdict(costs: Costs) -> str:
    """From where it pays."""
    share = needed(1.0, costs)
    if share is None:
        return "It cannot pay here: drafts take too long, even if all of their tokens are accepted."
    best = best_draft([share] * len(costs.draft), costs).num_draft_tokens
    return (
        f"It pays if at least {share:.0%} of draft tokens are accepted, each if those before it are: with drafts of "
        f"{_tokens(best)}, {costs.break_even(best):.2f} tokens per round."
    )


def _tokens(count: int) -> str:
    return f"{count} token{'s' * (count != 1)}"
