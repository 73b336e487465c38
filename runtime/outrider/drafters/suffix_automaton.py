"""An index of a growing text: the occurrences of each of its substrings, and the tokens that followed."""

from __future__ import annotations

from typing import NamedTuple

_ROOT = 0
_MAX_COUNTED = 32  # most states that are counted for a new token, the longest first


class Followers(NamedTuple):
    """The tokens that followed a context.

    token_id: the most frequent one, and of several the latest. times: how often it followed. total: how often any token
    followed. num_distinct: the number of different tokens.
    """

    token_id: int
    times: int
    total: int
    num_distinct: int


class Match(NamedTuple):
    """A substring of the text that is a suffix of some context: the automaton's state, and the length in tokens."""

    state: int
    length: int


class SuffixAutomaton:
    """The smallest automaton that reads every substring of a text. It grows with the text.

        automaton = SuffixAutomaton()
        automaton.append(token_id)                 # amortised O(1)
        match = automaton.longest                  # the text's longest suffix that occurred before
        automaton.followers(match)                 # the tokens that followed it
        match = automaton.walk(match, token_id)    # as if the text continued so; the text is not changed

    A state stands for the substrings that end at the same positions. Its link leads to their longest suffix with more
    positions. Source: Blumer et al. 1985, "The smallest automaton recognizing the subwords of a text". Occurrences are
    counted along the links of each new token, as in Hu et al. 2024, "SAM Decoding". In a text that repeats itself many
    times there are many links, and only the longest substrings are counted exactly.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        # By state. The whole text's state is the only one without a next token.
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]  # of the longest substring
        self._count = [0]  # occurrences of its substrings
        self._latest = [0]  # end of their latest occurrence, in tokens from the start
        self._whole = _ROOT

    def append(self, token_id: int) -> None:
        """Append a token to the text."""
        self.num_tokens += 1
        following, link, length = self._next, self._link, self._length
        at, new = self._whole, self._add({}, _ROOT, self.num_tokens, 0)
        while at >= 0 and token_id not in following[at]:
            following[at][token_id] = new
            at = link[at]
        if at >= 0:
            target = following[at][token_id]
            if length[target] > length[at] + 1:  # its longer substrings do not end here: split the state
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
        """The text's longest suffix that occurred before; of length 0 if the last token is new."""
        state = max(self._link[self._whole], _ROOT)
        return Match(state, self._length[state])

    def latest(self, match: Match) -> int:
        """The end of the latest occurrence, in tokens from the start."""
        return self._latest[match.state]

    def walk(self, match: Match, token_id: int) -> Match:
        """The longest suffix of (match + token) that occurs in the text.

        If that occurs only at the text's end, no token follows it. The copy then continues with its own beginning: at
        the longest suffix that occurred before, with the length reached so far.
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
        """The longest suffix of the match that occurs at more positions; of length 0 in the end."""
        state = max(self._link[match.state], _ROOT)
        return Match(state, self._length[state])

    def followers(self, match: Match, token_id: int | None = None) -> Followers:
        """The tokens that followed the match, or how often this token did. A match of length 0 is everywhere."""
        following, count, latest = self._next[match.state], self._count, self._latest
        if token_id is None and len(following) == 1:  # as most long matches have: quicker
            (token_id,) = following
        elif token_id is None:
            token_id = max(following, key=lambda token_id: (count[following[token_id]], latest[following[token_id]]))
        total = sum([count[state] for state in following.values()])
        return Followers(token_id, count[following[token_id]], total, len(following))
