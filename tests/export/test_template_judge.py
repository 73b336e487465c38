"""Chat templates are rendered as Transformers renders them, byte for byte."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import family_templates
from family_templates import FAMILIES
from outrider.errors import RequestError
from outrider.inputs.text.chat_template import ChatTemplates
from outrider_export.tokenizers.ir import write_tokenizer_ir
from tiny import train_tokenizer

TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": 'Where? "<b>" & é'},
        "unit": {"enum": ["c", "f"], "nullable": True},
        "days": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["city"],
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"Gets {name}", "parameters": PARAMETERS}}
    for name in ("weather", "uhrzeit_é")
]


def calling(*all_arguments: Any, content: str = "") -> list[dict[str, Any]]:
    calls = [
        {"id": f"call0000{i}", "type": "function", "function": {"name": "weather", "arguments": arguments}}
        for i, arguments in enumerate(all_arguments)
    ]
    results = [{"role": "tool", "name": "weather", "tool_call_id": call["id"], "content": '{"t": 3}'} for call in calls]
    return [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": content, "tool_calls": calls},
        *results,
        {"role": "assistant", "content": "3 °C"},
        {"role": "user", "content": "Thanks"},
    ]


def turn(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


ARGUMENTS = {"city": "Zürich & <Paris>", "days": [1, 2.5, None, True], "deep": {"a": {"b": "'\"\\"}}}
TALK = [turn("user", "Hi"), turn("assistant", "Hello!"), turn("user", "Why?")]
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [turn("user", "Hi")],
    "system": [turn("system", "  Be brief. /no_think\n"), *TALK],
    "thinking": [turn("user", "Q"), turn("assistant", "<think>\na\n</think>\n\nb"), turn("user", "R")],
    "reasoning": [turn("user", "Q"), turn("assistant", "b", reasoning_content="why\n"), turn("user", "R")],
    "last answer": [
        turn("user", "Q"),
        turn("assistant", "<think>x</think><answer> b </answer>", reasoning_content="y"),
    ],
    "unicode": [
        turn("user", "\u3000é🙂\u00a0<tag>&'\"\t"),
        turn("assistant", "ß\r\nİ\n\n"),
        turn("user", "\ufeff日本"),
    ],
    "empty": [turn("user", ""), turn("assistant", ""), turn("user", "x")],
    "parts": [
        turn("user", [{"type": "text", "text": " a "}, {"type": "image"}]),
        turn("assistant", "b"),
        turn("user", "c"),
    ],
    "call": calling(ARGUMENTS),
    "calls": calling(ARGUMENTS, {}, content="Let me see."),
    "unknown role": [turn("user", "a"), turn("critic", "b")],
}


@pytest.fixture(scope="module")
def judge() -> Any:
    from transformers.utils.chat_template_utils import render_jinja_template

    return render_jinja_template


def expected(judge: Any, template: str, messages: Any, tools: Any = None, answering: bool = True) -> str:
    """What Transformers writes; "refused" for an error."""
    try:
        texts, _ = judge([messages], tools=tools, chat_template=template, add_generation_prompt=answering, **TOKENS)
    except Exception:
        return "refused"
    return str(texts[0])


def written(template: str, messages: Any, tools: Any = None, answering: bool = True) -> str:
    templates = ChatTemplates({"default": template}, TOKENS)
    try:
        return templates.render(messages, tools or (), answering=answering)
    except RequestError as error:
        return "beyond a limit" if "exceeds a limit" in str(error) else "refused"


def cases() -> Iterator[tuple[str, Any, bool]]:
    for name in CONVERSATIONS:
        for tools in (None, TOOLS):
            yield from ((name, tools, answering) for answering in (True, False))


@pytest.mark.fast_cases(17)
@pytest.mark.parametrize("family", FAMILIES)
def test_families_as_transformers(judge: Any, family: str) -> None:
    """But what a template refuses may be joined, what it leaves out is refused, and tools that it has not are told."""
    template, texts = FAMILIES[family], []
    for name, tools, answering in cases():
        wanted = expected(judge, template, CONVERSATIONS[name], tools, answering)
        found = written(template, CONVERSATIONS[name], tools, answering)
        if wanted == "refused" and "call" in name:
            continue  # for some arguments have to be text, which is tested below
        if tools and "tools" not in template:
            told = [json.dumps(tool, ensure_ascii=False) in found for tool in tools]
            assert all(told) or found == "refused" or name == "parts"  # which some templates write as Python's list
        elif wanted == "refused":
            assert found == "refused" or all(str(each["content"]).strip() in found for each in CONVERSATIONS[name])
        elif name == "unknown role":
            assert found in (wanted, "refused")
        else:
            assert found == wanted, (name, bool(tools), answering)
        texts.append(wanted)
    assert len({*texts}) > 3


@pytest.mark.parametrize(
    "family", ["llama3.1", "qwen2.5", "qwen3", "qwen3-coder", "mistral-v3", "deepseek-r1", "kimi-k2"]
)
def test_arguments_may_be_text(judge: Any, family: str) -> None:
    """A template that needs an object gets one, and one that needs text gets text."""
    text, template = json.dumps(ARGUMENTS, ensure_ascii=False), FAMILIES[family]
    fitting = text if family in ("deepseek-r1", "qwen3", "kimi-k2") else ARGUMENTS
    wanted = expected(judge, template, calling(fitting))
    assert "Zürich" in wanted
    assert written(template, calling(text)) == wanted
    assert "Zürich" in written(template, calling(ARGUMENTS))


# Each line is a template for messages; the last ones are refused.
FILE = Path(family_templates.__file__).with_name("template_constructs.jinja")
CONSTRUCTS = FILE.read_text(encoding="utf-8").removesuffix("\n").split("\n")
WHITESPACE = next(i for i, line in enumerate(CONSTRUCTS) if "{%- if true -%}" in line)  # with the seven lines below it


def test_constructs_as_transformers(judge: Any) -> None:
    lines = [
        *CONSTRUCTS[:WHITESPACE],
        "\n".join(CONSTRUCTS[WHITESPACE : WHITESPACE + 7]),
        *CONSTRUCTS[WHITESPACE + 7 :],
    ]
    refused = 0
    for line in lines:
        wanted = expected(judge, line, TALK)
        assert written(line, TALK) == wanted, line
        refused += wanted == "refused"
    assert refused == 14


def write_folder(folder: Path, config: Any, files: dict[str, str]) -> Path:
    (folder / "additional_chat_templates").mkdir(parents=True)
    train_tokenizer().save(str(folder / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "unk_token": {"__type": "AddedToken", "content": "<|endoftext|>"},
    }
    described |= {} if config is None else {"chat_template": config}
    (folder / "tokenizer_config.json").write_text(json.dumps(described), encoding="utf-8")
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


NAMED = [{"name": "default", "template": "D {{ eos_token }}{{ unk_token }}"}, {"name": "tool_use", "template": "T"}]
JINJA, TOOLS_FILE = {"chat_template.jinja": "J{{ bos_token }}"}, {"additional_chat_templates/tool_use.jinja": "F"}


@pytest.mark.parametrize(
    ("config", "files"),
    [("C", {}), ("C", JINJA), (NAMED, {}), (NAMED, JINJA), (NAMED, JINJA | TOOLS_FILE), (None, JINJA | TOOLS_FILE),
     (NAMED, TOOLS_FILE), (NAMED[1:], {}), (None, {})],
)  # fmt: skip
def test_which_template_is_used(tmp_path: Path, config: Any, files: dict[str, str]) -> None:
    """Of files, and of an entry with one or several, with tools and without; also once it was converted."""
    from transformers import PreTrainedTokenizerFast

    from outrider.inputs.text import Tokenizer

    folder = write_folder(tmp_path / "tokenizer", config, files)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    assert write_tokenizer_ir(folder)
    ours = Tokenizer(folder)
    assert ours.has_chat_template == bool(theirs.chat_template)
    for tools in (None, TOOLS):
        try:
            wanted = theirs.apply_chat_template(TALK, tools=tools, tokenize=False, add_generation_prompt=True)
        except ValueError:  # there is no default
            with pytest.raises((RequestError, ValueError), match="chat template"):
                ours.render(TALK, tools=tools or ())
        else:
            assert ours.render(TALK, tools=tools or ()) == wanted
