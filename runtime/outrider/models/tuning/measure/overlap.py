"""Whether overlap pays: drafting for the next round during this round's target pass."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider.models.cost.slots import open_slot, random_tokens
from outrider.models.cost.table import LONGEST, NEAR
from outrider.types import Chunk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from outrider.models.cost.table import CallCost
    from outrider.types import Backend, CompiledModel, Pending

_ROWS = 4  # of the main model's call that is measured
_ACCEPTANCE = 0.7  # the assumed probability of acceptance, as at the controller's start
_ROUNDS = 4  # that are timed; the first one compiles kernels
_LEAST_GAIN = 1.02  # smaller gains are within the uncertainty of this estimate
_MOST_TIMES = 1e9  # as long: no measurement exceeds that


@dataclass(frozen=True, slots=True)
class Contention:
    """How many times as long a call takes while calls of the other model run.

    check: calls of the main model. draft: calls of the draft model. 1 if the two models share no resources. On one
    processor both may be above 2.
    """

    check: float
    draft: float

    def __post_init__(self) -> None:
        if not all(1 <= times <= _MOST_TIMES for times in (self.check, self.draft)):
            raise ValueError(f"beside another, a call takes from 1 to {_MOST_TIMES:g} times as long")


ALONE = Contention(1.0, 1.0)


def pays(main: CallCost, draft: CallCost, contention: Contention) -> bool:
    """Whether overlap is faster, by the cost of calls."""
    lengths = range(1, LONGEST + 1)
    apart = max(1 / main(1), *(rate(main, draft, k, _ACCEPTANCE) for k in lengths))
    return max(rate(main, draft, k, _ACCEPTANCE, contention) for k in lengths) > _LEAST_GAIN * apart


def rate(main: CallCost, draft: CallCost, k: int, acceptance: float, contention: Contention | None = None) -> float:
    """Tokens per second with drafts of k tokens. acceptance: probability of each if those before it are accepted.

    A round yields Σ acceptance^i tokens, i = 0 … k (Leviathan et al. 2022, equation 1). A draft that was made ahead
    counts if all k tokens are accepted and the next one is as guessed. Those after a guessed recovered token do not
    count, so this is a lower bound.
    """
    num_tokens = sum(acceptance**i for i in range(k + 1))
    check, step = main(k + 1), draft(1)
    if contention is None:
        return num_tokens / (check + k * step)
    check, ahead_step = check * contention.check, step * contention.draft
    num_ahead = min(max(check // ahead_step - 1, 0), k)  # the first call gives the guessed bonus token
    wait = min(ahead_step / 2, check)  # for the draft model's call that runs when the target pass ends
    return num_tokens / (check + wait + (k - acceptance ** (k + 1) * num_ahead) * step)


def measure_contention(main: CompiledModel, draft: Backend) -> Contention:
    """Time calls of both models, alone and at the same time. The main model's do not run in the background later."""
    main.run_in_background(True)
    try:
        with _calls(main, _ROWS) as check, _calls(draft, 1) as step:
            return _measure(main, check, step)
    finally:
        main.run_in_background(False)


def _measure(main: Backend, check: Callable[[], Pending], step: Callable[[], Pending]) -> Contention:
    alone, beside, step_alone, step_beside = [], [], [], []
    for _ in range(_ROUNDS):
        alone.append(_seconds(lambda: check().wait()))
        step_alone.append(_seconds(lambda: step().wait()))
        began = main.seconds
        under_way = check()
        steps: list[float] = []
        while not under_way.done:
            steps.append(_seconds(lambda: step().wait()))
        under_way.wait()
        beside.append(main.seconds - began)
        step_beside.extend(steps[:-1] or steps)  # the last one ended alone, after the main model's call
    return Contention(
        check=max(min(beside[1:]) / min(alone[1:]), 1.0),
        draft=max(min(step_beside, default=0.0) / min(step_alone[1:]), 1.0),
    )


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


@contextlib.contextmanager
def _calls(backend: Backend, num_rows: int) -> Iterator[Callable[[], Pending]]:
    """Yield a function that submits a call of `num_rows` rows, at a context of NEAR tokens if there is room."""
    context, token_ids = max(min(NEAR, backend.max_tokens - num_rows), 0), random_tokens(backend, num_rows)
    with contextlib.closing(open_slot(backend, context + num_rows)) as slot:

        def submit() -> Pending:
            slot.trim(0)
            slot.skip_to(context)
            return backend.submit([Chunk(slot, token_ids, num_rows=num_rows)])

        yield submit
