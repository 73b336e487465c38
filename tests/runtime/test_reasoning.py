"""A model's reasoning: told from the answer, however the text is cut, and ended by a budget."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from outrider.inputs.reasoning import ReasoningFormat, Thought
from outrider.tokens.sampling.reasoning_budget import ReasoningBudget

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


@pytest.mark.parametrize("case", CASES)
def test_reasoning_is_told_from_the_answer_however_the_text_is_cut(case: str) -> None:
    sign, opened, text, reasoning, content = CASES[case]
    form = ReasoningFormat.of_template(f"… {sign} …")
    assert form is not None
    assert form.parse(text, opened=opened) == (reasoning, content)
    for size in (1, 2, 3, 5, 7):
        stream = form.stream(opened=opened)
        pieces = [piece for at in range(0, len(text), size) for piece in stream.push(text[at : at + size])]
        pieces += stream.finish()
        assert all(isinstance(piece, str) or piece.text for piece in pieces)
        said = "".join(piece.text for piece in pieces if isinstance(piece, Thought))
        assert (said, "".join(piece for piece in pieces if isinstance(piece, str))) == (reasoning, content)


def test_calls_of_gpt_oss_are_passed_on_in_one_order() -> None:
    form = ReasoningFormat.of_template("<|channel|>")
    assert form is not None
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
    form = ReasoningFormat.of_template("<think>")
    assert form is not None
    assert form.count(texts, opened=opened) == count


BEGIN, END, OTHER = 1, 2, 5


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


@pytest.mark.parametrize("drafted", [0, 1, 3, 7])
@pytest.mark.parametrize(("opened", "budget", "wanted", "expected"), [
    (False, 2, [BEGIN, 5, 6, 7, 5, END, 6], [BEGIN, 5, 6, END, 5, END, 6]),
    (True, 2, [5, 6, 7, 5, 6], [5, 6, END, 5, 6]),
    (True, 0, [5, 6], [END, 6]),
    (False, 0, [BEGIN, 6, 7], [BEGIN, END, 7]),
    (False, 0, [5, BEGIN, 7], [5, BEGIN, END]),
    (True, 3, [5, END, 6, 7, 5, 6, 7], [5, END, 6, 7, 5, 6, 7]),
])  # fmt: skip
def test_a_budget_ends_the_reasoning_with_any_draft(
    drafted: int, opened: bool, budget: int, wanted: list[int], expected: list[int]
) -> None:
    rule = ReasoningBudget(budget, [BEGIN], [END], [END], opened=opened)
    assert answered(rule, wanted, drafted) == expected


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
