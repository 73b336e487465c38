"""Finds stop strings in a text that is generated piece by piece."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class StopStrings:
    """Finds stop strings in a text that comes piece by piece.

        stops = StopStrings(["END", "\\n\\n"])
        stops.push("xEN"), stops.num_held    # 0, 2: no stop string yet; "EN" may be the beginning of one
        stops.push("D!")                     # 4: the stop string begins 4 characters from the end

    Takes time linear in the text, for any number and length of stop strings, by the automaton of Aho and Corasick 1975,
    "Efficient string matching: an aid to bibliographic search". A state is made when the text first needs it, so the
    length of stop strings beyond the text's costs nothing.
    """

    def __init__(self, stop: Iterable[str]) -> None:
        self._stop = sorted(set(stop))  # those with a common beginning are neighbours
        self._root = self._state = _State(0, 0, len(self._stop))

    @property
    def num_held(self) -> int:
        """The most characters at the end of the text that may begin a stop string."""
        return self._state.depth

    def push(self, text: str) -> int:
        """Add text. If a stop string ends in it, returns how many characters before the end it begins; otherwise 0.

        If several end in it, the one that begins first counts. It may begin in an earlier piece.
        """
        begin = len(text)
        for end, character in enumerate(text, 1):
            self._state = self._follow(self._state, character)
            if self._state.num_complete:
                begin = min(begin, end - self._state.num_complete)
        return len(text) - begin

    def _follow(self, state: _State, character: str) -> _State:
        """The state after this one and a character.

        Missing states are made. Each has the next one as its `fallback`.
        """
        made: list[_State] = []
        while True:
            found = state.next.get(character)
            if found is not None:
                break
            if new := self._extended(state, character):
                made.append(new)
                state.next[character] = new
            if state is self._root:
                found = self._root
                break
            state = state.fallback or self._root
        for fallback, new in pairwise([found, *reversed(made)]):
            new.fallback = fallback
            new.num_complete = new.num_complete or fallback.num_complete
        return made[0] if made else found

    def _extended(self, state: _State, character: str) -> _State | None:
        """The state for this one's text plus a character, if a stop string begins with that."""

        def next_character(stop: str) -> str:
            return stop[state.depth : state.depth + 1]

        first = bisect_left(self._stop, character, state.first, state.last, key=next_character)
        last = bisect_right(self._stop, character, first, state.last, key=next_character)
        if first == last:
            return None
        depth = state.depth + 1
        return _State(depth, first, last, depth if len(self._stop[first]) == depth else 0)


class _State:
    """The longest end of the text that a stop string begins with.

    depth: its characters. first, last: the range of stop strings that begin with it. num_complete: characters of the
    longest stop string that the text ends with, or 0. fallback: the state of the next shorter end.
    """

    __slots__ = ("depth", "fallback", "first", "last", "next", "num_complete")

    def __init__(self, depth: int, first: int, last: int, num_complete: int = 0) -> None:
        self.depth, self.first, self.last, self.num_complete = depth, first, last, num_complete
        self.fallback: _State | None = None
        self.next: dict[str, _State] = {}
