"""A conversation, its options, and how its answers are shown."""

from __future__ import annotations

import json
from contextlib import closing
from typing import TYPE_CHECKING, Any

from outrider.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from outrider.config import GenerationConfig
    from outrider.decoding.results import Result, TextChunk
    from outrider.engine.chat import Chat
    from outrider.engine.chat.turn import Message
    from outrider.engine.engine import Engine

WORDS = {"none": None, "off": None, "on": True}  # besides JSON's true, false and null
MANY = ("stop", "references")  # options whose value is a text or several


class Session:
    """What the chat program changes: the conversation, and how the next answer is made and shown.

        session = Session(engine, system="You are terse.")
        for chunk in session.send("Why is the sky blue?"): ...
        session.undo()

    Every change is made to a fork of the conversation, which takes its place when the change has succeeded. So after an
    error it is as before, and any change can be undone.

    options: of all answers from now on, they win over the engine's. plain: answer without drafts. drafts: show where
    each token comes from. last: the last answer. unsent: a message to edit and send again.
    """

    def __init__(self, engine: Engine, system: str | None = None) -> None:
        self.engine = engine
        self.options: dict[str, Any] = {}
        self.plain = self.drafts = False
        self.last: Result | None = None
        self.unsent = ""
        self._chats: list[Chat] = [engine.chat(system)]
        self._answering: Chat | None = None

    @property
    def chat(self) -> Chat:
        """The conversation."""
        return self._chats[-1]

    @property
    def system(self) -> str | None:
        """The system message."""
        first = next(iter(self.chat.messages), {})
        return text_of(first["content"]) if first.get("role") == "system" else None

    @property
    def config(self) -> GenerationConfig:
        """The options of the next answer."""
        return self.engine.config.generation.replace(**self._turn_options)

    def send(self, message: str | Sequence[Message]) -> Generator[TextChunk, None, None]:
        """Answer a message piece by piece. Errors are raised when the pieces are read."""
        return self._stream(self.chat.fork(), message)

    def retry(self) -> Generator[TextChunk, None, None]:
        """Answer the last message again, with the options as they are now.

        Raises:
            RequestError: before the first turn.
        """
        chat = self.chat.fork()
        return self._stream(chat, chat.rewind())

    def go_on(self) -> Generator[TextChunk, None, None]:
        """Go on with the last answer, which was cut or cancelled.

        Raises:
            RequestError: before the first turn.
        """
        chat = self.chat.fork()
        chunks, last = chat.go_on(**self._turn_options), None
        self._answering = chat
        before = chat.turns
        try:
            with closing(chunks):
                for chunk in chunks:
                    last = chunk.result
                    yield chunk
        finally:
            self._answering = None
            if chat.turns != before:
                self._become(chat)
                self.last = last

    def cancel(self) -> bool:
        """End the answer under way. Returns whether there was one, with its prompt tokenized already."""
        chat = self._answering
        return chat is not None and chat.cancel()

    def rewind(self, turns: int = 1) -> None:
        """Forget the last turns. The first of their messages can be edited and sent again.

        Raises:
            RequestError: when there are fewer.
        """
        chat = self.chat.fork()
        messages = chat.rewind(turns)
        self.unsent = text_of(messages[-1]["content"])
        self._become(chat)

    def undo(self) -> None:
        """Take back the last change of the conversation.

        Raises:
            RequestError: when there was none.
        """
        if len(self._chats) == 1:
            raise RequestError("There is nothing to undo: the conversation has not changed yet.")
        self._chats.pop()
        self.last = None

    def begin(self, system: str | None) -> None:
        """Begin a new conversation."""
        self._become(self.engine.chat(system))

    def load(self, path: str) -> None:
        """Go on with a saved conversation.

        Raises:
            OptionError: when the file is missing, damaged, or of another model.
        """
        self._become(self.engine.load_chat(path))

    def set(self, name: str, text: str) -> None:
        """Set an option for all answers from now on. The text "default" takes the engine's value again.

        Raises:
            OptionError: for an unknown option or a bad value.
        """
        options = {key: value for key, value in self.options.items() if key != name}
        if text != "default":
            options[name] = value_of(name, text)
        defaults = self.engine.config.generation
        config = defaults.replace(**{name: getattr(defaults, name, None), **options})
        if name == "drafter" and config.drafter not in (None, "auto"):
            self.engine.find_drafter(str(config.drafter))
        self.options = options

    def _become(self, chat: Chat) -> None:
        self._chats.append(chat)
        self.last = None

    @property
    def _turn_options(self) -> dict[str, Any]:
        return {**self.options, **({"drafter": None} if self.plain else {})}

    def _stream(self, chat: Chat, message: str | Sequence[Message]) -> Generator[TextChunk, None, None]:
        """Answer in `chat`, which takes the conversation's place, unless there is no answer."""
        before, last = chat.turns, None
        self._answering = chat
        try:
            with closing(chat.stream(message, prompt_progress=True, **self._turn_options)) as chunks:
                for chunk in chunks:
                    last = chunk.result
                    yield chunk
        finally:
            self._answering = None
            new = chat.turns[len(before) :]
            if new and (new[0].answer_token_ids or new[0].finish_reason != "cancelled"):
                self._become(chat)
                self.last = last
            elif self.chat.turns == before:  # not a retry, whose message has its answer still
                self.unsent = message if isinstance(message, str) else text_of(message[-1]["content"])


def text_of(content: str | Sequence[Message]) -> str:
    """A message's text, without the images that a saved conversation may have."""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def value_of(name: str, text: str) -> Any:
    """The value of an option that was typed: JSON, on, off, none, or a text as it is."""
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return text if name in MANY and not isinstance(value, str | list) else value
