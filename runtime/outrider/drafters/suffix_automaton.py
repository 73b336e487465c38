"""An index of a growing text: where each of its parts stood before, and what followed there."""

from __future__ import annotations

from typing import NamedTuple

_ROOT = 0
_MAX_COUNTED = 32  # of the states that end at a new token, so many are counted, the longest first


class Followers(NamedTuple):
    """What followed a context where it stood before.

    token_id: the most frequent next token, and of several the latest. times: how often it followed. total: how often
    anything did. num_distinct: how many different tokens did.
    """

    token_id: int
    times: int
    total: int
    num_distinct: int


class Match(NamedTuple):
    """A part of the text that is the end of some context: a state of the automaton, and the part's length in tokens."""

    state: int
    length: int


class SuffixAutomaton:
    """The smallest automaton that reads every part of a text, kept up to date as the text grows.

        automaton = SuffixAutomaton()
        automaton.append(token_id)                 # amortised O(1)
        match = automaton.longest                  # the longest end of the text that stood in it before
        automaton.followers(match)                 # what came next
        match = automaton.walk(match, token_id)    # as if the text went on so; nothing is entered

    A state stands for the parts that end at the same positions; its link leads to the longest of their ends that has
    more. Source: Blumer et al. 1985, "The smallest automaton recognizing the subwords of a text"; how often a part
    stands in the text is counted along the links of each new token, as in Hu et al. 2024, "SAM Decoding". In a text
    that repeats itself on and on, there are many links, and only the longest parts are counted exactly.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        # By state. The text's own, from the first token on, is the one that nothing has followed yet.
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]  # of the longest part
        self._count = [0]  # how often its parts stand in the text
        self._latest = [0]  # where they did last: the number of tokens up to their end
        self._whole = _ROOT

    def append(self, token_id: int) -> None:
        """Let the text grow by a token."""
        self.num_tokens += 1
        following, link, length = self._next, self._link, self._length
        at, new = self._whole, self._add({}, _ROOT, self.num_tokens, 0)
        while at >= 0 and token_id not in following[at]:
            following[at][token_id] = new
            at = link[at]
        if at >= 0:
            target = following[at][token_id]
            if length[target] > length[at] + 1:  # its longer parts do not stand here: the shorter ones part from them
                longer = target
                target = self._add(dict(following[longer]), link[longer], length[at] + 1, self._count[longer])
                link[longer] = target
                while at >= 0 and following[at].get(token_id) == longer:
                    following[at][token_id] = target
                    at = link[at]
            link[new] = target
        self._whole = new
        for _ in range(_MAX_COUNTED):
            if new == _ROOT:
                break
            self._count[new] += 1
            self._latest[new] = self.num_tokens
            new = link[new]

    def _add(self, following: dict[int, int], link: int, length: int, count: int) -> int:
        self._next.append(following)
        self._link.append(link)
        self._length.append(length)
        self._count.append(count)
        self._latest.append(self.num_tokens)
        return len(self._next) - 1

    @property
    def longest(self) -> Match:
        """The longest end of the text that stood in it before; of length 0 where the last token is new."""
        state = max(self._link[self._whole], _ROOT)
        return Match(state, self._length[state])

    def latest(self, match: Match) -> int:
        """Where this part ended last: how many tokens there were then."""
        return self._latest[match.state]

    def walk(self, match: Match, token_id: int) -> Match:
        """The longest end of (this part, then the token) that stands in the text.

        Where that is the text's own end, nothing has followed yet. A copy that has come so far goes on as it began: at
        the longest end that stood before, with the length it has reached.
        """
        state, length = match
        while token_id not in self._next[state]:
            if state == _ROOT:
                return Match(_ROOT, 0)
            state = self._link[state]
            length = self._length[state]
        state = self._next[state][token_id]
        if state == self._whole:
            state = self._link[state]
        return Match(state, length + 1 if state else 0)

    def shorter(self, match: Match) -> Match:
        """The longest end of this part that stands in more positions; of length 0 in the end."""
        state = max(self._link[match.state], _ROOT)
        return Match(state, self._length[state])

    def followers(self, match: Match, token_id: int | None = None) -> Followers:
        """What came next where this part stood, or how often this token did. A part of length 0 stands everywhere."""
        following, count, latest = self._next[match.state], self._count, self._latest
        if token_id is None:
            token_id = max(following, key=lambda token_id: (count[following[token_id]], latest[following[token_id]]))
        total = sum([count[state] for state in following.values()])
        return Followers(token_id, count[following[token_id]], total, len(following))
