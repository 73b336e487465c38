"""Conversations on disk.

A JSON file with the messages, and the tokens as they were generated. A text that is tokenized again may have other
tokens, which the model would go on from in another way.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from outrider.engine.chat.turn import ChatTurn
from outrider.errors import OptionError, RequestError, nearest
from outrider.inputs.vision.images import is_data_url
from outrider.system.files import FAULTS, check_seal, reading, sealed, shown, usable, why, write_whole
from outrider.system.nesting import check_json
from outrider.types import Prompt, num_common_tokens
from outrider.version import __version__

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from outrider.bundle.folder import Bundle
    from outrider.engine.chat.turn import Message

VERSION = 1
_KIND = "outrider chat"
_LEVELS = 4  # around a message
_OTHER = "Load it with the bundle that it was saved with"


class _Turn(msgspec.Struct):
    """A turn. Its tokens are the first `num_kept` of the turn before, and token_ids."""

    messages: list[dict[str, Any]]
    text: str
    num_kept: int
    token_ids: list[int]
    answers: list[tuple[int, int]]
    finish_reason: str
    seed: int | None = None


class _Model(msgspec.Struct):
    """sha256 of the main model's files, of its vocabulary, of the tokenizer's files, and of the vision encoder's."""

    main: str
    vocabulary: str
    tokenizer: str
    vision: str | None = None

    @classmethod
    def of(cls, bundle: Bundle) -> _Model:
        """Those of a bundle."""
        manifest = bundle.manifest
        main, tokenizer = bundle.sha256_of(manifest.main.folder), bundle.sha256_of(manifest.tokenizer.folder)
        vision = None if manifest.main.vision is None else bundle.sha256_of(manifest.main.vision.folder)
        return cls(main, manifest.main.vocab_sha256, tokenizer, vision)


class _File(msgspec.Struct):
    kind: str
    version: int
    outrider: str
    model: _Model
    opening: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    turns: list[_Turn]
    adapter: str | None = None
    adapter_sha256: str | None = None


def write_chat(
    path: str | Path,
    bundle: Bundle,
    opening: Sequence[Message],
    tools: Sequence[Message],
    turns: Sequence[ChatTurn],
    adapter: str | None = None,
) -> None:
    """Write a conversation, and the name of its adapter. The file is there as a whole, or as it was.

    A new file is its owner's alone, and an old one keeps its permissions.

    Raises:
        OptionError: when it cannot be written.
    """
    path = usable(Path(path).expanduser())
    saved = list[_Turn]()
    before: tuple[int, ...] = ()
    for turn in turns:
        kept = num_common_tokens(before, turn.token_ids)
        messages, new = [dict(message) for message in turn.messages], [*turn.token_ids[kept:]]
        saved.append(_Turn(messages, turn.text, kept, new, [*turn.answers], turn.finish_reason, turn.seed))
        before = turn.token_ids
    about = _File(_KIND, VERSION, __version__, _Model.of(bundle), _dicts(opening), _dicts(tools), saved)
    file = msgspec.structs.replace(about, adapter=adapter, adapter_sha256=_hashes(bundle).get(adapter or ""))
    try:
        write_whole(path, sealed(msgspec.json.decode(msgspec.json.encode(file))), private=True)
    except (*FAULTS, TypeError) as error:
        raise OptionError(f"{shown(path)} cannot be written: {why(error)}. Name another file.") from error


def read_chat(
    path: str | Path, bundle: Bundle, *, same_model: bool = True
) -> tuple[list[Message], list[Message], list[ChatTurn], str | None]:
    """The opening messages, tools, turns and adapter of a file.

    same_model: whether the main model and the adapter must be those of the file.

    Raises:
        OptionError: when the file is missing, damaged, newer, or of another model or tokenizer.
    """
    path = usable(Path(path).expanduser())
    with reading(str(path)):
        raw = path.read_bytes()
        check_json(raw, around=_LEVELS)
        header = msgspec.json.decode(raw)
        if not isinstance(header, dict) or header.get("kind") != _KIND:
            raise OptionError(f"{shown(path)} is not a chat. Name a file that Chat.save wrote.")
        if header.get("version") != VERSION:
            raise OptionError(
                f"{shown(path)} has version {header.get('version')!r} of the format, and this is outrider "
                f"{__version__}, which reads version {VERSION}. Upgrade with 'pip install --upgrade outrider'."
            )
        try:
            check_seal(header)  # files of earlier versions have no checksum
        except ValueError as error:
            remedy = "Load a copy of it, or if you have changed it yourself, take out its 'checksum'."
            raise OptionError(f"{shown(path)} is damaged: {why(error)}. {remedy}") from error
        file = msgspec.json.decode(raw, type=_File)
    _check_model(path, file.model, _Model.of(bundle), same_model=same_model)
    if fault := _fault_of(file.opening):
        raise OptionError(f"{shown(path)} is damaged: it begins with {fault}. Load another file, or begin a new chat.")
    turns = list[ChatTurn]()
    before: tuple[int, ...] = ()
    for i, each in enumerate(file.turns, 1):
        token_ids = (*before[: each.num_kept], *each.token_ids)
        if fault := _fault(each, token_ids, len(before), bundle.manifest.main.vocab_size):
            raise OptionError(f"{shown(path)} is damaged: turn {i} {fault}. Load another file, or begin a new chat.")
        answers = tuple(each.answers)
        turns.append(ChatTurn(tuple(each.messages), each.text, token_ids, answers, each.finish_reason, each.seed))
        before = token_ids
    _check_adapter(path, file, _hashes(bundle), same_model=same_model)
    return [*file.opening], [*file.tools], turns, file.adapter


def _hashes(bundle: Bundle) -> dict[str, str]:
    """A hash of each of the bundle's adapters, by name."""
    return {entry.name: bundle.sha256_of(entry.folder) for entry in bundle.manifest.adapters}


def _check_adapter(path: Path, file: _File, ours: dict[str, str], *, same_model: bool) -> None:
    if file.adapter is None:
        return
    if file.adapter not in ours:
        raise OptionError(
            f"{shown(path)} was saved with the adapter '{file.adapter}', which this bundle does not have. "
            f"{nearest(file.adapter, ours)} Or add it: outrider add BUNDLE FOLDER --name {file.adapter}."
        )
    if same_model and file.adapter_sha256 != ours[file.adapter]:
        raise OptionError(
            f"{shown(path)} was saved with another adapter of the name '{file.adapter}'. {_OTHER}, or pass "
            "same_model=False."
        )


def _check_model(path: Path, saved: _Model, ours: _Model, *, same_model: bool) -> None:
    if (saved.vocabulary, saved.tokenizer) != (ours.vocabulary, ours.tokenizer):
        raise OptionError(f"{shown(path)} was saved with another tokenizer, so its tokens mean other texts. {_OTHER}.")
    if same_model and (saved.main, saved.vision) != (ours.main, ours.vision):
        raise OptionError(
            f"{shown(path)} was saved with another main model. {_OTHER}, or pass same_model=False to use this bundle's."
        )


def _fault(turn: _Turn, token_ids: Sequence[int], num_before: int, vocab_size: int) -> str:
    """What is wrong with a turn; nothing if it is empty. token_ids: all of the conversation up to its end."""
    if fault := _fault_of(turn.messages):
        return f"has {fault}"
    if unknown := [token_id for token_id in turn.token_ids if not 0 <= token_id < vocab_size]:
        return f"has the token id {unknown[0]:,}, of {vocab_size:,}"
    if not (0 <= turn.num_kept <= num_before and turn.answers):
        return "does not fit the one before"
    try:
        Prompt(token_ids, answers=turn.answers)
    except RequestError:
        return f"has answers at {turn.answers}, of {len(token_ids):,} tokens"
    return ""


def _fault_of(messages: Sequence[Message]) -> str:
    """What is wrong with messages; nothing if it is empty."""
    for message in messages:
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not isinstance(content, str | list):
            return "a message without a role or a content"
        # A file from elsewhere could name an image of this machine.
        if isinstance(content, list) and not all(isinstance(part, dict) and _is_kept(part) for part in content):
            return "a message whose image is not in the file"
    return ""


def _is_kept(part: Mapping[str, Any]) -> bool:
    """Whether a part is no image, or has it as a `data:` URL."""
    return part.get("type") != "image" or is_data_url(part.get("image"))


def _dicts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [dict(message) for message in messages]
