"""Grammars in GBNF: the language is llama.cpp's, which has no lexer."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from outrider.tokens.grammar.gbnf import is_gbnf
from outrider.tokens.grammar.gbnf_lark import gbnf_to_lark
from tiny import train_tokenizer

TOKENIZER = LLTokenizer(train_tokenizer().to_str(), n_vocab=404, eos_token=[400, 402])
NAMES = ("root", "x", "y")
CHARACTERS = "abéü"  # the last two begin with the same byte
COUNTS = ((0, None), (1, None), (0, 1), (2, 2), (1, 3), (0, 2), (2, None))

# A part is ("class", characters), ("rule", name), ("sequence" or "choice", parts), or ("repeat", part, counts).
CLASSES = st.sets(st.sampled_from(CHARACTERS), min_size=1).map(lambda each: ("class", "".join(sorted(each))))
LEAVES = st.one_of(CLASSES, CLASSES, st.tuples(st.just("rule"), st.sampled_from(NAMES)))


def parts(inner: Any) -> Any:
    return st.one_of(
        st.tuples(st.just("sequence"), st.lists(inner, max_size=3)),
        st.tuples(st.just("choice"), st.lists(inner, min_size=1, max_size=3)),
        st.tuples(st.just("repeat"), inner, st.sampled_from(COUNTS)),
    )


GRAMMARS = st.fixed_dictionaries({name: st.recursive(LEAVES, parts, max_leaves=6) for name in NAMES})


def written(part: Any) -> str:
    """A part in GBNF."""
    kind, value = part[:2]
    if kind == "rule":
        return str(value)
    if kind == "class":
        return f"[{value}]" if len(value) > 1 else f'"{value}"'
    if kind == "repeat":
        return f"({written(value)}){{{part[2][0]},{'' if part[2][1] is None else part[2][1]}}}"
    return f"({(' ' if kind == 'sequence' else ' | ').join(map(written, value))})"


class Recogniser:
    """Reads texts by the rules of a grammar, each a list of bodies (Earley 1970)."""

    def __init__(self, grammar: dict[str, Any]) -> None:
        self.rules: dict[str, list[list[str]]] = {}
        for name, part in grammar.items():
            self.rules[name] = [[self.symbol(part)]]

    def symbol(self, part: Any) -> str:
        """The name of a rule for a part; a class is its own."""
        kind, value = part[:2]
        if kind == "rule":
            return str(value)
        if kind == "class":
            return f"[{value}"
        name = f"rule {len(self.rules)}"
        self.rules[name] = bodies = []
        if kind == "repeat":
            (least, most), item = part[2], self.symbol(value)
            bodies += [[item] * count for count in range(least, (least if most is None else most) + 1)]
            bodies += [[name, item]] if most is None else []
        else:
            items = [self.symbol(each) for each in value]
            bodies += [items] if kind == "sequence" else [[item] for item in items]
        return name

    def read(self, text: str) -> list[tuple[bool, bool]]:
        """Of each beginning of a text: whether it may stand so, and whether it may end there."""
        found, sets = list[tuple[bool, bool]](), list[set[Any]]()
        scanned = {("root", tuple(body), 0, 0) for body in self.rules["root"]}
        for place in range(len(text) + 1):
            sets.append(self.completed(scanned, sets, place))
            ends = any(name == "root" and dot == len(body) and not begin for name, body, dot, begin in sets[place])
            found.append((bool(scanned), ends))
            scanned = {
                (name, body, dot + 1, begin)
                for name, body, dot, begin in sets[place]
                if place < len(text) and dot < len(body) and body[dot][0] == "[" and text[place] in body[dot][1:]
            }
        return found

    def completed(self, items: set[Any], sets: Sequence[set[Any]], place: int) -> set[Any]:
        """The items of a place: those that were scanned, and what they predict and complete."""
        before = set[Any]()
        while items != before:
            before, found = items, set(items)
            for name, body, dot, begin in items:
                if dot == len(body):
                    earlier = items if begin == place else sets[begin]
                    found |= {(n, b, d + 1, i) for n, b, d, i in earlier if d < len(b) and b[d] == name}
                elif body[dot] in self.rules:
                    found |= {(body[dot], tuple(each), 0, place) for each in self.rules[body[dot]]}
            items = found
        return items


def matcher_of(text: str) -> LLMatcher:
    matcher = LLMatcher(TOKENIZER, gbnf_to_lark(text, TOKENIZER), log_level=0)
    assert not matcher.get_error()
    return matcher


def read(matcher: LLMatcher, token_ids: Sequence[int]) -> tuple[bool, bool]:
    """Whether a text may stand so, and whether it may end there."""
    copy = matcher.deep_copy()
    taken = copy.try_consume_tokens([*token_ids]) == len(token_ids)
    return taken, taken and copy.is_accepting()


@settings(max_examples=60, deadline=None)
@given(GRAMMARS, st.data())
def test_the_language_is_that_of_the_rules(grammar: dict[str, Any], data: Any) -> None:
    """Of a text and each character after it, whether it may stand so and end there, read by characters and as usual."""
    rules = "".join(f"{name} ::= {written(part)}\n" for name, part in grammar.items())
    matcher, recogniser, text = matcher_of(rules), Recogniser(grammar), ""
    for _ in range(7):
        after = {character: recogniser.read(text + character)[-1] for character in CHARACTERS}
        for character, expected in after.items():
            longer = text + character
            assert read(matcher, [i for each in longer for i in TOKENIZER.tokenize_str(each)]) == expected, rules
            assert read(matcher, TOKENIZER.tokenize_str(longer)) == expected, rules
        if not (begun := [character for character, (may_stand, _) in after.items() if may_stand]):
            break
        text += data.draw(st.sampled_from(begun))


EXPRESSIONS = r"""
root  ::= (sum "=" ws item "\n")+   # one a line
sum   ::= item ([-+] item)*
item  ::= name | [0-9]+ ws | "(" ws sum ")" ws
name  ::= [a-z] [a-z0-9_]* ws
ws    ::= [ \t\n]*
"""
PROGRAM = r"""root ::= (kind name "(" (kind name)? ")" "{" line* "}")*
kind ::= "int" ws | "char" ws
name ::= [a-z_]+
line ::= ( kind name ws "=" ws value ";" ) |
  ( name ws "=" ws value ";" ) | ( name ws "(" ")" ";" ) | ( "return" ws value ";" ) | ( "//" [^\n]* "\n" )
value ::= name | [0-9]+ | "-" value | "(" ws value ws ")"
ws ::= ([ \t\n]+)
"""
DATA = r"""root ::= object
value ::= object | list | text | number | ("true" | "null") ws
object ::= "{" ws ( text ":" ws value ("," ws text ":" ws value)* )? "}" ws
list ::= "[" ws ( value ("," ws value)* )? "]" ws
text ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bn] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""


@pytest.mark.parametrize(("rules", "taken", "refused"), [
    ('root ::= word "s"\nword ::= [a-z]+', ["dogs", "ss"], ["dog", "s"]),
    ('root ::= num "\\n"\nnum ::= [0-9]+ ws\nws ::= [ \\n]*', ["3\n", "3 \n\n"], ["3"]),
    ('root ::= "(" word root? ")"\nword ::= [a-z]* "s"', ["(dogs)", "(ss(s))"], ["(dog)", "(dogs"]),
    (EXPRESSIONS, ["1+2= 3\n", "(a+b)-2=c\nx=y\n\n"], ["1+=2\n", "1=2"]),
    (PROGRAM, ["int f(int a){return -a;}", "char g(){int = 1;x = ( y );f ();//x\n}"], ["int f(int a){return a}"]),
    (DATA, ['{"a": [1, true, null, "x\\u00e9é"]}', "{}", '{"b":-1.5}'], ["{a: 1}", "[1]", '{"a":01}']),
    (r'root ::= "\u00e9" [\u4e00-\u9fff] [\U0001F600-\U0001F64F] "\x41" [^\x00-\x1F]', ["é日🙂A!"], ["é日🙂A\n"]),
    (r'root ::= [a\-z] [a-c-] [\[\]] [\]] "\t\r\n\\\"\[\]" .', ["-c[]\t\r\n\\\"[]\n"], ["b-[]\t\r\n\\\"[]x"]),
    ('root ::= "a"{2} "b"{1,3} "c"{2,} [0-9]{ 0 , 2 } "d"? "e"{2}{2}', ["aabcceeee", "aabbbccc12deeee"], ["aacceeee"]),
    ('x ::= "a" # last\r\n\r\nroot ::= (\n x\n |\n "b" ) |\n x-1_B x-1_B\nx-1_B ::= "c" |', ["a", "cc", ""], ["ab"]),
    ('x ::= "a"\nroot ::= x root | "" | x{0,0} "b"\nx ::= "c"', ["cc", "b"], ["a"]),
    ('root ::= root "a" | "b"', ["b", "baa"], ["a"]),
    ('root ::= [a-z]+ more "s"\nmore ::= "(" more ")" | ""', ["dogs", "dog()s"], ["dog"]),
    ('root ::= [ab] x "d" | "b" y "!"\nx ::= "c" | "(" x ")"\ny ::= "cd" | "<" y ">"', ["bcd", "bcd!"], ["acd!"]),
    ('root ::= "b" y "!" | [ab] x "d"\nx ::= "cde" | "(" x ")"\ny ::= "c" | y "d"', ["bcded", "bcd!", "bc!"], ["acd!"]),
    (r'root ::= [\uD800-\uE000]', ["\ue000"], ["a"]),
], ids=lambda each: None if isinstance(each, list) else each.split(" ")[-1][-12:].strip())  # fmt: skip
def test_the_notation(rules: str, taken: list[str], refused: list[str]) -> None:
    matcher = matcher_of(rules)
    for text in (*taken, *refused):
        letters = [token_id for each in text for token_id in TOKENIZER.tokenize_str(each)]
        assert read(matcher, letters)[1] == read(matcher, TOKENIZER.tokenize_str(text))[1] == (text in taken), text


TOOL_CALL = 403


@pytest.mark.parametrize(("rules", "taken", "refused"), [
    ("root ::= <tool_call> inner <[401]> .*\ninner ::= !<[401]>*",
     [[TOOL_CALL, 70, 71, 401, 70], [TOOL_CALL, 401]], [[70, 401], [TOOL_CALL, 70], [TOOL_CALL, 401, 401]]),
    ("root ::= !<[401]>", [[70], [TOOL_CALL]], [[401]]),
])  # fmt: skip
def test_tokens(rules: str, taken: list[list[int]], refused: list[list[int]]) -> None:
    matcher = matcher_of(rules)
    assert all(read(matcher, token_ids)[1] for token_ids in taken)
    assert not any(read(matcher, token_ids)[1] for token_ids in refused)


def test_any_token_but_one_is_not_the_end_of_the_answer() -> None:
    mask = np.frombuffer(matcher_of("root ::= !<[401]>").compute_bitmask(), np.uint8)
    assert np.flatnonzero(np.unpackbits(mask, bitorder="little") == 0).tolist()[:3] == [400, 401, 402]


@pytest.mark.parametrize(("rules", "says"), [
    ('root ::= "a" x', "there is no rule 'x'"),
    ('start ::= "a"', "there is no rule 'root'"),
    ('root ::= "a"\n"b"', "line 2: a rule's name is expected before '\"b\"'"),
    ('root = "a"\nx ::= "b"', "line 1: '::=' is expected before '= \"a\"'"),
    ('root ::= "a" )', "line 1: the end of the line is expected before ')'"),
    ('root ::= ("a"', "line 1: ')' is missing"),
    ('root ::= "a', "line 1: the end of a text or class is missing"),
    (r'root ::= "\d"', "line 1: one of the escapes"),
    ("root ::= *", "line 1: something to repeat is expected before '*'"),
    ('root ::= "a"{x}', "line 1: a count such as {2,4} is expected before"),
    ('root ::= "a"{3,2}', "has a most below its least"),
    ("root ::= []", "a class in [] has no character"),
    ("root ::= <never> .", "<never> is not one token of this model: write it as a text, in quotes"),
    ("root ::= <[9999]> root?", "there is no token 9,999"),
    ('root ::= !<[401]>* "a"', "in place of !<[401]> there may be another token or a text that begins with it"),
    ("root ::= ([a-z] | <[70]>) root?", "in place of <[70]>"),
    ("root ::= (!<[401]> | <[70]>) root?", "there may be another token"),
])  # fmt: skip
def test_what_cannot_be_followed(rules: str, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        gbnf_to_lark(rules, TOKENIZER)


def test_a_grammar_of_lark_is_not_taken_for_one_of_gbnf() -> None:
    assert not any(map(is_gbnf, ('start: "root ::= x"', "// root ::= x\nstart: /a/", "start: A\nA: /::=/")))
    assert is_gbnf("# rules\n  root  ::= x")
