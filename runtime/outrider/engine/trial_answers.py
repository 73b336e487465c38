"""Short answers at a first load, which draft models draft: so their acceptance is known before the first request."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from outrider.config import GenerationConfig
from outrider.decoding.loop import step
from outrider.decoding.scheduler import Scheduler
from outrider.drafters.controller import replay
from outrider.errors import OutriderError
from outrider.models.tuning.measure import NEAR
from outrider.system.progress import report

if TYPE_CHECKING:
    from outrider.decoding.row_budget import RowBudget
    from outrider.engine.preparation import Preparation

log = logging.getLogger("outrider")

# Of kinds whose drafts are accepted more and less often.
_PROMPTS = (
    "Why is the sky blue?",
    "Write a Python function that returns the median of a list of numbers.",
    "Give three tips for a healthy life.",
    "A train runs 180 km in two hours. How far does it run in seven hours? Explain each step.",
    "Who wrote Faust, and what is it about?",
    "Write an email to a colleague about a meeting that is moved to Friday.",
)
_NUM_TOKENS = 24  # of each answer: enough records, although the token after a whole draft is not judged
_LEAST_SECONDS = 5e-3  # of a call with one row; answers of faster models show soon enough what drafts are worth
_MOST_SECONDS = 8.0  # of decoding; a slow machine decodes fewer answers


def draft_trial_answers(preparation: Preparation, rows: RowBudget) -> None:
    """Decode some answers plainly, in one batch, and have each model without records draft them again.

    A main model that runs one request at a time, or has an encoder, decodes none.
    """
    registry, main = preparation.registry, preparation.loaded["main"]
    counts, cost = range(1, len(_PROMPTS) + 1), main.cost
    count = max((n for n in counts if _NUM_TOKENS * cost.together([1] * n, NEAR) <= _MOST_SECONDS), default=0)
    encodes = main.spec.model.encoder is not None
    if main.backend.capabilities.fixed or encodes or cost(1) < _LEAST_SECONDS or not count:
        return
    if not (unknown := registry.unknown_models()):
        return
    report("Short answers are drafted, to know how many draft tokens are accepted.")
    config = GenerationConfig(max_new_tokens=_NUM_TOKENS, drafter=None, ignore_eos=True)
    alone = replace(preparation, store=None, prefixes=None, reuse=False)  # nobody is to find them anywhere
    try:
        answers = [alone.answer(alone.prompts.lay_out(prompt, config, fits=True)) for prompt in _PROMPTS[:count]]
        scheduler = Scheduler(main.backend, rows)
        scheduler.waiting.extend(answers)
        scheduler.settle()
        while scheduler.running:
            step(main.backend, scheduler)
            scheduler.settle()
        for model, record in unknown:
            for answer in answers:
                if answer.error is None:
                    for _ in replay(model, record, answer.draft_request(), lambda: False):
                        pass
    except OutriderError as error:  # the engine's requests will show it, if it matters to them
        log.warning("Drafts of short answers could not be tried: %s", error)
    registry.save_records()
