"""The bundle's tokenizer, through openvino-genai's, and apps' own, whose values are checked where they enter."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import Any, cast

import numpy as np

from outrider.errors import BundleError, OptionError, RequestError, TooLong, one_line
from outrider.inputs.text.chat_template import DEFAULT, ChatTemplates
from outrider.inputs.text.joinable_texts import JoinableTexts, joins_bytes
from outrider.inputs.text.special_tokens import parts_of, read_special_tokens, without_special
from outrider.system.guard import Guarded, Rule
from outrider.system.nesting import TooDeep, check_json, check_levels
from outrider.system.processes import spare
from outrider.types import TextTokenizer

FILES = tuple(f"openvino_{which}.{kind}" for which in ("tokenizer", "detokenizer") for kind in ("xml", "bin"))

_PIECE = 16_384  # characters
_CUT = 16  # tokens that cutting a text at any place adds at most, and some


class Tokenizer:
    """Text to tokens and back.

        tokenizer = Tokenizer(bundle.tokenizer_path)
        token_ids = tokenizer.encode_prompt("Why is the sky blue?")
        tokenizer.decode(token_ids)

    max_tokens: of a prompt. One that has more is refused after so many, not after all of its tokens. None: any number.
    special_tokens_in_content: whether the text of a special token in a message becomes that token, as in the template.

    Raises:
        BundleError: when the folder or one of its files is not there, or cannot be read.
    """

    def __init__(self, folder: Path, max_tokens: int | None = None, *, special_tokens_in_content: bool = True) -> None:
        import openvino_genai

        check_tokenizer(folder)
        self._max_tokens = max_tokens
        try:
            self._tokenizer = openvino_genai.Tokenizer(str(folder))
        except RuntimeError as error:
            raise BundleError(
                f"The tokenizer in {folder} cannot be read: {one_line(error)}. Export the bundle again."
            ) from error
        spare(self, self._tokenizer)
        self._texts = JoinableTexts(self._tokenizer) if joins_bytes(folder) else None
        self._templates = self._read_templates(folder)
        self._special = () if special_tokens_in_content else read_special_tokens(folder)

    @property
    def has_chat_template(self) -> bool:
        """Whether messages can be laid out for this model."""
        return bool(self._templates.by_name)

    @property
    def chat_template(self) -> str:
        """The template that messages are laid out with; empty if there is none."""
        return self._templates.default

    @property
    def tool_template(self) -> str:
        """The template of requests with tools. Most models have one for both."""
        return self._templates.with_tools

    def set_chat_template(self, template: str) -> None:
        """Use another template, in Jinja2, for all messages."""
        self._templates = replace(self._templates, by_name={DEFAULT: template} if template else {})

    def encode_prompt(
        self,
        prompt: str | Sequence[Mapping[str, Any]] | Sequence[int],
        *,
        chat_template: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        continuing: bool = False,
    ) -> list[int]:
        """The token ids of a prompt: text, chat messages, or token ids, which are used as they are.

        Text counts as one user message when the model has a chat template, unless `chat_template` is False. tools:
        functions as in OpenAI's API, for the template. Messages may then have `tool_calls`, and the role "tool".
        variables: of the template. continuing: the prompt ends within the last message, which is the assistant's.

        Raises:
            RequestError: when the prompt is empty, nested too deeply, or longer than `max_tokens`.
            OptionError: when it is none of the three kinds, or messages meet a model without a chat template.
        """
        laid_out: dict[str, Any] = {"tools": tools, "variables": variables, "continuing": continuing}
        if isinstance(prompt, str):
            if not prompt.strip() and chat_template:
                raise RequestError("The prompt is empty. Give at least one word.")
            if chat_template and self.has_chat_template:
                return self.encode_rendered(self.render([{"role": "user", "content": prompt}], **laid_out))
            if not prompt:
                return self.prefix or self._first_token
            if tools:
                raise OptionError("tools need a chat template, and this prompt is used without one. Leave them out.")
            self._check_length(prompt)
            return self._encode(prompt, add_special_tokens=True)
        if hasattr(prompt, "tolist"):  # an array, which need not have a length
            prompt = prompt.tolist()
        if isinstance(prompt, bytes | Mapping) or not isinstance(prompt, Iterable):
            raise OptionError(f"The prompt is a {type(prompt).__name__}. Give text, a list of messages, or token ids.")
        items: list[Any] = list(prompt)
        if not items:
            raise RequestError("The prompt is empty. Give text, at least one message, or at least one token id.")
        if all(isinstance(item, Integral) and not isinstance(item, bool) for item in items):
            return [int(item) for item in items]
        _check_messages(items)
        if not chat_template:
            raise OptionError("Messages need a chat template, and there is none. Give the prompt as text.")
        return self.encode_rendered(self.render(items, **laid_out))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        answering: bool = True,
        parts: bool = False,
        variables: Mapping[str, Any] | None = None,
        continuing: bool = False,
    ) -> str:
        """The text of chat messages, by the model's template. It ends where an answer begins, if `answering`.

        tools: descriptions of functions that the model may call, as JSON schemas. parts: whether contents may be lists
        of parts, which the template reads. variables: of the template, as JSON. continuing: the text ends within the
        last message, which is the assistant's.

        Raises:
            OptionError: when a message lacks its role or content, or the model has no chat template.
            RequestError: when the template refuses the messages, or they are nested too deeply.
        """
        _check_nesting(messages, tools)
        _check_messages(messages, parts=parts)
        history = [_with_content(message) for message in messages]
        if not self.has_chat_template:
            raise OptionError("Messages need a chat template, and there is none. Give the prompt as text.")
        try:
            written = json.dumps([history, list(map(dict, tools))], ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise OptionError(
                f"The prompt's messages are not JSON: {one_line(error)}. Give texts and numbers."
            ) from error
        _check_text(written)
        given, described = json.loads(written)  # plain values, whatever the app's are
        if self._special:
            given, described = without_special((given, described), self._special)
        if continuing:
            _check_continued(given)
        return self._templates.render(given, described, answering=answering, variables=variables, continuing=continuing)

    def encode_rendered(self, text: str) -> list[int]:
        """The token ids of a text that a template has written, from its beginning on.

        The tokens that every text of this tokenizer begins with are added if the template has not written them, as
        llama.cpp does (TinyLlama's and Zephyr's templates leave it to the tokenizer).
        """
        self._check_length(text)
        begin, *rest = self.parts(text)
        token_ids = self._encode(begin, add_special_tokens=False)
        added = [] if token_ids[: len(self.prefix)] == self.prefix else self.prefix
        return [*added, *token_ids, *self._continued(rest)]

    def encode(self, text: str) -> list[int]:
        """The token ids of a text that continues another: no prefix is added. Special tokens are recognised."""
        return self._continued(self.parts(text))

    def parts(self, text: str) -> list[str]:
        """A rendered text, cut within the special tokens that contents hold, so that they are read as text."""
        return parts_of(text) if self._special else [text]

    def _continued(self, texts: Sequence[str]) -> list[int]:
        return [token_id for text in texts for token_id in self._continue(text)]

    def _continue(self, text: str) -> list[int]:
        token_ids = self._encode(self._anchor + text, add_special_tokens=False) if text else []
        return token_ids[len(self._anchor_token_ids) :]

    @cached_property
    def prefix(self) -> list[int]:
        """The special tokens that every text begins with."""
        whole = self._encode("a", add_special_tokens=True)
        return whole[: whole.index(self._encode("a", add_special_tokens=False)[0])]

    @property
    def _first_token(self) -> list[int]:
        """What an empty text begins with, where the tokenizer adds nothing."""
        named = self._templates.special_tokens
        token = named.get("bos_token") or named.get("eos_token")
        if token is None:
            raise RequestError("The prompt is empty, and the tokenizer has no first token. Give at least one word.")
        return self._encode(token, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, without special tokens."""
        if not token_ids:
            return ""
        text: str | None = self._texts.join(token_ids) if self._texts is not None else None
        return self._tokenizer.decode(list(token_ids)) if text is None else text

    @cached_property
    def _anchor(self) -> str:
        """A text to encode before one that continues it.

        Tokenizers like SentencePiece's put a space before every text, but not after a line end.
        """
        plain, after, anchor = (self._encode(text, add_special_tokens=False) for text in ("a", "\na", "\n"))
        return "" if after == anchor + plain else "\n"

    @cached_property
    def _anchor_token_ids(self) -> list[int]:
        return self._encode(self._anchor, add_special_tokens=False) if self._anchor else []

    def _read_templates(self, folder: Path) -> ChatTemplates:
        """Those of the folder's files. An imported tokenizer may have none; then openvino-genai's."""
        try:
            found = ChatTemplates.read(folder)
        except (OSError, ValueError) as error:
            raise BundleError(
                f"The chat template in {folder} cannot be read: {one_line(error)}. Export the bundle again."
            ) from error
        if not found.by_name and (template := self._tokenizer.chat_template):
            found = replace(found, by_name={DEFAULT: template})
        if not found.special_tokens:
            known = {
                name: getattr(self._tokenizer, f"get_{name}")() for name in ("bos_token", "eos_token", "pad_token")
            }
            found = replace(found, special_tokens={name: token for name, token in known.items() if token})
        return found

    def _check_length(self, text: str) -> None:
        """Raise TooLong for a text that has more than `max_tokens`, as soon as its beginning has."""
        if self._max_tokens is None or len(text) <= _PIECE:
            return
        _check_text(text)
        count = 0
        for end, piece in enumerate(pieces_of(text), 1):
            encoded = self._tokenizer.encode(piece, add_special_tokens=False)
            count += int(encoded.input_ids.shape[1]) - _CUT
            if count > self._max_tokens:
                read = min(end * _PIECE, len(text))
                raise TooLong(
                    f"The first {read:,} of the prompt's {len(text):,} characters, with the chat template's, exceed "
                    f"the model's context of {self._max_tokens:,} tokens. Shorten it."
                )

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        _check_text(text)
        encoded = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        token_ids: list[int] = encoded.input_ids.data[0].tolist()
        return token_ids


def pieces_of(text: str) -> Iterator[str]:
    """A text in pieces, between which other threads have their turn: openvino-genai's tokenizer holds Python's lock."""
    for begin in range(0, len(text), _PIECE):
        yield text[begin : begin + _PIECE]


def check_tokenizer(folder: Path) -> None:
    """Whether a tokenizer's files are there: openvino-genai takes any folder, and fails at the first text.

    Raises:
        BundleError: naming what is missing.
    """
    if not folder.is_dir():
        raise BundleError(f"There is no folder {folder}, where the tokenizer should be. Export the bundle again.")
    for name in FILES:
        if not (folder / name).is_file():
            raise BundleError(f"The tokenizer in {folder} has no {name}. Export the bundle again.")


def _check_nesting(messages: Sequence[Any], tools: Sequence[Any]) -> None:
    """Raise RequestError for what a template reads recursively: values, and the arguments of calls as JSON."""
    try:
        check_levels((messages, tools))
        for message in messages:
            calls = message.get("tool_calls") if isinstance(message, Mapping) else None
            for call in calls if isinstance(calls, list | tuple) else ():
                function = call.get("function", call) if isinstance(call, Mapping) else None
                arguments = function.get("arguments") if isinstance(function, Mapping) else None
                if isinstance(arguments, str):
                    check_json(arguments)
    except TooDeep as error:
        raise RequestError(f"The prompt cannot be laid out: {one_line(error)}. Make it flatter.") from error


def _check_messages(messages: Sequence[Any], *, parts: bool = False) -> None:
    for i, item in enumerate(map(_with_content, messages)):
        if isinstance(item, Mapping) and isinstance(item.get("content"), list | tuple):
            if parts and isinstance(item.get("role"), str):
                continue
            raise OptionError(
                f"Message {i} of the prompt has its content in parts, which only a model that sees images reads. Give "
                "the content as text."
            )
        if not isinstance(item, Mapping) or not all(isinstance(item.get(k), str) for k in ("role", "content")):
            raise OptionError(f"Message {i} of the prompt is {item!r}: it needs a 'role' and a 'content', as text.")


def _check_continued(messages: Sequence[Mapping[str, Any]]) -> None:
    last = messages[-1]
    content = last["content"]
    is_text = isinstance(content, str) or (content and "text" in content[-1])
    if last["role"] != "assistant" or not is_text or last.get("tool_calls"):
        raise OptionError(
            "continue_final_message=True goes on with an assistant's text, and the last message is none. End with "
            "one, or leave the option out."
        )


def _with_content(message: Any) -> Any:
    """A copy of a message, with an empty content if it has calls of tools instead."""
    if not isinstance(message, Mapping):
        return message
    return {**message, "content": ""} if message.get("tool_calls") and message.get("content") is None else dict(message)


def _check_text(text: str) -> None:
    """Raise RequestError for what Python makes of bytes that are not UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        message = "The prompt has characters that are not text (lone surrogates). Give it as UTF-8."
        raise RequestError(message) from error


class _WithoutTemplate:
    """What a `TextTokenizer` lacks of a `ChatTokenizer`."""

    has_chat_template = False


def guarded(tokenizer: TextTokenizer) -> TextTokenizer:
    """An app's tokenizer, whose errors and wrong values are RequestErrors."""
    what = f"the tokenizer, a {type(tokenizer).__name__},"
    return cast("TextTokenizer", Guarded(tokenizer, what, RULES, RequestError, "Mend it.", _WithoutTemplate()))


def _are_token_ids(values: Any) -> bool:
    return isinstance(values, list) and {*map(type, values)} <= {int}


def _are_integers(values: Any) -> bool:
    if isinstance(values, np.ndarray):
        return values.ndim == 1 and values.dtype.kind in "iu"
    is_list = isinstance(values, list | tuple)
    return is_list and all(issubclass(kind, Integral) and not issubclass(kind, bool) for kind in {*map(type, values)})


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


# By member of `TextTokenizer` and `ChatTokenizer`.
RULES = {
    "prefix": Rule("a list of integers", _are_integers),
    "encode": Rule("a list of integers", _are_token_ids, of_call=True),
    "chat_template": Rule("a text", _is_text),
    "encode_prompt": Rule(
        "a list of integers, with one at least", lambda values: _are_integers(values) and len(values) > 0, of_call=True
    ),
    "decode": Rule("a text", _is_text, of_call=True),
    "has_chat_template": Rule("True or False", lambda value: isinstance(value, bool)),
    "render": Rule("a text", _is_text, of_call=True),
    "encode_rendered": Rule("a list of integers", _are_integers, of_call=True),
}
