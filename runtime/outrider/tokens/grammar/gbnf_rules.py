"""Rules of GBNF as rules of llguidance's Lark, once it is known which of their parts are terminals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from typing import TYPE_CHECKING

from outrider.tokens.grammar.gbnf import Characters, NamedRule, Node, OneOf, OneToken, Repeat, Sequence, disjoint

if TYPE_CHECKING:
    from llguidance import LLTokenizer

ANY_BYTE = (1 << 256) - 1  # a bit for each byte

Symbol = Node | str  # a part, or the name of a rule


def parts_of(node: Node) -> tuple[Node, ...]:
    """The parts that a part is made of."""
    return node.items if isinstance(node, Sequence | OneOf) else (node.item,) if isinstance(node, Repeat) else ()


def _within(node: Node) -> Iterable[Node]:
    """A part and all parts in it, without rules that it refers to."""
    more = [node]
    while more:
        part = more.pop()
        yield part
        more += parts_of(part)


def regular_rules(rules: Mapping[str, Node]) -> set[str]:
    """The rules without recursion and tokens, also through others."""
    named = {name: {part.name for part in _within(node) if isinstance(part, NamedRule)} for name, node in rules.items()}
    users: dict[str, list[str]] = {name: [] for name in rules}
    for name, others in named.items():
        for other in others:
            users[other].append(name)
    tokens = {name for name, node in rules.items() if any(isinstance(part, OneToken) for part in _within(node))}
    found, ready = set[str](), [name for name, others in named.items() if not others]
    while ready:
        name = ready.pop()
        if name in tokens:
            continue
        found.add(name)
        for user in users[name]:
            named[user].discard(name)
            if not named[user]:
                ready.append(user)
    return found


def _is_regular(node: Node, regular: set[str]) -> bool:
    return not any(
        isinstance(part, OneToken) or (isinstance(part, NamedRule) and part.name not in regular)
        for part in _within(node)
    )


def simplified(node: Node, rules: Mapping[str, Node], regular: set[str]) -> Node:
    """The same, with one class for characters to choose from, and one part for neighbours without recursion.

    llguidance 1.9 ends in a panic for some alternatives that have characters in common.
    """
    if isinstance(node, NamedRule):
        return rules[node.name] if isinstance(rules[node.name], Characters) else node
    items = tuple(simplified(each, rules, regular) for each in parts_of(node))
    if isinstance(node, Repeat):
        return Repeat(items[0], node.least, node.most)
    if isinstance(node, OneOf):
        flat = [part for each in items for part in (each.items if isinstance(each, OneOf) else (each,))]
        ranges = [pair for each in flat if isinstance(each, Characters) for pair in each.ranges]
        others = [each for each in flat if not isinstance(each, Characters)]
        simple: list[Node] = [Characters(disjoint(ranges))] if ranges else []
        simple += [each for each in others if _is_regular(each, regular)]
        recursive = [each for each in others if not _is_regular(each, regular)]
        if recursive and len(simple) > 1:
            simple = [OneOf(tuple(simple))]
        return OneOf((*recursive, *simple)) if len(recursive) + len(simple) > 1 else [*recursive, *simple][0]
    if isinstance(node, Sequence) and not _is_regular(node, regular):
        runs = [(is_regular, tuple(run)) for is_regular, run in groupby(items, lambda each: _is_regular(each, regular))]
        grouped = [[Sequence(run)] if is_regular and len(run) > 1 else run for is_regular, run in runs]
        return Sequence(tuple(part for each in grouped for part in each))
    return Sequence(items) if isinstance(node, Sequence) else node


class Grammar:
    """Rules, and which of their parts are terminals. split: those that are none, though they have no recursion."""

    def __init__(self, rules: dict[str, Node], regular: set[str], tokenizer: LLTokenizer) -> None:
        self.rules, self._tokenizer, self.split = rules, tokenizer, set[Node]()
        self._are_regular = {part for node in rules.values() for part in _within(node) if _is_regular(part, regular)}
        self._names: dict[tuple[str, Symbol], str] = {}
        self._unwritten: list[tuple[str, Node, Callable[[Node], str]]] = []

    def is_terminal(self, node: Node) -> bool:
        """Whether a part of a rule is read by the lexer as a whole."""
        if isinstance(node, Characters | OneToken):
            return True
        return node in self._are_regular and node not in self.split and node != Sequence(())

    def token_id(self, token: OneToken) -> int:
        """Raises ValueError for a text that is not one token."""
        if not token.name:
            return token.token_id
        found = self._tokenizer.tokenize_str(token.name, parse_special=True)
        if len(found) != 1:
            raise ValueError(f"{token.name} is not one token of this model: write it as a text, in quotes")
        return found[0]

    def token_ids(self, token: OneToken) -> tuple[frozenset[int], bool]:
        """Those that may stand in its place; True: those that may not, of which the ends of an answer are some."""
        own = {self.token_id(token)}
        return frozenset(own | {*self._tokenizer.eos_tokens} if token.negated else own), token.negated

    def first_bytes(self, token: OneToken) -> int:
        """A bit for each byte that its text may begin with; none for a special token, which no text has."""
        if token.negated:
            return ANY_BYTE
        token_id = self.token_id(token)
        if token_id >= self._tokenizer.vocab_size:
            raise ValueError(f"there is no token {token_id:,}")
        text = b"" if self._tokenizer.is_special_token(token_id) else self._tokenizer.decode_bytes([token_id])
        return 1 << text[0] if text else 0

    def productions(self) -> dict[Symbol, list[list[Symbol]]]:
        """Of "root", and of all that it leads to and that is no terminal."""
        found: dict[Symbol, list[list[Symbol]]] = {}
        more: list[Symbol] = ["root"]
        while more:
            symbol = more.pop()
            if symbol not in found and (isinstance(symbol, str) or not self.is_terminal(symbol)):
                found[symbol] = self._productions(symbol)
                more += [each for body in found[symbol] for each in body]
        return found

    def _productions(self, symbol: Symbol) -> list[list[Symbol]]:
        if isinstance(symbol, Repeat):
            again: list[list[Symbol]] = [] if symbol.most == 1 else [[symbol, symbol.item]]
            return [[symbol.item], *again, *([] if symbol.least else [[]])]
        if isinstance(symbol, OneOf):
            return [[item] for item in symbol.items]
        if isinstance(symbol, NamedRule):
            return [[symbol.name]]
        return [[self.rules[symbol]]] if isinstance(symbol, str) else [[*parts_of(symbol)]]

    def lark(self) -> str:
        """The grammar in Lark."""
        lines = [f"start: {self._in_rule(self.rules['root'])}"]
        while self._unwritten:
            name, node, write = self._unwritten.pop()
            lines.append(f"{name}: {write(node)}")
        return "\n".join(lines)

    def _in_rule(self, node: Node) -> str:
        if isinstance(node, OneToken):
            token_ids, negated = self.token_ids(node)
            return f"<[{'^' * negated}{','.join(map(str, sorted(token_ids)))}]>"
        if self.is_terminal(node):
            return self._named("T", node, node, self._in_terminal)
        if isinstance(node, NamedRule):
            return self._named("r", node.name, self.rules[node.name], self._in_rule)
        return _written(node, self._in_rule)

    def _in_terminal(self, node: Node) -> str:
        if isinstance(node, NamedRule):
            return self._named("P", node.name, self.rules[node.name], self._in_terminal)
        if isinstance(node, Characters):
            return f"/{_class(node)}/"
        return _written(node, self._in_terminal).replace("]/ /[", "][")

    def _named(self, kind: str, key: Symbol, node: Node, write: Callable[[Node], str]) -> str:
        """The name of a rule or terminal in Lark, which is written once."""
        if (kind, key) not in self._names:
            self._names[kind, key] = name = f"{kind}{len(self._names)}"
            self._unwritten.append((name, node, write))
        return self._names[kind, key]


def _written(node: Node, write: Callable[[Node], str]) -> str:
    if isinstance(node, Repeat):
        return f"({write(node.item)}){{{node.least},{'' if node.most is None else node.most}}}"
    texts = [write(each) for each in parts_of(node)]
    grouped = [f"({text})" if " " in text else text for text in texts]
    return (" | " if isinstance(node, OneOf) else " ").join(grouped) or '""'


def _class(node: Characters) -> str:
    """A class of a regular expression, without any character that has a meaning there or in Lark."""
    codes = ((f"\\x{{{first:x}}}", f"\\x{{{last:x}}}") for first, last in node.ranges)
    return f"[{''.join(first if first == last else f'{first}-{last}' for first, last in codes)}]"
