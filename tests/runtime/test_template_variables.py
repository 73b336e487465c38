"""Variables of chat templates, messages that are continued, earlier reasoning, and the first token of a chat."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from outrider.errors import OptionError, RequestError
from outrider.inputs.text import Tokenizer
from outrider.inputs.text.chat_template import ChatTemplates
from outrider.testing import ToyTokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

HI = {"role": "user", "content": "Hi"}
MARKED = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content{filter} }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if enable_thinking is defined and not enable_thinking %}"
    "<think></think>{% endif %}{% endif %}"
)
TEMPLATE = MARKED.replace("{filter}", "")


def rendered(template: str, messages: Sequence[Any], **options: Any) -> str:
    return ChatTemplates({"default": template}).render(messages, (), **{"answering": True} | options)


def test_variables_reach_the_template() -> None:
    assert rendered(TEMPLATE, [HI]) == "<user>Hi</><assistant>"
    assert rendered(TEMPLATE, [HI], variables={"enable_thinking": False}).endswith("<assistant><think></think>")
    documents = [{"title": "a"}]
    assert rendered("{{ documents[0].title }}", [HI], variables={"documents": documents}) == "a"


_HY3 = (
    "{% if reasoning_effort not in ['no_think', 'low', 'high'] %}{% set reasoning_effort = 'low' %}{% endif %}"
    "{{ reasoning_effort }}"
)
_REFUSING = (
    "{% if reasoning_effort is defined and reasoning_effort not in ('low', 'high') %}{{ raise_exception('!') }}"
    "{% endif %}{{ enable_thinking }}"
)


@pytest.mark.parametrize(("template", "text"), [
    (_HY3, "no_think"),
    ("{% if reasoning_effort == 'off' %}silent{% endif %}", "silent"),
    (_HY3.replace("'no_think'", "'none', 'no_think'"), "none"),
    ("{{ reasoning_effort }}{% if tool_choice == 'off' %}{% endif %}", "none"),  # gpt-oss writes any word
    (_REFUSING, "False"),
])  # fmt: skip
def test_no_reasoning_is_asked_for_by_the_templates_own_word(template: str, text: str) -> None:
    assert rendered(template, [HI], variables={"reasoning_effort": "none", "enable_thinking": False}) == text


@pytest.mark.parametrize("template", [TEMPLATE, MARKED.replace("{filter}", " | trim")])
@pytest.mark.parametrize("content", ["One, two", "One, two ", "Hi", "</>"])
def test_the_last_message_is_left_open(template: str, content: str) -> None:
    """As Transformers' continue_final_message: what the template writes after the content is left out."""
    text = rendered(template, [HI, {"role": "assistant", "content": content}], continuing=True)
    assert text == f"<user>Hi</><assistant>{content}"


def test_a_part_is_left_open() -> None:
    template = "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}"
    message = {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert rendered(template, [message], continuing=True) == "[a][b"


def test_a_template_that_leaves_the_content_out_cannot_go_on() -> None:
    with pytest.raises(RequestError, match="cannot be continued"):
        rendered("{{ messages[0].content }}", [HI, {"role": "assistant", "content": "a"}], continuing=True)


@pytest.mark.parametrize("read", ["m.reasoning_content", "m['reasoning']", "m.thinking", "m.get('thinking')"])
def test_earlier_reasoning_has_the_name_that_the_template_reads(read: str) -> None:
    message = {"role": "assistant", "content": "Yes", "reasoning_content": "Hm."}
    template = f"{{% for m in messages %}}({{{{ {read} }}}}){{{{ m.content }}}}{{% endfor %}}"
    assert rendered(template, [message]) == "(Hm.)Yes"


IDS = (  # as in the templates of Mistral 7B v0.3 and Nemo
    "{% for m in messages %}{% for c in m.tool_calls %}{% if not c.id is defined or c.id|length != 9 %}"
    "{{ raise_exception('ids') }}{% endif %}[{{ c.id }}]{% endfor %}"
    "{% if m.role == 'tool' %}({{ m.tool_call_id }}){% endif %}{% endfor %}"
)


@pytest.mark.parametrize(("given", "written"), [
    (["abc123XYZ", "DEF456uvw"], ["abc123XYZ", "DEF456uvw"]),
    (["call_0123456789abcdef", "call_1123456789abcde0"], ["789abcdef", "789abcde0"]),
    (["1", None], ["000000001", "0000call1"]), ([None, None], ["0000call0", "0000call1"]),
])  # fmt: skip
def test_ids_of_calls_are_short_where_a_template_needs_it(given: list[Any], written: list[str]) -> None:
    calls = [{"id": each, "type": "function", "function": {"name": "f", "arguments": {}}} for each in given]
    results = [{"role": "tool", "content": "a", **({"tool_call_id": each} if each else {})} for each in given]
    history = [HI, {"role": "assistant", "content": "", "tool_calls": calls}, *results]
    first, second = written
    assert rendered(IDS, history) == f"[{first}][{second}]({first})({second})"
    assert calls[0]["id"] == given[0]


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> Tokenizer:
    made = Tokenizer(tiny / "tokenizer")
    made.set_chat_template(TEMPLATE)
    return made


def test_prompts_have_variables_and_go_on(tokenizer: Tokenizer) -> None:
    plain = tokenizer.encode_prompt([HI])
    assert len(tokenizer.encode_prompt([HI], variables={"enable_thinking": False})) > len(plain)
    begun = [HI, {"role": "assistant", "content": "One, two"}]
    assert tokenizer.decode(tokenizer.encode_prompt(begun, continuing=True)).endswith("One, two")
    called: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}
    chats: list[list[dict[str, Any]]] = [[HI], [HI, called]]
    for wrong in chats:
        with pytest.raises(OptionError, match="the last message is none"):
            tokenizer.encode_prompt(wrong, continuing=True)


def test_a_chat_begins_with_what_every_text_begins_with(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """TinyLlama's and Zephyr's templates leave it to the tokenizer."""
    (begin,) = tokenizer.encode("<|endoftext|>")
    plain = tokenizer.encode_rendered("Hi")
    monkeypatch.setitem(tokenizer.__dict__, "prefix", [begin])
    assert tokenizer.encode_rendered("Hi") == [begin, *plain]
    assert tokenizer.encode_rendered("<|endoftext|>Hi") == [begin, *plain]  # the template has written it


def test_an_app_s_tokenizer_is_asked_for_what_a_request_has() -> None:
    toy = ToyTokenizer(chat=True)
    begun = [{"role": "user", "content": "hi"}, {"role": "a", "content": "so"}]
    assert toy.decode(toy.encode_prompt(begun, continuing=True)) == "u hia so"
