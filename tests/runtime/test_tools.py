"""Calls of functions: in the format of the chat template, from text in any pieces, and required by a grammar."""

import functools
import json
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

import outrider
from grammars import EOS, new_grammars
from outrider.inputs.text import Tokenizer
from outrider.inputs.tools import ToolCall, ToolCallDelta, ToolFormat, keep_markers, source_of_calls
from outrider.inputs.tools.bodies import JsonBody, NamedBody
from outrider.inputs.tools.formats import (
    DEEPSEEK,
    GEMMA,
    GLM,
    GLM_IN_LINE,
    GRANITE,
    HERMES,
    KIMI,
    LFM,
    LLAMA,
    MISTRAL,
    MISTRAL_ARGS,
    PHI,
    QWEN_CODER,
)
from outrider.inputs.tools.stream import ToolCallStream, joined
from outrider.inputs.tools.syntaxes import CallSyntax
from outrider.inputs.tools.tags import Tags
from outrider.tokens.grammar import Grammars, GrammarSource, GrammarState
from tiny import train_tokenizer

FORMS = [HERMES, LLAMA, MISTRAL, MISTRAL_ARGS, QWEN_CODER, GLM, GLM_IN_LINE, LFM, GEMMA]
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "get_weather", "description": "The weather.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "stop"}},
]
TRAINED = train_tokenizer()
CALLS = [ToolCall("get_weather", '{"city": "Paris", "days": 3}'), ToolCall("stop", "{}")]
TEMPLATE = (
    "{%- if tools %}Tools:{% for tool in tools %} {{ tool | tojson }}{% endfor %}, in "
    "<tool_call></tool_call>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% for call in message.tool_calls %}<tool_call>{{ call.function.name }} {{ call.function.arguments | tojson }}"
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

CALL_IN_TAGS = (
    "<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n"
)
CALL = '{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}'
STOP = '{"name": "stop", "arguments": {}}'
LLAMA_CALL = CALL.replace("arguments", "parameters")
ONE = [ToolCall("f", '{"a": 1}')]
TEXTS = [
    (HERMES, "Hello.\nHow are you?", "Hello.\nHow are you?", []),
    (HERMES, f"I look.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{STOP}\n</tool_call>", "I look.", CALLS),
    (HERMES, '<tool_call>{"name":"f","arguments":{"a":"}\\"]{"}}</tool_call>', "", [ToolCall("f", '{"a":"}\\"]{"}')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": [1, {"b', "", [ToolCall("f", '{"a": [1, {"b')]),
    (HERMES, "Write <tool_call> there.", "Write <tool_call> there.", []),
    (HERMES, r'<tool_call>{"name": "a\d", "arguments": {"a": 1}}</tool_call>', "", [ToolCall(r"a\d", '{"a": 1}')]),
    (HERMES, 'No <tool_call> <tool_call>{"name":"f","arguments":{}}', "No <tool_call>", [ToolCall("f", "{}")]),
    (HERMES, f"<tool_call>{CALL}\n<tool_call>{STOP}</tool_call> Done. ", "Done. ", CALLS),
    (LLAMA, LLAMA_CALL, "", CALLS[:1]),
    (LLAMA, '<|python_tag|>{"name": "stop", "parameters": {}}', "", CALLS[1:]),
    (LLAMA, f' {LLAMA_CALL}; {{"name": "stop", "parameters": {{}}}}', "", CALLS),
    (LLAMA, '{"name": "Ann", "age": 3}', '{"name": "Ann", "age": 3}', []),
    (LLAMA, "  Hello {", "  Hello {", []),
    (MISTRAL, f'[TOOL_CALLS] [{CALL}, {STOP[:-1]}, "id": "VvvODy9mT"}}]', "", CALLS),
    (MISTRAL, "[TOOL_CALL] is no marker [", "[TOOL_CALL] is no marker [", []),
    (MISTRAL, "[TOOL_CALLS] nothing", "[TOOL_CALLS] nothing", []),
    (MISTRAL, '[TOOL_CALLS][{"name":"\\u00e9\\ud800","arguments":{}}]', "", [ToolCall("é\ufffd", "{}")]),
    (MISTRAL_ARGS,
     'So.[TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "days": 3}[TOOL_CALLS]stop[CALL_ID]VvvODy9mT[ARGS]{}', "So.",
     CALLS),
    (MISTRAL_ARGS, "[TOOL_CALLS]f[ARGS]none", "[TOOL_CALLS]f[ARGS]none", []),
    (QWEN_CODER,
     f"I look.\n<tool_call>\n{CALL_IN_TAGS}</tool_call>\n<tool_call>\n<function=stop>\n</function>\n</tool_call>",
     "I look.", CALLS),
    (QWEN_CODER,
     '<tool_call><function=f><parameter=a>\n\n"é"\n\n</parameter> <parameter=b>True</parameter>and</tool_call>.', ".",
     [ToolCall("f", '{"a": "é", "b": true}')]),
    (QWEN_CODER, "<tool_call>\n<function=f>\n<parameter=a>\nx\n</para", "", [ToolCall("f", "")]),
    (QWEN_CODER, '<tool_call><function=f>{"a": 1}</function></tool_call> e', "e", ONE),
    (QWEN_CODER, "<tool_call>\n<function>", "<tool_call>\n<function>", []),
    (GLM,
     "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n"
     "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>stop\n</tool_call>\nDone.", "Done.", CALLS),
    (GLM_IN_LINE,
     "Hm.<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value><arg_key>days</arg_key><arg_value>3"
     "</arg_value></tool_call><tool_call>stop</tool_call>", "Hm.", CALLS),
    (GLM, "Write <tool_call> there <arg", "Write <tool_call> there <arg", []),
    # In other shapes.
    (HERMES, '<tool_call>\n{"arguments": {"a": 1}, "name": "f"}\n</tool_call>', "", ONE),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", ONE),
    (HERMES, '<tool_call>{"name": "f"}</tool_call>', "", [ToolCall("f", "{}")]),
    (HERMES, '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [ToolCall("f", "{}")]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": [1,\n], "b": ",}" ,}}</tool_call>', "",
     [ToolCall("f", '{"a": [1\n], "b": ",}" }')]),
    (HERMES, '<tool_call>{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}</tool_call>', "", ONE),
    (HERMES, '<tool_call>[{"name": "f", "arguments": {"a": 1}}, {"name": "g"}]</tool_call>', "",
     [*ONE, ToolCall("g", "{}")]),
    (HERMES, f"So. <tool_call>\n{CALL}\n{STOP}\n</tool_call>Done", "So.Done", CALLS),
    (HERMES, '<tool_call>{"colour": "red"}</tool_call>', '<tool_call>{"colour": "red"}</tool_call>', []),
    (LLAMA, '{"type": "function", "name": "f", "parameters": {"a": 1}}', "", ONE),
    (MISTRAL, '[TOOL_CALLS][{"arguments": {"a": 1}, "name": "f"}]', "", ONE),
    (HERMES, f'<tool_call>{{"name": "f",{" " * 1100}"arguments": {{"a', "", [ToolCall("f", '{"a')]),
    # What max_tokens has cut is not shown.
    *((HERMES, text, "", []) for text in (
        "<tool_call>\n", '<tool_call>\n{"name', '<tool_call>\n{"name": "f", "arguments":',
        '<tool_call>{"arguments": {"a',
    )),
    # By a sign of the template.
    ("<|tool_call|>", '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]', "", ONE),
    ("<|tool|>", 'functools[{"name": "f", "arguments": {"a": 1}}]', "", ONE),
    ("<|tool_call_argument_begin|>",
     '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>', "", ONE),
    ("<｜tool▁sep｜>{", '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>', "", ONE),
    ("<|channel|>commentary", '<|channel|>commentary to=functions.f<|message|>{"a": 1}<|call|>', "", ONE),
    ("<|tool_call_start|>", '<|tool_call_start|>[f(a="""x, "(y)""", b=[1, true]), g()]<|tool_call_end|>Then', "Then",
     [ToolCall("f", '{"a": "x, \\"(y)", "b": [1, true]}'), ToolCall("g", "{}")]),
    (LFM, "<|tool_call_start|>[f(a=g(b=1))]<|tool_call_end|>", "<|tool_call_start|>[f(a=g(b=1))]<|tool_call_end|>", []),
    ("<|tool_call>", "<|tool_call>call:f{a:1}<tool_call|>", "", ONE),
    ("<|tool_call>", '<|tool_call>call:f{a:<|"|>{b:"}<|"|>,c:[{d:true}]}<tool_call|>Then', "Then",
     [ToolCall("f", '{"a": "{b:\\"}", "c": [{"d": true}]}')]),
    ("<minimax:tool_call>",
     '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">1</parameter>\n</invoke>\n</minimax:tool_call>', "",
     ONE),
    ("<minimax:tool_call>", '<minimax:tool_call><invoke name="f"><parameter name="a">x</parameter></invoke>'
     '<invoke name="g"></invoke></minimax:tool_call>Then', "Then", [ToolCall("f", '{"a": "x"}'), ToolCall("g", "{}")]),
    ("<minimax:tool_call>", '<minimax:tool_call><invoke name="f">{"a": 1}</invoke><invoke name="g">{}</invoke>'
     "</minimax:tool_call>Then", "Then", [*ONE, ToolCall("g", "{}")]),
]  # fmt: skip


def in_pieces(stream: ToolCallStream, text: str, size: int) -> tuple[str, list[ToolCall]]:
    """What is read of a text that comes in pieces of a size."""
    pieces = [piece for at in range(0, len(text), size) for piece in stream.push(text[at : at + size])]
    return joined([*pieces, *stream.finish()])


@pytest.mark.parametrize(("form", "text", "content", "calls"), TEXTS, ids=lambda given: str(given)[:50])
def test_texts_with_calls(form: ToolFormat | str, text: str, content: str, calls: list[ToolCall]) -> None:
    found = ToolFormat.of_template(f"… {form} … <tool_call>") if isinstance(form, str) else form
    assert found is not None
    assert found.parse(text) == (content, calls)
    for size in (1, 2, 3, 7):
        assert in_pieces(found.stream(), text, size) == (content, calls)


LOOSE = [  # as small models write calls where tools were offered
    (HERMES, f"I look.\n{CALL}\n\nWait.", "I look.Wait.", CALLS[:1]),
    (HERMES, f"Sure:\n```json\n{CALL}\n```\nOk", "Sure:Ok", CALLS[:1]),
    (HERMES, f"```xml\n<tool_call>\n{CALL}\n</tool_call>\n```", "", CALLS[:1]),
    (HERMES, f'```\n{CALL}\n{{"name": "stop", "arguments": []}}\n```\nDone.', "Done.", CALLS),
    (HERMES, f"```json\n{CALL}\n```\n```json\n{STOP}\n```\n done", "done", CALLS),
    (LLAMA, f"```json\n{CALL}\n```\n```python\nx\n```", "```python\nx\n```", CALLS[:1]),
    (HERMES, f'<tools>\n[{CALL}, {{"name": "stop"}}]\n</tools>', "", CALLS),
    (HERMES, f'<tool_call>\n{CALL[:-1]}\n</tool_call>\n<tool_call>{{"name": "stop"}}', "", CALLS),
    (HERMES, f'<tool_call>{CALL},\n{{"name": "stop"}}</tool_call>', "", CALLS),
    (HERMES, '```tool_code\nget_weather(city="Paris", days=3)\nstop()\n```', "", CALLS),
    *((HERMES, text, "", CALLS[:1]) for text in (
        CALL, f"<function_call> {CALL}}} </function_call>", f"<tool_call>\n{CALL}}}\n</tool_call>",
        f"<tool_call>\n{{{CALL}}}\n</tool_call>", f'{{"tool_calls": [{CALL}]}}',
        f'```json\n{{"tool_call": {CALL}}}\n```',
        *(CALL.replace("arguments", key) for key in ("args", "params", "input", "tool_input")),
        CALL.replace("name", "action").replace("arguments", "action_input"), CALL.replace("name", "function_name"),
        "<tool_call>\n{'name': 'get_weather', 'arguments': {'city': 'Paris', 'days': 3}}\n</tool_call>",
        CALL.replace('"', "'"), CALL.replace("get_weather", "functions.get_weather"),
        '<tool_call>\nget_weather\n{"city": "Paris", "days": 3}\n</tool_call>',
        '<tool_call>get_weather(city="Paris", days=3)</tool_call>',
        '```tool_code\nget_weather(city="Paris", days=3)\n```', f"<tool_call>\n{CALL_IN_TAGS}</tool_call>",
        '<function name="get_weather">{"city": "Paris", "days": 3}</function>',
        '<function_calls>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n</function_calls>',
        '<tool_call><function=get_weather>{"city": "Paris", "days": 3}</function></tool_call>',
        f"[TOOL_CALLS] [{CALL}]", f"<|tool_call_start|>{CALL}<|tool_call_end|>", f"<tool_calls>[{CALL}]</tool_calls>",
        f"{CALL}\n</tool_call>", f"<tool_call>{CALL}</tool_call></tool_call>",
    )),
    *((HERMES, text, text, []) for text in (
        'Use get_weather(city="Paris").', '```python\nget_weather(city="Paris")\n```',
        "import functools\n<function=f> <json>", '```json\n{"name": "Ann"}\n``` {"name": "stop"}',
        'function f() { "name" } ```js\nx', '{"name": "Ann", "arguments": {}}', '```json\n{"name": "Ann"}\n```',
        "```json\n[1, 2]\n```", "{}",
    )),
    (LLAMA, f'I call.\n{LLAMA_CALL}\n{{"name": "stop", "parameters": {{}}}}', "I call.", CALLS),
    (LLAMA, f"[{LLAMA_CALL}]", "", CALLS[:1]),
    (LLAMA, '[get_weather(city="Paris", days=3), stop()]', "", CALLS),
    (LLAMA, '<|python_tag|>functions.get_weather.call(city="Paris", days=3)', "", CALLS[:1]),
    (LLAMA, '[get_weather("Paris")] [a](b)', '[get_weather("Paris")] [a](b)', []),
    (LLAMA, '<function=get_weather>{"city": "Paris", "days": 3}</function>', "", CALLS[:1]),
    (LLAMA, '<function=other>{"city": "Paris"}</function>', '<function=other>{"city": "Paris"}</function>', []),
    (QWEN_CODER, f"I look.\n{CALL_IN_TAGS}</tool_call>", "I look.", CALLS[:1]),
    *((QWEN_CODER, text, "", CALLS[:1]) for text in (
        f"<tool_call>\n{CALL}\n</tool_call>", f"```json\n{CALL}\n```",
        f"<tool_call>{CALL_IN_TAGS}</tool_call>".replace("\n</parameter>", ""),
        f"<tool_call>{CALL_IN_TAGS}</tool_call>".replace("city", '"city"').replace("get_weather", '"get_weather"'),
    )),
    (MISTRAL_ARGS, '[TOOL_CALLS]get_weather{"city": "Paris", "days": 3}', "", CALLS[:1]),
    (MISTRAL_ARGS, f"[TOOL_CALLS][{CALL}]", "", CALLS[:1]),
    (GRANITE, f"<tool_call>[{CALL}]", "", CALLS[:1]),
    (PHI, f"<|tool_call|>[{CALL}]<|/tool_call|>", "", CALLS[:1]),
    (LFM, '<|tool_call_start|>[get_weather(city="Paris", days=3)]', "", CALLS[:1]),
    (LFM, f"<|tool_call_start|>[{CALL}]<|tool_call_end|>", "", CALLS[:1]),
    (LFM, r'<|tool_call_start|>[get-it(from="a\/b", in="\ud83d\ude00 \d")]<|tool_call_end|>', "",
     [ToolCall("get-it", r'{"from": "a/b", "in": "' "\U0001f600" r' \\d"}')]),
    (HERMES, r'<tool_call>{"arguments": {"a": "\ud83d"}, "name": "f\ud800"}</tool_call>', "",
     [ToolCall("f\ufffd", '{"a": "\ufffd"}')]),
    (LFM, "<|tool_call_start|>[f(a=1e999)]<|tool_call_end|>", "<|tool_call_start|>[f(a=1e999)]<|tool_call_end|>", []),
    (KIMI,
     '<|tool_calls_section_begin|><|tool_call_begin|>get_weather:0<|tool_call_argument_begin|>{"city": "Paris", '
     '"days": 3}<|tool_call_end|><|tool_calls_section_end|>', "", CALLS[:1]),
    (KIMI, '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>', "", ONE),
    (DEEPSEEK,
     'So.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris", "days": 3}'
     "<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "So.", CALLS[:1]),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "content", "calls"), LOOSE, ids=lambda given: str(given)[:50])
def test_calls_as_small_models_write_them(form: ToolFormat, text: str, content: str, calls: list[ToolCall]) -> None:
    for size in (1, 5, 1000):
        assert in_pieces(form.stream(tools=TOOLS, loose=True), text, size) == (content, calls)


@pytest.mark.parametrize(("written", "meant"), [
    ('"a\nb\tc"', "a\nb\tc"), ('"L\'A"', "L'A"), ('"\\d+\\."', "\\d+\\."), ('"it\\\'s"', "it\\'s"),
    ('"a\\nb\\u00e9"', "a\nbé"), ('"\\""', '"'),
    ("{'a': True, 'b': [None, False], 'c': 'it\\'s \"so\"', 'None': 1}",
     {"a": True, "b": [None, False], "c": 'it\'s "so"', "None": 1}),
])  # fmt: skip
def test_strings_and_values_of_python_in_arguments_become_json(written: str, meant: Any) -> None:
    text = f'<tool_call>\n{{"name": "f", "arguments": {{"a": {written}}}}}\n</tool_call>'
    for size in (1, 2, 1000):
        (call,) = in_pieces(HERMES.stream(), text, size)[1]
        assert json.loads(call.arguments) == {"a": meant}


@pytest.mark.parametrize(("written", "meant"), [
    ('"a\nb)]"', "a\nb)]"), ("None", None), ("[true, null]", [True, None]), (".5", 0.5), ("+1", 1), ("0x10", 16),
    ("1_000", 1000), ('"a" "b"', "ab"), ('{1: "a"}', {"1": "a"}), (r'"\x41"', "A"), (r'r"\d"', r"\d"),
    (r'"C:\Us \\d"', r"C:\Us \d"), (r'"it\'s"', "it's"),
])  # fmt: skip
def test_values_in_calls_of_python_become_json(written: str, meant: Any) -> None:
    call = f"[f(Title={written}, n=None)]"
    for form, text in ((LLAMA, call), (LFM, f"<|tool_call_start|>{call}<|tool_call_end|>")):
        (found,) = in_pieces(form.stream(tools=[{"function": {"name": "f"}}], loose=True), text, 1000)[1]
        assert json.loads(found.arguments) == {"Title": meant, "n": None}


def add_up(pieces: Sequence[str | ToolCallDelta]) -> tuple[str, list[tuple[int, str, str]]]:
    content, calls = "", list[tuple[int, str, str]]()
    for piece in pieces:
        if isinstance(piece, str):
            content += piece
        elif piece.name is not None:
            assert piece.index == len(calls)
            calls.append((piece.index, piece.name, piece.arguments))
        else:
            index, name, arguments = calls.pop()
            assert piece.index == index
            calls.append((index, name, arguments + piece.arguments))
    return content, calls


PARTS = [
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<tool", "}", "]", "[", ";", ",", " ", "\n"),
    *("```", "<tools>", "<function_call>", "json", '{"name', '": "f"', ', "arguments": {}}', "</tools>", "\n"),
    *("f", "[ARGS]", "[CALL_ID]", "<function=", ">", "<parameter=", "\n</parameter>", "</function>", "<arg_key>"),
    *("</arg_key>", "<arg_value>", "</arg_value>", "</"),
    *('{"name": "f", "arguments": {', '{"name": "g", "parameters": {"a": "b"}}', "{", '"', "\\", "x"),
]


@given(
    form=st.sampled_from(FORMS),
    tools=st.sampled_from([(), [{"function": {"name": "f", "parameters": {"properties": {"f": {"type": "string"}}}}}]]),
    loose=st.booleans(),
    text=st.one_of(st.sampled_from([text for _, text, _, _ in TEXTS]), st.lists(st.sampled_from(PARTS)).map("".join)),
    cuts=st.lists(st.integers(0, 200), max_size=8),
)
def test_pieces_add_up_to_the_same(form: ToolFormat, tools: Any, loose: bool, text: str, cuts: list[int]) -> None:
    stream, pieces = form.stream(tools=tools, loose=loose), []
    for begin, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(text)], strict=True):
        pieces += stream.push(text[begin:end])
    pieces += stream.finish()
    whole = form.stream(tools=tools, loose=loose)
    content, calls = joined([*whole.push(text), *whole.finish()])
    assert add_up(pieces) == (content, [(i, call.name, call.arguments) for i, call in enumerate(calls)])
    if not calls:
        assert content == text or (form.begin in text and text.startswith(content))  # a call that was cut is dropped
    assert stream.finish() == []


def test_calls_beyond_the_last_that_is_wanted_are_dropped() -> None:
    text = "So: " + '<tool_call>\n{"name": "f", "arguments": {"a": {}}}\n</tool_call>\n' * 3 + "And more."
    for size in (1, 7, 1000):
        assert in_pieces(HERMES.stream(2), text, size) == ("So:", [ToolCall("f", '{"a": {}}')] * 2)
    assert HERMES.parse(text, 1) == ("So:", [ToolCall("f", '{"a": {}}')])
    assert HERMES.parse(text)[0] != "So:"


def test_nothing_is_held_back_that_is_certain() -> None:
    stream = HERMES.stream()
    assert stream.push("Let me see. <tool") == ["Let me see."]
    assert stream.push("_calls") == [" <tool_calls"]
    assert stream.push('\n<tool_call>{"name": "f", "argu') == []
    assert stream.push('ments": {"city": "Pa') == [ToolCallDelta(0, "f", ""), ToolCallDelta(0, None, '{"city": "Pa')]
    assert stream.push('ris"}}') == [ToolCallDelta(0, None, 'ris"}')]
    assert stream.push("</tool_call>\nBye") == ["Bye"]
    assert QWEN_CODER.stream().push(f"<tool_call>\n{CALL_IN_TAGS[:-12]}") == []  # arguments that are no JSON


@pytest.mark.parametrize(("template", "form"), [
    (TEMPLATE, HERMES),
    ("{{ '[TOOL_CALLS] [' }}", MISTRAL),
    ("Environment: ipython {{ '<|python_tag|>' }}", LLAMA),
    ('Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.', LLAMA),
    ("<tool_call>\n<function=name>\n<parameter=key>", QWEN_CODER),
    ("<tool_call>\n<function=name>", None),
    ("<tool_call>{name}\n<arg_key>{key}</arg_key>\n<arg_value>", GLM),
    ("<tool_call>{name}<arg_key>{key}</arg_key><arg_value>", GLM_IN_LINE),
    ("{{ '[TOOL_CALLS]' + name + '[ARGS]' }}", MISTRAL_ARGS),
    ("{{ message['content'] }}", None),
    ("", None),
])  # fmt: skip
def test_the_format_of_a_template(template: str, form: ToolFormat | None) -> None:
    assert ToolFormat.of_template(template) is form


class Fast:
    """A tokenizer of Hugging Face's kind, which leaves special tokens out of texts as ours does."""

    chat_template, prefix = "", ()

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        token_ids: list[int] = self.tokenizer.encode(text).ids
        return token_ids

    def encode_prompt(self, prompt: Any, *, chat_template: bool = True, tools: Any = ()) -> list[int]:
        return self.encode(prompt)

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(list(token_ids))
        return text


MadeWith = Callable[[ToolFormat, bool | None], tuple[Fast, Grammars]]


@pytest.fixture(scope="module")
def made_with(tmp_path_factory: pytest.TempPathFactory) -> MadeWith:
    """`made_with(form, special)`: a tokenizer, and grammars for it.

    For it the form's markers are tokens of their own, special or (None) not, or text.
    """

    @functools.cache
    def make(markers: tuple[str, ...], special: bool | None) -> tuple[Fast, Grammars]:
        folder = tmp_path_factory.mktemp("tokenizer")
        made = train_tokenizer(special=["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(markers if special else ())])
        if special is None:
            made.add_tokens([AddedToken(name, special=False) for name in ("<think>", "</think>", *markers)])
        made.save(str(folder / "tokenizer.json"))
        return Fast(made), Grammars(folder, made.get_vocab_size(), EOS)

    return lambda form, special: make(tuple(name for name in form.markers if len(name) > 1), special)


def walk(state: GrammarState, vocab_size: int, step: int = 7) -> list[int]:
    """Tokens that the grammar allows, chosen without sense, up to an end of the answer."""
    token_ids: list[int] = []
    while not state.is_complete(token_ids) and len(token_ids) < 400:
        logits = np.zeros(vocab_size, dtype=np.float32)
        state.apply(logits, token_ids)
        choices = np.flatnonzero(logits == 0).tolist()
        if {*EOS} & {*choices} and len(token_ids) > 150:
            break
        others = [i for i in choices if i not in EOS]
        token_ids.append(others[(step * len(token_ids)) % len(others)])
    return token_ids


def fits(state: GrammarState, token_ids: list[int]) -> bool:
    """Whether a grammar allows all these tokens next."""
    return state.num_allowed(token_ids) == len(token_ids)


def check_calls(calls: Sequence[ToolCall], names: Sequence[str]) -> None:
    """Check that calls are of these functions, with arguments that follow their schemas."""
    for call in calls:
        assert call.name in names
        jsonschema.validate(json.loads(call.arguments), WEATHER if call.name == "get_weather" else {"const": {}})


# Which tools may be called, and how the markers stand in the vocabulary: in the fast tests, one of both is as usual.
ONLY_AND_SPECIAL = [
    pytest.param(only, special, marks=() if only is None or special is None else pytest.mark.slow)
    for only in (None, "get_weather", "stop")
    for special in (True, False, None)
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize(("only", "special"), ONLY_AND_SPECIAL)
def test_a_grammar_gives_calls_and_nothing_else(
    made_with: MadeWith, form: ToolFormat, special: bool | None, only: str | None
) -> None:
    """With markers that are tokens of their own, and with markers that are text."""
    tokenizer, grammars = made_with(form, special)
    state = grammars.new_state(source_of_calls(form, TOOLS, only, tokenizer))
    token_ids = walk(state, tokenizer.tokenizer.get_vocab_size())
    text = keep_markers(form.markers, tokenizer)(token_ids)
    content, calls = form.parse(text, tools=TOOLS)
    assert content == ""
    assert calls
    check_calls(calls, ("get_weather", "stop") if only is None else (only,))
    assert len(calls) == 1 or only is None
    if special and form.end and len(form.begin) > 1 and not form.bare:
        assert token_ids[0] == tokenizer.encode(form.begin)[0]


def test_dates_in_arguments_exist(tmp_path: Path) -> None:
    parameters = {"type": "object", "properties": {"day": {"type": "string", "format": "date"}}, "required": ["day"]}
    tools = [{"type": "function", "function": {"name": "look_up", "parameters": parameters}}]
    grammars, tokenizer = new_grammars(tmp_path), Fast(train_tokenizer())
    state = grammars.new_state(source_of_calls(HERMES, tools, None, tokenizer))
    for day, exists in (("2024-02-29", True), ("2023-02-29", False)):
        call = f'<tool_call>\n{{"name": "look_up", "arguments": {{"day": "{day}"}}}}\n</tool_call>'
        assert fits(state, tokenizer.encode(call)) == exists


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("special", [True, False, None])
@pytest.mark.parametrize("once", [True, False])
def test_a_free_answer_follows_the_schemas_once_it_calls(
    made_with: MadeWith, form: ToolFormat, special: bool | None, once: bool
) -> None:
    tokenizer, grammars = made_with(form, special)
    source = source_of_calls(form, TOOLS, None, tokenizer, once=once, free=True)
    text, call = "The weather? {", call_in(form, "get_weather", city="Paris", days="3")

    def allowed(text: str, *, spelled: bool = False) -> bool:
        token_ids = [tokenizer.encode(each)[0] for each in text] if spelled else tokenizer.encode(text)
        return fits(grammars.new_state(source), token_ids)

    assert allowed(f"{text} Sunny.")
    assert form.bare or allowed(f"<think>Hm.</think>{text}{call}")
    assert allowed(f"{form.begin}{call}" if form.bare else f"{text}{call}")
    assert allowed(call)
    assert not allowed(call.replace("Paris", "Oslo"))
    assert not allowed(call.replace("Paris", "Oslo"), spelled=True)
    assert not allowed(call.replace("get_weather", "get_whether"))
    assert allowed(f"{call} So.") == (not once and not form.bare)
    content, calls = form.parse(f"{text}{call}" if not form.bare else call, tools=TOOLS)
    assert (content, calls) == ("" if form.bare else text, CALLS[:1])
    state = grammars.new_state(source)
    assert state.is_complete(tokenizer.encode(call)) == once


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_an_answer_beside_tools_follows_its_schema_or_calls(made_with: MadeWith, form: ToolFormat) -> None:
    tokenizer, grammars = made_with(form, True)
    source = source_of_calls(form, TOOLS, None, tokenizer, free=True, schema={"enum": ["sun", "rain"]})

    def allowed(text: str) -> bool:
        return fits(grammars.new_state(source), tokenizer.encode(text))

    call = call_in(form, "get_weather", city="Paris", days="3")
    assert allowed('"rain"')
    assert not allowed("rain")
    assert allowed(call)
    assert not allowed(call.replace("Paris", "Oslo"))
    assert not allowed(f'"rain"{call}')


def call_in(form: ToolFormat, name: str, **arguments: Any) -> str:
    """A call as the template writes it. arguments: texts of enums and numbers; for a syntax, values."""
    values = {key: int(value) if re.fullmatch("[0-9]", str(value)) else value for key, value in arguments.items()}
    made = form.body
    if isinstance(made, Tags):
        shown = "".join(
            f"{made.key[0]}{key}{made.key[1]}{made.value[0]}{value}{made.value[1]}{made.line}"
            for key, value in arguments.items()
        )
        body = f"{made.name[0]}{name}{made.name[1]}{made.line}{shown}{made.end}"
    elif isinstance(made, NamedBody):
        body = f"{name}{made.after}{json.dumps(values)}"
    elif isinstance(made, CallSyntax):
        shown = made.comma.join(f"{key}{made.equals}{spelled(form, each)}" for key, each in values.items())
        body = f"{made.before}{name}{made.opener}{shown}{made.closer}"
    else:
        assert isinstance(made, JsonBody)
        body = json.dumps({"name": name, made.key: values})
    begin = "" if form.bare else f"{form.begin}{form.blank}{form.opener}"
    return f"{begin}{body}{'' if form.separator else form.blank}{form.closer}{form.end}"


def spelled(form: ToolFormat, value: Any) -> str:
    """A value as Python writes it, with JSON in it, or Gemma."""
    if form is LFM:
        return repr(value) if value is None or isinstance(value, bool) else json.dumps(value)
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, list):
        return f"[{','.join(spelled(form, each) for each in value)}]"
    if isinstance(value, dict):
        pairs = ",".join(f"{key}:{spelled(form, each)}" for key, each in value.items())
        return f"{{{pairs}}}"
    return json.dumps(value)


ODD_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "description": "Any."},
        "short": {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "null"}]},
        "color": {"$ref": "#/$defs/Color"},
        "flags": {"type": ["array", "null"], "items": {"type": "boolean"}, "maxItems": 2},
        "any": {},
        "place": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
    },
    "required": ["text", "color", "flags", "more"],
    "$defs": {"Color": {"enum": ["red", 3, None, "x y"]}},
}


@pytest.mark.parametrize("form", [QWEN_CODER, GLM, GLM_IN_LINE], ids=lambda form: form.name)
@pytest.mark.parametrize("special", [True, False, None])
def test_arguments_between_tags_follow_their_schema(
    made_with: MadeWith, form: ToolFormat, special: bool | None
) -> None:
    tools = [function_of(ODD_SCHEMA)]
    tokenizer, grammars = made_with(form, special)
    state = grammars.new_state(source_of_calls(form, tools, "f", tokenizer))
    assert not state.is_complete()
    written = {"text": "1\n\n 2", "color": "red", "flags": "[true]", "any": "3", "more": "[1", "place": '{"x": 5}'}
    order = ["text", "color", "flags", "any", "place", "more"]
    shown = call_in(form, "f", **{key: written[key] for key in order})
    assert fits(state, tokenizer.encode(shown))
    expected = {"text": "1\n\n 2", "color": "red", "flags": [True], "any": 3, "place": {"x": 5}, "more": "[1"}
    ((name, arguments),) = [(call.name, call.arguments) for call in form.parse(shown, tools=tools)[1]]
    assert (name, json.loads(arguments)) == ("f", expected)
    for wrong in ({"color": "green"}, {"flags": "true"}, {"place": "{}"}, {"color": ""}):
        call = call_in(form, "f", **{key: (written | wrong)[key] for key in order})
        assert not fits(state, tokenizer.encode(call))


IN_A_SYNTAX: dict[str, Any] = ODD_SCHEMA | {
    "properties": ODD_SCHEMA["properties"] | {
        "tree": {"$ref": "#/$defs/Tree"}, "day-of": {"type": "string", "pattern": "^[0-9]+$"},
        "map": {"type": "object", "additionalProperties": {"type": "number"}},
    },
    "$defs": ODD_SCHEMA["$defs"] | {
        "Tree": {"type": "object", "properties": {"of": {"type": "array", "items": {"$ref": "#/$defs/Tree"}}}},
    },
}  # fmt: skip


@pytest.mark.parametrize("form", [LFM, GEMMA], ids=lambda form: form.name)
@pytest.mark.parametrize("special", [True, False, None])
def test_arguments_in_a_syntax_follow_their_schema(made_with: MadeWith, form: ToolFormat, special: bool | None) -> None:
    tokenizer, grammars = made_with(form, special)
    source = source_of_calls(form, [function_of(IN_A_SYNTAX)], "f", tokenizer)
    value: dict[str, Any] = {
        "text": "1\n\n 2", "short": None, "color": "x y", "flags": [True, False], "any": [{"a": "b"}, 1.5, None],
        "place": {"x": 5}, "tree": {"of": [{}, {"of": [{"of": []}]}]}, "day-of": "12", "map": {"a": 1}, "more": "[1",
    }  # fmt: skip
    order = sorted(value) if form is GEMMA else list(value)

    def written(**changed: Any) -> str:
        given = {key: {**value, **changed}[key] for key in order}
        keys = {"day-of": '<|"|>day-of<|"|>'} if form is GEMMA else {}
        return call_in(form, "f", **{keys.get(key, key): each for key, each in given.items() if each is not ...})

    def allowed(text: str) -> bool:
        return fits(grammars.new_state(source), tokenizer.encode(text))

    assert allowed(written())
    ((name, arguments),) = [(call.name, call.arguments) for call in form.parse(written())[1]]
    assert (name, json.loads(arguments)) == ("f", value)
    assert allowed(written(short=..., any=..., tree=...))
    wrong: list[dict[str, Any]] = [{"color": "green"}, {"short": "12345"}, {"text": ...}, {"flags": 5}]
    nested: list[dict[str, Any]] = [
        {"flags": [1]}, {"flags": [True] * 3}, {"place": {}}, {"map": {"a": "b"}}, {"tree": {"of": [1]}},
        {"day-of": "x"},
    ]  # fmt: skip
    for each in [*wrong, *(nested if form is LFM else ())]:
        assert not allowed(written(**each)), each


@pytest.mark.parametrize(("form", "schema", "place"), [
    (QWEN_CODER, {"properties": {"day": {"type": "string", "format": "date"}}}, "/properties/day/format"),
    (QWEN_CODER, {"anyOf": []}, "/anyOf"),
    (GEMMA, {"properties": {"day": {"type": "string", "pattern": "^[0-9]$"}}}, "/properties/day"),
])  # fmt: skip
def test_what_a_syntax_cannot_be_held_to_is_left_out(form: ToolFormat, schema: Any, place: str) -> None:
    """And refused where the function is strict."""
    tools = [function_of(schema)]
    source_of_calls(form, tools, "f", Fast(train_tokenizer()))
    tools[0]["function"]["strict"] = True
    with pytest.raises(outrider.OptionError, match=f"'f' is strict.*{place}"):
        source_of_calls(form, tools, "f", Fast(train_tokenizer()))


WORDS = st.sampled_from(["type", "string", "enum", "const", "anyOf", "$ref", "#/$defs/a", "$defs", "a", "properties",
                         "required", "integer", "maxLength", "items"])  # fmt: skip
JSON = st.recursive(
    st.one_of(WORDS, st.integers(-2, 9), st.none(), st.booleans()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(WORDS, inner, max_size=4)),
)


@given(schema=st.dictionaries(WORDS, JSON), value=st.one_of(JSON.map(json.dumps), st.text()))
def test_odd_schemas_are_read_or_refused(schema: Any, value: str) -> None:
    tools = [function_of(schema)]
    ((call,), text) = QWEN_CODER.parse(call_in(QWEN_CODER, "f", a=value), tools=tools)[::-1]
    assert text == "" or "</" in value
    assert call.name == "f"
    assert isinstance(json.loads(call.arguments), dict)
    for form in (QWEN_CODER, LFM, GEMMA):
        with suppress(outrider.OptionError):
            source_of_calls(form, tools, "f", Fast(TRAINED))


def test_a_schema_may_refer_to_itself() -> None:
    schema = {"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}}
    assert QWEN_CODER.parse(call_in(QWEN_CODER, "f", a="1"), tools=[function_of(schema)])[1][0].arguments == '{"a": 1}'


def test_arguments_are_what_their_schema_says() -> None:
    shown = call_in(QWEN_CODER, "f", text="1", short="null", color="3", flags="None", any="2", place="5.0")
    ((_, calls), (_, unknown)) = QWEN_CODER.parse(shown, tools=[function_of(ODD_SCHEMA)]), QWEN_CODER.parse(shown)
    expected = {"text": "1", "short": None, "color": 3, "flags": None, "any": 2, "place": "5.0"}
    assert json.loads(calls[0].arguments) == expected
    assert json.loads(unknown[0].arguments) == expected | {"text": 1, "place": 5.0}
    assert QWEN_CODER.parse(call_in(QWEN_CODER, "f", a="NaN"))[1][0].arguments == '{"a": "NaN"}'  # which JSON has not


def function_of(schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": schema}}


def test_markers_that_are_special_tokens_are_kept() -> None:
    tokenizer = Fast(train_tokenizer(special=["<|im_end|>", "[TOOL_CALLS]"]))
    token_ids = tokenizer.encode('Well. [TOOL_CALLS] [{"name"<|im_end|>')
    assert "[TOOL_CALLS]" not in tokenizer.decode(token_ids)
    assert keep_markers(MISTRAL.markers, tokenizer)(token_ids) == 'Well. [TOOL_CALLS] [{"name"'
    assert keep_markers(HERMES.markers, tokenizer)(token_ids) == tokenizer.decode(token_ids)
    tokenizer = Fast(train_tokenizer(special=["<|im_end|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"]))
    call = '[TOOL_CALLS]f[CALL_ID]a1[ARGS]{"a": 1}'
    assert keep_markers(MISTRAL_ARGS.markers, tokenizer)(tokenizer.encode(call)) == call


# With the tokenizer and template of a bundle


@pytest.fixture(scope="module")
def engine(tiny: Path) -> outrider.Engine:
    engine = outrider.load(tiny, cache_size=0.05)
    assert isinstance(engine.tokenizer, Tokenizer)
    engine.tokenizer.set_chat_template(TEMPLATE)
    return engine


MESSAGES: list[Any] = [{"role": "user", "content": "How is the weather in Paris?"}]


def test_templates_are_given_tools(engine: outrider.Engine) -> None:
    tokenizer = engine.tokenizer
    call = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Rome"}}}
    history = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "Sunny."},
    ]
    text = tokenizer.decode(tokenizer.encode_prompt(history, tools=TOOLS))
    assert text.startswith("Tools: ")
    assert '"get_weather"' in text
    assert 'get_weather {"city": "Rome"}' in text
    assert text.count("Sunny.") == 1
    plain = tokenizer.decode(tokenizer.encode_prompt(MESSAGES))
    assert "Tools" not in plain
    assert tokenizer.encode_prompt(MESSAGES[0]["content"], tools=TOOLS) == tokenizer.encode_prompt(
        MESSAGES, tools=TOOLS
    )


@pytest.mark.parametrize("choice", ["required", "stop", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_random_model_calls_functions(engine: outrider.Engine, choice: Any) -> None:
    form = engine.tool_format
    assert form is HERMES
    for options in ({}, {"temperature": 1.0, "seed": 4}):
        given: dict[str, Any] = {"tools": TOOLS, "tool_choice": choice, "max_new_tokens": 300, **options}
        plain = engine.generate(MESSAGES, drafter=None, **given)
        drafted = engine.generate(MESSAGES, drafter="suffix", **given)
        assert plain.token_ids == drafted.token_ids
        content, calls = form.parse(plain.text)
        assert calls
        check_calls(calls if plain.finish_reason == "stop" else calls[:-1], ("get_weather", "stop"))
        if choice != "required":
            assert (content, len(calls), plain.finish_reason) == ("", 1, "stop")


def test_strict_functions_are_free_to_call(engine: outrider.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def recorded(*given: Any, **more: Any) -> GrammarSource:
        made.append(more)
        return source_of_calls(*given, **more)

    monkeypatch.setattr("outrider.engine.prompts.source_of_calls", recorded)
    strict = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    for options in ({}, {"temperature": 1.0, "seed": 4}):
        given: dict[str, Any] = {"max_new_tokens": 60, **options}
        plain = engine.generate(MESSAGES, drafter=None, tools=strict, **given)
        drafted = engine.generate(MESSAGES, drafter="suffix", tools=strict, **given)
        assert plain.token_ids == drafted.token_ids
    engine.generate(MESSAGES, tools=strict, parallel_tool_calls=False, max_new_tokens=2)
    engine.generate(MESSAGES, tools=TOOLS, max_new_tokens=2)
    free = {"free": True, "schema": None}
    assert made == [{"once": False, **free}] * 4 + [{"once": True, **free}]
    with pytest.raises(outrider.OptionError, match="ignore_eos=True continues after the end, and tools defines"):
        engine.generate(MESSAGES, tools=strict, ignore_eos=True)


@pytest.mark.parametrize("by_grammar", [True, False])
def test_the_answer_ends_with_its_first_call(
    engine: outrider.Engine, by_grammar: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not by_grammar:
        monkeypatch.setattr(
            "outrider.engine.prompts.source_of_calls", lambda *given, once, **more: source_of_calls(*given, **more)
        )
    given: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "max_new_tokens": 300, "temperature": 1.0}
    results = [engine.generate(MESSAGES, seed=seed, **given) for seed in range(12)]
    several = max(results, key=lambda result: len(HERMES.parse(result.text)[1]))
    plain, drafted = (
        engine.generate(MESSAGES, seed=several.seed, drafter=drafter, parallel_tool_calls=False, **given)
        for drafter in (None, "suffix")
    )
    assert plain.token_ids == drafted.token_ids
    assert (plain.text, plain.finish_reason) == (drafted.text, "stop")
    assert len(plain.token_ids) < len(several.token_ids)
    assert plain.token_ids == several.token_ids[: len(plain.token_ids)]
    assert plain.text.endswith("</tool_call>")
    assert HERMES.parse(plain.text) == HERMES.parse(several.text, 1)
    assert len(HERMES.parse(several.text)[1]) > 1 == len(HERMES.parse(plain.text)[1])


def test_tools_that_are_not_offered(engine: outrider.Engine) -> None:
    options: dict[str, Any] = {"max_new_tokens": 8, "tools": TOOLS}
    plain = engine.generate(MESSAGES, max_new_tokens=8)
    none = engine.generate(MESSAGES, tool_choice="none", **options)
    auto = engine.generate(MESSAGES, **options)
    assert none.stats.num_prompt_tokens == plain.stats.num_prompt_tokens
    assert none.token_ids == plain.token_ids
    assert auto.stats.num_prompt_tokens > plain.stats.num_prompt_tokens


def test_prompts_that_cannot_have_tools(engine: outrider.Engine, tiny: Path) -> None:
    with pytest.raises(outrider.OptionError, match="tools need a chat template, and this prompt is used without one"):
        engine.generate("Hello", chat_template=False, tools=TOOLS)
    with pytest.raises(outrider.OptionError, match="messages are not JSON"):
        engine.generate([{"role": "user", "content": "a", "x": {1}}], tools=TOOLS)
    with pytest.raises(outrider.RequestError, match="lone surrogates"):
        engine.generate([{"role": "user", "content": "a", "tool_calls": ["\ud800"]}])
    with outrider.load(tiny, cache_size=0.05) as other:
        assert other.tool_format is HERMES  # its template has no tools: the model is told of them
        called = other.generate(MESSAGES, tools=TOOLS, tool_choice="required", temperature=1, seed=1)
        assert HERMES.parse(called.text)[1][0].name in ("get_weather", "stop")
        tokenizer: Any = other.tokenizer
        tokenizer.set_chat_template("{{ tools }}")
        assert other.tool_format is None
        with pytest.raises(outrider.OptionError, match="tools need a chat template that has a known format"):
            other.generate(MESSAGES, tools=TOOLS)


def test_a_call_that_was_cut_is_not_text() -> None:
    stream = GLM.stream()
    assert joined([*stream.push("Hm. <tool_call>get_weather\n<arg"), *stream.finish(is_cut=True)]) == ("Hm.", [])
    for name, shown in (("get_weather", ""), ("Ann", '{"name": "Ann", "arguments": {"ci')):  # without a marker
        stream = HERMES.stream(tools=TOOLS, loose=True)
        cut = f'{CALL}\n{{"name": "{name}", "arguments": {{"ci'
        assert joined([*stream.push(cut), *stream.finish(is_cut=True)]) == (shown, CALLS[:1])


@pytest.mark.parametrize(("schema", "strict", "says"), [
    ({"properties": {"to": {"type": "string", "pattern": "("}}}, True, "in 'tool_7', /properties/to/pattern cannot be"),
    ({"properties": {"to": {"not": {"type": "string"}}}}, True, "in 'tool_7', /properties/to/not cannot be followed"),
    ({"properties": {"to": {"not": {"type": "string"}}}}, False, None),
])  # fmt: skip
def test_a_bad_schema_among_many_tools_is_named(
    tmp_path: Path, schema: dict[str, Any], strict: bool, says: str | None
) -> None:
    grammars, tokenizer = new_grammars(tmp_path), Fast(TRAINED)
    functions = [{"name": f"tool_{i}", "strict": strict, "parameters": schema if i == 7 else WEATHER} for i in range(9)]
    tools = [{"type": "function", "function": function} for function in functions]
    with pytest.raises(outrider.OptionError, match=says) if says else nullcontext():
        grammars.new_state(source_of_calls(HERMES, tools, None, tokenizer))
    grammars.close()
