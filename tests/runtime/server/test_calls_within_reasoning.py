"""Calls that a model writes within its reasoning, in all formats, forms of reasoning and APIs."""

import itertools
from typing import Any

import pytest

from outrider.inputs.reasoning import ReasoningFormat, Thought, formats, split
from outrider.inputs.reasoning.formats import THINK
from outrider.inputs.tools import ToolCall, ToolCallDelta, ToolFormat
from outrider.inputs.tools.formats import (
    DEEPSEEK,
    GEMMA,
    GLM,
    GLM_IN_LINE,
    GRANITE,
    HARMONY,
    HERMES,
    KIMI,
    LFM,
    LLAMA,
    MINIMAX,
    MISTRAL,
    MISTRAL_ARGS,
    PHI,
    QWEN_CODER,
)
from outrider.inputs.tools.stream import joined
from outrider.server.chat import CHAT
from outrider.server.dialect import Dialect
from outrider.server.messages import MESSAGES
from outrider.server.ollama import OLLAMA_CHAT
from outrider.server.reader import AnswerReading
from outrider.server.responses import RESPONSES
from serving import answer_of, body_of, chunks_of, result_of, streamed

JSON = '{"name": "f", "arguments": {"a": 1}}'
CALLS = [ToolCall("f", '{"a": 1}')]
TOOLS: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {
    "a": {"type": "integer"}}}}}]  # fmt: skip
WRITTEN = {
    HERMES: f"<tool_call>\n{JSON}\n</tool_call>",
    QWEN_CODER: "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
    LLAMA: f"<|python_tag|>{JSON.replace('arguments', 'parameters')}",
    MISTRAL: f"[TOOL_CALLS] [{JSON}]",
    MISTRAL_ARGS: '[TOOL_CALLS]f[ARGS]{"a": 1}',
    GLM: "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    GLM_IN_LINE: "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>",
    GRANITE: f"<|tool_call|>[{JSON}]",
    PHI: f"functools[{JSON}]",
    KIMI: '<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}'
          "<|tool_call_end|><|tool_calls_section_end|>",
    DEEPSEEK: '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>',
    HARMONY: '<|channel|>commentary to=functions.f<|message|>{"a": 1}<|call|>',
    LFM: "<|tool_call_start|>[f(a=1)]<|tool_call_end|>",
    GEMMA: "<|tool_call>call:f{a:1}<tool_call|>",
    MINIMAX: '<minimax:tool_call>\n<invoke name="f"><parameter name="a">1</parameter></invoke>\n</minimax:tool_call>',
}  # fmt: skip
REASONING = {*formats._SIGNS.values()}
FINAL = "<|start|>assistant<|channel|>final<|message|>"


def cases(calls: ToolFormat, form: ReasoningFormat) -> list[tuple[str, str, str, list[ToolCall], bool]]:
    """Texts that begin within the reasoning; their reasoning, content and calls; and whether they are cut."""
    call, marker = WRITTEN[calls], calls.begins[0]
    end, final = form.end, FINAL if form.channels else ""
    if form.channels and calls is HARMONY:  # a call is a message of its own
        return [(f"A.\n{call}", "A.", "", CALLS, False), (f"A.{end}{call}", "A.", "", CALLS, False)]
    return [
        (f"A.{end}\n\n{final}{call}", "A.", "", CALLS, False),
        (f'A "b"{call}', 'A "b"', "", CALLS, False),
        (f"A.\n{call}\n{end}\n", "A.", "", CALLS, False),
        (f"A.\n{call}\nB. {end}", f"A.\n{call}\nB.", "", [], False),
        (f"A {call} b.\n{end}{final}No.", f"A {call} b.", "No.", [], False),
        (f"A {call}{end}{final}{call}", f"A {call}", "", CALLS, False),
        (f"A {marker} b, {marker} c.", f"A {marker} b, {marker} c.", "", [], False),
        *([(f"A `{call}` b.", f"A `{call}` b.", "", list[ToolCall](), False)] if len(calls.begins) == 1 else []),
        (f"A.\n{call}", f"A.\n{call}", "", [], True),
    ]


@pytest.mark.parametrize("calls", WRITTEN, ids=lambda calls: calls.name)
def test_a_call_that_no_end_of_the_reasoning_follows_ends_it(calls: ToolFormat) -> None:
    """Whole, character by character, and for one form of reasoning cut at every place."""
    for form, loose in itertools.product(REASONING, (True, False)):
        reading = AnswerReading(reasoning=form, calls=calls, tools=TOOLS, loose=loose)
        for text, reasoning, content, made, is_cut in cases(calls, form):
            places = range(1, len(text)) if form is THINK and loose else ()
            for parts in ([text], *[[*text]] * loose, *([text[:at], text[at:]] for at in places)):
                reader = reading.reader(thinks=True)
                pieces = [piece for part in parts for piece in reader.push(part)]
                pieces += reader.finish(result_of(text, "length" if is_cut else "stop"))
                said = split(piece for piece in pieces if not isinstance(piece, ToolCallDelta))
                found = joined(piece for piece in pieces if not isinstance(piece, Thought))[1]
                assert (*said, found) == (reasoning, content, made), (form.name, parts)
            if not is_cut:  # in Python
                thoughts, rest = form.parse(text, opened=True, calls=calls)
                assert (thoughts, *calls.parse(rest)) == (reasoning, content, made)


def test_thoughts_are_held_back_from_the_marker_of_a_call_on() -> None:
    stream = THINK.stream(opened=True, calls=HERMES)
    assert stream.push("See <tool") == [Thought("See")]
    assert stream.push("s. It is <tool_call> and") == [Thought(" <tools. It is <tool_call> and")]
    assert stream.push(f"\n{WRITTEN[HERMES]} So.") == []
    assert stream.push("</think>\n") == []
    assert stream.push("No") == [Thought(f"\n{WRITTEN[HERMES]} So."), "No"]


@pytest.mark.parametrize(("text", "count"), [
    (["A", ".", "<tool_call>", JSON, "</tool_call>"], 2),
    (["A", ".", "<tool_call>", JSON, "</tool_call>", "</think>", "No"], 6),
])  # fmt: skip
def test_tokens_of_such_a_call_are_none_of_the_reasoning(text: list[str], count: int) -> None:
    assert THINK.count(text, opened=True, calls=HERMES) == count


FUNCTION = TOOLS[0]["function"]
ASKED: list[tuple[Dialect, dict[str, Any]]] = [
    (CHAT, {"messages": [{"role": "user", "content": "?"}], "tools": TOOLS}),
    (MESSAGES, {"messages": [{"role": "user", "content": "?"}], "tools": [
        {"name": "f", "input_schema": FUNCTION["parameters"]}]}),
    (OLLAMA_CHAT, {"messages": [{"role": "user", "content": "?"}], "tools": TOOLS}),
    (RESPONSES, {"input": "?", "tools": [{"type": "function", **FUNCTION}]}),
]  # fmt: skip


@pytest.mark.parametrize(("after", "calls"), [("", 1), (" b.", 1), (" b.</think>No.", 0)])
def test_every_api_has_such_calls(after: str, calls: int) -> None:
    text = f"<think>A.\n{WRITTEN[HERMES]}{after}"
    for dialect, asked in ASKED:
        cut, whole = (answer_of(dialect, "<tool_call><think>", **asked) for _ in range(2))
        assert streamed(dialect, cut, chunks_of(text))
        assert body_of(dialect, whole, text)
        for answer in (cut, whole):
            (said,) = answer.choices
            assert (len(said.calls), said.finish_reason) == (calls, "tool_calls" if calls else "stop")
