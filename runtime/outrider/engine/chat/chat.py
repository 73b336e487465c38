"""A conversation with an engine."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping
from contextlib import aclosing, closing, contextmanager
from dataclasses import replace
from threading import Event, Lock
from typing import TYPE_CHECKING, Any, Unpack

from outrider.engine.chat.file import read_chat, write_chat
from outrider.engine.chat.images import Seen, keep_images
from outrider.engine.chat.turn import TurnLayout
from outrider.errors import OptionError, RequestError
from outrider.inputs.vision import check_images

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
    from pathlib import Path

    from outrider.config.generation_options import GenerationOptions
    from outrider.decoding.results import AnswerToken, Result, TextChunk
    from outrider.engine.chat.turn import ChatTurn, Message
    from outrider.engine.engine import Engine
    from outrider.types import Prompt


class Chat:
    """A conversation: it keeps its messages, and the tokens that were generated.

        chat = engine.chat(system="You are terse.", temperature=0.7)
        chat.send("Why is the sky blue?").text
        for chunk in chat.stream("And red at dusk?"): ...

    A message is a user's text, a chat message ({"role": …, "content": …}), or a list of them. Contents may have images,
    as those of `generate`; they are kept as `data:` URLs. Options given here are those of `GenerationConfig`, for every
    turn; those of a turn win over them.

    An answer becomes a turn when it has ended, for whatever reason: a cancelled one with what was there was, one
    whose stream was closed with what was given out. After an error the conversation is as before. There is one answer
    at a time. All methods may be called from any thread.
    """

    def __init__(
        self,
        engine: Engine,
        system: str | None = None,
        *,
        messages: Sequence[Message] = (),
        tools: Sequence[Message] = (),
        turns: Sequence[ChatTurn] = (),
        **options: Any,
    ) -> None:
        tokenizer: Any = engine.tokenizer
        if not getattr(tokenizer, "has_chat_template", False):
            raise OptionError(
                f"{engine.bundle.folder} has no chat template, and a chat needs one. Use engine.generate with a text, "
                "or export the bundle from an instruct model."
            )
        opening = () if system is None else ({"role": "system", "content": system},)
        special = engine.bundle.manifest.tokenizer
        self._engine = engine
        self._layout = TurnLayout(
            tokenizer,
            _copied((*opening, *messages)),
            tuple(tools),
            frozenset((*special.eos_token_ids, *special.special_token_ids)),
            Seen(engine.vision) if engine.vision else None,
            marks_opening=engine.has_states,
        )
        self._turns = tuple(turns)
        self.options: Mapping[str, Any] = options
        self._answering = Lock()
        self._cancel: Event | None = None  # ends the answer under way

    @property
    def turns(self) -> tuple[ChatTurn, ...]:
        """The turns so far, without the answer under way."""
        return self._turns

    @property
    def messages(self) -> list[Message]:
        """All messages so far: the system's, the app's and the answers."""
        return [*self._layout.opening, *(message for turn in self._turns for message in turn.all_messages)]

    @property
    def token_ids(self) -> list[int]:
        """The tokens that the next turn goes on from; none before the first."""
        return list(self._turns[-1].token_ids) if self._turns else []

    def send(self, message: str | Message | Sequence[Message], **options: Unpack[GenerationOptions]) -> Result:
        """Answer a message, and wait for the whole answer. `options` are for this turn.

        Raises:
            OptionError: for an unknown option, a bad value, or a message without role or content.
            RequestError: when the message is empty, the conversation too long, another answer under way, or an image
                cannot be read, or not by this model.
            DeviceError: when a device fails.
        """
        return self._generate(_messages(message), options)

    def stream(
        self,
        message: str | Message | Sequence[Message],
        *,
        prompt_progress: bool = False,
        **options: Unpack[GenerationOptions],
    ) -> Generator[TextChunk, None, None]:
        """Answer a message piece by piece; as `send`. Closing or dropping the stream ends the answer.

        prompt_progress: as of `Engine.stream`.
        """
        with self._answer(_messages(message), options) as answer:
            stream = self._engine.stream(
                answer.prompt, cancel=answer.cancel, prompt_progress=prompt_progress, **answer.options
            )
            with closing(stream) as chunks:
                for chunk in chunks:
                    answer.add(chunk)
                    yield chunk

    async def asend(self, message: str | Message | Sequence[Message], **options: Unpack[GenerationOptions]) -> Result:
        """As `send`, in an event loop. Cancelling the task ends the answer."""
        messages = await asyncio.to_thread(_messages, message)
        with self._answer(messages, options) as answer:
            prompt = await asyncio.to_thread(lambda: answer.prompt)  # images take a while
            result = await self._engine.agenerate(prompt, cancel=answer.cancel, **answer.options)
            answer.result = result
        return result

    async def astream(
        self, message: str | Message | Sequence[Message], **options: Unpack[GenerationOptions]
    ) -> AsyncGenerator[TextChunk, None]:
        """As `stream`, in an event loop. Closing the generator, or cancelling the task, ends the answer."""
        messages = await asyncio.to_thread(_messages, message)
        with self._answer(messages, options) as answer:
            prompt = await asyncio.to_thread(lambda: answer.prompt)
            async with aclosing(self._engine.astream(prompt, cancel=answer.cancel, **answer.options)) as chunks:
                async for chunk in chunks:
                    answer.add(chunk)
                    yield chunk

    def cancel(self) -> bool:
        """End the answer under way, after the model's running call. From any thread, at any time.

        The answer's result still comes, with finish_reason "cancelled". Returns whether an answer was under way.
        """
        cancel = self._cancel
        if cancel is not None:
            cancel.set()
        return cancel is not None

    def retry(self, **options: Unpack[GenerationOptions]) -> Result:
        """Answer the last turn's messages again, and put the answer in place of the last one.

        The options are those of the last answer but for its seed, and `options` win over them. The seed of the last
        answer, `chat.turns[-1].seed`, gives the same text. If it fails, the last answer stays.

        Raises:
            RequestError: before the first turn; otherwise as `send`.
        """
        return self._generate(None, options)

    def go_on(self, **options: Unpack[GenerationOptions]) -> Generator[TextChunk, None, None]:
        """Go on with the last answer, which was cut or cancelled: the pieces become part of it. As `stream`.

        The options are those of the last answer but for its seed, and `options` win over them. The last chunk's result
        has what was added.

        Raises:
            RequestError: before the first turn, and where there are images; otherwise as `send`.
        """
        with (
            self._answer(None, options, extends=True) as answer,
            closing(self._engine.stream(answer.prompt, cancel=answer.cancel, **answer.options)) as chunks,
        ):
            for chunk in chunks:
                answer.add(chunk)
                yield chunk

    def rewind(self, turns: int = 1) -> tuple[Message, ...]:
        """Forget the last turns. Returns the messages that the first of them began with, which can be sent again.

        Raises:
            RequestError: when there are fewer turns, or an answer is under way.
        """
        with self._alone():
            forgotten = self._last(turns)
            self._turns = self._turns[: len(self._turns) - turns]
        return forgotten[0].messages

    def fork(self) -> Chat:
        """A second conversation that goes on from here. Both share the cache of what they have in common."""
        layout = self._layout
        chat = Chat(self._engine, messages=layout.opening, tools=layout.tools, turns=self._turns, **self.options)
        chat._layout = replace(layout, seen=layout.seen and layout.seen.copy())
        return chat

    def save(self, path: str | Path) -> None:
        """Write the conversation, its messages and its tokens, to a JSON file. A file of this name is replaced.

        It keeps its permissions, and a new one is its owner's alone. A link is followed.

        Of the options, the adapter is saved.

        Raises:
            OptionError: when the file cannot be written.
        """
        adapter = self.options.get("adapter")
        write_chat(path, self._engine.bundle, self._layout.opening, self._layout.tools, self._turns, adapter)

    @classmethod
    def load(cls, engine: Engine, path: str | Path, *, same_model: bool = True, **options: Any) -> Chat:
        """A conversation from a file that `save` wrote; as `engine.load_chat`."""
        opening, tools, turns, adapter = read_chat(path, engine.bundle, same_model=same_model)
        if adapter is not None:
            options = {"adapter": adapter, **options}
        return cls(engine, messages=opening, tools=tools, turns=turns, **options)

    def _last(self, count: int) -> tuple[ChatTurn, ...]:
        if not isinstance(count, int) or not 1 <= count <= len(self._turns):
            raise RequestError(
                f"turns={count!r} is not a number of turns of this chat, which has {len(self._turns)}. Give a number "
                f"from 1 to {len(self._turns)}."
                if self._turns
                else "This chat has no turn yet. Send a message first."
            )
        return self._turns[-count:]

    def _generate(self, messages: tuple[Message, ...] | None, options: Mapping[str, Any]) -> Result:
        with self._answer(messages, options) as answer:
            result = self._engine.generate(answer.prompt, cancel=answer.cancel, **answer.options)
            answer.result = result
        return result

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Let nothing else change the conversation during the block."""
        if not self._answering.acquire(blocking=False):
            raise RequestError(
                "This chat is giving an answer. Read or close its stream, call cancel(), or use a fork()."
            )
        try:
            yield
        finally:
            self._answering.release()

    @contextmanager
    def _answer(
        self, messages: tuple[Message, ...] | None, options: Mapping[str, Any], *, extends: bool = False
    ) -> Iterator[_Answer]:
        """Make a turn of what is answered in the block.

        messages: None to put it in place of the last turn. extends: the last turn's answer is gone on with.
        """
        with self._alone():
            if "cancel" in options:
                raise OptionError("cancel is not an option of a turn. Call chat.cancel(), from any thread.")
            before, extended = self._turns, self._last(1)[0] if extends else None
            if messages is None:
                (last,), before = self._last(1), before[:-1]
                messages, options = last.messages, {**last.options, "seed": None, **options}
            self._cancel = Event()
            try:
                check_images([*self.messages, *messages], self._engine.vision)
                asked = {**self.options, **options}
                generation = self._engine.config.generation
                if asked.get("chat_template_kwargs") is not None:
                    generation = generation.replace(chat_template_kwargs=asked["chat_template_kwargs"])
                layout = replace(self._layout, variables=generation.chat_template_kwargs)
                lay_out = functools.partial(layout.prompt, before, messages)
                if extended is not None:
                    lay_out = functools.partial(layout.prompt_within, extended)
                answer = _Answer(lay_out, asked, self._cancel)
                try:
                    yield answer
                except Exception:
                    raise
                except BaseException:  # the stream was closed, or its task cancelled
                    if answer.tokens:
                        self._turns = (*before, self._turn(messages, answer, options, extended))
                    raise
                self._turns = (*before, self._turn(messages, answer, options, extended))
            finally:
                self._cancel = None

    def _turn(
        self,
        messages: tuple[Message, ...],
        answer: _Answer,
        options: Mapping[str, Any],
        extended: ChatTurn | None = None,
    ) -> ChatTurn:
        result = answer.result
        turn = self._layout.turn(
            messages,
            answer.prompt,
            answer.text if result is None else result.text,
            [token.token_id for token in answer.tokens] if result is None else result.token_ids,
            finish_reason="cancelled" if result is None else result.finish_reason,
            seed=answer.options.get("seed") if result is None else result.seed,
            options=options,
        )
        return turn if extended is None else extended.with_more(turn)


class _Answer:
    """An answer under way, with what was given out of it."""

    def __init__(self, lay_out: Callable[[], Prompt], options: Mapping[str, Any], cancel: Event) -> None:
        self._lay_out, self.options, self.cancel = lay_out, options, cancel
        self.text = ""
        self.tokens: list[AnswerToken] = []
        self.result: Result | None = None

    @functools.cached_property
    def prompt(self) -> Prompt:
        """What is answered. It is laid out once, in the first thread that asks."""
        return self._lay_out()

    def add(self, chunk: TextChunk) -> None:
        """Take in what is given out next."""
        self.text += chunk.text
        self.tokens += chunk.tokens
        self.result = chunk.result


def _messages(message: str | Message | Sequence[Message]) -> tuple[Message, ...]:
    """The messages of a turn."""
    if isinstance(message, str):
        if not message.strip():
            raise RequestError("The message is empty. Give at least one word.")
        return ({"role": "user", "content": message},)
    messages = (message,) if isinstance(message, Mapping) else tuple(message)
    if not messages:
        raise RequestError("There is no message to answer. Give a text, or at least one message.")
    return _copied(messages)


def _copied(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages as they are now; the app may change its own later. What is no message fails when it is rendered."""
    return tuple(keep_images(each) if isinstance(each, Mapping) else each for each in messages)
