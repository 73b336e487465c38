"""The forms in which models write their reasoning, by chat template."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from outrider.inputs.reasoning.calls import CallsWithin
from outrider.inputs.reasoning.channels import MARKERS, Channels
from outrider.inputs.reasoning.stream import MarkedReasoning, Splitter, Thought
from outrider.inputs.tools.formats import ToolFormat
from outrider.types import TextTokenizer


@dataclass(frozen=True)
class ReasoningFormat:
    """How a model writes its reasoning: between two markers, before the answer.

    form = ReasoningFormat.of_template(template)
    reasoning, content = form.parse(text)

    """

    name: str
    begin: str  # the markers
    end: str
    around: tuple[str, str] = ("", "")  # what may stand around the answer after it
    forced: str = ""  # what ends the reasoning and begins the answer; by default `end`
    channels: bool = False  # whether the answer consists of messages, of which several may be reasoning

    @classmethod
    def of_template(cls, template: str) -> ReasoningFormat | None:
        """The form that a chat template is for; None if it has none that is known here."""
        return _of_template(template)

    @classmethod
    def of_tokenizer(cls, tokenizer: TextTokenizer) -> ReasoningFormat | None:
        """The form of a tokenizer's chat template."""
        return _of_template(tokenizer.chat_template)

    @property
    def apart(self) -> bool:
        """Whether the template takes an earlier answer's reasoning by a name of its own, and not within the content."""
        return self.channels or self.begin.startswith("<|channel>")

    @property
    def markers(self) -> tuple[str, ...]:
        """What may be tokens of their own."""
        return MARKERS if self.channels else tuple(_TAG.findall(self.begin + self.end))

    def last_marker(self, text: str, num_written: int = 0) -> str:
        """Whether a prompt has begun the reasoning (`begin`) or ended it (`end`) where the answer begins; else "".

        num_written: characters at its end that the answer has already. Their last marker counts, or the one before.
        """
        text = text.rstrip()
        begun = len(text[: max(len(text) - num_written, 0)].rstrip())
        places = {marker: text.rfind(marker.rstrip()) + len(marker.rstrip()) for marker in (self.begin, self.end)}
        last = max(places, key=places.__getitem__)
        return last if last in text and places[last] >= begun else ""

    def stream(
        self, *, opened: bool = False, calls: ToolFormat | None = None, **options: Any
    ) -> Splitter | CallsWithin:
        """Splits a text that grows. opened: the prompt has begun the reasoning. calls: how the model writes calls.

        A call within the reasoning, which no end of it follows, is of the answer then. options: of `ToolFormat.stream`.
        """
        stream = self.splitter(opened=opened)
        return stream if calls is None else CallsWithin(stream, partial(calls.stream, **options), calls.begins)

    def splitter(self, *, opened: bool = False) -> Splitter:
        """The same without a look at calls, which says where the answer itself is in the text."""
        if self.channels:
            return Channels(opened=opened)
        return MarkedReasoning(self.begin, self.end, opened=opened, around=self.around)

    def parse(self, text: str, *, opened: bool = False, calls: ToolFormat | None = None) -> tuple[str, str]:
        """The reasoning of a whole answer, and the answer, in which calls are left as they are."""
        stream = self.stream(opened=opened, calls=calls)
        return split([*stream.push(text), *stream.finish()])

    def count(self, texts: Iterable[str], *, is_cut: bool = False, **options: Any) -> int:
        """How many of an answer's tokens are reasoning, with its markers. texts: of each token, markers included.

        is_cut: the answer was, by its length. options: of `stream`.
        """
        stream, count, count_before = self.stream(**options), 0, 0
        for text in texts:
            was = stream.is_reasoning
            stream.push(text)
            count += was or stream.is_reasoning
            count_before = count_before if stream.is_calling else count
        stream.finish(is_cut=is_cut)
        return count_before if stream.has_called else count


def split(pieces: Iterable[Thought | str]) -> tuple[str, str]:
    """The reasoning and the answer that pieces add up to."""
    thoughts, texts = list[str](), list[str]()
    for piece in pieces:
        if isinstance(piece, Thought):
            thoughts.append(piece.text)
        else:
            texts.append(piece)
    return "".join(thoughts), "".join(texts)


_TAG = re.compile(r"<[^<>]+>|\[/?[A-Z]+\]")

THINK = ReasoningFormat("think", "<think>", "</think>")
HARMONY = ReasoningFormat(
    "harmony", "<|channel|>analysis<|message|>", "<|end|>",
    forced="<|end|><|start|>assistant<|channel|>final<|message|>", channels=True,
)  # fmt: skip
_SIGNS = {  # the first that is found
    "<|channel|>": HARMONY,  # gpt-oss
    "<|channel>": ReasoningFormat("gemma", "<|channel>thought", "<channel|>"),  # Gemma 4
    "<|START_THINKING|>": ReasoningFormat("command", "<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
    "<|inner_prefix|>": ReasoningFormat("apertus", "<|inner_prefix|>", "<|inner_suffix|>"),
    "[THINK]": ReasoningFormat("mistral", "[THINK]", "[/THINK]"),  # Magistral, Ministral 3
    "<seed:think>": ReasoningFormat("seed", "<seed:think>", "</seed:think>"),  # Seed-OSS
    "Here is my thought process:": ReasoningFormat(  # Granite 3.2
        "granite", "Here is my thought process:", "Here is my response:"
    ),
    "<response>": ReasoningFormat(
        "think-response", "<think>", "</think>", ("<response>", "</response>")
    ),  # Granite 3.3
    "<think>": THINK,  # Qwen3, Qwen3.5, R1 and its distills, LFM2.5, GLM 4.5, MiniMax M2, Kimi K2, SmolLM3, Nemotron
    "</think>": THINK,
}


@lru_cache(maxsize=64)
def _of_template(template: str) -> ReasoningFormat | None:
    return next((form for sign, form in _SIGNS.items() if sign in template), None)
