"""The turns of a conversation, as messages and as tokens."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from outrider.errors import RequestError
from outrider.inputs.reasoning import ReasoningFormat
from outrider.inputs.vision import has_images
from outrider.types import Prompt, num_common_tokens

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from outrider.engine.chat.images import Seen
    from outrider.inputs.vision import EncodedImage
    from outrider.inputs.vision.prompts import PartsTokenizer
    from outrider.types import ChatTokenizer

    Message: TypeAlias = Mapping[str, Any]

log = logging.getLogger("outrider")


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """Messages and the answer to them.

    messages: those that the app sent. text: of the answer. token_ids: of the whole conversation up to the end of this
    answer, without its end-of-sequence token. answers: the parts of token_ids that were generated, as (begin, end); the
    last is this turn's. finish_reason, seed: of the answer, as in `Result`. options: those that it was asked for with;
    they are not saved.
    """

    messages: tuple[Message, ...]
    text: str
    token_ids: tuple[int, ...]
    answers: tuple[tuple[int, int], ...]
    finish_reason: str
    seed: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def answer_token_ids(self) -> tuple[int, ...]:
        """The answer's tokens."""
        return self.token_ids[self.answers[-1][0] :]

    @property
    def all_messages(self) -> tuple[Message, ...]:
        """The messages, and the answer as one."""
        return (*self.messages, {"role": "assistant", "content": self.text})

    def with_more(self, turn: ChatTurn) -> ChatTurn:
        """This turn with what another one, whose prompt is this one's whole text, adds to its answer."""
        *earlier, (begin, _) = self.answers
        return replace(turn, text=self.text + turn.text, answers=(*earlier, (begin, turn.answers[-1][1])))


@dataclass(frozen=True, slots=True)
class TurnLayout:
    """Lays a conversation out as tokens.

    tokenizer: with the model's chat template. opening: the messages before the first turn. tools: descriptions of
    functions that the model may call. special_token_ids: those that an answer may end with, and its text does not have.
    seen: the images, for a bundle with a vision encoder. variables: of the chat template. marks_opening: whether the
    first prompt says where the opening ends.
    """

    tokenizer: ChatTokenizer
    opening: tuple[Message, ...]
    tools: tuple[Message, ...]
    special_token_ids: Collection[int]
    seen: Seen | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    marks_opening: bool = False

    def prompt(self, turns: Sequence[ChatTurn], messages: Sequence[Message]) -> Prompt:
        """The prompt for the answer to `messages`, after these turns.

        The tokens of the turns are kept, and those that the template writes from the last answer to the next one are
        put after them. A template may change what stands before, for instance leave out earlier answers' thinking.
        Then all is rendered anew, and the tokens of those answers are kept whose text is still there.

        Raises:
            OptionError: when a message lacks its role or content.
            RequestError: when the template refuses the messages, or an image cannot be read.
        """
        before = [*self.opening, *(message for turn in turns for message in self._messages(turn))]
        whole, images = self._rendered([*before, *messages])
        if self.seen is None:
            return self._prompt(turns, before, whole)
        encoded = self.seen.encode(images)
        prompt = self._prompt(turns, before, whole, encoded)
        return replace(prompt, embeds=self.seen.vision.place(prompt.token_ids, encoded, prompt.answers))

    def prompt_within(self, turn: ChatTurn) -> Prompt:
        """The prompt that goes on with a turn's answer.

        Raises:
            RequestError: where there are images.
        """
        if self.seen is not None and has_images([*self.opening, *turn.messages]):
            raise RequestError("An answer about images cannot be continued. Use retry.")
        return _marked(list(turn.token_ids), turn.answers)

    def _messages(self, turn: ChatTurn) -> tuple[Message, ...]:
        """A turn's messages. A template that refuses reasoning within a content gets it apart."""
        form = ReasoningFormat.of_tokenizer(self.tokenizer)
        if form is None or not form.apart:
            return turn.all_messages
        reasoning, content = form.parse(turn.text)
        answer = {"role": "assistant", "content": content, "reasoning_content": reasoning}
        return (*turn.messages, answer if reasoning else {"role": "assistant", "content": content})

    def _prompt(
        self, turns: Sequence[ChatTurn], before: Sequence[Message], whole: str, images: Sequence[EncodedImage] = ()
    ) -> Prompt:
        """The prompt without embeds. before: the messages up to the last answer. whole: all, rendered."""
        if not turns:
            token_ids = self.tokenizer.encode_rendered(self._expand(whole, images))
            return replace(_marked(token_ids, ()), opening=self._num_opening(token_ids))
        last = turns[-1]
        asked, earlier = self._rendered(before[:-1])
        tail = _tail(asked, last.text, whole)
        if tail is not None:
            tail = self._expand(tail, images[len(earlier) :], len(earlier))
            return _marked([*last.token_ids, *self.tokenizer.encode(tail)], last.answers)
        log.info("The chat template changes earlier turns, so the whole conversation is tokenized again.")
        return self._anew(turns, self._expand(whole, images), before)

    def _num_opening(self, token_ids: Sequence[int]) -> int:
        """How many of the first prompt's tokens the opening has, which other conversations may begin with, too."""
        if not self.marks_opening or not self.opening or self.seen is not None:
            return 0
        try:
            rendered = self._render(self.opening, answering=False)
        except RequestError:  # a template that refuses it alone
            return 0
        return num_common_tokens(self.tokenizer.encode_rendered(rendered), token_ids)

    def _expand(self, text: str, images: Sequence[EncodedImage], num_before: int = 0) -> str:
        """A rendered text with all tokens of its images."""
        return text if self.seen is None else self.seen.vision.expand(text, images, num_before)

    def turn(
        self, messages: tuple[Message, ...], prompt: Prompt, text: str, token_ids: Sequence[int], **known: Any
    ) -> ChatTurn:
        """The turn of an answer with this text and these tokens. known: the turn's other fields."""
        said = list(token_ids[:-1] if token_ids and token_ids[-1] in self.special_token_ids else token_ids)
        decoded, rest = self.tokenizer.decode(said), list[int]()
        # Where an answer was cut within a character, its text has none of it
        while said and decoded.endswith("\ufffd") and not text.endswith("\ufffd"):
            said.pop()
            decoded = self.tokenizer.decode(said)
        if len(decoded) < len(text) and text.startswith(decoded):  # a stop string began within a token
            rest = self.tokenizer.encode(text[len(decoded) :])
        begin = len(prompt.token_ids)
        earlier = tuple(part for part in prompt.answers if part[1] > part[0])
        answers = (*earlier, (begin, begin + len(said)))
        return ChatTurn(messages, text, (*prompt.token_ids, *said, *rest), answers, **known)

    def _anew(self, turns: Sequence[ChatTurn], whole: str, before: Sequence[Message]) -> Prompt:
        """The rendered text as tokens, with those of the answers that are found in it."""
        asked = before[: len(self.opening) + len(turns[0].messages)]
        header = self._render(asked)[len(self._render(asked, answering=False)) :]
        token_ids: list[int] = []
        answers: list[tuple[int, int]] = []
        at = 0
        for turn in turns:
            found = whole.find(header + turn.text, at) if turn.text else -1
            if found < 0:
                continue
            end = found + len(header)
            token_ids += self._encode(whole[at:end], at)
            begin, generated = turn.answers[-1]
            answers.append((len(token_ids), len(token_ids) + generated - begin))
            token_ids += turn.answer_token_ids
            at = end + len(turn.text)
        return _marked([*token_ids, *self._encode(whole[at:], at)], answers)

    def _encode(self, text: str, at: int) -> list[int]:
        """The tokens of a part of a rendered text, which begins `at` characters after its beginning."""
        return self.tokenizer.encode(text) if at else self.tokenizer.encode_rendered(text)

    def _render(self, messages: Sequence[Message], *, answering: bool = True) -> str:
        return self._rendered(messages, answering=answering)[0]

    def _rendered(self, messages: Sequence[Message], *, answering: bool = True) -> tuple[str, list[Any]]:
        """The text of messages, with one token for each image, and the images."""
        options: dict[str, Any] = {"tools": self.tools, "answering": answering}
        options |= {"variables": self.variables} if self.variables else {}
        if self.seen is None:
            return self.tokenizer.render(messages, **options), []
        return self.seen.vision.render(messages, cast("PartsTokenizer", self.tokenizer), **options)


def _tail(asked: str, answer: str, whole: str) -> str | None:
    """What a template writes after an answer. None if it changes the answer, or the text before it.

    asked: the rendered text up to the answer. It may be rendered without the spaces around it, or after one that the
    model is to write itself.
    """
    if not whole.startswith(asked):
        return None
    rest = whole[len(asked) :]
    for after in (rest, rest.removeprefix(" ")):
        for text in (answer, answer.rstrip(), answer.lstrip(), answer.strip()):
            if after.startswith(text):
                return after[len(text) :]
    return None


def _marked(token_ids: list[int], answers: Sequence[tuple[int, int]]) -> Prompt:
    """A prompt whose answers are read as they were generated.

    Without an earlier answer an empty one stands at the end, so that its answer is not read again as part of a prompt:
    the next turn marks it.
    """
    return Prompt(token_ids, answers=answers or ((len(token_ids), len(token_ids)),))
