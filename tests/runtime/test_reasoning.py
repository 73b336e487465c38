"""A model's reasoning: told from the answer, however the text is cut, and ended by a budget."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from outrider.engine.reasoning import Reasoning
from outrider.inputs.reasoning import ReasoningFormat, Thought
from outrider.inputs.text import TextStream
from outrider.inputs.tools import ToolCall, ToolFormat, source_of_calls
from outrider.inputs.tools.formats import HERMES
from outrider.tokens.grammar import Grammars, GrammarSource
from outrider.tokens.sampling.reasoning_budget import ReasoningBudget
from outrider.types import TextTokenizer
from tiny import train_tokenizer

# A sign of the model's chat template, whether its prompt begins the reasoning, an answer, and what it says.
ANALYSIS = "<|channel|>analysis<|message|>"
CASES: dict[str, tuple[str, bool, str, str, str]] = {
    "qwen3": ("<think>", False, "<think>\nHm. 1 < 2\n</think>\n\nYes.", "Hm. 1 < 2", "Yes."),
    "qwen3.5": ("<think>", True, "Hm.\n</think>\n\nYes.", "Hm.", "Yes."),
    "r1, begun again": ("</think>", True, "<think>\nHm.\n</think>\nYes. </think>", "Hm.", "Yes. </think>"),
    "without": ("<think>", False, "Yes, <think> is a tag.</think>", "", "Yes, <think> is a tag.</think>"),
    "blanks": ("<think>", False, "  Yes. ", "", "  Yes. "),
    "empty": ("<think>", False, "<think>\n\n</think>\n\nYes.", "", "Yes."),
    "cut": ("<think>", False, "<think>\nHm. </thi", "Hm. </thi", ""),
    "cut, opened": ("<think>", True, "Hm. ", "Hm.", ""),
    "magistral": ("[THINK]", False, "[THINK]Hm.[/THINK]Yes.", "Hm.", "Yes."),
    "granite 3.2": (
        "Here is my thought process:", False, "Here is my thought process: Hm.\n\nHere is my response: Yes.", "Hm.",
        "Yes.",
    ),
    "granite 3.3": ("<response>", False, "<think>Hm.</think><response>Yes.</response>", "Hm.", "Yes."),
    "granite 3.3, bare": ("<response>", False, "<think>Hm.</think> Yes.", "Hm.", "Yes."),
    "gemma 4": ("<|channel>", False, "<|channel>thought\nHm.\n<channel|>Yes.", "Hm.", "Yes."),
    "command": ("<|START_THINKING|>", False, "<|START_THINKING|>Hm.<|END_THINKING|>Yes.", "Hm.", "Yes."),
    "gpt-oss": (
        "<|channel|>", False, f"{ANALYSIS}Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>", "Hm.",
        "Yes.",
    ),
    "gpt-oss, comment": (
        "<|channel|>", False,
        f"{ANALYSIS}Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>So.<|end|>", "Hm.", "So.",
    ),
    "gpt-oss, cut": ("<|channel|>", False, f"{ANALYSIS}Hm. <|en", "Hm. <|en", ""),
    "gpt-oss, cut in a header": ("<|channel|>", False, f"{ANALYSIS}Hm.<|end|><|start|>assist", "Hm.", ""),
    "gpt-oss, no channel": ("<|channel|>", False, "Yes. <|x|>", "", "Yes. <|x|>"),
}  # fmt: skip


def form_of(template: str) -> ReasoningFormat:
    form = ReasoningFormat.of_template(template)
    assert form is not None
    return form


@pytest.mark.parametrize("case", CASES)
def test_reasoning_is_told_from_the_answer_however_the_text_is_cut(case: str) -> None:
    sign, opened, text, reasoning, content = CASES[case]
    form = form_of(f"… {sign} …")
    assert form.parse(text, opened=opened) == (reasoning, content)
    for size in (1, 2, 3, 5, 7):
        stream = form.stream(opened=opened)
        pieces = [piece for at in range(0, len(text), size) for piece in stream.push(text[at : at + size])]
        pieces += stream.finish()
        assert all(isinstance(piece, str) or piece.text for piece in pieces)
        said = "".join(piece.text for piece in pieces if isinstance(piece, Thought))
        assert (said, "".join(piece for piece in pieces if isinstance(piece, str))) == (reasoning, content)


FINAL, NEXT = "<|channel|>final<|message|>", "<|end|><|start|>assistant"


@pytest.mark.parametrize(("sign", "text", "stop", "kept"), [
    ("<think>", "Blue.</think>\n\nSky. Blue.", "Blue", "Blue.</think>\n\nSky. "),
    ("<think>", "1 > 2</think>\n3 > 4", ">", "1 > 2</think>\n3 "),
    ("<think>", "A.\n\nB.</think>\n\nC.\n\nD.", "\n\n", "A.\n\nB.</think>\n\nC."),
    ("<think>", "think</think>think", "think", "think</think>"),
    ("<think>", "A. Blue.", "Blue", None),
    ("<response>", "A</think><response>B > C</response>", ">", "A</think><response>B "),
    ("<response>", "A</think><response>B</response>", ">", None),
    ("<|channel|>", f"A.{NEXT}{FINAL}B. A.", "A", f"A.{NEXT}{FINAL}B. "),
    ("<|channel|>", f"A.{NEXT}<|channel|>commentary<|message|>B.{NEXT}{FINAL}C.", "B.C", None),
    ("<|channel|>", f"A.{NEXT}{FINAL}B.<|return|>", "|", None),
])  # fmt: skip
def test_stop_strings_count_in_the_content_alone(sign: str, text: str, stop: str, kept: str | None) -> None:
    """Not in reasoning, and not in markers nor in the blanks around them."""
    form = form_of(sign)
    stream = TextStream(lambda ids: "".join(map(chr, ids)), [stop], reasoning=form.splitter(opened=True))
    for at, character in enumerate(text):
        stream.push([ord(character)])
        assert text.startswith(stream.text)
        if stream.is_over:
            assert kept is not None
            assert at + 1 == len(kept) + len(stop)
            break
    stream.finish()
    assert (stream.text, stream.stop_string) == ((text, None) if kept is None else (kept, stop))


@pytest.mark.parametrize(("text", "token", "end"), [
    ("A x</think>\nB x C", "x", "A x</think>\nB x"), ("A\n</think>\n\nB\nC", "\n", "A\n</think>\n\nB\n"),
    ("A x", "x", "A x"), ("A\0</think>B\0C", "\0", "A\0</think>B\0"),
])  # fmt: skip
def test_tokens_that_end_an_answer_count_in_the_content_alone(text: str, token: str, end: str) -> None:
    form = form_of("<think>")
    for given in ({"stop_token_ids": [ord(token)]}, {"until": lambda new: token in new}):
        read, splitter = "", form.splitter(opened=True)
        options: Any = {**given, "reasoning": splitter}
        stream = TextStream(lambda ids: bytes(filter(None, ids)).decode(), **options)
        for character in text:
            stream.push([ord(character)])
            read += character
            if stream.is_over:
                break
        assert read == (text if "until" in given and not ord(token) else end)


@pytest.mark.parametrize(("prompt", "written", "state"), [
    ("user: <think>?\nassistant\n", "", ""),
    ("user\nassistant\n<think>\n", "", "open"),
    ("assistant\n<think>\n\n</think>\n\n", "", "closed"),
    ("assistant\n<think>\nThe sky is", "<think>\nThe sky is", "open"),
    ("assistant\n<think>\nThe sky is", "The sky is", "open"),
    ("assistant\n<think>\nA\n</think>\n\nThe sky", "<think>\nA\n</think>\n\nThe sky ", "closed"),
    ("assistant\n<think>\nA</think>\nThe sky", "The sky", "closed"),
    ("assistant\nA</think>B<think>C", "A</think>B<think>C", "open"),
    ("user: <think>?\nassistant\nThe sky is", "The sky is", "closed"),
])  # fmt: skip
def test_the_last_marker_since_the_turn_began_decides(tmp_path: Path, prompt: str, written: str, state: str) -> None:
    for special in ((), ("<think>", "</think>")):
        found = Marked(tmp_path, "<think>", special).reasoning(prompt, written)
        assert (found.is_open, found.is_closed) == (state == "open", state == "closed")


def test_the_last_marker_of_gpt_oss_decides(harmony: Marked) -> None:
    assert harmony.reasoning(f"<|start|>assistant{ANALYSIS}The", "The").is_open
    assert harmony.reasoning(f"<|start|>assistant{ANALYSIS}A.{NEXT}{FINAL}The", "The").is_closed
    assert not harmony.reasoning("Hi<|end|><|start|>assistant").is_closed


def test_calls_of_gpt_oss_are_passed_on_in_one_order() -> None:
    form = form_of("<|channel|>")
    for head in (
        "<|start|>assistant to=functions.f<|channel|>commentary json",
        "<|channel|>commentary to=functions.f <|constrain|>json",
    ):  # fmt: skip
        _, content = form.parse(f'{ANALYSIS}Hm.<|end|>{head}<|message|>{{"a": 1}}<|call|>')
        assert content == '<|channel|>commentary to=functions.f<|message|>{"a": 1}<|call|>'


def test_a_model_without_reasoning_has_no_form() -> None:
    assert ReasoningFormat.of_template("{{ messages[0].content }}") is None


@pytest.mark.parametrize(("opened", "texts", "count"), [
    (False, ["<think>", "\n", "Hm", ".", "</think>", "\n", "Yes"], 5),
    (True, ["Hm", ".", "</think>", "Yes"], 3),
    (False, ["Yes", "."], 0),
])  # fmt: skip
def test_tokens_of_reasoning_are_counted_with_their_markers(opened: bool, texts: list[str], count: int) -> None:
    form = form_of("<think>")
    assert form.count(texts, opened=opened) == count


BEGIN, END, CALL_BEGIN, CALL_END, OTHER, EOS = 1, 2, 3, 4, 5, 7


def answered(budget: ReasoningBudget, wanted: list[int], drafted: int) -> list[int]:
    """The greedy answer of a model that wants these tokens, in rounds of drafts of them."""
    answer: list[int] = []
    while len(answer) < len(wanted):
        row: list[int] = []
        for at in range(len(answer), min(len(answer) + drafted + 1, len(wanted))):
            logits = np.zeros(8, np.float32)
            logits[wanted[at]] = 9
            budget.apply(logits, row)
            row.append(int(logits.argmax()))
            if row[-1] != wanted[at]:
                break
        budget.commit(row)
        answer += row
    return answer


ONE: Any = {"begin": [BEGIN], "end": [END], "forced": [END]}
TWO: Any = {"begin": [1, 3], "end": [2, 4], "forced": [2, 4], "opened": False}  # part of an end is reasoning
OPEN, CLOSED = ONE | {"opened": True}, ONE | {"opened": False}
CALLS = OPEN | {"eos_token_ids": [EOS], "call": ([CALL_BEGIN], [CALL_END])}


@pytest.mark.parametrize(("budget", "rule", "wanted", "expected"), [
    (2, CLOSED, [BEGIN, 5, 6, 7, 5, END, 6], [BEGIN, 5, 6, END, 5, END, 6]),
    (2, OPEN, [5, 6, 7, 5, 6], [5, 6, END, 5, 6]),
    (0, OPEN, [5, 6], [END, 6]),
    (0, CLOSED, [BEGIN, 6, 7], [BEGIN, END, 7]),
    (0, CLOSED, [5, BEGIN, 7], [5, BEGIN, END]),
    (3, OPEN, [5, END, 6, 7, 5, 6, 7], [5, END, 6, 7, 5, 6, 7]),
    # All reasoning together.
    (4, TWO | {"again": True}, [1, 3, 5, 4, 2, 4, 7, 1, 3, 5, 5, 5, 1, 3, 5, 5],
     [1, 3, 5, 4, 2, 4, 7, 1, 3, 5, 2, 4, 1, 3, 2, 4]),
    (4, TWO, [1, 3, 5, 4, 2, 4, 7, 1, 3, 5, 5, 5, 5, 5], [1, 3, 5, 4, 2, 4, 7, 1, 3, 5, 5, 5, 5, 5]),
    (4, TWO, [1, 3, 5, 6, 7, 2, 5, 6], [1, 3, 5, 6, 7, 2, 4, 6]),
    # No call is cut, but for one that goes on for too long: the marker alone may stand in a thought.
    (2, CALLS, [5, CALL_BEGIN, 6, 6, CALL_END, EOS], [5, CALL_BEGIN, 6, 6, CALL_END, EOS]),
    (2, CALLS, [5, CALL_BEGIN, 6, 6, CALL_END, 6, 6], [5, CALL_BEGIN, 6, 6, CALL_END, END, 6]),
    (2, CALLS, [5, 6, EOS], [5, 6, END]),
    (2, CALLS, [CALL_BEGIN, 6, 6, 6, 6, 6, 6], [CALL_BEGIN, 6, 6, 6, 6, END, 6]),
])  # fmt: skip
def test_a_budget_ends_the_reasoning_with_any_draft(
    budget: int, rule: dict[str, Any], wanted: list[int], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.tokens.sampling.reasoning_budget._MOST_TOKENS_OF_CALL", 3)
    for drafted in (0, 1, 3, 7):
        assert answered(ReasoningBudget(budget, **rule), wanted, drafted) == expected


def test_what_a_grammar_bans_is_not_forced() -> None:
    rule = ReasoningBudget(0, [BEGIN], [END], [END, 3], opened=True)
    logits = np.zeros(8, np.float32)
    logits[END] = -np.inf  # within a character
    rule.apply(logits, [])
    assert np.isfinite(logits[OTHER])
    rule.commit([OTHER])
    logits = np.zeros(8, np.float32)
    rule.apply(logits, [END])
    assert np.flatnonzero(np.isfinite(logits)).tolist() == [3]


def test_options_name_what_is_wrong() -> None:
    from outrider import GenerationConfig
    from outrider.errors import OptionError

    assert (
        GenerationConfig(chat_template_kwargs={"enable_thinking": False}).chat_template_kwargs["enable_thinking"]
        is False
    )
    wrong: list[Any] = [{"messages": []}, {"a": object()}, [1]]
    for value in wrong:
        with pytest.raises(OptionError, match="chat_template_kwargs="):
            GenerationConfig(chat_template_kwargs=value)


MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")
CALL = "<|channel|>commentary to=functions.look_up"
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {
    "type": "object", "properties": {"day": {"enum": ["Mon", "Tue"]}}, "required": ["day"]}}}]  # fmt: skip


class Marked:
    """A tokenizer of a chat template, for which some markers are special tokens."""

    def __init__(self, folder: Path, template: str, special: Sequence[str] = ()) -> None:
        self.chat_template, self._tokenizer = template, train_tokenizer(special=["<|endoftext|>", *special])
        self._tokenizer.save(str(folder / "tokenizer.json"))
        self.end = self.encode("<|endoftext|>")[0]
        self._grammars = Grammars(folder, self._tokenizer.get_vocab_size(), (self.end,))

    def encode(self, text: str) -> list[int]:
        token_ids: list[int] = self._tokenizer.encode(text).ids
        return token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(token_ids))
        return text

    def allows(self, source: GrammarSource, text: str, *, spelled: bool = False) -> bool:
        """Whether a grammar allows a text and its end. spelled: markers are text."""
        token_ids = [self.encode(each)[0] for each in text] if spelled else self.encode(text)
        state = self._grammars.new_state(source)
        return state.is_complete(token_ids) or state.num_allowed([*token_ids, self.end]) == len(token_ids) + 1

    def reasoning(self, prompt: str = "", written: str = "") -> Reasoning:
        found = Reasoning.of(cast("TextTokenizer", self), self.encode(prompt), written)
        assert found is not None
        return found


@pytest.fixture(scope="module")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> Marked:
    return Marked(tmp_path_factory.mktemp("harmony"), "<|channel|>commentary", MARKS)


CALLED, THOUGHT = f'{CALL}<|message|>{{"day": "Mon"}}<|call|>', f"{ANALYSIS}A.{NEXT}"
OF_CALLS = [begun + call for call in (CALLED, CALLED.replace("<|m", " <|constrain|>json<|m"))
            for begun in ("", f"{ANALYSIS}Which day? Mon.{NEXT}", f"{THOUGHT}{ANALYSIS}B.{NEXT}")]  # fmt: skip
NOT_OF_CALLS = [CALLED.replace("Mon", "Sun"), CALLED.replace("look_up", "look_in")]
YES = GrammarSource("regex", "yes|no")


@pytest.mark.parametrize(("asked", "begun", "allowed", "refused"), [
    ({"free": False}, "", OF_CALLS, [*NOT_OF_CALLS, f"{THOUGHT}{FINAL}Monday.", "Monday."]),
    ({"free": True}, None, [*OF_CALLS, f"{THOUGHT}{FINAL}Monday.", "Monday."], NOT_OF_CALLS),
    ({"free": True, "schema": {"enum": ["Mon", "Tue"]}}, "",
     [f"{begun}{text}" for begun in ("", THOUGHT) for text in (CALLED, f'{FINAL}"Tue"')],
     [f"{begun}{FINAL}Tuesday" for begun in ("", THOUGHT)]),
    (YES, "", [f"{FINAL}yes", f"{ANALYSIS}Well, maybe. {NEXT}{FINAL}no", f"{THOUGHT}{ANALYSIS}B.{NEXT}{FINAL}no"],
     ["yes", f"{FINAL}maybe", f"{ANALYSIS}yes", f"{THOUGHT}{FINAL}maybe", f"{CALL}<|message|>yes"]),
    (YES, ANALYSIS, [f"Maybe.{NEXT}{FINAL}yes"], [f"{FINAL}yes"]),
], ids=["calls", "calls or text", "calls or a schema", "grammar", "grammar after a thought"])  # fmt: skip
def test_answers_of_gpt_oss_follow_grammars(
    harmony: Marked, asked: Any, begun: str | None, allowed: list[str], refused: list[str]
) -> None:
    """After its analyses. begun: the turn's text; None: the grammar is not put after reasoning."""
    source = asked
    if isinstance(asked, dict):
        form = ToolFormat.of_template(harmony.chat_template)
        assert form is not None
        source = source_of_calls(form, TOOLS, None, cast("TextTokenizer", harmony), **asked)
        assert form.parse(form_of(harmony.chat_template).parse(THOUGHT + CALLED)[1])[1] == [
            ToolCall("look_up", '{"day": "Mon"}')
        ]
    if begun is not None:
        source = harmony.reasoning(f"<|start|>assistant{begun}").before(source)
        assert not harmony.allows(source, allowed[0], spelled=True)
    assert all(harmony.allows(source, text) for text in allowed)
    assert not any(harmony.allows(source, text) for text in refused)


@pytest.mark.parametrize(("sign", "begin", "end", "special"), [
    ("Here is my thought process:", "Here is my thought process:", "Here is my response:", ()),
    ("<think>", "<think>", "</think>", ()),
    ("<think>", "<think>", "</think>", ("<think>", "</think>")),
    ("<|channel>", "<|channel>thought", "<channel|>", ("<|channel>", "<channel|>")),
])  # fmt: skip
def test_a_grammar_begins_after_markers_of_several_tokens(
    tmp_path: Path, sign: str, begin: str, end: str, special: tuple[str, ...]
) -> None:
    tokenizer = Marked(tmp_path, f"… {sign} …", special)
    source = tokenizer.reasoning().before(GrammarSource("regex", "yes|no"))
    opened = tokenizer.reasoning(begin).before(GrammarSource("regex", "yes|no"))
    for text in ("yes", f"{begin} Hm. no? {end}yes", f"{begin}\nHm.\n{end}\n\nno"):
        assert tokenizer.allows(source, text)
    assert tokenizer.allows(opened, f" Hm. {end} yes")
    for text in ("maybe", f"{begin} Hm.{end}maybe", f"{begin} yes"):
        assert not tokenizer.allows(source, text)
    assert not tokenizer.allows(opened, "yes")


def test_a_grammar_for_calls_lets_one_end_the_reasoning(tmp_path: Path) -> None:
    tokenizer = Marked(tmp_path, "<think>", ("<think>", "</think>", "<tool_call>", "</tool_call>"))
    source = source_of_calls(HERMES, TOOLS, None, cast("TextTokenizer", tokenizer))
    call = '<tool_call>\n{"name": "look_up", "arguments": {"day": "Mon"}}\n</tool_call>'
    opened, before = tokenizer.reasoning("<think>").before(source, HERMES), tokenizer.reasoning().before(source, HERMES)
    for text in (f"A.\n{call}", f"A.</think>\n\n{call}"):
        assert tokenizer.allows(opened, text)
        assert tokenizer.allows(before, f"<think>{text}")
        assert not tokenizer.allows(opened, text.replace("Mon", "Sun"))
    assert tokenizer.allows(before, call)
    assert not tokenizer.allows(opened, "A.")
    assert not tokenizer.allows(tokenizer.reasoning("<think>").before(source), f"A.\n{call}")


def test_a_budget_before_calls_of_gpt_oss_forces_no_answer(harmony: Marked) -> None:
    """The header of a final message would wait within the call's arguments for a place where it may stand."""
    reasoning = harmony.reasoning("<|start|>assistant")
    forced = {forced: reasoning.budget(0, (), None, forced=forced)._forced for forced in (False, True)}  # type: ignore[union-attr]
    assert forced[True] == tuple(harmony.encode(NEXT))
    assert forced[False] == tuple(harmony.encode(f"{NEXT}{FINAL}"))
