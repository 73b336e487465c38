"""The formats of calls, by chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from outrider.inputs.text.turns import TOLD_OF_TOOLS
from outrider.inputs.tools.arguments import Tags
from outrider.inputs.tools.heads import head_by_name, head_in_json
from outrider.inputs.tools.loose import BRACKET, EQUALS_TAGS, INVOKE_TAGS
from outrider.inputs.tools.shapes import ToolCall
from outrider.inputs.tools.stream import ToolCallStream, joined
from outrider.inputs.tools.syntaxes import IN_GEMMA, IN_PYTHON, CallSyntax
from outrider.types import TextTokenizer


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes calls of functions: a marker, and JSON with a name and arguments, unless it says otherwise.

    form = ToolFormat.of_template(template)
    content, calls = form.parse(text)
    """

    name: str
    begin: str  # the marker
    end: str = ""  # after a call, or after all if they are separated
    opener: str = ""  # between the marker and the first call
    separator: str = ""  # between calls; empty: each has a marker
    blank: str = ""  # next to markers
    key: str = "arguments"  # of the arguments
    bare: bool = False  # an answer may begin with a call that has no marker
    named: str = ""  # between a name and arguments in JSON, where these are no object together
    tags: Tags | None = None  # around a name and arguments that are written one by one
    numbered: str = ""  # between a name and the call's number
    prefix: str = ""  # of the name, within `begin`
    around: tuple[str, ...] = ()  # what may stand around all calls, and is dropped
    typed: str = ""  # what may stand before `named`
    channels: bool = False  # an answer consists of messages, of which calls are some
    syntax: CallSyntax | None = None  # of the calls between `begin` and `end`, which are no JSON
    closer: str = ""  # between the last of them and `end`

    @classmethod
    def of_template(cls, template: str) -> ToolFormat | None:
        """The format that a chat template is for; None if it has none, or one that is not known here."""
        return next((form for sign, form in _SIGNS.items() if sign in template), None)

    @classmethod
    def of_tokenizer(cls, tokenizer: TextTokenizer) -> ToolFormat | None:
        """The format of a tokenizer's template for requests with tools."""
        return cls.of_template(getattr(tokenizer, "tool_template", "") or tokenizer.chat_template)

    def parse(
        self, text: str, max_calls: int | None = None, tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[str, list[ToolCall]]:
        """The plain text of a whole answer, and its calls. What follows the last of max_calls is dropped.

        tools: as in OpenAI's API. Their schemas say what an argument is where it is written as plain text.
        """
        stream = self.stream(max_calls, tools)
        return joined([*stream.push(text), *stream.finish()])

    def stream(
        self, max_calls: int | None = None, tools: Sequence[Mapping[str, Any]] = (), *, loose: bool = False
    ) -> ToolCallStream:
        """The same for a text that grows. loose: see `ToolCallStream`."""
        return ToolCallStream(self, max_calls, tools, loose=loose)

    @property
    def is_object(self) -> bool:
        """Whether a call is one JSON object."""
        return not (self.named or self.tags or self.syntax)

    @property
    def markers(self) -> tuple[str, ...]:
        """What may be tokens of their own."""
        tags = [text.strip() for text in (*self.tags.key, *self.tags.value)] if self.tags else []
        strings = (self.syntax.quote,) if self.syntax and len(self.syntax.quote) > 1 else ()
        begin = self.begin.removesuffix(self.prefix)
        found = (*strings, *self.around, begin, self.end, self.named, "[CALL_ID]" if self.named else "")
        return (*filter(None, found), *(tag for tag in tags if tag.startswith("<") and tag.endswith(">")))

    @property
    def begins(self) -> tuple[str, ...]:
        """What calls begin with: the marker, or what may stand before it, or a tag that models write without it."""
        tag = self.tags.name[0] if self.tags else ""
        return (*filter(None, (self.begin.removesuffix(self.prefix), *self.around[:1], tag)),)

    @property
    def next_begin(self) -> str:
        """What another call in the same block begins with; empty if each has its marker."""
        if self.tags is not None:
            return self.tags.name[0]
        return BRACKET if self.is_object and not self.separator else ""

    @property
    def head(self) -> re.Pattern[str]:
        """Matches a call up to its arguments; group 1 is the name, as JSON if the call is an object."""
        return self._patterns[0]

    @property
    def part_of_head(self) -> re.Pattern[str]:
        """Matches what may become one."""
        return self._patterns[1]

    @cached_property
    def _patterns(self) -> tuple[re.Pattern[str], re.Pattern[str]]:
        if self.named:
            return head_by_name("", self.named, "{", optional=True)
        if self.tags:
            begin, after = self.tags.name
            return head_by_name(begin, after, *([""] if after else [self.tags.key[0], self.end]))
        return head_in_json(self.opener)


HERMES = ToolFormat("hermes", "<tool_call>", end="</tool_call>", blank="\n")
LLAMA = ToolFormat("llama", "<|python_tag|>", separator=";", key="parameters", bare=True)
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", end="]", opener="[", separator=",", blank=" ")
MISTRAL_ARGS = ToolFormat("mistral-args", "[TOOL_CALLS]", named="[ARGS]")
QWEN_CODER = ToolFormat("qwen-coder", "<tool_call>", end="</tool_call>", blank="\n", tags=EQUALS_TAGS)
GLM = ToolFormat(
    "glm",
    "<tool_call>",
    end="</tool_call>",
    tags=Tags(("", ""), ("<arg_key>", "</arg_key>"), ("\n<arg_value>", "</arg_value>")),
)
GLM_IN_LINE = replace(
    GLM, name="glm-in-line", tags=Tags(("", ""), ("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>"), line="")
)
GRANITE = ToolFormat("granite", "<|tool_call|>", end="]", opener="[", separator=",")
PHI = ToolFormat("phi", "functools", end="]", opener="[", separator=",")
KIMI = ToolFormat(
    "kimi", "<|tool_call_begin|>functions.", named="<|tool_call_argument_begin|>", end="<|tool_call_end|>",
    numbered=":", prefix="functions.", around=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
)  # fmt: skip
DEEPSEEK = ToolFormat(
    "deepseek", "<｜tool▁call▁begin｜>", named="<｜tool▁sep｜>", end="<｜tool▁call▁end｜>",
    around=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
)  # fmt: skip
HARMONY = ToolFormat(
    "harmony", "<|channel|>commentary to=functions.", named="<|message|>", end="<|call|>", typed=" <|constrain|>json",
    channels=True,
)  # fmt: skip
LFM = ToolFormat(
    "lfm", "<|tool_call_start|>", end="<|tool_call_end|>", opener="[", closer="]", separator=",", syntax=IN_PYTHON
)  # fmt: skip
GEMMA = ToolFormat("gemma", "<|tool_call>", end="<tool_call|>", syntax=IN_GEMMA)
MINIMAX = ToolFormat("minimax", "<minimax:tool_call>", end="</minimax:tool_call>", blank="\n", tags=INVOKE_TAGS)
_SIGNS = {  # the first that is found
    TOLD_OF_TOOLS: HERMES,
    "<minimax:tool_call>": MINIMAX,  # MiniMax M2
    "<|tool_call_argument_begin|>": KIMI,  # Kimi K2
    "<｜tool▁sep｜>{": DEEPSEEK,
    "<|tool_call_start|>": LFM,  # LFM2, LFM2.5
    "<|tool_call>": GEMMA,  # Gemma 4
    "<|channel|>commentary": HARMONY,  # gpt-oss
    "<|tool_call|>": GRANITE,  # Granite 3
    "<|tool|>": PHI,  # Phi-4-mini
    "<parameter=": QWEN_CODER,  # Qwen3-Coder, Qwen3.5
    "<function=": None,
    "</arg_key><arg_value>": GLM_IN_LINE,  # GLM-4.7
    "<arg_key>": GLM,  # GLM-4.5, 4.6
    "<tool_call>": HERMES,  # Qwen2.5, Qwen3, Hermes 2 and 3
    "[ARGS]": MISTRAL_ARGS,  # Mistral Small 3.2, Magistral, Devstral, Ministral 3
    "[TOOL_CALLS]": MISTRAL,  # Mistral 7B v0.3, Nemo, Large
    "<|python_tag|>": LLAMA,  # Llama 3.1, 3.2, 3.3
    '"parameters": dictionary of argument name': LLAMA,  # those of 1B and 3B
}
