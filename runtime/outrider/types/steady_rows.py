"""Keeps the number of rows of a model's calls."""

from collections.abc import Sequence as Seq

from outrider.types.capabilities import RowRule


class SteadyRows:
    """Pads a call to the rows of the call before, where idle rows cost less than a change of their number.

        steady = SteadyRows([0.0, 0.040, 0.041, 0.042], change=0.006, rule=rule)
        steady.next(3)    # rows of the call that is made now, which needs 3
        steady.peek(2)    # rows of a next call that would need 2: still 3

    A graph in dynamic shapes is prepared again when the number of rows changes. A smaller number is used once it would
    have saved as many seconds as a change takes, counted from the last call that needed more. So idle rows cost at most
    what changes would have (ski rental; Karlin et al. 1988, "Competitive snoopy caching").

    seconds: of calls with 0, 1, … rows, up to the most that calls are padded to. change: extra seconds of a call with
    another number of rows than the one before. rule: of all padding.
    """

    def __init__(self, seconds: Seq[float], change: float, rule: RowRule) -> None:
        self.current = 0  # rows of the last call
        self._seconds, self._change, self._rule = seconds, change, rule
        self._saved: dict[int, float] = {}  # seconds that smaller numbers would have saved

    def next(self, need: int) -> int:
        """The rows of the call that is made now, which needs so many. Both by the rule."""
        self.current, self._saved = self._next(need)
        return self.current

    def peek(self, need: int) -> int:
        """What `next` would return."""
        return self._next(need)[0]

    def _next(self, need: int) -> tuple[int, dict[int, float]]:
        now = self.current
        if need >= now or now >= len(self._seconds) or not self._rule.can_add(now - need):
            return need, {}
        saved = {
            n: self._saved.get(n, 0.0) + self._seconds[now] - self._seconds[n]
            for n in range(need, now)
            if self._rule.call(n) == n
        }
        best = max(saved, key=saved.__getitem__)
        return (now, saved) if saved[best] < self._change else (best, {})
