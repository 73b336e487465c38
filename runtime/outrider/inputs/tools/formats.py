"""The formats of calls, by chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from outrider.inputs.text.turns import TOLD_OF_TOOLS
from outrider.inputs.tools.bodies import CallBody, JsonBody, NamedBody
from outrider.inputs.tools.shapes import ToolCall
from outrider.inputs.tools.stream import ToolCallStream, joined
from outrider.inputs.tools.syntaxes import IN_GEMMA, IN_PYTHON
from outrider.inputs.tools.tags import EQUALS_TAGS, INVOKE_TAGS, Tags
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
    body: CallBody = field(default_factory=JsonBody)  # what stands between
    opener: str = ""  # between the marker and the first call
    closer: str = ""  # between the last call and `end`
    separator: str = ""  # between calls; empty: each has a marker
    blank: str = ""  # next to markers
    bare: bool = False  # an answer may begin with a call that has no marker
    prefix: str = ""  # of the name, within `begin`
    around: tuple[str, ...] = ()  # what may stand around all calls, and is dropped
    channels: bool = False  # an answer consists of messages, of which calls are some

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
        self, max_calls: int | None = None, tools: Sequence[Mapping[str, Any]] = (), **options: bool
    ) -> ToolCallStream:
        """The same for a text that grows. options: loose and once, see `ToolCallStream`."""
        return ToolCallStream(self, max_calls, tools, **options)

    @property
    def is_object(self) -> bool:
        """Whether a call is one JSON object."""
        return isinstance(self.body, JsonBody)

    @property
    def bare_begin(self) -> str:
        """The marker without what belongs to the name."""
        return self.begin.removesuffix(self.prefix)

    @property
    def markers(self) -> tuple[str, ...]:
        """What may be tokens of their own."""
        return (*filter(None, (*self.around, self.bare_begin, self.end)), *self.body.markers)

    @property
    def begins(self) -> tuple[str, ...]:
        """What calls begin with: the marker, or what may stand before it, or a tag that models write without it."""
        tag = self.body.next_begin if isinstance(self.body, Tags) else ""
        return (*filter(None, (self.bare_begin, *self.around[:1], tag)),)


HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>", blank="\n")
LLAMA = ToolFormat("llama", "<|python_tag|>", "", JsonBody("parameters"), separator=";", bare=True)
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", "]", opener="[", separator=",", blank=" ")
MISTRAL_ARGS = ToolFormat("mistral-args", "[TOOL_CALLS]", "", NamedBody("[ARGS]"))
QWEN_CODER = ToolFormat("qwen-coder", "<tool_call>", "</tool_call>", EQUALS_TAGS, blank="\n")
_GLM_TAGS = Tags(("", ""), ("<arg_key>", "</arg_key>"), ("\n<arg_value>", "</arg_value>"))
GLM = ToolFormat("glm", "<tool_call>", "</tool_call>", _GLM_TAGS)
GLM_IN_LINE = replace(GLM, name="glm-in-line", body=replace(_GLM_TAGS, value=("<arg_value>", "</arg_value>"), line=""))
GRANITE = ToolFormat("granite", "<|tool_call|>", "]", opener="[", separator=",")
PHI = ToolFormat("phi", "functools", "]", opener="[", separator=",")
KIMI = ToolFormat(
    "kimi", "<|tool_call_begin|>functions.", "<|tool_call_end|>",
    NamedBody("<|tool_call_argument_begin|>", numbered=":"), prefix="functions.",
    around=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
)  # fmt: skip
DEEPSEEK = ToolFormat(
    "deepseek", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", NamedBody("<｜tool▁sep｜>"),
    around=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
)  # fmt: skip
HARMONY = ToolFormat(
    "harmony", "<|channel|>commentary to=functions.", "<|call|>", NamedBody("<|message|>", typed=" <|constrain|>json"),
    channels=True,
)  # fmt: skip
LFM = ToolFormat(
    "lfm", "<|tool_call_start|>", "<|tool_call_end|>", IN_PYTHON, opener="[", closer="]", separator=","
)  # fmt: skip
GEMMA = ToolFormat("gemma", "<|tool_call>", "<tool_call|>", IN_GEMMA)
MINIMAX = ToolFormat("minimax", "<minimax:tool_call>", "</minimax:tool_call>", INVOKE_TAGS, blank="\n")
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
