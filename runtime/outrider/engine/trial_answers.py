"""Short answers while nobody asks, which draft models draft: so their acceptance is known before it is needed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from outrider.config import GenerationConfig
from outrider.decoding.loop import step
from outrider.decoding.measuring import Measuring
from outrider.decoding.scheduler import Scheduler
from outrider.drafters.controller import replay
from outrider.errors import RequestError
from outrider.models.cost.slots import GaveWay
from outrider.models.cost.table import NEAR
from outrider.system.progress import report

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from outrider.decoding.answer import Answer
    from outrider.decoding.row_budget import RowBudget
    from outrider.engine.preparation import Preparation
    from outrider.types import Backend

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


class TrialAnswers(Measuring):
    """Decodes some answers plainly, in one batch, and has each model without records draft them again.

        trial = TrialAnswers(preparation, rows)
        trial.go_on(main, lambda: False)    # at a load that measures first

    A main model that runs one request at a time, or has an encoder, decodes none.
    """

    fault = "Drafts of short answers could not be tried"

    def __init__(self, preparation: Preparation, rows: RowBudget) -> None:
        super().__init__()
        self._preparation, self._rows = preparation, rows
        self._answers: list[Answer] = []
        self._drafted: set[tuple[int, int]] = set()  # models and answers, by their places

    @property
    def is_due(self) -> bool:
        """Whether there are models that may be unknown, and none is yet to come."""
        return self._is_due and not self._preparation.registry.loading

    def measure(self, main: Backend, is_cancelled: Callable[[], bool]) -> bool:
        """Decode the answers, then draft them one by one."""
        registry, loaded = self._preparation.registry, self._preparation.loaded["main"]
        counts, cost = range(1, len(_PROMPTS) + 1), loaded.cost
        count = max((n for n in counts if _NUM_TOKENS * cost.together([1] * n, NEAR) <= _MOST_SECONDS), default=0)
        encodes = loaded.spec.model.encoder is not None
        if main.capabilities.fixed or encodes or cost(1) < _LEAST_SECONDS or not count or not registry.may_draft:
            return True
        if not (unknown := registry.unknown_models()):
            return True
        report("Short answers are drafted, to know how many draft tokens are accepted.")
        if not self._answers:
            self._answers = self._decode(main, _PROMPTS[:count], is_cancelled)
        for i, (model, record) in enumerate(unknown):
            for j, answer in enumerate(self._answers):
                if answer.error is None and (i, j) not in self._drafted:
                    self._drafted.add((i, j))
                    for _ in replay(model, record, answer.draft_request(), is_cancelled):
                        if is_cancelled():
                            raise GaveWay
        registry.save_records()
        return True

    def _decode(self, main: Backend, prompts: Sequence[str], is_cancelled: Callable[[], bool]) -> list[Answer]:
        """Plain answers, which nobody is to find anywhere."""
        alone = replace(self._preparation, store=None, prefixes=None, reuse=False)
        config = GenerationConfig(max_new_tokens=_NUM_TOKENS, drafter=None, ignore_eos=True)
        answers = [alone.answer(alone.prompts.lay_out(prompt, config, fits=True)) for prompt in prompts]
        scheduler = Scheduler(main, self._rows)
        scheduler.waiting.extend(answers)
        scheduler.settle()
        while scheduler.running:
            if is_cancelled():
                scheduler.give_up(RequestError("A request has come."))
                raise GaveWay
            step(main, scheduler)
            scheduler.settle()
        return answers
