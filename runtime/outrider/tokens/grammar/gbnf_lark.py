"""Writes grammars of GBNF in llguidance's Lark, with the same language.

llguidance has a lexer: of all terminals that may come next it takes the longest match, and does not come back to a
shorter one. With `word ::= [a-z]+` as a terminal, `word "s"` could never end. So a part without recursion is a terminal
only where the longest match is right:

    no text of a terminal begins a longer one of a terminal that may stand in its place,
    if the next byte of the longer one may also follow the shorter.

A terminal that fails is split into its parts, at last into single characters, which cannot fail. A grammar without
recursion is one terminal, and cannot fail either.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from itertools import groupby, product
from typing import TYPE_CHECKING, NamedTuple

from outrider.tokens.grammar.gbnf import Characters, NamedRule, Node, OneToken, Repeat, Sequence, read_gbnf
from outrider.tokens.grammar.gbnf_rules import Grammar, Symbol, parts_of, regular_rules, simplified

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_MOST_POSITIONS = 10_000  # characters of one terminal, with the rules that it refers to written out
_MOST_DEPTH = 100  # levels of a terminal, with the rules that it refers to


def gbnf_to_lark(text: str, tokenizer: LLTokenizer) -> str:
    """A grammar in GBNF as one in Lark.

    Raises:
        ValueError: for what cannot be read, or what Lark has no equal of.
    """
    rules = read_gbnf(text)
    regular = regular_rules(rules)
    grammar = Grammar({name: simplified(node, rules, regular) for name, node in rules.items()}, regular, tokenizer)
    if not grammar.is_terminal(grammar.rules["root"]):
        check = _LexerCheck(grammar)
        while failed := check.find():
            grammar.split |= failed
    return grammar.lark()


def _first_bytes(ranges: tuple[tuple[int, int], ...]) -> int:
    """A bit for each byte that these characters begin with in UTF-8."""
    bits = 0
    for first, last in ranges:
        bits |= (2 << chr(last).encode()[0]) - (1 << chr(first).encode()[0])
    return bits


class _Terminal(NamedTuple):
    """Where the texts of a terminal begin and end, as positions in the automaton of all, and its first bytes."""

    is_nullable: bool
    first: set[int]
    last: set[int]
    first_bytes: int


class _TooLarge(Exception):
    """A terminal with too many characters to be compared."""


class _LexerCheck:
    """Finds terminals for which the longest match may be wrong.

    The automaton has a position for each character of each terminal (Glushkov 1961), and those that may come next.
    Counts are read as any number of times, which finds more than there is.
    """

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._ranges: list[tuple[tuple[int, int], ...]] = []  # by position: its characters
        self._bytes: list[int] = []  # their first bytes, a bit for each
        self._next: list[set[int]] = []
        self._terminals: dict[Node, _Terminal] = {}
        self._compared: dict[tuple[Node, Node], tuple[bool, int, int]] = {}

    def find(self) -> set[Node]:
        """Terminals to be split. Raises ValueError where a token and a text may begin in the same place."""
        productions = self._grammar.productions()
        symbols = {each for bodies in productions.values() for body in bodies for each in body}
        terminals = [each for each in symbols if not isinstance(each, str) and each not in productions]
        failed = set[Node]()
        for node in terminals:
            try:
                self._terminals[node] = self._terminals.get(node) or self._terminal(node)
            except _TooLarge:
                failed.add(node)
        return failed or self._failed(*self._first_and_follow(productions, terminals))

    def _failed(self, first: set[Node], follow: dict[Node, set[Node]]) -> set[Node]:
        bytes_after = dict.fromkeys(follow, 0)
        for node, others in follow.items():
            for other in others:
                bytes_after[node] |= self._terminals[other].first_bytes
        failed, seen = set[Node](), set[tuple[Node, Node]]()
        more = deque([(first, first), *((others, others) for others in follow.values())])
        while more:
            for one, other in product(*more.popleft()):
                if (one, other) in seen:
                    continue
                seen |= {(one, other), (other, one)}
                if (one, other) not in self._compared:
                    self._compared[one, other] = self._compare(one, other)
                in_common, ones_next, others_next = self._compared[one, other]
                failed |= {one} if ones_next & bytes_after[other] else set()
                failed |= {other} if others_next & bytes_after[one] else set()
                if in_common:
                    more.append((follow[one], follow[other]))
        return failed

    def _compare(self, one: Node, other: Node) -> tuple[bool, int, int]:
        """Whether two terminals that may stand in the same place have a text in common; and the bytes with which the
        one goes on after a text of the other, and the other after a text of the one.
        """
        if isinstance(one, OneToken) or isinstance(other, OneToken):
            return self._are_one_token(one, other), 0, 0
        ones, others = self._terminals[one], self._terminals[other]
        in_common, ones_next, others_next = False, 0, 0
        begin = (frozenset(ones.first), frozenset(others.first))
        seen, more = {begin}, [begin]  # what may come after each text that both may begin with
        while more:
            for here, there in self._steps_of(*more.pop()):
                at = self._after(here), self._after(there)
                end, others_end = not ones.last.isdisjoint(here), not others.last.isdisjoint(there)
                ones_next |= self._first_bytes(at[0]) if others_end else 0
                others_next |= self._first_bytes(at[1]) if end else 0
                in_common = in_common or (end and others_end)
                if at not in seen:
                    seen.add(at)
                    more.append(at)
        return in_common, ones_next, others_next

    def _steps_of(self, here: frozenset[int], there: frozenset[int]) -> Iterable[tuple[set[int], set[int]]]:
        """The positions of two terminals that have a character in common, for each kind of character."""
        edges = sorted((edge, p) for p in here | there for pair in self._ranges[p] for edge in (pair[0], pair[1] + 1))
        within = set[int]()
        for _, group in groupby(edges, lambda edge: edge[0]):
            within ^= {position for _, position in group}
            if not within.isdisjoint(here) and not within.isdisjoint(there):
                yield within & here, within & there

    def _after(self, positions: set[int]) -> frozenset[int]:
        return frozenset().union(*(self._next[position] for position in positions))

    def _first_bytes(self, positions: Iterable[int]) -> int:
        bits = 0
        for position in positions:
            bits |= self._bytes[position]
        return bits

    def _are_one_token(self, one: Node, other: Node) -> bool:
        """Whether two parts are the same token. llguidance takes a token where a text may begin with it too.

        Raises:
            ValueError: if one of them may be taken for the other.
        """
        if isinstance(one, OneToken) and isinstance(other, OneToken):
            (ids, negated), (other_ids, other_negated) = map(self._grammar.token_ids, (one, other))
            if ids == other_ids and negated == other_negated:
                return True
            if not negated and not other_negated:
                return False
            if negated != other_negated and (other_ids <= ids if negated else ids <= other_ids):
                return False
        elif not self._terminals[one].first_bytes & self._terminals[other].first_bytes:
            return False
        token = next(each for each in (one, other) if isinstance(each, OneToken))
        shown = "!" * token.negated + (token.name or f"<[{token.token_id}]>")
        raise ValueError(
            f"in place of {shown} there may be another token or a text that begins with it: allow one only"
        )

    def _terminal(self, node: Node) -> _Terminal:
        if isinstance(node, OneToken):
            return _Terminal(False, set(), set(), self._grammar.first_bytes(node))
        is_nullable, first, last = self._automaton(node, len(self._next) + _MOST_POSITIONS, 0)
        return _Terminal(is_nullable, first, last, self._first_bytes(first))

    def _automaton(self, node: Node, most: int, depth: int) -> tuple[bool, set[int], set[int]]:
        """Whether a part may be empty, and its first and last positions. Raises _TooLarge."""
        if isinstance(node, Characters):
            self._ranges.append(node.ranges)
            self._bytes.append(_first_bytes(node.ranges))
            self._next.append(set())
            if len(self._next) > most:
                raise _TooLarge
            return False, {len(self._next) - 1}, {len(self._next) - 1}
        if depth > _MOST_DEPTH:
            raise _TooLarge
        inner = self._grammar.rules[node.name] if isinstance(node, NamedRule) else None
        parts = [self._automaton(part, most, depth + 1) for part in ((inner,) if inner else parts_of(node))]
        if isinstance(node, Sequence):
            return self._joined(parts)
        is_nullable = any(part[0] for part in parts)
        first, last = set[int]().union(*(part[1] for part in parts)), set[int]().union(*(part[2] for part in parts))
        if isinstance(node, Repeat):
            is_nullable = is_nullable or node.least == 0
            if node.most != 1:
                self._link(last, first)
        return is_nullable, first, last

    def _joined(self, parts: list[tuple[bool, set[int], set[int]]]) -> tuple[bool, set[int], set[int]]:
        are_nullable, first, last = True, set[int](), set[int]()
        for is_nullable, begins, ends in parts:
            self._link(last, begins)
            first = first | begins if are_nullable else first
            last = last | ends if is_nullable else ends
            are_nullable = are_nullable and is_nullable
        return are_nullable, first, last

    def _link(self, last: set[int], first: set[int]) -> None:
        for position in last:
            self._next[position] |= first

    def _first_and_follow(
        self, productions: Mapping[Symbol, list[list[Symbol]]], terminals: Iterable[Node]
    ) -> tuple[set[Node], dict[Node, set[Node]]]:
        """The terminals that a text may begin with, and those that may come after each terminal."""
        empty: set[Symbol] = {node for node in terminals if self._terminals[node].is_nullable}
        first: dict[Symbol, set[Node]] = {symbol: set() for symbol in productions}
        first |= {node: {node} for node in terminals}
        follow: dict[Symbol, set[Node]] = {symbol: set() for symbol in first}
        before = -1
        while before != (before := len(empty) + sum(map(len, first.values())) + sum(map(len, follow.values()))):
            for symbol, bodies in productions.items():
                for body in bodies:
                    after, can_end = set[Node](), True
                    for each in reversed(body):
                        follow[each] |= after | (follow[symbol] if can_end else set())
                        after = first[each] | (after if each in empty else set())
                        can_end = can_end and each in empty
                    first[symbol] |= after
                    if can_end:
                        empty.add(symbol)
        return first["root"], {node: follow[node] for node in terminals}
