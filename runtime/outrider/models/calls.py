"""Makes a model's call, tells an observer of it, and teaches the price list what it took."""

from __future__ import annotations

import time
from collections.abc import Sequence

from outrider.models.cost.table import CallCost
from outrider.types import Backend, Call, CallObserver, Chunk, Pending, Step

_now = time.perf_counter


def submit(backend: Backend, chunks: Sequence[Chunk], observer: CallObserver | None = None) -> Pending:
    """Evaluate chunks on a model. `observer` is told when the call has ended, or failed."""
    return backend.submit(chunks) if observer is None else _WatchedCall(backend, chunks, observer)


def teach(
    cost: CallCost,
    backend: Backend,
    seconds: float,
    answers: Sequence[tuple[int, float]],
    prompts: Sequence[tuple[int, float]],
) -> None:
    """Teach a cost what a call took. answers, prompts: rows and context of each sequence.

    Both are empty if they say nothing of the call: something else ran meanwhile, or rows were added to it.
    """
    can, num_rows = backend.capabilities, sum(rows for rows, _ in (*answers, *prompts))
    if can.fixed and num_rows > 1:  # they may have taken two windows
        answers = prompts = ()
    cost.observe(
        [rows for rows, _ in answers],
        sum(context for _, context in answers) / max(len(answers), 1),
        seconds,
        can.steady.current if can.steady else 0,
        prompt_rows=sum(rows for rows, _ in prompts),
        prompt_context=max((context for _, context in prompts), default=0),
    )


class _WatchedCall:
    """A running call that is timed."""

    _ran = 0.0

    def __init__(self, backend: Backend, chunks: Sequence[Chunk], observer: CallObserver) -> None:
        self._backend, self._chunks, self._observer = backend, chunks, observer
        self._context = max((chunk.slot.length for chunk in chunks), default=0)
        self._busy_before, self._began = backend.seconds, _now()
        try:
            self._pending = backend.submit(chunks)
        except BaseException as error:
            self._submitted = _now()
            self._tell(self._submitted, error)
            raise
        self._submitted = _now()
        self._ran = self._busy

    @property
    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._pending.done

    def wait(self) -> Step:
        """Block until the rows are there."""
        waited = _now()
        try:
            step = self._pending.wait()
        except BaseException as error:
            self._tell(waited, error)
            raise
        self._tell(waited)
        return step

    @property
    def _busy(self) -> float:
        """Seconds that the device has been busy with this call so far."""
        return self._backend.seconds - self._busy_before

    def _tell(self, waited: float, error: BaseException | None = None) -> None:
        self._observer.called(
            Call(
                self._backend,
                self._chunks,
                self._context,
                began=self._began,
                submitted=self._submitted,
                waited=waited,
                ended=_now(),
                ran=self._ran,
                busy=self._busy,
                error=error,
            )
        )
